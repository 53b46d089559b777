"""Describes the kernels of the wgmma family, for `flashsmith explain`."""

from __future__ import annotations

from typing import Any

from flashsmith.families.family import Intensity, SmemRegion, smem_regions
from flashsmith.families.head_dims import tile_columns
from flashsmith.families.order import EX2, Order, outgrown
from flashsmith.families.split_keys import order_of_parts


def smem_map(cfg: Any) -> tuple[SmemRegion, ...]:
    """The layout of a CTA's dynamic shared memory.

    O overwrites Q, except with separate_O or direct_O.
    """
    shared = not (cfg.separate_O or cfg.direct_O)
    d, d_v = tile_columns(cfg.d_head), tile_columns(cfg.d_head_v)
    tiles = [
        ("Q, then O" if shared else "Q", cfg.q_buffers, cfg.B_r, d),
        ("O", int(cfg.separate_O), cfg.B_r, d_v),
        ("K", cfg.kv_stages, cfg.B_c, d),
        ("V", cfg.kv_stages, cfg.B_c, d_v),
    ]
    rest = "barriers, tile info" + (", P for the partner" if cfg.halves_O else "")
    return smem_regions(cfg, tiles, rest=rest)


def intensity(cfg: Any) -> Intensity:
    """The FLOP per byte of the loop over K and V; the work outside the loop does not count.

    A step of the loop does 2 B_r B_c (d + d_v) FLOP. K and V are read from global memory once per
    CTA, and from shared memory once per warpgroup. The model assumes that each step reads all of Q
    from shared memory.
    """
    columns = cfg.d_head + cfg.d_head_v
    flop = 2 * cfg.B_r * cfg.B_c * columns
    tiles_bytes = cfg.B_c * columns * cfg.dtype.element_size
    shared = cfg.n_warpgroups * tiles_bytes + cfg.B_r * cfg.d_head * cfg.dtype.element_size
    return Intensity(shared=flop / shared, global_memory=flop / tiles_bytes)


def order(cfg: Any, arch: int) -> Order:
    """The order of operations in which a kernel computes a row."""
    if cfg.canonical:
        return Order.canonical(arch, cfg.B_c)
    own = {
        "row_sums": f"in {4 if cfg.stale_max else 2} chains of keys, separately for each tile",
        **order_of_parts(cfg.split_keys),
    }
    if cfg.rescale_threshold:
        own["offset"] = f"{outgrown(cfg.rescale_threshold)}, unless row maxima are requested"
    if cfg.stale_max:
        own["offset"] = (
            "the maximum of a row's first tiles, until sums show that the row has outgrown it by "
            f"its weight or 2^{cfg.rescale_threshold}, unless row maxima are requested"
        )
    if cfg.exp2_fma_share:
        own["exponentials"] = (
            f"FMAs for {cfg.exp2_fma_share} percent, in fixed columns; {EX2} for the others"
        )
    return Order.own(arch, cfg.B_c, **own)


# --- the effects of knob values ------------------------------------------------------------------

TURNS = {
    "NONE": "warpgroups run in the order of the hardware's schedulers",
    "GEMM": "warpgroups issue their GEMMs one after the other, in a ring",
    "EXP": "warpgroups exponentiate one after the other, in a ring",
}
SCHEDULES = {
    "ONE_TILE": "a CTA computes one tile",
    "STATIC_PERSISTENT": "as many CTAs as run at once; each takes every n-th tile",
    "DYNAMIC": "as many CTAs as run at once; each takes the next unstarted tile",
}
ORDERS = {
    "BY_HEAD": "tiles begin head by head, first rows first",
    "LONGEST_FIRST": "last rows first, with heads grouped whose K and V fit L2",
}


def halves(cfg: Any) -> str:
    if not cfg.halves_O:
        return ""
    return f", the right {cfg.O_columns} columns in a second warpgroup, to which the first sends P"


