"""The results of a sweep: one row per kernel, the winners, and the files that contain rows and
winners."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flashsmith.benchmark.measurement import Measurement, Proof, Times, Verdict, now
from flashsmith.benchmark.measurement_files import write_rows
from flashsmith.benchmark.table import make_columns, print_table, print_text
from flashsmith.chooser.winners import RankedConfig, WinnersTable, join_winners, record_winners
from flashsmith.chooser.winners.staleness import sources_here
from flashsmith.tuning.race import RaceState
from flashsmith.tuning.runner import Runner
from flashsmith.tuning.trial import FINAL, Trial

# The verdict on a kernel that was not timed, by its status; the verdict for a status that is not
# listed is 'absent'.
_VERDICTS: dict[str, Verdict] = {
    "wrong": "fail",
    "crash": "error",
    "hang": "error",
    "error": "error",
}
# The statuses of kernels that caused their failure themselves.
_WRONG = ("wrong", "crash", "hang")
_SHOWN = 3


def ranking_rows(states: Iterable[RaceState], runner: Runner) -> list[Measurement]:
    """One row for each kernel of each race.

    Among the rows of one problem, the timed kernels come first, fastest first.

    Rows are ranked by `ms`, which is the median time in the final, or the median time in a rung
    scaled to the final; `protocol` names the stage. `best_ms` is scaled in the same way. `note`
    says why a kernel was dropped.
    """
    rows = []
    for state in states:
        ranked = {trial.name: trial for trial in state.ranked}
        others = [trial for name, trial in state.trials.items() if name not in ranked]
        rows += [_row(state, trial, runner) for trial in (*ranked.values(), *others)]
    return rows


def winners(state: RaceState, runner: Runner) -> list[RankedConfig]:
    """Returns the ranking of a race, as an entry for the table of winners.

    The date of the figures is that of the final or, if there was no final, of the last timing.

    Kernels that were checked thoroughly are ranked before all other kernels.
    """
    proven = [trial for trial in state.ranked if trial.proof is not None]
    best_checked = min((trial.ms for trial in proven if trial.checked), default=0.0)
    kept = [trial for trial in proven if trial.checked or trial.ms >= best_checked]
    dated = [trial for trial in kept if trial.stage == FINAL] or kept
    origins = (trial.origins[trial.stage] for trial in dated)
    newest = max(origins, key=lambda origin: str(origin["time"]), default={})
    return [
        RankedConfig(
            family=trial.build.config.FAMILY,
            config=trial.name,
            ms=trial.ms,
            tflops=state.tflops(trial),
            environment={**_lasting(newest), "csrc": sources_here(trial.build.config.FAMILY)},
        )
        for trial in kept
    ]


def write_ranking(folder: Path, ended: Iterable[tuple[Sequence[RaceState], Runner]]) -> None:
    """Writes ranking.csv and ranking.json to `folder`, and replaces older ones.

    `ended` has, for each kind of GPU, the states of its races and the runner.
    """
    rows = [row for states, runner in ended for row in ranking_rows(states, runner)]
    write_rows(folder / "ranking.csv", rows)
    write_rows(folder / "ranking.json", rows)


def record_alone(state: RaceState, runner: Runner, path: Path) -> None:
    """Enters the current winners of a race into the sweep's own table.

    Raises TableError.
    """
    if ranked := winners(state, runner):
        record_winners(state.problem, runner.device, ranked, path)


def record_beside(
    state: RaceState, runner: Runner, path: Path, shipped: WinnersTable | None
) -> None:
    """Merges the winners of a race, after its final, into a table that also has other sweeps'
    winners. Kernels that failed in this sweep are removed from that table. If the table has no
    entry for the problem but ``shipped`` has one, the shipped entry is merged too.

    Raises TableError.
    """
    ranked = winners(state, runner) if state.decided else []
    wrong = [trial.name for trial in state.trials.values() if trial.status in _WRONG]
    if ranked or wrong:
        join_winners(state.problem, runner.device, ranked, wrong, path, shipped)


def summary(states: Sequence[RaceState]) -> list[dict[str, Any]]:
    """The summary for --json. It has for each problem the best configs, the configs that
    attention() uses according to the shipped tables, and how many kernels ended in each status."""
    return [
        {
            "problem": str(state.problem),
            "best": [_figures(state, trial) for trial in state.ranked[:_SHOWN]],
            "shipped": [
                _figures(state, trial) for trial in state.ranked if state.is_incumbent(trial)
            ],
            "candidates": len(state.trials),
            "statuses": dict(Counter(map(_fate, state.trials.values()))),
        }
        for state in states
    ]


def _figures(state: RaceState, trial: Trial) -> dict[str, Any]:
    return {
        "config": trial.name,
        "ms": trial.ms,
        "tflops": state.tflops(trial),
        "stage": trial.stage,
        "spread": trial.samples[trial.stage].spread,
    }


def print_ranking(console: Console, states: Sequence[RaceState], gpus: Sequence[str] = ()) -> None:
    """Prints for each problem the best configs, and the configs that attention() uses according to
    the shipped tables.

    If there are several kinds of GPU, each problem names its kind.
    """
    several = len(set(gpus)) > 1
    columns = make_columns("problem | config | ms> | TFLOP/s> | behind> | stage")
    rows = []
    for number, state in enumerate(states):
        problem = f"{gpus[number]}: {state.problem}" if several else str(state.problem)
        if not state.ranked:
            rows.append((problem, _why_nothing(state), "", "", "", ""))
        for place, trial in enumerate(state.ranked):
            shipped = state.is_incumbent(trial)
            if place >= _SHOWN and not shipped:
                continue
            behind = trial.ms / state.ranked[0].ms - 1
            rows.append(
                (
                    problem if place == 0 else "",
                    trial.name,
                    f"{trial.ms:.4f}",
                    f"{state.tflops(trial):.0f}",
                    f"{behind:.1%}" if place else "",
                    f"{trial.stage}, shipped choice" if shipped else trial.stage,
                )
            )
    print_table(console, columns, rows)


def print_plan(console: Console, states: Sequence[RaceState]) -> None:
    """Prints how many configs would be tried, and why the others would not. Used before anything
    runs."""
    columns = make_columns("problem | candidates> | culled>")
    rows = []
    for state in states:
        tried = len(state.active)
        rows.append((str(state.problem), str(tried), str(len(state.trials) - tried)))
    print_table(console, columns, rows)
    for reason, count in culls(states).most_common():
        print_text(console, f"{count:,} x {reason}", indent=4)


def plan_summary(states: Sequence[RaceState]) -> list[dict[str, Any]]:
    """The plan for --json: every candidate, and every culled config with the reason."""
    return [
        {
            "problem": str(state.problem),
            "candidates": [trial.name for trial in state.active],
            "culled": {t.name: t.reason for t in state.trials.values() if not t.active},
        }
        for state in states
    ]


def culls(states: Sequence[RaceState]) -> Counter[str]:
    """Counts how many configs were culled for each reason.

    Reasons that differ only in their numbers are counted together, under the first of them.
    """
    first: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for trial in (trial for state in states for trial in state.trials.values()):
        if trial.status == "culled":
            kind = re.sub(r"\d[\d,.]*", "0", trial.reason)
            reason = first.setdefault(kind, trial.reason.replace("(here ", "(for example "))
            counted[reason] += 1
    return counted


def _lasting(origin: Mapping[str, Any]) -> dict[str, Any]:
    """An origin without the name of the machine, which is stored only in the journal."""
    return {name: value for name, value in origin.items() if name != "worker"}


def _fate(trial: Trial) -> str:
    return "near the best" if trial.active else trial.status


def _why_nothing(state: RaceState) -> str:
    counted = Counter(trial.status for trial in state.trials.values())
    return "none: " + ", ".join(f"{count} {status}" for status, count in counted.most_common())


def _row(state: RaceState, trial: Trial, runner: Runner) -> Measurement:
    note = trial.status + (f": {trial.reason}" if trial.reason else "")
    verdict = "pass" if trial.stage else _VERDICTS.get(trial.status, "absent")
    proof = trial.proof or Proof(verdict)
    times = None
    if trial.stage:
        found = Times.of(trial.samples[trial.stage], state.problem)
        times = replace(
            found,
            ms=trial.ms,
            best_ms=found.best_ms * trial.ms / found.ms,
            tflops=state.tflops(trial),
        )
    return Measurement.of(
        trial.name,
        "ours",
        state.problem,
        replace(proof, verdict=verdict, note="" if trial.stage and trial.active else note),
        times,
        trial.facts,
        {"time": now(), **runner.origin, **_lasting(trial.origins.get(trial.stage, {}))},
        family=trial.build.config.FAMILY,
        config=trial.name,
        protocol=trial.stage,
    )
