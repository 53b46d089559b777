"""The cost model of the wgmma_mla family."""

from __future__ import annotations

from typing import Any

from flashsmith.families.device import DeviceSpec
from flashsmith.families.latent import LatentRates, call_work
from flashsmith.families.tile_work import CallWork, rates_of
from flashsmith.operations.problem import Problem

# The share of the peak rate of wgmma that the kernels are assumed to reach, because they were not
# measured.
_SHARE_OF_WGMMA = 0.6


def work(cfg: Any, problem: Problem, device: DeviceSpec) -> CallWork:
    """The work of all launches of a call, whose time is infinite on GPUs without wgmma."""
    rates = rates_of(device)
    if not rates.wgmma:
        return CallWork(float("inf"), 0, 0, cfg.B_r)
    step = 2 * cfg.B_r * cfg.B_c * (cfg.d_head + cfg.d_v) / (rates.wgmma * _SHARE_OF_WGMMA)
    latent = LatentRates(1, lambda ctas: step, rates.wgmma_clock, cfg.run_keys)
    return call_work(cfg, problem, device, latent)