def keys(cfg: Any) -> str:
    return f"a loop step takes {cfg.B_c} keys: S has {cfg.B_c // 2} registers a thread"


def ring(cfg: Any) -> str:
    if cfg.kv_stages == 1:
        return "one K and one V tile, each copied once the last GEMM on it has finished"
    return f"rings of {cfg.kv_stages} K and {cfg.kv_stages} V tiles, copied ahead by TMA"


def q(cfg: Any) -> str:
    if cfg.q_buffers == 1 and (cfg.separate_O or cfg.direct_O):
        return "the next tile's Q is copied once this one's last QK GEMM has finished"
    if cfg.q_buffers == 1:
        return "the next tile's Q is copied once this one's O has left Q's buffer"
    return "the next tile's Q is copied during this tile's work"


def overlap(cfg: Any) -> str:
    if cfg.overlap:
        return "the next block's QK GEMM and this block's PV GEMM overlap the softmax"
    return "a warpgroup's GEMMs and its softmax alternate"


def cluster(cfg: Any) -> str:
    if cfg.cluster_size == 1:
        return "every CTA copies its own K and V"
    return f"{cfg.cluster_size} CTAs each copy a part of K and V for all of them"


def rescale(cfg: Any) -> str:
    if cfg.rescale_threshold == 0:
        return "O is rescaled for every K/V block"
    return (
        "a row of O is rescaled only once its maximum has grown by a factor of "
        f"2^{cfg.rescale_threshold}"
    )


def way_of_O(cfg: Any) -> str:
    if cfg.separate_O:
        return "O is stored by TMA through a separate buffer in shared memory"
    if cfg.direct_O:
        return "O is not stored through shared memory"
    return "O is stored through Q's buffer, by TMA"


def section(cfg: Any) -> str:
    if cfg.tile_order.name == "LONGEST_FIRST":
        return f"heads whose K and V take {cfg.section_mib} MiB together are grouped for L2"
    return "nothing: tiles begin head by head"


def ctas(cfg: Any) -> str:
    if cfg.ctas_per_sm == 1:
        return "a CTA has an SM to itself: its threads start with all registers"
    return f"{cfg.ctas_per_sm} CTAs share an SM, and its registers"


def exp2(cfg: Any) -> str:
    if cfg.exp2_fma_share == 0:
        return "the special function unit computes all exponentials"
    return (
        f"the FMA pipe computes {cfg.exp2_fma_share} of 100 exponentials with a cubic, the "
        "special function unit the others"
    )


def early(cfg: Any) -> str:
    if cfg.early_exp:
        return "a block's exponentials end before the wait for the concurrent PV GEMM"
    if cfg.overlap:
        return "the compiler may delay exponentials until the concurrent PV GEMM has finished"
    return "nothing: no GEMM runs during the exponentials"


def stale(cfg: Any) -> str:
    if not cfg.stale_max:
        return "every block's maximum is computed before its exponentials"
    return (
        "from the third block on that all rows see, exponents are relative to the maximum so far; "
        "if a warp's sums show that a row has outgrown it, the warp scales its P down or computes "
        "the block's scores again"
    )


def direct(cfg: Any) -> str:
    if cfg.direct_O:
        return "O goes from registers to global memory; Q's buffer is free after the last QK GEMM"
    return "O goes to global memory by TMA, through shared memory"


def short(cfg: Any) -> str:
    if cfg.short_block == 0:
        return "a warpgroup computes all of its last block of keys"
    return (
        f"a warpgroup computes its last block only up to the first multiple of {cfg.short_block} "
        "keys that covers what its rows see"
    )


def register_Q(cfg: Any) -> str:
    if cfg.register_Q == 0:
        return "every QK GEMM reads all of Q from shared memory"
    return (
        f"{cfg.register_Q} of the {cfg.QK_steps} steps of a QK GEMM read Q from registers, "
        f"{4 * cfg.register_Q} per thread, the others from shared memory"
    )
