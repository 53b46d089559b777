"""Describes the kernels of the mma_sync_mla family, for `flashsmith explain`."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.family import Intensity, SmemRegion, smem_regions
from flashsmith.families.latent import order_of_rows
from flashsmith.families.mma_sync_mla.config import WARPS, MmaSyncMlaKernelConfig
from flashsmith.families.order import Order

# For each use that the kernels make of shared memory, the kinds of access that the emulator counts
# as this use.
CONFLICT_KINDS: dict[str, tuple[str, ...]] = {
    "ldmatrix": ("ldmatrix",),
    "copy st": ("cp.async",),
    "O st": (),
    "O ld": (),
}
_LOG2_GROWTH = 8


def smem_map(cfg: MmaSyncMlaKernelConfig) -> Sequence[SmemRegion]:
    """The layout of a CTA's dynamic shared memory."""
    return smem_regions(cfg, [("keys and values", cfg.stages, cfg.B_c)], "shares of the scores")


def intensity(cfg: MmaSyncMlaKernelConfig) -> Intensity:
    """The FLOP per byte of the loop over blocks of keys; the work outside the loop does not count.

    A block is read from global memory once. From shared memory, the block is read once for the
    scores, and its first d_v columns again for O. Each warp also reads all shares of the scores.
    """
    flop = 2 * cfg.B_r * cfg.B_c * (cfg.d_head + cfg.d_v)
    size = cfg.cache_element_bytes
    shared = cfg.B_c * (cfg.d_head + cfg.d_v) * size + WARPS * cfg.share_bytes
    return Intensity(shared=flop / shared, global_memory=flop / (cfg.B_c * cfg.d_head * size))


def order(cfg: MmaSyncMlaKernelConfig, arch: int) -> Order:
    """The order of operations in which a kernel computes a row."""
    return order_of_rows(cfg, arch, _LOG2_GROWTH if cfg.lazy_rescale else 0)
