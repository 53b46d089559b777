"""Describes the kernels of the mma_sync_backward family, for `flashsmith explain`."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.family import Intensity, SmemRegion, smem_regions
from flashsmith.families.head_dims import tile_columns
from flashsmith.families.mma_sync_backward.config import FlashBackwardKernelConfig

# For each use that the kernels make of shared memory, the kinds of access that the emulator counts
# as this use.
CONFLICT_KINDS: dict[str, tuple[str, ...]] = {
    "ldmatrix": ("ldmatrix",),
    "copy st": ("cp.async",),
    "O st": ("st.shared.4B",),
    "O ld": ("ld.shared.16B",),
}


def smem_map(cfg: FlashBackwardKernelConfig) -> Sequence[SmemRegion]:
    """The layout of shared memory in a CTA that keeps keys; dk and dv overwrite K and V."""
    d, d_v = tile_columns(cfg.d_head), tile_columns(cfg.d_head_v)
    tiles = [
        ("K, then dk", 1, cfg.B_c, d),
        ("V, then dv", 1, cfg.B_c, d_v),
        ("Q", cfg.stages, cfg.B_r, d),
        ("do", cfg.stages, cfg.B_r, d_v),
    ]
    return smem_regions(cfg, tiles, "dS, P, statistics")


def intensity(cfg: FlashBackwardKernelConfig) -> Intensity:
    """The FLOP per byte of the loop over queries; the work outside the loop does not count.

    A step does 2 B_r B_c (3 d + 2 d_v) FLOP, or 2 B_r B_c (2 d + 2 d_v) without dq. Q and do are
    read from global memory once per CTA. From shared memory, each warp reads its parts of K, V, Q,
    do, dS and P.
    """
    both = cfg.d_head + cfg.d_head_v
    flop = 2 * cfg.B_r * cfg.B_c * (2 * both + (cfg.d_head if cfg.dq else 0))
    element, warps, columns = cfg.dtype.element_size, cfg.n_warps, cfg.column_warps
    keys, queries = cfg.B_c * columns // warps, cfg.B_r // columns
    # S and dP read two operands each. dv and dk read do and Q by columns, and also P and dS if
    # warps share them.
    of_a_warp = (keys + queries) * both + cfg.B_r * both // columns
    if columns > 1:
        of_a_warp += 2 * keys * cfg.B_r
    shared = warps * of_a_warp * element
    streamed = cfg.B_r * both * element
    return Intensity(shared=flop / shared, global_memory=flop / streamed)
