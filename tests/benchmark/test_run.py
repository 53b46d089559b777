"""The main job's judgement: what is a failure, what is refused, what the report says."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from stand_ins import PretendedClock

from flashsmith.benchmark import run as run_module
from flashsmith.benchmark.kernel_facts import CONFLICT_KINDS, KernelFacts, conflict_factors
from flashsmith.benchmark.measurement import Times
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.run import Options, run_kernels
from flashsmith.benchmark.run_table import print_report
from flashsmith.benchmark.table import make_console
from flashsmith.benchmark.tasks import EMULATED, OneProblem, Size, default_size
from flashsmith.errors import ArgumentError, EmulatorError, IllegalConfigError, LaunchError
from flashsmith.families import KernelConfig, Problem, Semantics, get_kernel_configs
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime.target import choose_target
from flashsmith.verify import prove
from ptxlab.checks import BankConflicts

STEP_1 = parse("(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles")
STEP_2 = parse("(FP16, 128, 64, 64, 4): async+swizzled+load_0_0_0_tiles")
STEP_3 = parse("(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_0_0_tiles")
SMALL = Size(batch=1, seq=64, heads=1)
TARGET = choose_target("sm_80", emulate=True)


def run(*configs, task=SMALL, **options):
    return run_kernels(
        configs,
        TARGET,
        task=task,
        options=Options(**options),
        reporter=ProgressReporter(quiet=True),
    )


def printed(report) -> str:
    out = io.StringIO()
    print_report(make_console(out), report)
    return out.getvalue()


def test_the_default_size_gives_enough_outputs_for_every_block_size() -> None:
    assert EMULATED.batch * EMULATED.seq * EMULATED.heads * 64 >= 4096
    assert EMULATED.seq % 128 == 0


@pytest.mark.parametrize(
    ("size", "named"),
    [
        (replace(SMALL, seq=96), "seq=96: must be a multiple of B_r=64"),
        (replace(SMALL, seq=0), "seq=0"),
        (replace(SMALL, batch=-1), "batch=-1"),
        (replace(SMALL, heads=0), "heads=0"),
    ],
)
def test_a_bad_size_is_refused(size: Size, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        run(STEP_1, task=size)


def test_an_illegal_config_is_refused_before_anything_runs(monkeypatch) -> None:
    monkeypatch.setattr(run_module, "libraries_for", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(IllegalConfigError):
        run(STEP_1, replace(STEP_2, n_warps=8))


def test_a_right_kernel_passes() -> None:
    report = run(STEP_2)
    (row,) = report.rows
    assert report.ok
    assert row.problems == ()
    assert row.times is None
    assert "1 of 1 kernel passed" in printed(report)


def test_a_wrong_kernel_fails_and_is_located(monkeypatch) -> None:
    right = run_module.prove

    def wrong(cfg, problem, **options):
        verdict = right(cfg, problem, **options)
        if cfg == STEP_2:
            return replace(verdict, reasons=("largest error 3 is above 0.1",), max_error=3.0)
        return verdict

    monkeypatch.setattr(run_module, "prove", wrong)
    report = run(STEP_1, STEP_2)
    assert [row.ok for row in report.rows] == [True, False]
    assert not report.ok
    text = printed(report)
    assert "| FAIL " in text
    assert "largest error 3 is above 0.1" in text
    assert "1 of 2 kernels passed" in text
    assert [row["verdict"] for row in report.to_json()["kernels"]] == ["pass", "FAIL"]


def test_a_kernel_that_does_not_end_is_a_row_and_not_a_crash(monkeypatch) -> None:
    def deadlock(cfg, problem, **options):
        raise EmulatorError("deadlock: 32 threads wait at bar.sync 0")

    monkeypatch.setattr(run_module, "prove", deadlock)
    report = run(STEP_1)
    assert not report.ok
    text = printed(report)
    assert "did not finish: deadlock" in text
    assert "0 of 1 kernel passed" in text


def test_a_kernel_that_takes_the_gpu_with_it_ends_the_run(monkeypatch) -> None:
    """Or every kernel after it would be called wrong. The emulator stands for a GPU."""
    right = run_module.prove
    clock = PretendedClock()

    def prove_or_not(cfg, problem, **options):
        if options["backend"] == "gpu" and cfg == STEP_2:
            raise LaunchError("an illegal memory access")
        return right(cfg, problem, **{**options, "backend": "emulator"})

    def gone() -> None:
        raise LaunchError("an illegal memory access was encountered")

    monkeypatch.setattr(run_module, "prove", prove_or_not)
    monkeypatch.setattr(run_module, "CudaEvents", lambda: clock)
    monkeypatch.setattr(run_module, "time_kernels", lambda problem_of, seed: {})
    target = replace(TARGET, backend="gpu")
    (row,) = run_kernels([STEP_2], target, task=SMALL, reporter=ProgressReporter(quiet=True)).rows
    assert row.problems == ("did not finish: an illegal memory access",)
    clock.synchronize = gone  # type: ignore[method-assign]
    with pytest.raises(LaunchError) as raised:
        run_kernels([STEP_2, STEP_1], target, task=SMALL, reporter=ProgressReporter(quiet=True))
    assert str(raised.value).startswith(f"{STEP_2} left the GPU unusable to this process")


def test_conflict_factors_are_grouped_by_use() -> None:
    measured = BankConflicts()
    prove(STEP_1, seq=64, observers=[measured])
    factors = conflict_factors(measured, STEP_1)
    assert tuple(factors) == CONFLICT_KINDS
    assert factors["ldmatrix"] == 8.0
    measured.by_kind.clear()
    assert conflict_factors(measured, STEP_1) == dict.fromkeys(CONFLICT_KINDS)


def test_on_a_gpu_what_is_right_is_timed(monkeypatch) -> None:
    """The emulator stands for the GPU that proves."""
    right = run_module.prove

    def prove_or_not(cfg, problem, **options):
        verdict = right(cfg, problem, **{**options, "backend": "emulator"})
        wrong = cfg == STEP_1 and options["backend"] == "gpu"
        return replace(verdict, reasons=("wrong",)) if wrong else verdict

    asked = []

    def time_kernels(problem_of, seed):
        asked.extend(problem_of)
        return {STEP_2: Times(1.5, 1.25, 0.01, 300.0), STEP_3: ("the timed launch: wrong",)}

    monkeypatch.setattr(run_module, "prove", prove_or_not)
    monkeypatch.setattr(run_module, "time_kernels", time_kernels)
    target = replace(TARGET, backend="gpu")
    report = run_kernels(
        [STEP_1, STEP_2, STEP_3], target, task=SMALL, reporter=ProgressReporter(quiet=True)
    )
    assert asked == [STEP_2, STEP_3]
    assert [row.ok for row in report.rows] == [False, True, False]
    assert [row.times is None for row in report.rows] == [True, False, True]
    text = printed(report)
    assert "| 1.500 |" in text
    assert "the timed launch: wrong" in text
    assert report.to_json()["kernels"][1]["timing"]["ms"] == 1.5


def test_on_a_gpu_the_plain_kernel_is_counted_whatever_its_tiles(monkeypatch) -> None:
    asked = []

    def prove_or_not(cfg, problem, **options):
        asked.append((options["backend"], problem.seq_q))
        raise EmulatorError("not today")

    monkeypatch.setattr(run_module, "prove", prove_or_not)
    monkeypatch.setattr(run_module, "CudaEvents", PretendedClock)
    monkeypatch.setattr(run_module, "time_kernels", lambda problem_of, seed: {})
    wide = parse("(FP16, 128, 64, 96, 4): async+swizzled+load_0_0_0_tiles")
    target = replace(TARGET, backend="gpu")
    report = run_kernels(
        [wide], target, task=Size(1, 192, 1), reporter=ProgressReporter(quiet=True)
    )
    assert asked == [("emulator", 384), ("gpu", 192)]
    assert report.rows[0].emulated.seq_q == 384


@pytest.mark.parametrize(
    ("task", "proven", "emulated", "timed", "said"),
    [
        (
            Size(2, 1023, 4, Semantics("causal", uneven=True)),
            "b2 s1023 h4 d128 fp16 causal uneven",
            "b1 s255 h2 d128 fp16 causal uneven",
            "b16 s4095 h16 d128 fp16 causal uneven",
            "batch 16, seq 4095, heads 16",
        ),
        (
            OneProblem(Problem.parse("b3 s300 h4:2 d128 fp16 window packed")),
            "b3 s300 h4:2 d128 fp16 window packed uneven",
            "b4 s255 h2 d128 fp16 window packed uneven",
            "b3 s300 h4:2 d128 fp16 window packed uneven",
            "the same problem",
        ),
        (
            OneProblem(Problem.parse("s64 d128 fp16 softcap")),
            "b1 s64 h1 d128 fp16 softcap",
            "b1 s256 h2 d128 fp16 softcap",
            "b1 s64 h1 d128 fp16 softcap",
            "the same problem",
        ),
        (  # Zeros are proven, and there is nothing to time.
            OneProblem(Problem.parse("s64:0 d128 fp16")),
            "b1 s64:0 h1 d128 fp16 uneven",
            "b1 s255 h2 d128 fp16 uneven",
            None,
            "the same problem",
        ),
    ],
)
def test_on_a_gpu_the_same_semantics_are_proven_counted_and_timed(
    monkeypatch, task, proven: str, emulated: str, timed: str | None, said: str
) -> None:
    calls, asked = [], {}
    verdict = prove(STEP_2, seq=64)

    def prove_or_not(cfg, problem, *, options, backend, **call):
        calls.append((backend, options["causal"], options["window"][0], options["softcap"]))
        return verdict

    def time_kernels(problem_of, seed):
        asked.update(problem_of)
        return dict.fromkeys(problem_of, Times(1.5, 1.25, 0.01, 300.0))

    library = SimpleNamespace(entry=lambda cfg: cfg)
    built = []
    monkeypatch.setattr(run_module, "prove", prove_or_not)
    monkeypatch.setattr(run_module, "time_kernels", time_kernels)
    monkeypatch.setattr(run_module.KernelFacts, "of", lambda *_: KernelFacts(99, 0, 0, 49152, 2))
    monkeypatch.setattr(
        run_module,
        "libraries_for",
        lambda configs, *, semantics, **_: (
            built.append(semantics) or dict.fromkeys(configs, library)
        ),
    )
    target = replace(TARGET, backend="gpu")
    report = run_kernels([STEP_2], target, task=task, reporter=ProgressReporter(quiet=True))
    (row,) = report.rows
    assert (str(row.proven), str(row.emulated)) == (proven, emulated)
    assert {cfg: str(problem) for cfg, problem in asked.items()} == (
        {STEP_2: timed} if timed else {}
    )
    assert (row.times is None) is (timed is None)
    assert built == [row.proven.semantics]
    assert [backend for backend, *_ in calls] == ["emulator", "gpu"]
    assert len({(causal, softcap) for _, causal, _, softcap in calls}) == 1
    text = printed(report)
    assert f"timed:   interleaved, {said}; the output is checked" in text
    assert f"| {row.proven.semantics} " in text
    facts = report.to_json()
    assert (facts["kernels"][0]["proven"], facts["kernels"][0]["emulated"]) == (proven, emulated)
    assert facts["timed"] == (
        facts["proven"] if isinstance(task, OneProblem) else {"batch": 16, "seq": 4095, "heads": 16}
    )


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_is_proven_there_and_timed() -> None:
    report = run_kernels(
        [STEP_2], choose_target(), task=Size(1, 128, 2), reporter=ProgressReporter(quiet=True)
    )
    (row,) = report.rows
    assert report.target.backend == "gpu"
    assert report.ok
    assert row.times is not None
    assert row.times.ms > 0
    assert "TFLOP/s" in printed(report)


def asked_lengths(monkeypatch, key: str, backend: str) -> dict[str, dict[KernelConfig, int]]:
    """At which length a run proves each kernel of a set when none is given, by backend."""
    asked: dict[str, dict[KernelConfig, int]] = {"emulator": {}, "gpu": {}}

    def prove_or_not(cfg, problem, **options):
        asked[options["backend"]][cfg] = problem.seq_q
        raise EmulatorError("not today")

    library = SimpleNamespace(entry=lambda cfg: cfg)
    monkeypatch.setattr(run_module.KernelFacts, "of", lambda *_: KernelFacts(168, 0, 0, 49152, 2))
    monkeypatch.setattr(run_module, "prove", prove_or_not)
    monkeypatch.setattr(
        run_module, "libraries_for", lambda configs, **_: dict.fromkeys(configs, library)
    )
    monkeypatch.setattr(run_module, "CudaEvents", PretendedClock)
    monkeypatch.setattr(run_module, "time_kernels", lambda problem_of, seed: {})
    configs = get_kernel_configs(key)
    target = replace(choose_target("sm_90", emulate=True), backend=backend)
    reporter = ProgressReporter(quiet=True)
    report = run_kernels(configs, target, task=default_size(target), reporter=reporter)
    assert set(asked["emulator"]) == set(configs)
    if len(set(asked["emulator"].values())) > 1:
        assert report.to_json()["proven"]["seq"] is None
        assert "| seq |" in printed(report)
        assert "(each kernel its own)" in printed(report)
    return asked


@pytest.mark.parametrize("key", ["prog", "tune", "prog-all", "cover", "space", "hopper"])
def test_every_kernel_is_proven_at_whole_tiles_of_its_own(monkeypatch, key: str) -> None:
    """The least common multiple over the wgmma set would be 13,440 keys: hours."""
    for cfg, seq in asked_lengths(monkeypatch, key, "emulator")["emulator"].items():
        assert all(seq % tile == 0 for tile in cfg.family.dividing_tiles(cfg).values())
        assert 256 <= seq < 256 + math.lcm(*cfg.family.dividing_tiles(cfg).values())


def test_so_it_is_on_a_gpu(monkeypatch) -> None:
    asked = asked_lengths(monkeypatch, "hopper", "gpu")
    assert len(set(asked["gpu"].values())) > 1
    for cfg, seq in asked["gpu"].items():
        assert seq % cfg.B_c == 0
        assert 1024 <= seq < 1024 + cfg.B_c
        assert asked["emulator"][cfg] < 256 + cfg.B_c


def test_an_estimate_comes_first_and_what_is_left_with_every_kernel(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run_module, "estimate_seconds", lambda cfg, problem: problem.seq_q / 8)
    with ProgressReporter() as reporter:
        run_kernels([STEP_1, STEP_2], TARGET, task=SMALL, reporter=reporter)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "emulating is estimated to take about 16s"
    assert f"proving {STEP_1} (1 of 2, estimate: about 16s)" in lines
    assert lines[-1].startswith(f"proving {STEP_2} (2 of 2")


def test_checks_are_in_the_estimate(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run_module, "libraries_for", lambda *_, **__: {})
    monkeypatch.setattr(run_module, "_REFERENCE_SECONDS", 0.0)
    seconds = []
    large = Size(batch=1, seq=4096, heads=1)
    for checks in (False, True):
        with pytest.raises(KeyError), ProgressReporter() as reporter:
            run_kernels(
                [STEP_1], TARGET, task=large, options=Options(checks=checks), reporter=reporter
            )
        words = capsys.readouterr().err.splitlines()[0].split()
        seconds.append(int(words[-1].removesuffix("s")))
    assert seconds[1] > 1.5 * seconds[0] > 0


def test_the_references_are_in_the_estimate_once_a_problem(monkeypatch) -> None:
    """They take longer than the emulation of long problems, and are kept for the next kernel."""
    monkeypatch.setattr(run_module, "estimate_seconds", lambda cfg, problem: 1.0)
    monkeypatch.setattr(run_module, "libraries_for", lambda *_, **__: {})
    reporter = ProgressReporter(quiet=True)
    expected: list[float] = []
    monkeypatch.setattr(reporter, "expect", lambda what, estimates: expected.extend(estimates))
    size = Size(batch=1, seq=8192, heads=2)
    with pytest.raises(KeyError):
        run_kernels([STEP_1, STEP_2], TARGET, task=size, reporter=reporter)
    assert expected[0] > 10.0
    assert expected[1] == 1.0
