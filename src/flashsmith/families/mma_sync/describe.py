"""Describes the kernels of the mma.sync family, for `flashsmith explain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashsmith.families.family import Intensity, SmemRegion, smem_regions
from flashsmith.families.head_dims import tile_columns
from flashsmith.families.order import DIFFERENCE_OF_PRODUCTS, Order, outgrown
from flashsmith.families.split_keys import order_of_parts

Effect = Callable[[Any], str]

# For each use that the kernels make of shared memory, the kinds of access that the emulator counts
# as this use.
CONFLICT_KINDS: dict[str, tuple[str, ...]] = {
    "ldmatrix": ("ldmatrix",),
    "copy st": ("cp.async", "st.shared.16B"),
    "O st": ("st.shared.4B",),
    "O ld": ("ld.shared.16B",),
}


def smem_map(cfg: Any) -> tuple[SmemRegion, ...]:
    """The layout of a CTA's dynamic shared memory; O overwrites Q."""
    d, d_v = tile_columns(cfg.d_head), tile_columns(cfg.d_head_v)
    first = ("Q, then O", 1, cfg.B_r, max(d, d_v))
    if not cfg.d_v:
        rows = (("K", cfg.kv_tiles, cfg.B_c, d), ("V", cfg.kv_tiles, cfg.B_c, d))
        return smem_regions(cfg, (first, *rows))
    pairs = [
        (f"{tile} {i + 1}", 1, cfg.B_c, width)
        for i in range(cfg.kv_tiles)
        for tile, width in (("K", d), ("V", d_v))
    ]
    return smem_regions(cfg, (first, *pairs))


def intensity(cfg: Any) -> Intensity:
    """The FLOP per byte of the loop over K and V; the work outside the loop does not count.

    A step of the loop does 2 B_r B_c (d + d_v) FLOP. K and V are read from global memory once per
    CTA, and from shared memory once per warp. Q is read from shared memory too, unless its
    fragments stay in registers.
    """
    columns = cfg.d_head + cfg.d_head_v
    flop = 2 * cfg.B_r * cfg.B_c * columns
    tiles_bytes = cfg.B_c * columns * cfg.dtype.element_size
    shared = cfg.n_warps * tiles_bytes
    if cfg.Q_mma_load_K_tiles:
        shared += cfg.B_r * cfg.d_head * cfg.dtype.element_size
    return Intensity(shared=flop / shared, global_memory=flop / tiles_bytes)


def order(cfg: Any, arch: int) -> Order:
    """The order of operations in which a kernel computes a row."""
    if cfg.canonical:
        return Order.canonical(arch, cfg.B_c)
    own: dict[str, str] = order_of_parts(cfg.split_keys)
    if not cfg.optimized_softmax:
        own |= {"scale": "before the maximum", "factor": DIFFERENCE_OF_PRODUCTS}
    if cfg.lazy_rescale:
        own |= {"offset": outgrown(8), "factor": DIFFERENCE_OF_PRODUCTS}
    return Order.own(arch, cfg.B_c, **own)


# --- the effects of knob values ------------------------------------------------------------------


def loads(operand: str, depth: str, unit: str) -> Effect:
    knob = f"{operand}_mma_load_K_tiles"

    def effect(cfg: Any) -> str:
        count = getattr(cfg, knob)
        if count == 0 and operand == "Q":
            return "all of Q's fragments are loaded once and stay in registers for the whole loop"
        if count == 0:
            return f"all of {operand}'s fragments are in registers before the GEMM begins"
        total = getattr(cfg, depth)
        part = f"{8 * count} of {total} {unit}"
        return f"{operand}'s fragments are loaded {count} K-tiles ({part}) at a time"

    return effect


def buffer(cfg: Any) -> str:
    if not any(cfg.load_counts):
        return "nothing: every operand is loaded whole"
    if cfg.mma_double_buffer_loads:
        return "streamed fragments have two register sets: one is loaded while the other multiplies"
    return "streamed fragments are loaded right before they are multiplied"


def ring(cfg: Any) -> str:
    if cfg.kv_stages == 0:
        return (
            "one K and one V tile, each filled once the last GEMM on it has finished; two barriers "
            "per block"
        )
    ahead = cfg.kv_stages - (2 if cfg.ping_pong else 1)
    return f"a ring of {cfg.kv_stages} K/V tiles, filled {ahead} ahead; one barrier per block"


def group(cfg: Any) -> str:
    if cfg.l2_group_mib == 0:
        return "no head grouping: the blocks of one head run together"
    return f"head grouping: heads whose K and V take {cfg.l2_group_mib} MiB run block by block"


def eager(cfg: Any) -> str:
    if not cfg.eager_load_blocks:
        return "a tile's copy is issued where the tile is needed, which stalls until it arrives"
    if not cfg.async_copy:
        return "the next tile is copied as soon as its buffer is free, by ordinary loads"
    return "the next tile's copy is issued once its buffer is free and overlaps the other GEMM"


def swizzle(cfg: Any) -> str:
    if not cfg.swizzled:
        return "rows are stored unswizzled: the eight rows of an ldmatrix share their banks"
    # A tile consists of panels of 64 columns, followed by one panel of 32 columns if 32 columns are
    # left.
    wide, narrow = "c xor (r mod 8)", "c xor (r / 2 mod 4)"
    if cfg.d_head % 64 == 0:
        where = wide
    elif cfg.d_head < 64:
        where = narrow
    else:
        where = f"{wide}, in the last 32 columns {narrow}"
    return f"chunk c of row r is stored at chunk {where}: ldmatrix has no bank conflicts"
