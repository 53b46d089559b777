"""Whole sweeps over fake kernels, in real worker processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sweep_fakes as fakes
from processes import child_pids, wait_until_gone, with_path
from sweep_fakes import NAMES, PROBLEM, Kernel, World, but, times

from flashsmith.chooser import choose
from flashsmith.chooser.winners import WinnersTable
from flashsmith.errors import CompileError, LaunchError
from flashsmith.families import Problem
from flashsmith.tuning import sweep as sweep_module
from flashsmith.tuning.executor import LocalExecutor
from flashsmith.tuning.journal import Journal
from flashsmith.tuning.race import Halving, Race, RaceState, Rung
from flashsmith.tuning.ranking import winners
from flashsmith.tuning.runner import BuildResult
from flashsmith.tuning.space import search_space
from flashsmith.tuning.sweep import Settings, Sweep, run_sweeps
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.trial import Build
from flashsmith.tuning.tune import make_race

HALVING = Halving((Rung(3, 0.0, 0.10), Rung(10, 0.0, 0.04)), finalists=3, final_least=15)
# One process compiles: each takes a third of a second to start.
SETTINGS = Settings(HALVING, jobs=1, patience=2.0, compile_patience=2.0)
TWO_JOBS = replace(SETTINGS, jobs=2)
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
    on_finished: Callable[[RaceState], None] = lambda state: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[RaceState]:
    """Runs a sweep from what the folder's journal knows; where it leaves its races."""
    races = races_of(world, problems, settings.halving)
    return run(world, folder, races, settings, on_finished, clock)


def run(
    world: World,
    folder: Path,
    races: Sequence[Race],
    settings: Settings = SETTINGS,
    on_finished: Callable[[RaceState], None] = lambda state: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[RaceState]:
    journal = Journal(folder / "journal.jsonl", "here")
    try:
        progress, runner = SweepProgress(quiet=True), fakes.fake_runner(world)
        executor = LocalExecutor.of(runner)
        sweep = Sweep(races, runner, journal.part("here"), settings, progress, executor,
                      on_finished=on_finished, clock=clock)  # fmt: skip
        run_sweeps([sweep], executor, progress)
    finally:
        journal.close()
    return sweep.states


def order(state: RaceState) -> list[str]:
    return [trial.name for trial in state.ranked]


def statuses(state: RaceState) -> dict[str, str]:
    return {name: trial.status for name, trial in state.trials.items()}


def test_the_fastest_wins_and_every_kernel_is_ranked(tmp_path: Path) -> None:
    (race,) = sweep(World(times(best=7, count=12)), tmp_path)
    assert order(race) == [NAMES[n] for n in (7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11)]
    first, second, *_ = race.ranked
    assert (first.stage, first.ms) == ("final", pytest.approx(PROBLEM.attn_flop() / 1e9))
    assert second.stage == "rung 2"  # 5% behind is not within the last rung's 4%
    assert race.finished


FAILURES = {
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
    kernels = but(kernels, FAILURES)
    for n in range(13, 18):
        kernels[NAMES[n]] = Kernel(ms=2 + n / 100)
    kernels[NAMES[0]] = Kernel(ms=1.9)
    (race,) = sweep(World(kernels), tmp_path, settings=TWO_JOBS)
    assert order(race) == [NAMES[n] for n in (0, 13, 14, 15, 16, 17)]
    for n, (status, reason) in EXPECTED.items():
        trial = race.trials[NAMES[n]]
        assert trial.status == status, trial
        assert reason in trial.reason


def test_ties_are_ranked_by_name(tmp_path: Path) -> None:
    kernels = {name: Kernel(ms=1.0) for name in NAMES[:6]}
    (race,) = sweep(World(kernels), tmp_path)
    finalists = [trial.name for trial in race.ranked if trial.stage == "final"]
    assert finalists == sorted(NAMES[:6])[:3]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]
)
def test_on_a_noisy_clock_the_winner_is_among_the_best(tmp_path: Path, seed: int) -> None:
    best = 5 + seed
    kernels = times(best, count=16, step=0.02)
    (race,) = sweep(World(kernels, noise=0.015), tmp_path)
    winner = order(race)[0]
    assert kernels[winner].ms <= 1.02
    assert NAMES[best] in [trial.name for trial in race.ranked if trial.stage == "final"]


