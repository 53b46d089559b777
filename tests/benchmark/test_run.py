"""The main job's judgement: what is a failure, what is refused, what the report says."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from stand_ins import PretendedClock

from flashsmith.benchmark import run as run_module
from flashsmith.benchmark.conflicts import CONFLICT_KINDS, conflict_factors
from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.run import Options, run_kernels
from flashsmith.benchmark.run_table import print_report
from flashsmith.benchmark.run_times import Timing
from flashsmith.benchmark.table import make_console
from flashsmith.benchmark.target import choose_target
from flashsmith.benchmark.tasks import EMULATED, OneProblem, Size, default_size
from flashsmith.configs import Problem, Semantics, get_kernel_configs
from flashsmith.configs import parse_kernel_name_into_config as parse
from flashsmith.emulator import BankConflicts
from flashsmith.errors import ArgumentError, EmulatorError, IllegalConfigError, LaunchError

STEP_1 = parse("(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles")
STEP_2 = parse("(FP16, 128, 64, 64, 4): async+swizzled+load_0_0_0_tiles")
STEP_3 = parse("(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_0_0_tiles")
SMALL = Size(batch=1, seq=64, heads=1)
TARGET = choose_target("sm_80", emulate=True)


def run(*configs, task=SMALL, **options):
    return run_kernels(
        configs, TARGET, task=task, options=Options(**options), narrator=Narrator(quiet=True)
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
    assert row.timing is None
    assert "1 of 1 kernels passed" in printed(report)


def test_a_wrong_kernel_fails_and_is_located(monkeypatch) -> None:
    right = run_module.prove

    def wrong(cfg, **options):
        verdict = right(cfg, **options)
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
    def deadlock(cfg, **options):
        raise EmulatorError("deadlock: 32 threads wait at bar.sync 0")

    monkeypatch.setattr(run_module, "prove", deadlock)
    report = run(STEP_1)
    assert not report.ok
    text = printed(report)
    assert "did not come to its end: deadlock" in text
    assert "0 of 1 kernels passed" in text


def test_a_kernel_that_takes_the_gpu_with_it_ends_the_run(monkeypatch) -> None:
    """Or every kernel after it would be called wrong. The emulator stands for a GPU."""
    right = run_module.prove
    clock = PretendedClock()

    def prove(cfg, **options):
        if options["backend"] == "gpu" and cfg == STEP_2:
            raise LaunchError("an illegal memory access")
        return right(cfg, **{**options, "backend": "emulator"})

    def gone() -> None:
        raise LaunchError("an illegal memory access was encountered")

    monkeypatch.setattr(run_module, "prove", prove)
    monkeypatch.setattr(run_module, "CudaEvents", lambda: clock)
    monkeypatch.setattr(run_module, "time_kernels", lambda problem_of, seed: {})
    target = replace(TARGET, backend="gpu")
    (row,) = run_kernels([STEP_2], target, task=SMALL, narrator=Narrator(quiet=True)).rows
    assert row.problems == ("did not come to its end: an illegal memory access",)
    clock.synchronize = gone  # type: ignore[method-assign]
    with pytest.raises(LaunchError) as raised:
        run_kernels([STEP_2, STEP_1], target, task=SMALL, narrator=Narrator(quiet=True))
    assert str(raised.value).startswith(f"{STEP_2} left the GPU unusable to this process")


def test_conflict_factors_are_grouped_by_use() -> None:
    measured = BankConflicts()
    run_module.prove(STEP_1, seq=64, observers=[measured])
    factors = conflict_factors(measured, STEP_1)
    assert tuple(factors) == CONFLICT_KINDS
    assert factors["ldmatrix"] == 8.0
    measured.by_kind.clear()
    assert conflict_factors(measured, STEP_1) == dict.fromkeys(CONFLICT_KINDS)


def test_on_a_gpu_what_is_right_is_timed(monkeypatch) -> None:
    """The emulator stands for the GPU that proves."""
    right = run_module.prove

    def prove(cfg, **options):
        verdict = right(cfg, **{**options, "backend": "emulator"})
        wrong = cfg == STEP_1 and options["backend"] == "gpu"
        return replace(verdict, reasons=("wrong",)) if wrong else verdict

    asked = []

    def time_kernels(problem_of, seed):
        asked.extend(problem_of)
        return {STEP_2: Timing(1.5, 1.25, 0.01, 300.0), STEP_3: ("the timed launch: wrong",)}

    monkeypatch.setattr(run_module, "prove", prove)
    monkeypatch.setattr(run_module, "time_kernels", time_kernels)
    target = replace(TARGET, backend="gpu")
    report = run_kernels(
        [STEP_1, STEP_2, STEP_3], target, task=SMALL, narrator=Narrator(quiet=True)
    )
    assert asked == [STEP_2, STEP_3]
    assert [row.ok for row in report.rows] == [False, True, False]
    assert [row.timing is None for row in report.rows] == [True, False, True]
    text = printed(report)
    assert "| 1.500 |" in text
    assert "the timed launch: wrong" in text
    assert report.to_json()["kernels"][1]["timing"]["ms"] == 1.5


def test_on_a_gpu_the_plain_kernel_is_counted_whatever_its_tiles(monkeypatch) -> None:
    asked = []

    def prove(cfg, **options):
        asked.append((options["backend"], options["seq"]))
        raise EmulatorError("not today")

    monkeypatch.setattr(run_module, "prove", prove)
    monkeypatch.setattr(run_module, "CudaEvents", PretendedClock)
    monkeypatch.setattr(run_module, "time_kernels", lambda problem_of, seed: {})
    wide = parse("(FP16, 128, 64, 96, 4): async+swizzled+load_0_0_0_tiles")
    target = replace(TARGET, backend="gpu")
    report = run_kernels([wide], target, task=Size(1, 192, 1), narrator=Narrator(quiet=True))
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
    verdict = run_module.prove(STEP_2, seq=64)

    def prove(cfg, **call):
        calls.append((call["backend"], call["causal"], call["window"][0], call["softcap"]))
        return verdict

    def time_kernels(problem_of, seed):
        asked.update(problem_of)
        return dict.fromkeys(problem_of, Timing(1.5, 1.25, 0.01, 300.0))

    entry = SimpleNamespace(registers=99, spill_store_bytes=0, spill_load_bytes=0)
    library = SimpleNamespace(entry=lambda cfg: entry)
    built = []
    monkeypatch.setattr(run_module, "prove", prove)
    monkeypatch.setattr(run_module, "time_kernels", time_kernels)
    monkeypatch.setattr(run_module, "conflict_factors", lambda *_: dict.fromkeys(CONFLICT_KINDS))
    monkeypatch.setattr(
        run_module,
        "libraries_for",
        lambda configs, *, semantics, **_: (
            built.append(semantics) or dict.fromkeys(configs, library)
        ),
    )
    target = replace(TARGET, backend="gpu")
    report = run_kernels([STEP_2], target, task=task, narrator=Narrator(quiet=True))
    (row,) = report.rows
    assert (str(row.proven), str(row.emulated)) == (proven, emulated)
    assert {cfg: str(problem) for cfg, problem in asked.items()} == (
        {STEP_2: timed} if timed else {}
    )
    assert (row.timing is None) is (timed is None)
    assert built == [row.proven.semantics]
    assert [backend for backend, *_ in calls] == ["emulator", "gpu"]
    assert len({(causal, softcap) for _, causal, _, softcap in calls}) == 1
    text = printed(report)
    assert f"timed:   in turn, {said}; the output is judged" in text
    assert f"| {row.proven.semantics} " in text
    facts = report.to_json()
    assert (facts["kernels"][0]["proven"], facts["kernels"][0]["emulated"]) == (proven, emulated)
    assert facts["timed"] == (
        facts["proven"] if isinstance(task, OneProblem) else {"batch": 16, "seq": 4095, "heads": 16}
    )


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_is_proven_there_and_timed() -> None:
    report = run_kernels(
        [STEP_2], choose_target(), task=Size(1, 128, 2), narrator=Narrator(quiet=True)
    )
    (row,) = report.rows
    assert report.target.backend == "gpu"
    assert report.ok
    assert row.timing is not None
    assert row.timing.ms > 0
    assert "TFLOP/s" in printed(report)


@pytest.mark.parametrize("key", ["prog", "tune", "prog-all", "cover"])
def test_every_sets_tiles_divide_the_default_length(key: str) -> None:
    configs = get_kernel_configs(key)
    seq = default_size(choose_target("sm_80", emulate=True), configs).seq
    assert seq >= 256
    assert all(seq % cfg.B_r == 0 == seq % cfg.B_c for cfg in configs)
