"""What a sweep writes: a row for every kernel, the winners, and what it prints."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sweep_fakes as fakes
from rich.console import Console
from sweep_fakes import NAMES, PROBLEM, World, but, times

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.measurement_files import read_rows
from flashsmith.chooser.winners import WinnersTable
from flashsmith.families import Problem
from flashsmith.time_left import format_seconds
from flashsmith.tuning.race import Halving, RaceState, Rung, states_of
from flashsmith.tuning.ranking import plan_summary, print_plan, print_ranking, summary
from flashsmith.tuning.sweep import Settings
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.trial import Trials
from flashsmith.tuning.tune import SweepResult, make_race, tune

HALVING = Halving((Rung(3, 0.0, 0.10), Rung(5, 0.0, 0.04)), finalists=2, final_least=5)
KERNELS = but(
    times(best=1, count=6),
    {
        0: {"fails": "prove", "how": "lie"},
        2: {"spill_bytes": 999},
        3: {"fails": "prove", "how": "raise"},
    },
)
EMPTY = Problem.parse("b2 s4096 h4 d128 fp16")


def run(folder: Path) -> SweepResult:
    world = World(KERNELS, refuses=(str(EMPTY),))
    races = [
        make_race(problem, fakes.DEVICE, "; ".join(KERNELS), HALVING)
        for problem in (PROBLEM, EMPTY)
    ]
    with SweepProgress() as progress:
        return tune(
            races,
            fakes.fake_runner(world),
            Settings(HALVING, jobs=1),
            folder / "out",
            progress,
            table=folder / "mine.json",
        )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, Path]:
    folder = tmp_path_factory.mktemp("tuned")
    return run(folder), folder


def rows_of(folder: Path, problem: Problem) -> list[Measurement]:
    return [r for r in read_rows(folder / "out" / "ranking.csv") if r.problem == problem]


def test_every_kernel_has_a_row_with_its_status(tuned: tuple[SweepResult, Path]) -> None:
    _, folder = tuned
    rows = rows_of(folder, PROBLEM)
    assert read_rows(folder / "out" / "ranking.json") == [
        *rows,
        *rows_of(folder, EMPTY),
    ]
    assert [(r.config, r.verdict, r.protocol) for r in rows] == [
        (NAMES[1], "pass", "final"),
        (NAMES[4], "pass", "rung 2"),
        (NAMES[5], "pass", "rung 1"),
        (NAMES[0], "fail", ""),
        (NAMES[2], "absent", ""),
        (NAMES[3], "error", ""),
    ]
    assert [r.note.partition(":")[0] for r in rows] == [
        "", "", "slower", "wrong", "culled", "error",
    ]  # fmt: skip
    best = rows[0]
    ms = PROBLEM.attn_flop() / 1e9
    assert (best.ms, best.tflops) == (pytest.approx(ms), pytest.approx(1.0))
    assert (best.registers, best.spill_bytes, best.max_error) == (128, 0, 1e-4)
    assert (best.gpu, best.arch, best.family) == ("fake", 90, "mma_sync")
    assert rows[4].spill_bytes == 999
    assert {r.verdict for r in rows_of(folder, EMPTY)} == {"fail", "error", "absent"}


def test_the_tables_have_the_ranking(tuned: tuple[SweepResult, Path]) -> None:
    _, folder = tuned
    for path in (folder / "out" / "winners.json", folder / "mine.json"):
        table = WinnersTable.load(path)
        assert table.validate() == []
        (entry,) = table
        assert entry.problem == PROBLEM
        assert [r.config for r in entry.ranked] == [NAMES[1], NAMES[4], NAMES[5]]
        assert entry.best.environment["gpu"] == "fake"
        assert entry.best.time
        assert WinnersTable.load(path).lookup(PROBLEM, fakes.DEVICE)[0].entry == entry


def test_a_problem_without_a_winner_is_not_ok(tuned: tuple[SweepResult, Path]) -> None:
    result, _ = tuned
    assert not result.ok
    assert not result.interrupted
    assert SweepResult(result.races[:1], False).ok


def text_of(function, races: list[RaceState]) -> str:
    file = io.StringIO()
    function(Console(file=file, width=10_000), races)
    return file.getvalue()


def test_a_person_reads_the_best_and_why_there_is_none(tuned: tuple[SweepResult, Path]) -> None:
    result, _ = tuned
    text = text_of(print_ranking, result.races)
    best, second, third, none = text.splitlines()[2:]
    assert NAMES[1] in best
    assert str(PROBLEM) in best
    assert "| 1 |" in best.replace("  ", " ").replace("  ", " ").replace("  ", " ")
    assert f"{NAMES[4]}" in second
    assert "4.8%" not in best
    assert "rung 1" in third
    assert "none: " in none
    facts = summary(result.races)
    assert [found["config"] for found in facts[0]["best"]] == [NAMES[1], NAMES[4], NAMES[5]]
    assert facts[0]["statuses"] == {
        "near the best": 2, "slower": 1, "wrong": 1, "culled": 1, "error": 1,
    }  # fmt: skip
    assert facts[1]["best"] == []


def test_progress_is_reported_as_it_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    said = capsys.readouterr().err
    assert f"culled {NAMES[2]}: spills: 999 bytes per thread, allowed are 256" in said
    assert f"wrong: {NAMES[0]} on {PROBLEM}: largest error" in said
    assert f"error: {NAMES[3]} while it was proven on {PROBLEM}: RuntimeError" in said
    assert f"{EMPTY}: left out, its tensors cannot be made: RuntimeError: out of memory" in said
    assert f"done {PROBLEM}: {NAMES[1]}, " in said
    assert "1 of 2 problems have a winner" in said
    run(tmp_path)
    assert "continuing from" in capsys.readouterr().err


def test_a_plan_says_what_is_tried_and_what_is_not() -> None:
    from flashsmith.families import device_spec

    device = device_spec("RTX 4090")
    race = make_race(Problem.parse("b1 s1024 h8 d256 fp16"), device)
    states = states_of([race], Trials(device))
    text = text_of(print_plan, states)
    assert "b1 s1024 h8 d256 fp16" in text
    assert "x illegal: the Q, K and V tiles" in text
    (facts,) = plan_summary(states)
    assert len(facts["candidates"]) + len(facts["culled"]) == len(race.builds)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59, "59s"), (61, "1m01s"), (3599, "59m59s"), (7500, "2h05m")],
)
def test_seconds_are_read_easily(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
