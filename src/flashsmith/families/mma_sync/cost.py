"""The cost model of the mma_sync family: how long an SM takes for one step of a CTA's loop.

In a step, B_r rows are multiplied by B_c keys twice. Five parts of the SM work at the same time:
the tensor cores, shared memory, the exp2 units, the issue slots, and the path to the L2. The part
with the most work limits the throughput of all resident warps. Each warp is also limited by the
latency of its own chain: load, GEMM, softmax, GEMM. Neither limit is sharp, so the model combines
them by a 4-norm.

The constants from _PER_SCORE on are not from data sheets. They are fitted to 173 timings on an
H200, which are in benchmarks/h200/factory-run-*.json.
"""

from __future__ import annotations

from functools import lru_cache

from flashsmith.families.config import (
    REGISTERS_PER_THREAD_UNIT,
    RESERVED_SMEM_PER_CTA,
    THREADS_PER_WARP,
)
from flashsmith.families.device import DeviceSpec
from flashsmith.families.mma_sync.config import FlashForwardKernelConfig
from flashsmith.families.tile_work import EXP2, QUARTERS, SMEM_BYTES, Rates, TileWork, rates_of

_WARP = 32
_MMA_FLOP = 4096  # Of one m16n8k16
_LDMATRIX_BYTES = 512  # Of one ldmatrix.x4
_CHUNK = 16

# Numbers of instructions: per score of a lane, per score of a lane for scaling before the maximum,
# per MMA with its fragments, and per step.
_PER_SCORE, _SCALING, _PER_PRODUCT, _PER_STEP = 9.0, 1.0, 2.0, 180.0
# The number of additional instructions if a 16-byte chunk is copied through registers and not with
# cp.async; the wait counts as instructions.
_PER_SYNC_CHUNK = 55.0
# Of a warp's own products and of its own softmax, the shares of the time that other warps' work
# does not hide.
_PRODUCTS_ALONE, _SOFTMAX_ALONE = 0.8, 0.55
# Cycles for barriers and for waiting for copies. The first value is for eager copies, which overlap
# with a GEMM; the second is for other copies.
_EAGER_LATENCY, _LATENCY = 550.0, 1550.0
# Cycles per step for each byte that a thread spills.
_SPILL = 3.2
_NORM = 4.0
# Cycles for the launch, the first copies of Q and K, and the epilogue.
CTA_CYCLES = 3000.0