def test_many_problems_share_builds_and_a_kernel_that_failed_on_one_is_out_of_all(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    kernels = but(times(best=0, count=8), {3: {"fails": "prove"}})
    races = sweep(World(kernels, log=log), tmp_path, [PROBLEM, LONG, CAUSAL])
    compiled = [
        int(line.split(" | ")[1]) for line in log.read_text().splitlines() if "comp" in line
    ]
    assert sum(compiled) == 16  # 8 that the first two share, and 8 that are causal
    dense, long, causal = races
    assert {statuses(race)[NAMES[3]] for race in races} == {"crash"}
    assert long.trials[NAMES[3]].reason == dense.trials[NAMES[3]].reason
    assert "causal" in causal.trials[NAMES[3]].reason
    assert log.read_text().count(f"prove | {LONG} | {NAMES[3]}") == 0
    assert [order(race)[0] for race in races] == [NAMES[0]] * 3


def test_a_kernel_that_breaks_the_final_is_found_and_the_others_run_it(tmp_path: Path) -> None:
    kernels = but(times(best=2, count=6, step=0.01), {2: {"fails": "final", "how": "abort"}})
    (race,) = sweep(World(kernels), tmp_path)
    # None fails alone, so the final fails twice and the rungs decide.
    assert race.failed_finals == 2
    assert race.ranked[0].stage == "rung 2"
    assert order(race)[0] == NAMES[2]
    # What broke it may have been the GPU's fault: another run tries again.
    (race,) = sweep(World(times(best=2, count=6, step=0.01)), tmp_path)
    assert race.ranked[0].stage == "final"


def test_a_library_that_is_gone_is_compiled_again(tmp_path: Path) -> None:
    kernels = times(best=0, count=4)
    sweep(World(kernels), tmp_path)
    log, gone = tmp_path / "log", tmp_path / "gone"
    kernels[NAMES[4]] = Kernel(ms=0.9)
    world = World(kernels, log=log, gone=gone)
    journal = Journal(tmp_path / "journal.jsonl", "here")
    progress, runner = SweepProgress(quiet=True), fakes.fake_runner(world)
    executor = LocalExecutor.of(runner)
    whole = Sweep(races_of(world), runner, journal.part("here"), SETTINGS, progress, executor)
    compiled = whole._compiled

    def lose(build: Build, found: BuildResult) -> None:
        compiled(build, found)
        if log.read_text().count("compile") == 1:
            gone.write_text("\n".join(NAMES[:5]))

    whole._compiled = lose  # type: ignore[method-assign]
    gone.write_text("")
    run_sweeps([whole], executor, progress)
    journal.close()
    (race,) = whole.states
    assert order(race)[0] == NAMES[4]
    assert race.ranked[0].stage == "final"
    assert log.read_text().count("compile") >= 2
    assert set(statuses(race).values()) <= {"active", "slower"}


def test_a_library_that_is_gone_again_costs_its_kernel(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.write_text(NAMES[1])
    world = World(times(best=1, count=3), gone=gone, heals=False)
    (race,) = sweep(world, tmp_path)
    assert statuses(race)[NAMES[1]] == "error"
    assert order(race) == [NAMES[0], NAMES[2]]


@pytest.mark.parametrize(
    ("fails", "how"),
    [("prove", "raise"), pytest.param("compile", "refuse", marks=pytest.mark.full)],
)
def test_what_the_machine_may_be_to_blame_for_is_tried_again_when_going_on(
    tmp_path: Path, fails: str, how: str
) -> None:
    kernels = times(best=0, count=4)
    (race,) = sweep(World(but(kernels, {0: {"fails": fails, "how": how}})), tmp_path)
    assert order(race)[0] == NAMES[1]
    (race,) = sweep(World(kernels), tmp_path)
    assert order(race)[0] == NAMES[0]


@pytest.mark.parametrize("how", [pytest.param("abort", marks=pytest.mark.full), "lie"])
def test_what_a_kernel_did_is_remembered(tmp_path: Path, how: str) -> None:
    kernels = times(best=0, count=4)
    sweep(World(but(kernels, {0: {"fails": "prove", "how": how}})), tmp_path)
    (race,) = sweep(World(kernels), tmp_path)
    assert order(race) == NAMES[1:4]


def test_a_problem_that_cannot_be_set_up_does_not_cost_its_kernels(tmp_path: Path) -> None:
    world = World(times(best=1, count=5), refuses=(str(LONG),))
    dense, long = sweep(world, tmp_path, [PROBLEM, LONG])
    assert order(dense)[0] == NAMES[1]
    assert set(statuses(long).values()) == {"not reached"}
    assert "out of memory" in long.trials[NAMES[1]].reason


def test_a_gpu_that_does_not_come_back_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"did not start 3 times in a row; .* no CUDA-capable device"
    ):
        sweep(World(times(best=1, count=3), opens=False), tmp_path)


def test_a_missing_compiler_ends_the_sweep_and_culls_no_kernel(tmp_path: Path) -> None:
    kernels = but(times(best=1, count=3), {0: {"fails": "compile", "how": "raise"}})
    with pytest.raises(CompileError, match="a compile process failed"):
        sweep(World(kernels), tmp_path)
    assert not (tmp_path / "journal.jsonl").read_text()


def test_a_fast_kernel_with_wrong_results_drops_no_right_one(tmp_path: Path) -> None:
    # Beside a kernel that takes a tenth, no other is within any margin.
    kernels = but(times(best=0, count=12), {5: {"ms": 0.1, "fails": "check", "how": "lie"}})
    (race,) = sweep(World(kernels), tmp_path)
    assert statuses(race)[NAMES[5]] == "wrong"
    honest, _ = sorted(kernels.items(), key=lambda item: item[1].ms)[1:3]
    assert race.ranked[0].name == honest[0]
    assert race.ranked[0].stage == "final"


def test_a_slow_compilation_delays_no_other_kernel(tmp_path: Path) -> None:
    kernels = times(best=1, count=9)
    kernels = but(kernels, {8: {"compile_seconds": 1.5}})
    log = tmp_path / "log"
    (race,) = sweep(World(kernels, log=log), tmp_path, settings=TWO_JOBS)
    proven = [line for line in log.read_text().splitlines() if line.startswith("prove")]
    assert len(proven) == 9
    assert NAMES[8] in proven[-1] or proven[-1].split(" | ")[2] in race.trials
    assert order(race)[0] == NAMES[1]


def test_the_bench_is_replaced_before_it_holds_too_many_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "MAX_LIBRARIES", 4)
    log = tmp_path / "log"
    (race,) = sweep(World(times(best=2, count=12), log=log), tmp_path)
    assert order(race)[0] == NAMES[2]
    # Each fake kernel is a library of its own: 12 are proven by three processes at least.
    assert log.read_text().count("open") >= 3


