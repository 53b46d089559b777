"""The cost model of the mma_sync_backward family: how long an SM takes for one step of a CTA's
loop. It covers two kernels: the kernel whose CTAs keep keys, and the kernel that computes only dq.

As in the mma_sync family, the part of the SM with the most work limits the throughput of all
resident warps, and a warp's own chain of MMAs limits its latency. The path by which CTAs add dq to
its sums in memory counts as one more part of the SM.

The constants that are not from data sheets are fitted to 212 timings on an H200
(benchmarks/h200/mma-sync-backward.csv). These are for d 64 and 128 at length 4096, full and causal;
other head dimensions are extrapolated. In the measured kernels, the loop had one more barrier and
computed dq in the same step as dS.
"""

from __future__ import annotations

from functools import lru_cache

from flashsmith.families.backward_work import joined, reduced_per_clock
from flashsmith.families.config import RESERVED_SMEM_PER_CTA, THREADS_PER_WARP
from flashsmith.families.device import DeviceSpec
from flashsmith.families.head_dims import step_columns
from flashsmith.families.mma_sync_backward.config import (
    MMA_ROWS,
    DqMode,
    FlashBackwardKernelConfig,
)
from flashsmith.families.mma_sync_backward.rules import shares_dq
from flashsmith.families.tile_work import EXP2, QUARTERS, SMEM_BYTES, Rates, TileWork, rates_of
from flashsmith.operations.backward import n_products
from flashsmith.semantics.sizes import NO_DQ

_WARP = THREADS_PER_WARP
_MMA_FLOP = 4096  # Of one m16n8k16
_FLOAT_BYTES = 4

# Numbers of instructions: per score of a lane, per MMA (including its fragments), per addition of a
# lane to dq's sums, and per step.
_PER_SCORE, _PER_PRODUCT, _PER_SUM, _PER_STEP = 9.0, 1.6, 25.0, 180.0
# The share of a warp's chain that does not overlap with other warps' work.
_ALONE = 0.83
# Cycles per barrier (barriers for exchanges between warps count too), and per wait for copies.
_BARRIER, _LATENCY = 100.0, 620.0
# Cycles for the launch, the first copies and the epilogue.
_CTA_CYCLES = 6000.0
# The number of registers that a thread needs in addition to its accumulators, and the maximum
# number of registers of a thread.
_BESIDE, _MOST_REGISTERS = 50, 255


