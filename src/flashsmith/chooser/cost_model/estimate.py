"""estimate(): a config's expected time on a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashsmith.chooser.cost_model import mma_sync, wgmma
from flashsmith.chooser.cost_model.schedule import schedule
from flashsmith.chooser.cost_model.tile_work import TileWork
from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, Problem

# From a family's config on a device, with its registers and spilled bytes as built, to its tile.
_MODELS: dict[str, Callable[[Any, DeviceSpec, int | None, int | None], TileWork]] = {
    "mma_sync": mma_sync.tile_work,
    "wgmma": wgmma.tile_work,
}


class Estimate(NamedTuple):
    """ms: the expected time; ctas: of the problem; resident: CTAs that an SM holds; waves: ctas
    over what all SMs hold at a time; rows: of one CTA's tile."""

    ms: float
    ctas: int
    resident: int
    waves: float
    rows: int


def has_model(family: str) -> bool:
    """Whether kernels of a family can be estimated."""
    return family in _MODELS


def estimate(
    cfg: Any,
    problem: Problem,
    device: DeviceSpec,
    *,
    registers: int | None = None,
    spill_bytes: int | None = None,
) -> Estimate:
    """What a config should take on a problem.

    Args:
        cfg: of a family that has_model() knows.
        registers, spill_bytes: per thread, from the compiler's report; None estimates them too.

    Raises:
        ArgumentError: no model of the config's family.
    """
    if cfg.FAMILY not in _MODELS:
        raise ArgumentError(f"cfg: no cost model for the family {cfg.FAMILY!r}")
    work = _MODELS[cfg.FAMILY](cfg, device, registers, spill_bytes)
    if work.resident == 0:
        return Estimate(float("inf"), 0, 0, float("inf"), work.rows)
    whole = schedule(work, problem, device.sm_count)
    ms = whole.cycles / work.clock / 1e6
    return Estimate(ms, whole.ctas, work.resident, whole.waves, work.rows)