# ---- time ----


class RequestClock:
    """A clock by which every request to the bench takes a second, and nothing else any time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.touch()

    def __call__(self) -> float:
        return float(sum(line.startswith(REQUESTS) for line in self.log.open()))


REQUESTS = ("prove", "check", "time", "final")


def test_a_budget_ends_the_sweep_with_the_best_so_far(tmp_path: Path) -> None:
    log = tmp_path / "log"
    world = World(times(best=1, count=30), log=log)
    settings = replace(TWO_JOBS, budget=40.0)
    (race,) = sweep(world, tmp_path, settings=settings, clock=RequestClock(log))
    timed = [trial for trial in race.trials.values() if trial.samples]
    assert len(timed) == 15  # three quarters of the budget are 30 requests, two a kernel
    assert Counter(statuses(race).values())["not reached"] == 15
    assert race.ranked[0].stage == "final"
    # Later, with more time, all are tried, and what was measured is not measured again.
    before = log.read_text()
    (race,) = sweep(world, tmp_path)
    assert "not reached" not in statuses(race).values()
    assert order(race)[0] == NAMES[1]
    again = log.read_text()[len(before) :]
    assert not any(f"prove | {PROBLEM} | {c.name}\n" in again for c in timed)


def test_a_budget_is_divided_over_the_problems(tmp_path: Path) -> None:
    log = tmp_path / "log"
    world = World(times(best=1, count=30), log=log)
    settings = replace(TWO_JOBS, budget=80.0)
    clock = RequestClock(log)
    races = sweep(world, tmp_path, [PROBLEM, CAUSAL], settings, clock=clock)
    timed = [len([trial for trial in race.trials.values() if trial.samples]) for race in races]
    assert sum(timed) in (29, 30)
    assert min(timed) >= 12
    assert all(race.ranked[0].stage == "final" for race in races)


def test_a_budget_reaches_problems_whose_reference_never_ends_its_rung(tmp_path: Path) -> None:
    log = tmp_path / "log"
    world = World(times(best=1, count=30), log=log)
    key = "; ".join(world.kernels)
    short = make_race(PROBLEM, fakes.DEVICE, key, HALVING)
    long = make_race(LONG, fakes.DEVICE, key, HALVING, reference=short)
    settings = replace(TWO_JOBS, budget=80.0)
    on_short, on_long = run(world, tmp_path, [short, long], settings, clock=RequestClock(log))
    assert on_short.measurements < 30
    assert on_long.measurements >= 10
    assert on_long.ranked[0].stage == "final"
    # What did best on the short problem is tried first.
    first = next(line for line in log.read_text().splitlines() if f"prove | {LONG}" in line)
    timed = [trial for trial in on_short.trials.values() if "rung 1" in trial.samples]
    assert first.endswith(f" | {min(timed, key=lambda t: t.medians['rung 1']).name}")


# ---- stopping and going on ----


def ranking(races: Sequence[RaceState]) -> list[object]:
    found = []
    for race in races:
        found += [(t.name, t.ms, t.stage) for t in race.ranked]
        found += [(t.name, t.status, t.reason) for t in race.trials.values()]
    return found


MIXED = but(
    times(best=4, count=10, step=0.03),
    {
        1: {"fails": "prove", "how": "abort"},
        2: {"fails": "check", "how": "lie", "ms": 0.9},
        3: {"spill_bytes": 999},
        5: {"fails": "compile", "how": "refuse"},
    },
)
NOISY = World(MIXED, noise=0.01)
PROBLEMS = [PROBLEM, CAUSAL]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], bytes]:
    """The result of a sweep that is not stopped, and its journal."""
    folder = tmp_path_factory.mktemp("whole")
    found = ranking(sweep(NOISY, folder, PROBLEMS))
    return found, (folder / "journal.jsonl").read_bytes()


@pytest.mark.parametrize(
    "part", [0.6, *(pytest.param(part, marks=pytest.mark.full) for part in (0.0, 0.15, 0.9, 1.0))]
)
def test_whatever_part_of_the_journal_is_left_the_ranking_is_the_same(
    tmp_path: Path, whole: tuple[list[object], bytes], part: float
) -> None:
    """A kill at any moment leaves a beginning of the journal, perhaps cut within a line."""
    expected, content = whole
    cut = int(part * len(content))
    (tmp_path / "journal.jsonl").write_bytes(content[:cut])
    assert ranking(sweep(NOISY, tmp_path, PROBLEMS)) == expected, cut


@pytest.mark.parametrize("budget", [float("inf"), 3600.0])
def test_without_a_budget_a_problem_ends_before_the_next_begins(
    tmp_path: Path, budget: float
) -> None:
    """A sweep that is stopped has whole problems; of a budget finals get their part at the end."""
    world = World(times(best=1, count=4), log=tmp_path / "log")
    sweep(world, tmp_path, PROBLEMS, replace(SETTINGS, budget=budget))
    lines = [line.split(" | ") for line in world.log.read_text().splitlines()]
    order = [(words[0], words[1]) for words in lines if words[0] in REQUESTS]
    finals = order.index(("check", str(PROBLEM)))
    began = order.index(("prove", str(CAUSAL)))
    assert (began > finals) == (budget == float("inf"))


def test_a_finished_sweep_measures_nothing_again(
    tmp_path: Path, whole: tuple[list[object], bytes]
) -> None:
    expected, content = whole
    (tmp_path / "journal.jsonl").write_bytes(content)
    log = tmp_path / "log"
    ends: list[RaceState] = []
    races = sweep(replace(NOISY, log=log), tmp_path, PROBLEMS, on_finished=ends.append)
    assert ranking(races) == expected
    # Only what did not compile is tried again, for both problems at once.
    assert sorted(str(race.problem) for race in ends) == sorted(map(str, PROBLEMS))
    assert not any(line.startswith(REQUESTS) for line in log.read_text().splitlines())


SWEEP_PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_sweep import MIXED, PROBLEMS, sweep
from sweep_fakes import World
sweep(World(MIXED, noise=0.01, seconds_per_request=0.02), Path({folder!r}), PROBLEMS)
"""


