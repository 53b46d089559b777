"""Describes the kernels of the wgmma_dq family, for `flashsmith explain`."""

from __future__ import annotations

from typing import Any

from flashsmith.families.family import Intensity, SmemRegion, smem_regions
from flashsmith.families.head_dims import tile_columns


def smem_map(cfg: Any) -> tuple[SmemRegion, ...]:
    """The layout of a CTA's dynamic shared memory."""
    d, d_v = tile_columns(cfg.d_head), tile_columns(cfg.d_head_v)
    tiles = [
        ("Q", 1, cfg.B_r, d),
        ("do", 1, cfg.B_r, d_v),
        ("K", cfg.k_stages, cfg.B_c, d),
        ("V", cfg.v_stages, cfg.B_c, d_v),
    ]
    return smem_regions(cfg, tiles, rest="barriers")


def intensity(cfg: Any) -> Intensity:
    """The FLOP per byte of the loop over keys; the work outside the loop does not count.

    A step does 2 B_r B_c (2 d + d_v) FLOP. K and V are read from global memory once per CTA. From
    shared memory, each warpgroup reads its rows of Q and do, V once and K twice.
    """
    both = cfg.d_head + cfg.d_head_v
    flop = 2 * cfg.B_r * cfg.B_c * (both + cfg.d_head)
    element = cfg.dtype.element_size
    read = cfg.n_warpgroups * ((64 + cfg.B_c) * both + cfg.B_c * cfg.d_head)
    return Intensity(
        shared=flop / (read * element),
        global_memory=flop / (cfg.B_c * both * element),
    )
