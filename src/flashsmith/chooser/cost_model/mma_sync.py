"""The mma.sync family: what one step of a CTA's loop takes of an SM.

A step multiplies B_r rows with B_c keys, twice. Five parts of the SM work on it side by side: the
tensor cores, shared memory, the exp2 units, the issue slots and the way to L2. The busiest bounds
the throughput of all resident warps; one warp's own chain (load, product, softmax, product) bounds
how soon it is done. Neither bound is sharp, so they are joined by a norm of the fourth power.

The constants without a data sheet behind them (_PER_SCORE and below) are fitted to 173 timings of
an H200, benchmarks/h200/factory-run-*.json.
"""

from __future__ import annotations

from functools import lru_cache

from flashsmith.chooser.cost_model.rates import EXP2, QUARTERS, SMEM_BYTES, Rates, rates_of
from flashsmith.chooser.cost_model.resources import (
    estimated_registers,
    estimated_spill_bytes,
    resident_ctas,
)
from flashsmith.chooser.cost_model.tile_work import TileWork
from flashsmith.families import DeviceSpec, FlashForwardKernelConfig

_WARP = 32
_MMA_FLOP = 4096  # of one m16n8k16
_LDMATRIX_BYTES = 512  # of one ldmatrix.x4
_CHUNK = 16

# Instructions: per score of a lane, per product with its fragments, and per step.
_PER_SCORE, _SCALING, _PER_PRODUCT, _PER_STEP = 9.0, 1.0, 2.0, 180.0
# A 16-byte chunk that goes through registers instead of cp.async, with its wait.
_PER_SYNC_CHUNK = 55.0
# Of a warp's own chain: how much of it the hardware does not overlap by itself.
_PRODUCTS_ALONE, _SOFTMAX_ALONE = 0.8, 0.55
# Barriers and copies that were waited for: eager ones ran under a product.
_EAGER_LATENCY, _LATENCY = 550.0, 1550.0
# Cycles per spilled byte of a thread.
_SPILL = 3.2
_NORM = 4.0
# Launch, Q's copy and the first K's, the epilogue.
CTA_CYCLES = 3000.0


@lru_cache(maxsize=4096)
def tile_work(
    cfg: FlashForwardKernelConfig, device: DeviceSpec, registers: int | None, spill: int | None
) -> TileWork:
    """The kernel's tile on ``device``; registers and spilled bytes as built, None: estimated."""
    per_thread = estimated_registers(cfg) if registers is None else registers
    spilled = estimated_spill_bytes(cfg) if spill is None else spill
    resident, rates = resident_ctas(cfg, device, per_thread), rates_of(device)
    return TileWork(
        rows=cfg.B_r,
        keys=cfg.B_c,
        resident=resident,
        cta_cycles=CTA_CYCLES,
        step_cycles=tuple(_step_cycles(cfg, rates, spilled, n) for n in range(resident + 1)),
        clock=rates.clock,
    )


def _step_cycles(
    cfg: FlashForwardKernelConfig, rates: Rates, spilled: float, resident: int
) -> float:
    """SM cycles in which each of ``resident`` CTAs does one step of its loop."""
    warps = resident * cfg.n_warps / QUARTERS  # that share one quarter of the SM
    element = cfg.dtype.element_size
    scores = cfg.rows_per_warp * cfg.B_c / _WARP  # of a lane
    products = 2 * cfg.rows_per_warp * cfg.B_c * cfg.d_head * 2 / _MMA_FLOP
    tile_bytes = 2 * cfg.B_c * cfg.d_head * element  # K and V

    mma = products * _MMA_FLOP * QUARTERS / rates.mma
    shared = _bytes_read(cfg, tile_bytes) * QUARTERS / SMEM_BYTES
    copied = tile_bytes / cfg.n_warps * QUARTERS / SMEM_BYTES
    exp2 = scores * _WARP * QUARTERS / EXP2
    issue = (
        scores * (_PER_SCORE + (0 if cfg.optimized_softmax else _SCALING))
        + cfg.rows_per_warp * cfg.d_head / _WARP  # O is rescaled
        + products * _PER_PRODUCT
        + _bytes_read(cfg, tile_bytes, conflicts=False) / _LDMATRIX_BYTES
        + _PER_STEP
    )
    staged = 0.0 if cfg.async_copy else _PER_SYNC_CHUNK * tile_bytes / _CHUNK / cfg.n_threads
    l2 = tile_bytes / cfg.n_warps * QUARTERS / rates.l2
    waited = _EAGER_LATENCY if cfg.eager_load_blocks else _LATENCY
    alone = (
        _PRODUCTS_ALONE * (mma + shared)
        + _SOFTMAX_ALONE * (exp2 + issue)
        + waited
        + _SPILL * spilled
    )
    bounds = [warps * part for part in (mma, shared + copied, exp2, issue + staged, l2)]
    joined = sum(bound**_NORM for bound in (*bounds, alone)) ** (1 / _NORM)
    return joined + warps * _SPILL * spilled / 2


def _bytes_read(cfg: FlashForwardKernelConfig, tile_bytes: int, conflicts: bool = True) -> float:
    """What one warp reads from shared memory in a step, bank conflicts counted as more bytes."""
    read = float(tile_bytes)
    if cfg.Q_mma_load_K_tiles:
        read += cfg.rows_per_warp * cfg.d_head * cfg.dtype.element_size
    # Unswizzled, the eight rows of an 8x8 matrix begin in the same bank, or in few.
    return read * (1 if cfg.swizzled or not conflicts else min(8, cfg.d_head / 8))
