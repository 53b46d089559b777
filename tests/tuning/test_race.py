"""One race, driven by hand: the order of measurements does not matter, mentors are followed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from sweep_fakes import CONFIGS, DEVICE, PROBLEM, World, fake_runner

from flashsmith.benchmark.timing import Samples
from flashsmith.families import Problem
from flashsmith.tuning.candidate import Candidate
from flashsmith.tuning.halving import Halving, Rung
from flashsmith.tuning.problems import mentor_of
from flashsmith.tuning.race import ALONE, Race, Task
from flashsmith.tuning.ranking import ranking_rows
from flashsmith.tuning.runner import Build, Proof

HALVING = Halving((Rung(1, 0.0, 0.10), Rung(3, 0.0, 0.04)), finalists=3, final_least=5)
SHORT = Problem.parse("b16 s2048 h16 d128 fp16")
LONG = Problem.parse("b4 s16384 h16 d128 fp16")
EVERYTHING = {Build.of(PROBLEM, cfg) for cfg in CONFIGS}


def race_of(count: int, problem: Problem = PROBLEM, mentor: Race | None = None) -> Race:
    configs = CONFIGS[:count]
    return Race(problem, [Candidate(Build.of(problem, cfg)) for cfg in configs], HALVING, mentor)


def answer(task: Task, ms: dict[str, float]) -> dict[str, object]:
    """The record of what a bench would say."""
    record: dict[str, object] = {"config": task.candidates[0].name}
    if task.kind in ("prove", "check"):
        return record | {
            "kind": "proof",
            "thorough": task.kind == "check",
            "proof": asdict(Proof(True)),
        }
    times = {c.name: asdict(Samples((ms[c.name],) * 3)) for c in task.candidates}
    if task.kind == "final":
        return {"kind": "final", "times": times}
    return record | {"kind": "times", "rung": task.rung, "times": times[task.candidates[0].name]}


def drive(race: Race, ms: dict[str, float], ready: Sequence[Build] = ()) -> list[Task]:
    """Does whatever the race asks for until it asks for nothing; the tasks."""
    builds = ready or EVERYTHING
    tasks = []
    while task := race.search_task(builds) or (
        race.final_task(builds, 1e9) if race.searched else None
    ):
        tasks.append(task)
        race.apply(answer(task, ms))
    return tasks


def ladder(race: Race, step: float = 0.05) -> dict[str, float]:
    return {name: 1 + step * n for n, name in enumerate(race.candidates)}


def test_a_kernel_is_proven_before_it_is_timed_and_checked_before_the_final() -> None:
    race = race_of(12)
    tasks = drive(race, ladder(race))
    first = next(iter(race.candidates))
    kinds = [(t.kind, t.rung) for t in tasks if first in [c.name for c in t.candidates]]
    assert kinds == [("prove", 0), ("time", 0), ("time", 1), ("check", 0), ("final", 0)]
    assert race.finished
    # 12, of which 4 stay, of which one is within the last rung's 4%.
    assert [t.kind for t in tasks].count("time") == 16
    assert len(tasks[-1].candidates) == 1


def test_a_rung_waits_for_kernels_that_are_still_compiled() -> None:
    race = race_of(6)
    builds = [c.build for c in race.candidates.values()]
    drive(race, ladder(race), builds[:4])
    assert (race.rung, race.finished) == (0, False)
    drive(race, ladder(race), builds)
    assert race.finished


def test_standings_scale_the_rungs_to_the_final() -> None:
    race = race_of(8)
    ms = ladder(race)
    while not race.searched:
        task = race.search_task(EVERYTHING)
        if task is None:
            break
        race.apply(answer(task, ms))
    # In the final the clock has settled, and everything takes twice as long.
    drive(race, {name: 2 * time for name, time in ms.items()})
    found = [(s.candidate.name, s.stage) for s in race.standings()]
    assert [name for name, _ in found] == list(race.candidates)
    assert [stage for _, stage in found] == ["final"] + ["rung 2"] * 2 + ["rung 1"] * 5
    for standing in race.standings():
        assert abs(standing.ms - 2 * ms[standing.candidate.name]) < 1e-12
    for row in ranking_rows([race], fake_runner(World({}))):  # all samples are alike
        assert row.ms is not None
        assert row.best_ms == pytest.approx(row.ms)


def test_without_a_final_the_rungs_are_scaled_to_the_last_complete_one() -> None:
    race = race_of(3)
    first, second, third = race.candidates.values()
    for candidate, ms in ((first, 1.00), (second, 1.05), (third, 1.02)):
        candidate.proof = Proof(True)
        candidate.times[0] = Samples((ms,))
    race.search_task(())
    first.times[1] = Samples((1.08,) * 3)  # the clock fell, and the budget ends before the others
    third.times[ALONE] = Samples((0.5,))
    race.close_search()
    found = [(s.candidate, s.stage, round(s.ms, 6)) for s in race.standings()]
    assert found == [(first, "rung 2", 1.0), (third, "rung 1", 1.02), (second, "rung 1", 1.05)]


def test_a_broken_final_is_no_reason_against_another() -> None:
    race = race_of(3)
    ms = ladder(race, 0.01)
    while task := race.search_task(EVERYTHING):
        race.apply(answer(task, ms))
    failed = {"kind": "final failed", "configs": list(race.candidates), "reason": "it hung"}
    for _ in range(2):
        assert not race.finished
        race.apply(failed)
    assert race.finished
    race.condemn(next(iter(race.candidates.values())).build, "crash", "alone")
    assert [t.kind for t in drive(race, ms)] == ["check", "check", "final"]
    assert race.standings()[0].stage == "final"


def test_the_same_records_in_any_order_give_the_same_standings() -> None:
    race = race_of(10)
    draw = random.Random(1)
    ms = {name: 1 + draw.random() / 4 for name in race.candidates}
    records = []
    liar = min(ms, key=ms.__getitem__)
    while task := race.search_task(EVERYTHING):
        records.append(answer(task, ms))
        race.apply(records[-1])
    race.condemn(race.candidates[liar].build, "wrong", "it lies")
    while task := race.search_task(EVERYTHING) or race.final_task(EVERYTHING, 1e9):
        records.append(answer(task, ms))
        race.apply(records[-1])
    assert race.finished
    for seed in range(5):
        again = race_of(10)
        random.Random(seed).shuffle(records)
        if seed % 2:
            again.condemn(again.candidates[liar].build, "wrong", "it lies")
        for record in records:
            again.apply(record)
        again.condemn(again.candidates[liar].build, "wrong", "it lies")
        assert again.search_task(()) is None
        assert again.finished
        assert again.standings() == race.standings()


def test_a_long_problem_only_tries_what_did_well_on_the_short_one() -> None:
    assert mentor_of(LONG, DEVICE, [SHORT]) == SHORT
    short = race_of(30, SHORT)
    long = race_of(30, LONG, mentor=short)
    ms = ladder(short, 0.01)
    assert long.search_task(EVERYTHING) is None  # not before the short one's first rung
    drive(short, ms)
    tasks = drive(long, ms)
    tried = {c.name for t in tasks for c in t.candidates}
    assert tried == set(list(ms)[:16])  # within 15% of the best
    out = long.candidates[list(ms)[16]]
    assert (out.status, out.reason) == ("slower", f"16.0% behind the best on {SHORT}")
    assert long.finished


def test_a_mentor_whose_best_lied_is_asked_again() -> None:
    short = race_of(30, SHORT)
    long = race_of(30, LONG, mentor=short)
    ms = ladder(short, 0.01)
    liar = next(iter(ms))
    drive(short, {**ms, liar: 0.1})
    drive(long, {**ms, liar: 0.1})
    assert len([c for c in long.candidates.values() if c.times]) == 10
    for race in (short, long):
        race.condemn(race.candidates[liar].build, "wrong", "it lies")
    drive(short, ms)
    drive(long, ms)
    assert {c.name for c in long.candidates.values() if c.times} >= set(list(ms)[1:16])
    assert long.standings()[0].candidate.name == list(ms)[1]


def test_a_mentor_without_a_kernel_lets_everybody_in() -> None:
    short = race_of(6, SHORT)
    long = race_of(6, LONG, mentor=short)
    for candidate in short.field:
        candidate.drop("not reached", "its tensors cannot be made")
    drive(long, ladder(long))
    assert long.finished
    assert len(long.standings()) == 6


def test_a_search_that_ends_early_ranks_what_was_timed() -> None:
    race = race_of(8)
    ms = ladder(race)
    for _ in range(9):
        task = race.search_task(EVERYTHING)
        assert task is not None
        race.apply(answer(task, ms))
    race.close_search()
    assert race.search_task(EVERYTHING) is None
    timed = [c.name for c in race.candidates.values() if c.times]
    assert len(timed) == 4
    assert {c.status for c in race.candidates.values()} == {"racing", "slower", "not reached"}
    assert [s.candidate.name for s in race.standings()] == sorted(timed, key=ms.__getitem__)
    task = race.final_task(EVERYTHING, 1e9)
    assert task is not None
    assert task.kind == "check"


def test_a_final_without_time_for_it_is_not_run() -> None:
    race = race_of(4)
    ms = dict.fromkeys(race.candidates, 50.0)
    while task := race.search_task(EVERYTHING):
        race.apply(answer(task, ms))
    while (task := race.final_task(EVERYTHING, 1e9)) and task.kind == "check":
        race.apply(answer(task, ms))
    assert race.final_task(EVERYTHING, 0.5) is None  # one launch each
    short = race.final_task(EVERYTHING, 1.0)  # half of it for warming up
    assert short is not None
    assert (short.least, len(short.candidates)) == (3, 3)


def test_work_grows_to_its_whole() -> None:
    race = race_of(9)
    shares = []
    while task := race.search_task(EVERYTHING) or race.final_task(EVERYTHING, 1e9):
        race.apply(answer(task, ladder(race)))
        done, total = race.work()
        shares.append(done / total)
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
