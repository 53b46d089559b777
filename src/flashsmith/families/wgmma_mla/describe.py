"""Describes the kernels of the wgmma_mla family, for `flashsmith explain`."""

from __future__ import annotations

from typing import Any

from flashsmith.families.family import Intensity, SmemRegion
from flashsmith.families.latent import order_of_rows
from flashsmith.families.order import Order
from flashsmith.families.wgmma_mla.config import STAGES


def smem_map(cfg: Any) -> tuple[SmemRegion, ...]:
    """The layout of a CTA's dynamic shared memory."""
    tile = cfg.B_c * cfg.d_head * cfg.dtype.element_size
    regions = [SmemRegion("Q", 0, tile, cfg.B_r, cfg.d_head)]
    for stage in range(1, STAGES + 1):
        name = f"keys and values {stage} of {STAGES}"
        regions.append(SmemRegion(name, stage * tile, (stage + 1) * tile, cfg.B_c, cfg.d_head))
    begin = (STAGES + 1) * tile
    end = begin + cfg.B_r * cfg.B_c * cfg.dtype.element_size
    regions.append(SmemRegion("P", begin, end, cfg.B_r, cfg.B_c))
    regions.append(SmemRegion("barriers, maxima, sums", end, cfg.smem_bytes(), 0, 0))
    return tuple(regions)


def intensity(cfg: Any) -> Intensity:
    """The FLOP per byte of the loop over blocks of keys; the work outside the loop does not count.

    A block is read from global memory once. From shared memory, the QK GEMM reads Q and the block
    once, each warpgroup reads its half of V, and one of them reads P.
    """
    columns = cfg.d_head + cfg.d_v
    flop = 2 * cfg.B_r * cfg.B_c * columns
    size = cfg.dtype.element_size
    shared = ((cfg.B_r + cfg.B_c) * cfg.d_head + cfg.B_c * cfg.d_v + cfg.B_r * cfg.B_c) * size
    return Intensity(shared=flop / shared, global_memory=flop / (cfg.B_c * cfg.d_head * size))


def order(cfg: Any, arch: int) -> Order:
    """The order of operations in which a kernel computes a row."""
    return order_of_rows(
        cfg,
        arch,
        cfg.rescale_threshold,
        row_sums="in 2 chains of keys, and separately for every second tile",
    )
