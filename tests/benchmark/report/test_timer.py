"""The ladder's times: what is asked of the benchmark, and how its rows become steps' times."""

from __future__ import annotations

import pytest
from ablations import PLAIN, SWIZZLED
from sample_rows import ENVIRONMENT, row

from flashsmith.benchmark import progression as timer_module
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.progression import StepTimer, times_of
from flashsmith.benchmark.timing import Environment, Telemetry
from flashsmith.families import Problem, device_spec
from flashsmith.families import parse_kernel_name_into_config as parse

H200 = device_spec("H200")
PROBLEM = Problem.parse("b16 s1024 h16 d128 fp16")
CONFIGS = [parse(PLAIN.config), parse(SWIZZLED.config)]
HERE = Environment(**{name: ENVIRONMENT[name] for name in Environment.__dataclass_fields__})


def test_rows_become_times_with_the_peers_of_the_same_problem() -> None:
    rows = [
        row(PLAIN.config, tflops=50.0, best_ms=1.0, spread=0.02),
        row("fa2", tflops=300.0),
        row("fa2", tflops=150.0, d=64),
    ]
    times = times_of(rows, [PROBLEM], "interleaved")
    time = times.by_config[PLAIN.config]
    assert (time.tflops, time.best_ms, time.spread) == (50.0, 1.0, 0.02)
    assert time.share == pytest.approx(50 / 300)
    assert (times.peer, times.peer_note, times.problem) == ("fa2", "", str(PROBLEM))
    assert times.problems == {}


def test_an_absent_peer_leaves_times_without_a_share() -> None:
    rows = [row(PLAIN.config), row("fa2", tflops=None, verdict="absent", note="no PyTorch")]
    times = times_of(rows, [PROBLEM], "interleaved")
    assert times.by_config[PLAIN.config].share is None
    assert times.peer_note == "no share of fa2: no PyTorch"


def test_a_wrong_kernel_has_a_problem_and_no_time() -> None:
    rows = [row(PLAIN.config, tflops=None, verdict="fail", note="o is NaN"), row("fa2")]
    times = times_of(rows, [PROBLEM], "interleaved")
    assert times.by_config == {}
    assert times.problems == {PLAIN.config: ["on the GPU: o is NaN"]}


def test_the_benchmark_gets_every_kernel_and_the_yardstick(monkeypatch) -> None:
    asked = {}

    def run_bench(plan, device, **options):
        asked.update(plan=plan, device=device, **options)
        return [row(SWIZZLED.config), row("fa2")]

    monkeypatch.setattr(timer_module, "run_bench", run_bench)
    clock = object()
    timer = StepTimer(
        H200,
        1024,
        ProgressReporter(quiet=True),
        seed=3,
        clock=clock,
        telemetry=Telemetry(sensor=lambda: (1500.0, 650.0)),
        environment=HERE,
    )
    bf16 = parse(SWIZZLED.config.replace("FP16", "BF16"))
    times = timer([*CONFIGS, bf16])
    plan = asked["plan"]
    assert [str(problem) for problem in plan.problems] == [
        "b16 s1024 h16 d128 fp16",
        "b16 s1024 h16 d128 bf16",
    ]
    assert plan.configs == (*CONFIGS, bf16)
    assert [peer.name for peer in plan.peers] == ["fa2"]
    assert (plan.ours, plan.seed, asked["clock"], asked["device"]) == (False, 3, clock, H200)
    assert set(times.by_config) == {SWIZZLED.config}


@pytest.mark.gpu
def test_the_ladder_is_timed_on_a_gpu() -> None:
    from flashsmith.benchmark.progression import run_ablation
    from flashsmith.runtime.target import choose_target

    target, reporter = choose_target(), ProgressReporter(quiet=True)
    timer = StepTimer(target.device, 1024, reporter)
    ladder = run_ablation(CONFIGS, target, timer=timer, environment={}, reporter=reporter)
    assert ladder.ok, [step.problems for step in ladder.steps]
    assert all(step.time and step.time.tflops > 0 for step in ladder.steps)
    assert ladder.timed == "b16 s1024 h16 d128 fp16"
    # Eight visits of shared memory for one cannot be hidden.
    assert ladder.steps[0].time.ms > ladder.steps[1].time.ms
