"""What a kernel of the mma.sync family takes of an SM, before it is built."""

from __future__ import annotations

from flashsmith.families import DeviceSpec, FlashForwardKernelConfig
from flashsmith.families.config import (
    REGISTERS_PER_THREAD_UNIT,
    RESERVED_SMEM_PER_CTA,
    THREADS_PER_WARP,
)

MAX_REGISTERS = 255
# Over the estimate by this much a kernel still compiles without spilling to speak of.
_SLACK = 28


def estimated_registers(cfg: FlashForwardKernelConfig) -> float:
    """Registers per thread that the kernel would like to have; above 255 it spills.

    The fp32 accumulators of O and S with what is kept beside them, and Q's fragments where all of
    them stay. Fitted to 498 kernels of all head dimensions and semantics as ptxas built them for
    sm_80 and sm_90: 10 registers root mean square, 34 at most; every kernel that spills more than
    16 bytes is estimated above 255.
    """
    of_a_lane = cfg.rows_per_warp / THREADS_PER_WARP
    registers = 25 + 6.5 * cfg.rows_per_warp / 16
    registers += 1.3 * of_a_lane * (cfg.d_head + cfg.B_c)
    if cfg.Q_mma_load_K_tiles == 0:
        registers += 0.7 * of_a_lane * cfg.d_head / 2
    return registers + (0 if cfg.async_copy else 5)


def estimated_spill_bytes(cfg: FlashForwardKernelConfig) -> float:
    """Bytes per thread that the kernel keeps in memory for want of registers."""
    return 12.0 * max(0.0, estimated_registers(cfg) - MAX_REGISTERS - _SLACK)


def resident_ctas(cfg: FlashForwardKernelConfig, device: DeviceSpec, registers: float) -> int:
    """CTAs that one SM of ``device`` holds at a time; 0: not even one."""
    unit = REGISTERS_PER_THREAD_UNIT
    per_thread = -(-int(min(registers, MAX_REGISTERS)) // unit) * unit
    warps = device.registers_per_sm // (per_thread * THREADS_PER_WARP)
    return min(
        device.max_smem_per_sm // (cfg.smem_bytes() + RESERVED_SMEM_PER_CTA),
        device.max_threads_per_sm // cfg.n_threads,
        device.max_ctas_per_sm,
        warps * THREADS_PER_WARP // cfg.n_threads,
    )
