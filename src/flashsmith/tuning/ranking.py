"""What came out of a sweep: a row for every candidate, the winners, and their files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flashsmith.benchmark.rows import BenchRow, Verdict, now, problem_columns, write_rows
from flashsmith.benchmark.table import Column, print_table, print_text
from flashsmith.builder.sources import source_hash
from flashsmith.chooser.winners import Ranked, WinnersTable, join_winners, record_winners
from flashsmith.chooser.winners.staleness import DIGITS
from flashsmith.tuning.candidate import Candidate
from flashsmith.tuning.race import Race, Standing
from flashsmith.tuning.runner import Runner

_VERDICTS: dict[str, Verdict] = {
    "racing": "absent",
    "slower": "absent",
    "not reached": "absent",
    "culled": "absent",
    "wrong": "fail",
    "crash": "error",
    "hang": "error",
    "error": "error",
}
# What says something about the kernel itself.
_WRONG = ("wrong", "crash", "hang")
_SHOWN = 3


def ranking_rows(races: Iterable[Race], runner: Runner) -> list[BenchRow]:
    """Every candidate of every race: per problem those with a time, fastest first, then the others.

    ms is what ranks: the final's median, or a rung's scaled to it (`protocol` says which stage);
    best_ms is scaled alike. note: what dropped a candidate.
    """
    time = now()
    rows = []
    for race in races:
        standings = race.standings()
        placed = {standing.candidate.name for standing in standings}
        others = [c for c in race.candidates.values() if c.name not in placed]
        rows += [_row(race, s.candidate, s, runner, time) for s in standings]
        rows += [_row(race, candidate, None, runner, time) for candidate in others]
    return rows


def winners(race: Race, runner: Runner) -> list[Ranked]:
    """The race's ranking as the table of winners takes it: as of its final, or of the last time
    without one. What was not checked thoroughly does not stand first where something was."""
    standings = [s for s in race.standings() if s.candidate.proof is not None]
    checked = [s.ms for s in standings if s.candidate.checked]
    standings = [s for s in standings if s.candidate.checked or s.ms >= min(checked, default=0.0)]
    # Who went on in an older journal did not write down when.
    origins = [{**runner.origin, "time": "", **s.origin} for s in standings if s.stage == "final"]
    origins = origins or [{**runner.origin, "time": "", **s.origin} for s in standings]
    environment = max(origins, key=lambda origin: str(origin["time"]), default={})
    return [
        Ranked(
            family=standing.candidate.build.config.FAMILY,
            config=standing.candidate.name,
            ms=standing.ms,
            tflops=_tflops(race, standing),
            environment=environment | _measured_with(standing, runner),
        )
        for standing in standings
    ]


def _measured_with(standing: Standing, runner: Runner) -> dict[str, str]:
    """The sources of the candidate's family; a journal ends where any sources change."""
    if "csrc" not in runner.environment:
        return {}
    return {"csrc": source_hash(standing.candidate.build.config.FAMILY)[:DIGITS]}


def write_ranking(folder: Path, races: Sequence[Race], runner: Runner) -> None:
    """ranking.csv and ranking.json in `folder`, in place of older ones."""
    rows = ranking_rows(races, runner)
    write_rows(folder / "ranking.csv", rows)
    write_rows(folder / "ranking.json", rows)


def record_alone(race: Race, runner: Runner, path: Path) -> None:
    """Enters what a race found so far into the table of this sweep alone.

    Raises TableError.
    """
    if ranked := winners(race, runner):
        record_winners(race.problem, runner.device, ranked, path)


def record_beside(race: Race, runner: Runner, path: Path, shipped: WinnersTable | None) -> None:
    """Enters a race that had its final into a table of other sweeps' winners, beside what they
    found, and takes out what did wrong here. `shipped` stands behind that table, if any does.

    Raises TableError.
    """
    ranked = winners(race, runner) if race.decided else []
    wrong = [c.name for c in race.candidates.values() if c.status in _WRONG]
    if ranked or wrong:
        join_winners(race.problem, runner.device, ranked, wrong, path, shipped)


def summary(races: Sequence[Race]) -> list[dict[str, Any]]:
    """Per problem: its best configs, and what became of the others, for --json."""
    return [
        {
            "problem": str(race.problem),
            "best": [
                {
                    "config": standing.candidate.name,
                    "ms": standing.ms,
                    "tflops": _tflops(race, standing),
                    "stage": standing.stage,
                    "spread": standing.samples.spread,
                }
                for standing in race.standings()[:_SHOWN]
            ],
            "candidates": len(race.candidates),
            "statuses": dict(Counter(map(_fate, race.candidates.values()))),
        }
        for race in races
    ]


