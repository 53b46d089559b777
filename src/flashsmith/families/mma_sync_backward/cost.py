"""What compiling a config of the mma_sync_backward family costs."""

from __future__ import annotations

from flashsmith.families.mma_sync_backward.config import DqMode, FlashBackwardKernelConfig

# Everything but the products, of five kernels, in products.
_FIXED_COST = 600.0


def compile_cost(cfg: FlashBackwardKernelConfig) -> float:
    """Relative compile time of one config (no unit): the m16n8k16 products of one step of a warp in
    each kernel's loop, whose bodies are unrolled."""
    elements = cfg.B_r * cfg.B_c * cfg.d_head / cfg.n_warps / (16 * 8 * 16)
    if cfg.dq == DqMode.ATOMICS:
        return _FIXED_COST + 5 * elements
    queries = 3 * cfg.B_r * cfg.d_head / (8 * 16)
    return _FIXED_COST + 4 * elements + queries