@pytest.mark.parametrize("records", [pytest.param(3, marks=pytest.mark.full), 40])
def test_killed_with_all_its_processes_it_goes_on(
    tmp_path: Path, whole: tuple[list[object], bytes], records: int
) -> None:
    expected, _ = whole
    folder = tmp_path / "killed"
    program = SWEEP_PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", program], env=with_path())
    journal = folder / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= records):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = child_pids(process.pid)
    assert children
    process.kill()
    process.wait()
    wait_until_gone(children)
    assert ranking(sweep(NOISY, folder, PROBLEMS)) == expected


# ---- neighbours ----


def refined(folder: Path, world: World, refinements: int, key: str) -> list[RaceState]:
    races = [make_race(p, fakes.DEVICE, key, HALVING, None, refinements) for p in PROBLEMS]
    return run(world, folder, races)


def path_to_the_best() -> tuple[list[str], World]:
    """Three configs, each the next one's neighbour and slower; all others are slower still."""
    start = next(cfg for cfg in fakes.CONFIGS if (cfg.B_r, cfg.B_c) == (64, 64))
    first = replace(start, eager_load_blocks=not start.eager_load_blocks)
    second = replace(first, optimized_softmax=not first.optimized_softmax)
    names = [str(start), str(first), str(second)]
    speeds = {name: Kernel(ms=1.0 - n / 10) for n, name in enumerate(names)}
    return names, World(speeds, default=Kernel(ms=2.0))