def print_ranking(console: Console, races: Sequence[Race]) -> None:
    """The best configs of every problem."""
    columns = [
        Column("problem"),
        Column("config"),
        Column("ms", True),
        Column("TFLOP/s", True),
        Column("behind", True),
        Column("stage"),
    ]
    rows = []
    for race in races:
        standings = race.standings()
        if not standings:
            rows.append((str(race.problem), _why_nothing(race), "", "", "", ""))
        for place, standing in enumerate(standings[:_SHOWN]):
            behind = standing.ms / standings[0].ms - 1
            rows.append(
                (
                    str(race.problem) if place == 0 else "",
                    standing.candidate.name,
                    f"{standing.ms:.4f}",
                    f"{_tflops(race, standing):.0f}",
                    f"{behind:.1%}" if place else "",
                    standing.stage,
                )
            )
    print_table(console, columns, rows)


def print_plan(console: Console, races: Sequence[Race]) -> None:
    """What would be tried, and what is culled, before anything runs."""
    columns = [Column("problem"), Column("candidates", True), Column("culled", True)]
    rows = [
        (str(race.problem), str(len(race.field)), str(len(race.candidates) - len(race.field)))
        for race in races
    ]
    print_table(console, columns, rows)
    for reason, count in culls(races).most_common():
        print_text(console, f"{count:,} x {reason}", indent=4)


def plan_summary(races: Sequence[Race]) -> list[dict[str, Any]]:
    """What print_plan prints, for --json: every candidate, and why it is culled if it is."""
    return [
        {
            "problem": str(race.problem),
            "candidates": [c.name for c in race.field],
            "culled": {c.name: c.reason for c in race.candidates.values() if not c.racing},
        }
        for race in races
    ]


def culls(races: Sequence[Race]) -> Counter[str]:
    """The reasons for which candidates were culled; those that differ in numbers alone are one,
    in the words of the first."""
    dropped = (c for race in races for c in race.candidates.values() if c.status == "culled")
    first: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for candidate in dropped:
        kind = re.sub(r"\d[\d,.]*", "0", candidate.reason)
        reason = first.setdefault(kind, candidate.reason.replace("(here ", "(for example "))
        counted[reason] += 1
    return counted


def _fate(candidate: Candidate) -> str:
    return "near the best" if candidate.racing else candidate.status


def _why_nothing(race: Race) -> str:
    counted = Counter(c.status for c in race.candidates.values())
    return "none: " + ", ".join(f"{count} {status}" for status, count in counted.most_common())


def _tflops(race: Race, standing: Standing) -> float:
    return race.problem.attn_flop() / standing.ms / 1e9


def _row(
    race: Race, candidate: Candidate, standing: Standing | None, runner: Runner, time: str
) -> BenchRow:
    cfg, compiled, proof = candidate.build.config, candidate.compiled, candidate.proof
    note = candidate.status + (f": {candidate.reason}" if candidate.reason else "")
    measured: dict[str, Any] = {}
    if standing is not None:
        samples = standing.samples
        measured = {
            "ms": standing.ms,
            "best_ms": samples.best_ms * standing.ms / samples.median_ms,
            "spread": samples.spread,
            "tflops": _tflops(race, standing),
            "sm_clock_mhz": samples.sm_clock_mhz,
            "power_w": samples.power_w,
            "protocol": standing.stage,
        }
    if proof is not None:
        measured |= {
            "max_error": proof.max_error,
            "error_bound": proof.error_bound,
            "rel_l2": proof.rel_l2,
        }
    if compiled is not None and compiled.error is None:
        ctas = cfg.num_ctas_per_sm(runner.device.max_smem_per_sm, compiled.registers)
        measured |= {
            "registers": compiled.registers,
            "spill_bytes": compiled.spill_bytes,
            "smem_bytes": cfg.smem_bytes(),
            "ctas_per_sm": ctas,
        }
    return BenchRow(
        contender=candidate.name,
        kind="ours",
        family=cfg.FAMILY,
        config=candidate.name,
        **problem_columns(race.problem),
        verdict="pass" if standing is not None else _VERDICTS[candidate.status],
        note="" if standing is not None and candidate.racing else note,
        **measured,
        **{**runner.origin, "time": time, **(standing.origin if standing is not None else {})},
    )
