"""The ablation's times: what is asked of the benchmark, and how its rows become steps' times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ablations import PLAIN, SWIZZLED
from sample_rows import ENVIRONMENT, row

from flashsmith.benchmark import progression
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.progression import Ablation, ablation_of, run_ablation
from flashsmith.benchmark.run import Report, run_kernels
from flashsmith.benchmark.tasks import Size
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime.target import choose_target

TARGET = choose_target("sm_90", emulate=True)
PROBLEM = "b16 s1024 h16 d128 fp16"
CONFIGS = [parse(PLAIN.config), parse(SWIZZLED.config)]
HERE = Environment(**{name: ENVIRONMENT[name] for name in Environment.__dataclass_fields__})


@pytest.fixture(scope="module")
def report() -> Report:
    reporter = ProgressReporter(quiet=True)
    return run_kernels(CONFIGS, TARGET, task=Size(1, 64, 1), reporter=reporter)


def test_rows_become_times_with_the_peers_of_the_same_problem(report: Report) -> None:
    rows = [
        row(PLAIN.config, tflops=50.0, best_ms=1.0, spread=0.02),
        row("fa2", tflops=150.0, d=64),
        row("fa2", tflops=300.0),
    ]
    ablation = ablation_of(report, rows)
    time = ablation.steps[0].time
    assert time is not None
    assert (time.tflops, time.best_ms, time.spread) == (50.0, 1.0, 0.02)
    assert time.share == pytest.approx(50 / 300)
    assert (ablation.peer, ablation.peer_note) == ("fa2", "")
    assert ablation.timed == f"{PROBLEM}; {PROBLEM.replace('d128', 'd64')}"
    assert (ablation.protocol, ablation.environment["revision"]) == ("interleaved", HERE.revision)
    assert ablation.ok
    assert ablation.steps[1].time is None


def test_an_absent_peer_leaves_times_without_a_share(report: Report) -> None:
    rows = [row(PLAIN.config), row("fa2", tflops=None, verdict="absent", note="no PyTorch")]
    ablation = ablation_of(report, rows)
    assert ablation.steps[0].time is not None
    assert ablation.steps[0].time.share is None
    assert ablation.peer_note == "no share of fa2: no PyTorch"


def test_a_wrong_kernel_has_a_problem_and_no_time(report: Report) -> None:
    rows = [row(PLAIN.config, tflops=None, verdict="fail", note="o is NaN"), row("fa2")]
    first, second = ablation_of(report, rows).steps
    assert first.time is None
    assert first.problems == ("on the GPU: o is NaN",)
    assert second.problems == ()


def test_the_benchmark_gets_every_kernel_and_the_baseline(monkeypatch, report: Report) -> None:
    asked = {}
    written: list[Measurement] = []

    def run_bench(plan, device, *, write, **options):
        asked.update(plan=plan, device=device, **options)
        rows = [row(SWIZZLED.config), row("fa2")]
        for made in rows:
            write(made)
        return rows

    clock = object()
    monkeypatch.setattr(progression, "run_bench", run_bench)
    monkeypatch.setattr(progression, "run_kernels", lambda *_, **options: report)
    monkeypatch.setattr(progression, "CudaEvents", lambda: clock)
    bf16 = parse(SWIZZLED.config.replace("FP16", "BF16"))
    ablation = run_ablation(
        [*CONFIGS, bf16],
        replace(TARGET, backend="gpu"),
        seq=1024,
        seed=3,
        reporter=ProgressReporter(quiet=True),
        write=written.append,
    )
    plan = asked["plan"]
    assert [str(problem) for problem in plan.problems] == [
        "b16 s1024 h16 d128 fp16",
        "b16 s1024 h16 d128 bf16",
    ]
    assert plan.configs == (*CONFIGS, bf16)
    assert [peer.name for peer in plan.peers] == ["fa2"]
    assert (plan.ours, plan.seed, asked["clock"]) == (False, 3, clock)
    assert asked["device"] == TARGET.device
    assert [step.time is not None for step in ablation.steps] == [False, True]
    assert len(written) == 2


@pytest.mark.gpu
def test_the_ablation_is_timed_on_a_gpu() -> None:
    ablation: Ablation = run_ablation(
        CONFIGS, choose_target(), seq=1024, reporter=ProgressReporter(quiet=True)
    )
    assert ablation.ok, [step.problems for step in ablation.steps]
    assert all(step.time and step.time.tflops > 0 for step in ablation.steps)
    assert ablation.timed == "b16 s1024 h16 d128 fp16"
    first, second = (step.time for step in ablation.steps)
    assert first is not None
    assert second is not None
    # Eight wavefronts of shared memory for one cannot be hidden.
    assert first.ms > second.ms