@pytest.mark.parametrize("refinements", [0, pytest.param(1, marks=pytest.mark.full), 2])
def test_neighbours_of_the_best_are_tried_and_their_neighbours(
    tmp_path: Path, refinements: int
) -> None:
    names, world = path_to_the_best()
    races = refined(tmp_path, world, refinements, names[0])
    assert [order(race)[0] for race in races] == [names[refinements]] * 2
    tried = [len(race.trials) for race in races]
    assert tried == [1, 1] if refinements == 0 else min(tried) > 8 * refinements


def test_both_families_race_and_the_table_says_which_wins(tmp_path: Path) -> None:
    """The fastest is a neighbour of the best of the wgmma space."""
    leader = (
        "(FP16, 128, 192, 96, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
        "+rescale_8"
    )
    best = leader.replace("192, 96", "192, 112")
    slower = {str(cfg): Kernel(ms=3.0) for cfg in search_space(PROBLEM, fakes.DEVICE, "space")}
    world = World({**slower, leader: Kernel(ms=1.5), best: Kernel(ms=1.0)}, default=Kernel(ms=2.0))
    folder = tmp_path / "whole"
    races = refined(folder, world, 1, "both")
    race = races[0]
    assert order(race)[:2] == [best, leader]
    table = WinnersTable()
    table.add(PROBLEM, fakes.DEVICE, winners(race, fakes.fake_runner(world)))
    (entry,) = table
    assert entry.families == {"mma_sync", "wgmma"}
    answer = choose(PROBLEM, fakes.DEVICE, table=table)
    assert (str(answer.config), answer.family) == (best, "wgmma")
    assert "takes" in answer.passed_over["mma_sync"]
    assert ranking(refined(folder, world, 1, "both")) == ranking(races)


@pytest.mark.parametrize(
    "part", [0.5, *(pytest.param(part, marks=pytest.mark.full) for part in (0.75, 1.0))]
)
def test_neighbours_that_fail_cost_themselves_and_a_refined_sweep_goes_on(
    tmp_path: Path, part: float
) -> None:
    names, world = path_to_the_best()
    kernels = {**world.kernels, names[2]: Kernel(ms=0.1, fails="check", how="lie")}
    world = replace(world, kernels=kernels)
    expected = refined(tmp_path / "whole", world, 2, names[0])
    assert [order(race)[0] for race in expected] == [names[1]] * 2
    assert [statuses(race)[names[2]] for race in expected] == ["wrong"] * 2
    content = (tmp_path / "whole" / "journal.jsonl").read_bytes()
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "journal.jsonl").write_bytes(content[: int(part * len(content))])
    assert ranking(refined(folder, world, 2, names[0])) == ranking(expected)