@lru_cache(maxsize=4096)
def tile_work(
    cfg: FlashForwardKernelConfig, device: DeviceSpec, registers: int | None, spill: int | None
) -> TileWork:
    """The work of a tile on ``device``.

    If ``registers`` or ``spill`` (in bytes) is None, it is estimated.
    """
    per_thread = estimated_registers(cfg) if registers is None else registers
    spilled = estimated_spill_bytes(cfg) if spill is None else spill
    resident, rates = resident_ctas(cfg, device, per_thread), rates_of(device)
    return TileWork(
        packs_gqa=cfg.pack_gqa,
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
    """The number of cycles in which an SM computes one loop step of each of its ``resident``
    CTAs."""
    warps = resident * cfg.n_warps / QUARTERS  # Warps that share a quarter of the SM
    element = cfg.dtype.element_size
    scores = cfg.rows_per_warp * cfg.B_c / _WARP  # Of a lane
    columns = cfg.d_head + cfg.d_head_v
    multiplied = 16 * cfg.QK_steps + cfg.d_head_v
    products = cfg.rows_per_warp * cfg.B_c * multiplied * 2 / _MMA_FLOP
    tile_bytes = cfg.B_c * columns * element  # For K and V

    mma = products * _MMA_FLOP * QUARTERS / rates.mma
    shared = _bytes_read(cfg, tile_bytes) * QUARTERS / SMEM_BYTES
    copied = tile_bytes / cfg.n_warps * QUARTERS / SMEM_BYTES
    exp2 = scores * _WARP * QUARTERS / EXP2
    issue = (
        scores * (_PER_SCORE + (0 if cfg.optimized_softmax else _SCALING))
        + cfg.rows_per_warp * cfg.d_head_v / _WARP  # For rescaling O
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
    """The number of bytes that a warp reads from shared memory per step.

    If ``conflicts`` is true, this number is multiplied by the number of accesses that conflict on a
    bank.
    """
    read = float(tile_bytes)
    if cfg.Q_mma_load_K_tiles:
        read += cfg.rows_per_warp * cfg.d_head * cfg.dtype.element_size
    # Without a swizzle, the eight rows of an 8x8 matrix begin in only one or a few banks.
    return read * (1 if cfg.swizzled or not conflicts else min(8, cfg.d_head / 8))


# --- resources of a kernel, estimated before it is built -----------------------------------------

MAX_REGISTERS = 255
# The number of registers by which an estimate may exceed 255 before spills matter.
_SLACK = 28


def estimated_registers(cfg: FlashForwardKernelConfig) -> float:
    """Estimates how many registers per thread the kernel needs; a kernel that needs over 255
    spills.

    The estimate adds up the fp32 accumulators of O and S, row statistics and addresses, and the
    fragments of Q if these stay in registers. Its factors are fitted to 498 kernels with all head
    dimensions and semantics, which ptxas built for sm_80 and sm_90. The root mean square of the
    error is 10 registers, and the largest error is 34. For every kernel that spills more than 16
    bytes, the estimate is above 255.
    """
    of_a_lane = cfg.rows_per_warp / THREADS_PER_WARP
    registers = 25 + 6.5 * cfg.rows_per_warp / 16
    registers += 1.3 * of_a_lane * (cfg.d_head_v + cfg.B_c)
    if cfg.Q_mma_load_K_tiles == 0:
        registers += 0.7 * of_a_lane * cfg.d_head / 2
    return registers + (0 if cfg.async_copy else 5)


def estimated_spill_bytes(cfg: FlashForwardKernelConfig) -> float:
    """Estimates how many bytes per thread the kernel spills."""
    return 12.0 * max(0.0, estimated_registers(cfg) - MAX_REGISTERS - _SLACK)


def resident_ctas(cfg: FlashForwardKernelConfig, device: DeviceSpec, registers: float) -> int:
    """The number of CTAs that an SM of ``device`` can hold; 0 if no CTA fits."""
    unit = REGISTERS_PER_THREAD_UNIT
    per_thread = -(-int(min(registers, MAX_REGISTERS)) // unit) * unit
    warps = device.registers_per_sm // (per_thread * THREADS_PER_WARP)
    return min(
        device.max_smem_per_sm // (cfg.smem_bytes() + RESERVED_SMEM_PER_CTA),
        device.max_threads_per_sm // cfg.n_threads,
        device.max_ctas_per_sm,
        warps * THREADS_PER_WARP // cfg.n_threads,
    )


# --- compilation ---------------------------------------------------------------------------------

# The compile time of everything except the MMAs, in units of one MMA's compile time. For the 80
# configs of tune, a kernel took 0.25 s plus 1.4 ms per MMA.
_FIXED_COST = 180.0


def compile_cost(cfg: FlashForwardKernelConfig) -> float:
    """The compile time of a config, relative to other configs.

    Both compilers need most of their time for the unrolled body of the loop over K and V. The
    length of the body is measured by the number of m16n8k16 MMAs that one warp issues per K/V
    block. For Q K^T this number is rows per warp / 16 x B_c / 8 x d_head / 16. For P V, d_v takes
    the place of d_head. A peeled first tile adds a second body.
    """
    columns = cfg.d_head + cfg.d_head_v
    products = (cfg.rows_per_warp // 16) * (cfg.B_c // 8) * (columns // 16)
    bodies = 2 if cfg.optimized_softmax else 1
    return _FIXED_COST + products * bodies
