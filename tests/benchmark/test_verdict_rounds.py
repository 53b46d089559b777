"""Rounds of the verdict in one process: files as of a process for each, tensors made once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from stand_ins import HostMemory, PretendedClock

from flashsmith.benchmark.bench import BenchPlan
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.measurement_files import read_rows
from flashsmith.benchmark.peers import PeerImplementation
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.timing import Protocol
from flashsmith.benchmark.workload import Workload
from flashsmith.families import Problem, device_spec
from flashsmith.verify import compute_references
from flashsmith.verify.proof_inputs import default_scale

PROBLEMS = tuple(map(Problem.parse, ("b2 s64 h2 d64 fp16", "b1 s64 h1 d64 bf16")))
HERE = Environment("Pretended", 90, "1.2", "13.0", "", "0.1.0", "abc", "3.11")
QUICK = Protocol(num_warmups=0, runs=2, warmup_ms=0, measure_ms=0, num_estimates=1)


@dataclass
class Right:
    """A peer that is right, and takes a second of the process's time a call."""

    name: str
    stage: Stage

    def absence(self, problem: Problem) -> None:
        return None

    def version(self) -> str:
        return "7"

    def prepare(self, workload: Workload) -> PeerImplementation:
        w = workload
        o = compute_references(w.q, w.k, w.v, default_scale(w.problem.d)).same_precision

        def call() -> np.ndarray:
            self.stage.clock.work(self.name, 1.0)
            self.stage.seconds += 1.0
            return o

        return PeerImplementation(self.name, call, lambda returned: returned)


@dataclass
class Stage:
    tool: ModuleType
    folder: Path
    clock: PretendedClock = field(default_factory=lambda: PretendedClock(tick=1e-7))
    seconds: float = 0.0
    made: list[str] = field(default_factory=list)

    def make_workload(self, problem: Problem, seed: int) -> Workload:
        self.made.append(str(problem))
        return Workload(problem, seed, HostMemory())

    def path(self, number: int) -> Path:
        return self.folder / f"round-{number}.csv"

    def rounds(self, peers: tuple[Any, ...], **limits: Any) -> Iterator[Any]:
        def plan_of(number: int) -> BenchPlan:
            return BenchPlan(PROBLEMS, peers=peers, protocol=QUICK, rotation=number)

        found: Iterator[Any] = self.tool.rounds(
            plan_of,
            self.path,
            device_spec(90),
            clock=self.clock,
            reporter=ProgressReporter(quiet=True),
            environment=HERE,
            make_workload=self.make_workload,
            now=lambda: self.seconds,
            **limits,
        )
        return found


@pytest.fixture
def stage(load_tool: Callable[[str], ModuleType], tmp_path: Path) -> Stage:
    return Stage(load_tool("gpu/verdict_rounds.py"), tmp_path)


def test_each_round_is_a_file_that_begins_with_another_and_tensors_are_made_once(
    stage: Stage,
) -> None:
    peers = Right("a", stage), Right("b", stage)
    stage.path(0).write_text("of an earlier run")
    done = list(stage.rounds(peers, seconds=1e9, most=3))
    assert stage.made == [str(problem) for problem in PROBLEMS]
    for number, rows in enumerate(done):
        assert read_rows(stage.path(number)) == rows
        assert [row.implementation for row in rows] == ["a", "b"] * 2
        assert all(row.verdict == "pass" and row.ms for row in rows)
    assert len(list(stage.folder.iterdir())) == 3
    # Of each of the six measurements: who was first.
    order = [name for name in stage.clock.log if name in ("a", "b", "begin")]
    firsts = [b for a, b in itertools.pairwise(order) if a == "begin"]
    assert firsts == ["a", "a", "b", "b", "a", "a"]


def test_it_ends_before_the_time_is_over(stage: Stage) -> None:
    peers = (Right("a", stage),)
    # Two problems of an output, an estimate of two launches, and two timed ones: a round takes ten
    # seconds, and is expected to take 11.5.
    assert len(list(stage.rounds(peers, seconds=41.6))) == 4
    stage.seconds = 0.0
    assert len(list(stage.rounds(peers, seconds=41.4))) == 3


def test_a_round_that_breaks_off_is_no_round(stage: Stage) -> None:
    class Stops(Right):
        def prepare(self, workload: Workload) -> PeerImplementation:
            if workload.problem == PROBLEMS[1] and stage.seconds > 10:
                raise KeyboardInterrupt
            return super().prepare(workload)

    found = stage.rounds((Stops("a", stage),), seconds=1e9)
    next(found)
    with pytest.raises(KeyboardInterrupt):
        next(found)
    assert sorted(path.name for path in stage.folder.iterdir()) == [
        "round-0.csv",
        "unfinished-round-1.csv",
    ]
