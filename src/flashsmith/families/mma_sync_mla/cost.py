"""The cost model of the mma_sync_mla family. Nothing was measured: the figures follow from numbers
of instructions, latencies of instructions and the rates of GPUs."""

from __future__ import annotations

from flashsmith.families.config import THREADS_PER_WARP
from flashsmith.families.device import DeviceSpec
from flashsmith.families.latent import LatentRates, call_work
from flashsmith.families.mma_sync_mla.config import WARPS, MmaSyncMlaKernelConfig
from flashsmith.families.tile_work import EXP2, SMEM_BYTES, CallWork, rates_of
from flashsmith.operations.problem import Problem
from flashsmith.semantics.dtype import DType

# The number of cycles that a CTA that runs alone takes for a block of 32 keys: for two barriers,
# the MMAs of each product one after another, the exchange of scores through shared memory, and the
# softmax.
_ALONE = 900.0
_ALONE_KEYS = 32
_REGISTERS = 232
# The number of instructions with which a warp loads and widens a pair of 8-bit floats, counted as
# in mma_sync_decode.
_PER_PAIR = {DType.FP16: 1.6, DType.BF16: 4.6}


def step_cycles(cfg: MmaSyncMlaKernelConfig, device: DeviceSpec, ctas: int) -> float:
    """The number of cycles that a CTA takes for a block of keys while `ctas` CTAs share its SM."""
    rates = rates_of(device)
    columns = cfg.d_head + cfg.d_v
    products = 2 * cfg.B_r * cfg.B_c * columns / rates.mma
    block = cfg.B_c * (cfg.d_head + columns) * cfg.cache_element_bytes
    shared = (block + (1 + WARPS) * cfg.share_bytes) / SMEM_BYTES
    exponentials = WARPS * cfg.B_r * cfg.B_c / EXP2
    # In each quarter of an SM, one warp widens each element of K and V.
    pairs = cfg.B_c * columns / (2 * WARPS * THREADS_PER_WARP)
    widened = pairs * _PER_PAIR[cfg.dtype] if cfg.cache.is_8bit else 0.0
    alone = _ALONE * (1 + cfg.B_c / _ALONE_KEYS) / 2
    return max(ctas * max(products, shared, exponentials, widened), alone + widened)


def work(cfg: MmaSyncMlaKernelConfig, problem: Problem, device: DeviceSpec) -> CallWork:
    """The work of all launches of a call, whose time is infinite if an SM cannot hold a CTA."""
    limits = cfg.cta_limits(
        device.max_smem_per_sm,
        _REGISTERS,
        max_threads=device.max_threads_per_sm,
        max_ctas=device.max_ctas_per_sm,
    )
    rates = LatentRates(
        resident=min(limits.values()),
        step_cycles=lambda ctas: step_cycles(cfg, device, ctas),
        clock=rates_of(device).clock,
    )
    return call_work(cfg, problem, device, rates)
