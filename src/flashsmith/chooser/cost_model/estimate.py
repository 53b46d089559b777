"""estimate(): the expected time of a config on a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashsmith.chooser.cost_model.schedule import schedule
from flashsmith.families import DeviceSpec, Problem
from flashsmith.families.tile_work import TileWork


class Estimate(NamedTuple):
    """The expected time of a call, and the CTAs of its main launch.

    ms: the time of all launches.
    ctas: the number of CTAs.
    resident: how many CTAs an SM holds.
    waves: ctas divided by the number of CTAs that all SMs together hold.
    rows: the number of rows in the tile of a CTA.
    heads: the number of heads of q to which these rows belong.
    """

    ms: float
    ctas: int
    resident: int
    waves: float
    rows: int
    heads: int = 1


def estimate(
    cfg: Any,
    problem: Problem,
    device: DeviceSpec,
    *,
    registers: int | None = None,
    spill_bytes: int | None = None,
) -> Estimate:
    """Returns an estimate of the time that a config's kernels take on a problem.

    Args:
        cfg: a config of a family that has a cost model.
        registers, spill_bytes: the registers and spilled bytes per thread in the compiler's report;
            None means that they are estimated as well.

    Raises:
        ArgumentError: the family of the config has no cost model.
    """
    call = cfg.family.call_work(cfg, problem, device)
    if call is not None:
        waves = call.ctas / (call.resident * device.sm_count) if call.resident else float("inf")
        return Estimate(call.ms, call.ctas, call.resident, waves, call.rows, call.heads)
    loops: Sequence[TileWork] = cfg.family.loops(cfg, problem, device, registers, spill_bytes)
    work = loops[0]
    if not all(one.resident for one in loops):
        return Estimate(float("inf"), 0, 0, float("inf"), work.rows)
    scheduled = [schedule(one, problem, device.sm_count) for one in loops]
    ms = sum(one.cycles / of.clock for one, of in zip(scheduled, loops, strict=True)) / 1e6
    whole = scheduled[0]
    if ms:
        ms += cfg.family.helpers_ms(cfg, problem, device)
    heads = work.group(problem)
    return Estimate(ms, whole.ctas, work.resident, whole.waves, work.rows, heads)
