"""estimate(): a config's expected time on a problem."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashsmith.chooser.cost_model.schedule import schedule
from flashsmith.families import DeviceSpec, Problem
from flashsmith.families.tile_work import TileWork


class Estimate(NamedTuple):
    """ms: the expected time; ctas: of the problem; resident: CTAs that an SM holds; waves: ctas
    over what all SMs hold at a time; rows: of one CTA's tile."""

    ms: float
    ctas: int
    resident: int
    waves: float
    rows: int


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
        cfg: of a family that has a cost model.
        registers, spill_bytes: per thread, from the compiler's report; None estimates them too.

    Raises:
        ArgumentError: no model of the config's family.
    """
    work: TileWork = cfg.family.tile_work(cfg, device, registers, spill_bytes)
    if work.resident == 0:
        return Estimate(float("inf"), 0, 0, float("inf"), work.rows)
    whole = schedule(work, problem, device.sm_count)
    ms = whole.cycles / work.clock / 1e6
    return Estimate(ms, whole.ctas, work.resident, whole.waves, work.rows)
