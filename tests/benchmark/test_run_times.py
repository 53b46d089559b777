"""The times of `flashsmith run`: who is timed with whom, and that nobody is who is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import HostMemory, PretendedClock

from flashsmith.benchmark import run as run_module
from flashsmith.benchmark.measurement import Times
from flashsmith.benchmark.run import time_kernels
from flashsmith.benchmark.tasks import TimedSize
from flashsmith.benchmark.workload import Workload
from flashsmith.errors import LaunchError
from flashsmith.families import FlashForwardKernelConfig, Problem
from flashsmith.families import parse_kernel_name_into_config as parse

CFG = parse("(FP16, 64, 64, 64, 4): async+swizzled+load_0_0_0_tiles")
OTHER = parse("(FP16, 64, 64, 32, 4): async+swizzled+load_0_0_0_tiles")
BF16 = parse("(BF16, 64, 64, 64, 4): async+swizzled+load_0_0_0_tiles")
TIMED = TimedSize(batch=2, seq=64, heads=3)
COSTS = {CFG: 1.0, OTHER: 2.0, BF16: 4.0}


class Stage:
    """Computes right answers in pretended time; ``spoiled`` kernels do not."""

    def __init__(self) -> None:
        self.clock = PretendedClock()
        self.made: list[Problem] = []
        self.spoiled: dict[FlashForwardKernelConfig, Any] = {}

    def forward(self, cfg: FlashForwardKernelConfig, q, k, v, o, *, causal: bool) -> None:
        from flashsmith.verify import compute_references

        self.clock.work(str(cfg), COSTS[cfg])
        o[:] = compute_references(q, k, v, cfg.d_head**-0.5, causal=causal).same_precision
        spoil = self.spoiled.get(cfg)
        if isinstance(spoil, Exception):
            raise spoil
        if spoil:
            o[spoil] += 1

    def run(self, *configs: FlashForwardKernelConfig) -> dict[FlashForwardKernelConfig, Any]:
        def make(problem: Problem, seed: int) -> Workload:
            self.made.append(problem)
            return Workload(problem, seed, HostMemory())

        problem_of = {cfg: TIMED.problem(cfg) for cfg in configs}
        return time_kernels(problem_of, 0, clock=self.clock, make_workload=make)


@pytest.fixture
def stage(monkeypatch) -> Stage:
    from flashsmith.benchmark import workload
    from flashsmith.benchmark.timing import Protocol

    stage = Stage()
    monkeypatch.setattr(workload, "forward", stage.forward)
    monkeypatch.setattr(run_module, "INTERLEAVED", Protocol(runs=3, measure_ms=0, warmup_ms=0))
    return stage


def test_kernels_of_one_problem_take_turns(stage: Stage) -> None:
    found = stage.run(CFG, BF16, OTHER)
    assert {cfg: timing.ms for cfg, timing in found.items()} == pytest.approx(COSTS)
    flop = 4 * 2 * 3 * 64 * 64 * 64
    assert found[CFG].tflops == pytest.approx(flop / 1e-3 / 1e12)
    assert found[CFG].best_ms == pytest.approx(1.0)
    # One set of tensors a problem.
    assert len(stage.made) == 2
    launched = [word for word in stage.clock.log if word == str(CFG) or word == str(OTHER)]
    first, second = launched[-6:-4], launched[-4:-2]
    assert sorted(first) == sorted(map(str, (CFG, OTHER)))
    assert second == first[::-1]


@pytest.mark.parametrize("where", [(0, 17, 0, 3), (1, 17, 2, 3)])
def test_a_wrong_output_is_not_timed(stage: Stage, where: tuple[int, ...]) -> None:
    stage.spoiled = {OTHER: where}
    found = stage.run(CFG, OTHER)
    assert isinstance(found[CFG], Times)
    assert found[OTHER][0].startswith("the timed launch: largest error")


def test_a_launch_that_fails_is_a_problem_of_that_kernel(stage: Stage) -> None:
    stage.spoiled = {OTHER: LaunchError("no such GPU")}
    found = stage.run(CFG, OTHER)
    assert isinstance(found[CFG], Times)
    assert found[OTHER] == ("the timed launch: no such GPU",)


def test_what_fails_while_timing_costs_all_that_were_timed_with_it(stage: Stage) -> None:
    def events(count: int) -> list[Any]:
        raise LaunchError("out of memory")

    stage.clock.events = events  # type: ignore[method-assign]
    found = stage.run(CFG, OTHER, BF16)
    assert found == dict.fromkeys(COSTS, ("the timed launches: out of memory",))


def test_a_gpu_that_is_gone_ends_the_run_and_names_who_it_was(stage: Stage) -> None:
    def synchronize() -> None:
        raise LaunchError("an illegal memory access")

    stage.clock.synchronize = synchronize  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match=r"one of .*load_0_0_0_tiles left the GPU unusable"):
        stage.run(CFG, OTHER)
    stage.spoiled = {OTHER: LaunchError("an illegal memory access")}
    with pytest.raises(LaunchError) as raised:
        stage.run(CFG, OTHER)
    assert str(raised.value).startswith(f"{OTHER} left the GPU unusable")


def test_a_backward_kernel_is_timed_on_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its prepared call, and only where they are right."""
    from flashsmith.benchmark import workload
    from flashsmith.benchmark.timing import Protocol
    from flashsmith.verify import reference_of

    clock = PretendedClock()
    right, wrong = (parse(f"(FP16, 64, 64, {B_c}, 4): backward") for B_c in (64, 128))

    def attention(q: Any, k: Any, v: Any, *, return_lse: bool, causal: bool) -> Any:
        from flashsmith.verify import compute_references

        found = compute_references(q, k, v, q.shape[-1] ** -0.5, causal=causal)
        return found.o.astype(q.dtype), found.lse.astype("float32")

    def prepare(cfg: Any, problem: Problem, tensors: dict[str, Any], *, options: Any) -> Any:
        names = ("do", "q", "k", "v", "o", "lse")
        inputs = {name: tensors[name] for name in names}
        reference = reference_of(problem.computed)
        expected = reference.expected(problem, inputs, reference.options(problem)).rounded

        def run() -> None:
            clock.work(str(cfg), 3.0)
            for name, gradient in expected.items():
                tensors[name][:] = gradient + (cfg == wrong)

        return SimpleNamespace(run=run)

    monkeypatch.setattr(workload, "attention", attention)
    monkeypatch.setattr(workload, "prepare_operation", prepare)
    monkeypatch.setattr(run_module, "INTERLEAVED", Protocol(runs=3, measure_ms=0, warmup_ms=0))
    problem_of = {cfg: TIMED.problem(cfg) for cfg in (right, wrong)}
    assert {str(problem) for problem in problem_of.values()} == {"b2 s64 h3 d64 fp16 backward"}
    found = time_kernels(
        problem_of,
        0,
        clock=clock,
        make_workload=lambda problem, seed: workload.workload_of(problem, seed, HostMemory()),
    )
    timed = found[right]
    assert isinstance(timed, Times)
    assert timed.tflops == pytest.approx(10 * 2 * 3 * 64 * 64 * 64 / 3e-3 / 1e12)
    assert found[wrong][0].startswith("the timed launch: ")
