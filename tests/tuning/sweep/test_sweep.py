"""Whole sweeps over fake kernels, in real worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sweep_fakes as fakes
from sweep_fakes import NAMES, PROBLEM, Kernel, World, but, times

from flashsmith.configs import Problem
from flashsmith.errors import LaunchError
from flashsmith.tuning.sweep import Halving, Journal, Rung, Settings, Sweep, make_race
from flashsmith.tuning.sweep.progress import SweepProgress
from flashsmith.tuning.sweep.race import Race

HALVING = Halving(rungs=(Rung(3, 0.10), Rung(10, 0.04)), finalists=3, final_runs=15)
SETTINGS = Settings(HALVING, jobs=2, patience=2.0, compile_patience=2.0)
CAUSAL = Problem.parse("b2 s512 h4 d128 fp16 causal")
LONG = Problem.parse("b1 s2048 h4 d128 fp16")


def races_of(
    world: World, problems: Sequence[Problem] = (PROBLEM,), halving: Halving = HALVING
) -> list[Race]:
    key = "; ".join(world.kernels)
    return [make_race(problem, fakes.DEVICE, key, halving) for problem in problems]


def sweep(
    world: World,
    folder: Path,
    problems: Sequence[Problem] = (PROBLEM,),
    settings: Settings = SETTINGS,
    finished: Callable[[Race], None] = lambda race: None,
) -> list[Race]:
    """Runs a sweep from what the folder's journal knows; its races."""
    races = races_of(world, problems, settings.halving)
    journal = Journal(folder / "journal.jsonl", "here")
    try:
        progress = SweepProgress(quiet=True)
        Sweep(races, fakes.fake_runner(world), journal, settings, progress, finished).run()
    finally:
        journal.close()
    return races


def order(race: Race) -> list[str]:
    return [standing.candidate.name for standing in race.standings()]


def statuses(race: Race) -> dict[str, str]:
    return {name: candidate.status for name, candidate in race.candidates.items()}


def test_the_fastest_wins_and_every_kernel_is_ranked(tmp_path: Path) -> None:
    (race,) = sweep(World(times(best=7, count=12)), tmp_path)
    assert order(race) == [NAMES[n] for n in (7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11)]
    first, second, *_ = race.standings()
    assert (first.stage, first.ms) == ("final", pytest.approx(PROBLEM.attn_flop() / 1e9))
    assert second.stage == "rung 2"  # 5% behind is not within the last rung's 4%
    assert race.finished


MISCHIEF = {
    1: {"fails": "compile", "how": "refuse"},
    2: {"fails": "compile", "how": "abort"},
    3: {"fails": "compile", "how": "hang"},
    4: {"spill_bytes": 4096},
    5: {"registers": 600},
    6: {"fails": "prove", "how": "abort"},
    7: {"fails": "prove", "how": "hang"},
    8: {"fails": "prove", "how": "raise"},
    9: {"fails": "prove", "how": "lie"},
    10: {"fails": "time", "how": "segfault"},
    11: {"fails": "time", "how": "hang"},
    12: {"fails": "check", "how": "lie"},
}
EXPECTED = {
    1: ("culled", "does not compile: nvcc says no"),
    2: ("culled", "does not compile: crash: the process was killed by SIGABRT"),
    3: ("culled", "does not compile: hang: not done after 2 s"),
    4: ("culled", "spills: 4096 bytes per thread, allowed are 256"),
    5: ("culled", "cannot reside: 128 threads"),
    6: ("crash", "while it was proven on b2 s512 h4 d128 fp16: the process was killed by SIGABRT"),
    7: ("hang", "while it was proven on b2 s512 h4 d128 fp16: not done after"),
    8: ("error", "illegal memory access"),
    9: ("wrong", "largest error 1 is above 0.001"),
    10: ("crash", "while it was timed on b2 s512 h4 d128 fp16: the process was killed by SIGSEGV"),
    11: ("hang", "while it was timed"),
    12: ("wrong", "largest error 1 is above 0.001"),
}


def test_every_failure_costs_its_kernel_only(tmp_path: Path) -> None:
    # All that fail would be faster than the best that works.
    kernels = times(best=1, count=13, step=0.001)
    kernels = but(kernels, MISCHIEF)
    for n in range(13, 18):
        kernels[NAMES[n]] = Kernel(ms=2 + n / 100)
    kernels[NAMES[0]] = Kernel(ms=1.9)
    (race,) = sweep(World(kernels), tmp_path)
    assert order(race) == [NAMES[n] for n in (0, 13, 14, 15, 16, 17)]
    for n, (status, reason) in EXPECTED.items():
        candidate = race.candidates[NAMES[n]]
        assert candidate.status == status, candidate
        assert reason in candidate.reason
