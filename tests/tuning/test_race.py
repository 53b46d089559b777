"""follow(): where a race is, and what is next, is a function of what is known, however it came."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field, replace

import pytest
from sweep_fakes import CONFIGS, DEVICE, PROBLEM, World, fake_runner

from flashsmith.benchmark.measurement import Proof
from flashsmith.benchmark.timing import Samples
from flashsmith.families import Problem, family_named
from flashsmith.tuning.race import Halving, Race, RaceState, Rung, Task, follow
from flashsmith.tuning.ranking import ranking_rows
from flashsmith.tuning.sweep_problems import reference_problem
from flashsmith.tuning.trial import (
    ALONE,
    CHECK,
    FINAL,
    PREPARE,
    PROVE,
    Build,
    Record,
    Trials,
    rung_stage,
)

HALVING = Halving((Rung(1, 0.0, 0.10), Rung(3, 0.0, 0.04)), finalists=3, final_least=5)
SHORT = Problem.parse("b16 s2048 h16 d128 fp16")
LONG = Problem.parse("b4 s16384 h16 d128 fp16")
EVERYTHING = {Build.of(PROBLEM, cfg) for cfg in CONFIGS}


@dataclass
class Driven:
    """A race of so many configs, and what is known of it."""

    count: int
    problem: Problem = PROBLEM
    reference: Driven | None = None
    known: Trials = field(default_factory=lambda: Trials(DEVICE))
    records: list[Record] = field(default_factory=list)
    early: bool = False
    closed: bool = False
    refinements: int = 0
    incumbent: int | None = None

    def __post_init__(self) -> None:
        builds = tuple(Build.of(self.problem, cfg) for cfg in CONFIGS[: self.count])
        reference = None
        if self.reference is not None:
            reference, self.known = self.reference.race, self.reference.known
        incumbents = () if self.incumbent is None else (builds[self.incumbent],)
        self.race = Race(self.problem, builds, HALVING, reference, self.refinements, incumbents)
        self.names = [build.name for build in builds]

    @property
    def state(self) -> RaceState:
        reference = self.reference.state if self.reference is not None else None
        return follow(self.race, self.known, reference, early=self.early, closed=self.closed)

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.known.add(record)

    def answer(self, task: Task, ms: dict[str, float]) -> None:
        """Adds what a bench would say."""
        about = task.stage, task.problem, task.builds
        if task.stage in (PROVE, CHECK):
            self.add(Record(*about, proof=Proof("pass")))
        else:
            samples = tuple(Samples((ms[build.name],) * 3) for build in task.builds)
            self.add(Record(*about, samples=samples))

    def search(self, ms: dict[str, float], ready: Container[Build] = EVERYTHING) -> list[Task]:
        """Does whatever the search asks for until it asks for nothing; the tasks."""
        tasks = []
        while task := self.state.search_task(ready):
            tasks.append(task)
            self.answer(task, ms)
        return tasks

    def drive(self, ms: dict[str, float], ready: Container[Build] = EVERYTHING) -> list[Task]:
        """The same for search and final."""
        tasks = self.search(ms, ready)
        while self.state.searched and (task := self.state.final_task(ready, 1e9)):
            tasks.append(task)
            self.answer(task, ms)
        return tasks

    def disqualify(self, name: str) -> None:
        builds = (self.state.trials[name].build,)
        self.add(Record(CHECK, self.problem, builds, proof=Proof("fail", "largest error 1")))

    def steps(self, step: float = 0.05) -> dict[str, float]:
        return {name: 1 + step * n for n, name in enumerate(self.names)}


def test_a_kernel_is_proven_before_it_is_timed_and_checked_before_the_final() -> None:
    race = Driven(12)
    tasks = race.drive(race.steps())
    stages = [t.stage for t in tasks if race.names[0] in [build.name for build in t.builds]]
    assert stages == [PROVE, "rung 1", "rung 2", CHECK, FINAL]
    assert race.state.finished
    # 12, of which 4 stay, of which one is within the last rung's 4%.
    assert [t.stage.startswith("rung") for t in tasks].count(True) == 16
    assert len(tasks[-1].builds) == 1


def test_an_incumbent_is_in_the_final_however_slow() -> None:
    race = Driven(12, incumbent=11)
    tasks = race.drive(race.steps())
    assert [build.name for build in tasks[-1].builds] == [race.names[0], race.names[11]]
    assert race.state.decided
    *_, last = race.state.ranked
    assert (last.name, last.stage, race.state.is_incumbent(last)) == (race.names[11], FINAL, True)
    # Unless it is wrong.
    race.disqualify(race.names[11])
    race.drive(race.steps())
    assert race.names[11] not in [trial.name for trial in race.state.ranked]
    assert race.state.finished


def test_an_incumbent_enters_long_races_however_slow_it_was_on_short_ones() -> None:
    short = Driven(12, SHORT)
    long = Driven(12, LONG, short, incumbent=11)
    short.drive(short.steps())
    long.drive(long.steps())
    assert {trial.name for trial in long.state.finalists} == {long.names[0], long.names[11]}


def test_asked_twice_it_says_the_same_and_changes_nothing() -> None:
    race = Driven(6)
    race.answer(race.state.search_task(EVERYTHING), race.steps())  # type: ignore[arg-type]
    before = race.state
    assert before.search_task(EVERYTHING) == before.search_task(EVERYTHING)
    assert before.ranked == []
    assert race.state == before


def test_a_rung_waits_for_kernels_that_are_still_compiled() -> None:
    race = Driven(6)
    race.drive(race.steps(), race.race.builds[:4])
    assert (race.state.rung, race.state.finished) == (0, False)
    race.drive(race.steps())
    assert race.state.finished


def test_the_ranking_scales_the_rungs_to_the_final() -> None:
    race = Driven(8)
    ms = race.steps()
    race.search(ms)
    # In the final the clock has settled, and everything takes twice as long.
    race.drive({name: 2 * time for name, time in ms.items()})
    ranked = race.state.ranked
    assert [trial.name for trial in ranked] == race.names
    assert [trial.stage for trial in ranked] == [FINAL] + ["rung 2"] * 2 + ["rung 1"] * 5
    for trial in ranked:
        assert abs(trial.ms - 2 * ms[trial.name]) < 1e-12
    for row in ranking_rows([race.state], fake_runner(World({}))):  # all samples are alike
        assert row.ms is not None
        assert row.best_ms == pytest.approx(row.ms)


def test_without_a_final_the_rungs_are_scaled_to_the_last_complete_one() -> None:
    race = Driven(3)
    first, second, third = race.race.builds

    def add(build: Build, stage: str, ms: float) -> None:
        race.add(Record(stage, PROBLEM, (build,), samples=(Samples((ms,)),)))

    for build, ms in ((first, 1.00), (second, 1.05), (third, 1.02)):
        race.add(Record(PROVE, PROBLEM, (build,), proof=Proof("pass")))
        add(build, "rung 1", ms)
    add(first, "rung 2", 1.08)  # the clock fell, and the budget ends before the others
    add(third, ALONE, 0.5)
    race.closed = True
    found = [(trial.build, trial.stage, round(trial.ms, 6)) for trial in race.state.ranked]
    assert found == [(first, "rung 2", 1.0), (third, "rung 1", 1.02), (second, "rung 1", 1.05)]


def test_a_broken_final_is_no_reason_against_another() -> None:
    race = Driven(3)
    ms = race.steps(0.01)
    race.search(ms)
    for _ in range(2):
        assert not race.state.finished
        race.add(Record(FINAL, PROBLEM, race.race.builds, failure=("hang", "it hung")))
    assert race.state.finished
    race.add(Record(ALONE, PROBLEM, race.race.builds[:1], failure=("crash", "alone")))
    assert [task.stage for task in race.drive(ms)] == [CHECK, CHECK, FINAL]
    assert race.state.ranked[0].stage == FINAL


def test_the_same_records_in_any_order_give_the_same_state() -> None:
    race = Driven(10)
    draw = random.Random(1)
    ms = {name: 1 + draw.random() / 4 for name in race.names}
    race.search(ms)
    race.disqualify(min(ms, key=ms.__getitem__))
    race.drive(ms)
    assert race.state.finished
    for seed in range(5):
        again = Driven(10)
        random.Random(seed).shuffle(race.records)
        for record in race.records:
            again.add(record)
        assert again.state.search_task(()) is None
        assert again.state.finished
        assert again.state.ranked == race.state.ranked
    # As read from a journal, too.
    texts = [json.dumps(record.to_json()) for record in race.records]
    lines = [Record.from_json(json.loads(text)) for text in texts]
    assert lines == race.records
    assert follow(race.race, Trials(DEVICE, records=race.records)) == race.state


@pytest.mark.parametrize(
    "record",
    [
        Record(FINAL, PROBLEM, (Build.of(PROBLEM, CONFIGS[0]),), failure=("crash", "alone")),
        Record(PROVE, PROBLEM, (Build.of(PROBLEM, CONFIGS[0]),), failure=("error", "no memory")),
        Record(PREPARE, PROBLEM, failure=("hang", "no memory")),
    ],
    ids=lambda record: record.stage,
)
def test_what_may_have_passed_does_not_count_another_time(record: Record) -> None:
    fresh = Driven(2).state
    assert follow(fresh.race, Trials(DEVICE, records=[record])) == fresh
    race = Driven(2)
    race.add(record)
    assert race.state != fresh or race.known.failed_finals


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"proof": Proof("pass"), "samples": (Samples((1.0,)),)},
        {"samples": (Samples((1.0,)),) * 2},
        {"failure": ("slower", "than others")},
        {"proof": Proof("pass"), "problem": None},
    ],
)
def test_a_record_whose_parts_do_not_fit_together(parts: dict[str, object]) -> None:
    fits = Record(PROVE, PROBLEM, (Build.of(PROBLEM, CONFIGS[0]),), proof=Proof("pass"))
    with pytest.raises(ValueError, match="do not fit"):
        replace(fits, **{"proof": None, **parts})  # type: ignore[arg-type]


def test_a_long_problem_only_tries_what_did_well_on_the_short_one() -> None:
    assert reference_problem(LONG, DEVICE, [SHORT]) == SHORT
    short = Driven(30, SHORT)
    long = Driven(30, LONG, reference=short)
    ms = short.steps(0.01)
    assert long.state.search_task(EVERYTHING) is None  # not before the short one's first rung
    assert long.state.waiting
    short.drive(ms)
    tasks = long.drive(ms)
    tried = {build.name for task in tasks for build in task.builds}
    assert tried == set(short.names[:16])  # within 15% of the best
    out = long.state.trials[short.names[16]]
    assert (out.status, out.reason) == ("slower", f"16.0% behind the best on {SHORT}")
    assert long.state.finished


def test_without_time_to_wait_kernels_enter_by_what_the_reference_has_timed() -> None:
    short = Driven(8, SHORT)
    long = Driven(8, LONG, reference=short, early=True)
    times = short.steps(0.2)
    slow, fast, *_ = short.race.builds
    for build, ms in ((slow, 2.0), (fast, 1.0)):
        short.add(Record(rung_stage(0), SHORT, (build,), samples=(Samples((ms,)),)))
    tasks = long.search(times)
    assert [task.builds for task in tasks[:2]] == [(fast,), (fast,)]


def test_entry_is_decided_again_when_the_best_on_the_reference_was_wrong() -> None:
    short = Driven(30, SHORT)
    long = Driven(30, LONG, reference=short)
    ms = short.steps(0.01)
    wrong = short.names[0]
    short.drive({**ms, wrong: 0.1})
    long.drive({**ms, wrong: 0.1})
    assert len([t for t in long.state.trials.values() if t.samples]) == 10
    short.disqualify(wrong)
    short.drive(ms)
    long.drive(ms)
    tried = {trial.name for trial in long.state.trials.values() if trial.samples}
    assert tried >= set(short.names[1:16])
    assert long.state.ranked[0].name == short.names[1]


def test_without_a_time_on_the_reference_all_kernels_enter() -> None:
    short = Driven(6, SHORT)
    long = Driven(6, LONG, reference=short)
    short.add(Record(PREPARE, SHORT, failure=("error", "out of memory")))
    assert {trial.status for trial in short.state.trials.values()} == {"not reached"}
    long.drive(long.steps())
    assert long.state.finished
    assert len(long.state.ranked) == 6


def test_a_search_that_ends_early_ranks_what_was_timed() -> None:
    race = Driven(8)
    ms = race.steps()
    for _ in range(9):
        task = race.state.search_task(EVERYTHING)
        assert task is not None
        race.answer(task, ms)
    race.closed = True
    state = race.state
    assert state.search_task(EVERYTHING) is None
    timed = [trial.name for trial in state.trials.values() if trial.samples]
    assert len(timed) == 4
    assert {t.status for t in state.trials.values()} == {"active", "slower", "not reached"}
    assert [trial.name for trial in state.ranked] == sorted(timed, key=ms.__getitem__)
    task = state.final_task(EVERYTHING, 1e9)
    assert task is not None
    assert task.stage == CHECK


class Anything:
    """All kernels are ready."""

    def __contains__(self, build: object) -> bool:
        return True


def test_neighbours_that_were_timed_count_though_the_search_was_ended_and_one_is_wrong() -> None:
    race = Driven(4, refinements=1)
    ms = defaultdict(lambda: 0.5, race.steps())
    while len(near := [trial.name for trial in race.state.ranked if trial.ms == 0.5]) < 3:
        task = race.state.search_task(Anything())
        assert task is not None
        race.answer(task, ms)
    race.closed = True
    race.disqualify(near[0])
    assert [trial.name for trial in race.state.ranked[:2]] == near[1:]


def test_a_final_without_time_for_it_is_not_run() -> None:
    race = Driven(4)
    ms = dict.fromkeys(race.names, 50.0)
    race.search(ms)
    while (task := race.state.final_task(EVERYTHING, 1e9)) and task.stage == CHECK:
        race.answer(task, ms)
    assert race.state.final_task(EVERYTHING, 0.5) is None  # one launch each
    short = race.state.final_task(EVERYTHING, 1.0)  # half of it for warming up
    assert short is not None
    assert (short.least, len(short.builds)) == (3, 3)


def test_work_grows_to_its_whole() -> None:
    race = Driven(9)
    shares = []
    while task := race.state.search_task(EVERYTHING) or race.state.final_task(EVERYTHING, 1e9):
        race.answer(task, race.steps())
        done, total = race.state.work
        shares.append(done / total)
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0


def test_deterministic_kernels_race_among_themselves_too() -> None:
    """Twice as slow as the others, the best of them is in the final, of the same precision."""
    problem = Problem.parse("b16 s4096 h16 d128 fp16 backward")
    family = family_named("mma_sync_backward")
    configs = family.search_space(problem.dtype, 128, False)
    driven = Driven(0, problem)
    builds = tuple(Build.of(problem, cfg) for cfg in configs)
    driven.race = Race(problem, builds, HALVING)
    repeatable = [b.name for b in builds if family.is_deterministic(b.config)]
    free = [b.name for b in builds if b.name not in repeatable]
    assert min(len(free), len(repeatable)) > 6
    ms = {name: 1.0 + place / 100 for place, name in enumerate(free)}
    ms |= {name: 2.0 + place / 60 for place, name in enumerate(repeatable)}
    driven.drive(ms, set(builds))
    state = driven.state
    assert state.decided
    assert [trial.name for trial in state.finalists] == [*free[:3], *repeatable[:3]]
    ranked = [trial.name for trial in state.ranked]
    assert ranked[:3] == free[:3]
    stages = {trial.name: trial.stage for trial in state.ranked}
    assert [stages[name] for name in repeatable[:3]] == [FINAL] * 3
    assert stages[repeatable[-1]] == rung_stage(0)