@lru_cache(maxsize=4096)
def tile_work(
    cfg: FlashBackwardKernelConfig,
    device: DeviceSpec,
    registers: int | None,
    gradients: str = "",
) -> TileWork:
    """The work of a tile of the kernel that keeps keys, for the named gradients.

    If ``registers`` is None, the number is estimated.
    """
    needed = cfg.accumulators + 2 * cfg.scores + _BESIDE
    resident = _resident(cfg, device, cfg.keys_smem_bytes(), registers or needed)
    rates, element = rates_of(device), cfg.dtype.element_size
    scores, columns = cfg.B_r * cfg.B_c, cfg.column_warps
    atomics = cfg.dq == DqMode.ATOMICS and gradients != NO_DQ
    # S, dk and dq have d columns, dP and dv have d_v.
    of_d = (n_products(gradients) if atomics else 4) - 2
    d, d_v = step_columns(cfg.d_head), step_columns(cfg.d_head_v)
    products = scores * (of_d * d + 2 * d_v) * 2 / _MMA_FLOP
    both = cfg.d_head + cfg.d_head_v
    queries = cfg.B_r // columns
    # For S and dP, a warp reads K, V, Q and do. For dv and dk, the warp reads do and Q by columns,
    # and also P and dS if warps share these.
    read = (cfg.keys_per_warp + queries) * both
    read += cfg.B_r * both // columns
    if columns > 1:
        read += 2 * cfg.keys_per_warp * cfg.B_r
    read *= cfg.n_warps
    exchanged = (columns > 1) + (columns > 1 or atomics)
    if atomics:
        # The reads of dS and K for dQ. The warps divide dQ so that they read as few elements as
        # possible.
        read += cfg.B_c * min(
            cfg.B_r * (cfg.n_warps // rows) + cfg.d_head * rows
            for rows in (1, 2, 4)
            if shares_dq(cfg, rows)
        )
    streamed = cfg.B_r * both
    return _work(
        cfg,
        device,
        rows=cfg.B_c,
        keys=cfg.B_r,
        resident=resident,
        of_keys=True,
        products=products,
        scores=scores,
        smem=(read + streamed + exchanged * scores) * element,
        sums=cfg.B_r * cfg.d_head if atomics else 0,
        streamed=streamed * element,
        barriers=1 + (columns > 1),
        rates=rates,
    )


@lru_cache(maxsize=4096)
def queries_work(cfg: FlashBackwardKernelConfig, device: DeviceSpec) -> TileWork:
    """The work of a tile of the kernel that computes only dq, in which each warp has 16 queries."""
    needed = cfg.d_head // 2 + cfg.B_r + _BESIDE
    resident = _resident(cfg, device, cfg.queries_smem_bytes(), needed)
    element, scores = cfg.dtype.element_size, cfg.dq_rows * cfg.B_r
    both = step_columns(cfg.d_head) + step_columns(cfg.d_head_v)
    read = cfg.n_warps * (cfg.B_r * (both + cfg.d_head) + MMA_ROWS * both)
    streamed = cfg.B_r * both
    return _work(
        cfg,
        device,
        rows=cfg.dq_rows,
        keys=cfg.B_r,
        resident=resident,
        of_keys=False,
        products=scores * (both + step_columns(cfg.d_head)) * 2 / _MMA_FLOP,
        scores=scores,
        smem=(read + streamed) * element,
        sums=0,
        streamed=streamed * element,
        barriers=1,
        rates=rates_of(device),
    )


def _work(
    cfg: FlashBackwardKernelConfig,
    device: DeviceSpec,
    *,
    rows: int,
    keys: int,
    resident: int,
    of_keys: bool,
    products: float,
    scores: int,
    smem: float,
    sums: int,
    streamed: int,
    barriers: int,
    rates: Rates,
) -> TileWork:
    """The work of a tile, computed from what one step needs: MMAs, scores, bytes of shared memory,
    fp32 additions to dq and bytes of the L2."""
    mma, shared = products * _MMA_FLOP / rates.mma, smem / SMEM_BYTES
    lanes = scores / _WARP
    exp2 = scores / EXP2
    issue = (
        lanes * _PER_SCORE + products * _PER_PRODUCT + sums / _WARP * _PER_SUM
    ) / QUARTERS + _PER_STEP * cfg.n_warps / QUARTERS
    bounds = (
        mma,
        shared,
        exp2,
        issue,
        sums * _FLOAT_BYTES / reduced_per_clock(device),
        streamed / rates.l2,
    )
    # In each quarter of the SM, the chain of one of the warps there does not overlap with the work
    # of the other warps.
    chain = QUARTERS / cfg.n_warps * (mma + shared + exp2 + issue) * _ALONE
    waits = barriers * _BARRIER + (_LATENCY if cfg.stages == 1 else 0.0)
    steps = (joined([*(n * bound for bound in bounds), chain + waits]) for n in range(resident + 1))
    return TileWork(
        rows=rows,
        keys=keys,
        resident=resident,
        cta_cycles=_CTA_CYCLES,
        step_cycles=tuple(steps),
        clock=rates.clock,
        of_keys=of_keys,
    )


def _resident(
    cfg: FlashBackwardKernelConfig, device: DeviceSpec, smem_bytes: int, registers: int
) -> int:
    """The number of CTAs that an SM can hold if each CTA needs this much shared memory and this
    number of registers per thread; 0 if no CTA fits."""
    limits = cfg.cta_limits(
        device.max_smem_per_sm,
        min(registers, _MOST_REGISTERS),
        max_threads=device.max_threads_per_sm,
        max_ctas=device.max_ctas_per_sm,
    )
    limits["shared memory"] = device.max_smem_per_sm // (smem_bytes + RESERVED_SMEM_PER_CTA)
    return min(limits.values())


# --- compilation ---------------------------------------------------------------------------------

# The compile time of everything except the MMAs, in the five kernels together, in units of one
# MMA's compile time.
_FIXED_COST = 600.0


def compile_cost(cfg: FlashBackwardKernelConfig) -> float:
    """The compile time of a config, relative to other configs: the number of m16n8k16 MMAs in one
    unrolled step of a warp, in the loops of all kernels together."""
    columns = (cfg.d_head + cfg.d_head_v) / 2
    elements = cfg.B_r * cfg.B_c * columns / cfg.n_warps / (16 * 8 * 16)
    if cfg.dq == DqMode.ATOMICS:
        return _FIXED_COST + 5 * elements
    queries = 3 * cfg.B_r * columns / (8 * 16)
    return _FIXED_COST + 4 * elements + queries
