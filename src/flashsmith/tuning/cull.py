"""What drops a candidate before it is measured, each with a reason for the log."""

from __future__ import annotations

from flashsmith.families import DeviceSpec, KernelConfig, broken_rules
from flashsmith.tuning.runner import Compiled

# ptxas's spill stores and loads per thread, bytes. A handful outside the loop costs nothing.
DEFAULT_MAX_SPILL = 256


def cull_unbuilt(cfg: KernelConfig, device: DeviceSpec) -> str | None:
    """Why no kernel need be compiled: the config is illegal on the device, or none of its CTAs fits
    an SM. None: it is worth a try."""
    broken = broken_rules(cfg, device)
    if broken:
        return "illegal: " + "; ".join(rule.message for rule in broken)
    if cfg.n_threads > device.max_threads_per_sm or not _resident(cfg, device, None):
        return f"cannot reside: {_needs(cfg, None)}, more than an SM of {device.name} has"
    return None


def cull_compiled(
    cfg: KernelConfig, compiled: Compiled, device: DeviceSpec, max_spill: int
) -> str | None:
    """Why a compiled kernel need not be run; None: it is worth a try.

    Where a kernel that spills is as good as lost, none may spill at all.
    """
    if cfg.family.must_not_spill:
        max_spill = 0
    if compiled.error is not None:
        return f"does not compile: {compiled.error}"
    if compiled.spill_bytes > max_spill:
        return f"spills: {compiled.spill_bytes} bytes per thread, allowed are {max_spill}"
    if not _resident(cfg, device, compiled.registers):
        needs = _needs(cfg, compiled.registers)
        return f"cannot reside: {needs}, more than an SM of {device.name} has"
    return None


def _resident(cfg: KernelConfig, device: DeviceSpec, registers: int | None) -> bool:
    return cfg.num_ctas_per_sm(device.max_smem_per_sm, registers) > 0


def _needs(cfg: KernelConfig, registers: int | None) -> str:
    needs = f"{cfg.n_threads} threads with {cfg.smem_bytes()} bytes of shared memory"
    return needs if registers is None else f"{needs} and {registers} registers each"
