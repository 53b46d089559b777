"""The training demo: a tiny model's gradients through the emulator, and the report."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import shared_kernels
from typer.testing import CliRunner

from flashsmith.chooser import choose
from flashsmith.errors import ArgumentError, DependencyError
from flashsmith_demos import recall
from flashsmith_demos.recall import EMULATED, ON_A_GPU, RecallReport, Training, train_twice

for _operation in ("forward", "backward"):
    _problem = replace(EMULATED.problem, operation=_operation)
    _config = choose(_problem, 80).config
    shared_kernels.want([_config], _problem.required_semantics(_config))


@pytest.fixture
def needs_torch() -> None:
    pytest.importorskip("torch", reason="needs PyTorch: it is not installed")


@pytest.mark.torch
@pytest.mark.usefixtures("needs_torch")
def test_a_tiny_model_in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    # The kernels of other tests' library serve.
    monkeypatch.setattr(recall, "build_for", lambda problem, **_: built.append(problem.operation))
    report = train_twice(emulate=True)
    assert built == ["forward", "backward"]
    assert report.backend == "emulator"
    assert report.ok
    assert report.launches >= report.least_launches
    assert len(report.pytorch.losses) == len(report.flashsmith.losses) == EMULATED.steps
    # Not a copy of PyTorch's.
    assert report.largest_difference > 0


@pytest.mark.torch
@pytest.mark.usefixtures("needs_torch")
@pytest.mark.parametrize("missing", range(3))
def test_a_missing_gradient_is_seen(missing: int) -> None:
    def attention(*tensors: Any) -> Any:
        kept = [t.detach() if i == missing else t for i, t in enumerate(tensors)]
        return recall.pytorchs_attention(*kept)

    wrong, _ = recall.train(EMULATED, attention)
    report = replace(REPORT, sizes=EMULATED, backend="emulator")
    assert replace(report, pytorch=right(), flashsmith=right()).ok
    assert not replace(report, pytorch=right(), flashsmith=wrong).ok


@functools.cache
def right() -> Training:
    return recall.train(EMULATED, recall.pytorchs_attention)[0]


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.usefixtures("needs_torch")
def test_on_a_gpu() -> None:
    report = train_twice()
    assert report.backend == "gpu"
    assert report.is_judged_by_its_end
    assert report.ok, report.to_json()


@pytest.mark.torch
@pytest.mark.usefixtures("needs_torch")
def test_every_line_can_be_answered_from_its_first_half() -> None:
    import torch

    sizes = replace(EMULATED, pairs=8, batch=50)
    tokens, answers = recall.lines_of(sizes, torch.Generator().manual_seed(0))
    assert tokens.shape == (50, 32)
    different = set()
    for line, expected in zip(tokens.tolist(), answers.tolist(), strict=True):
        known = dict(zip(line[:16:2], line[1:16:2], strict=True))
        assert [known[key] for key in line[16::2]] == line[17::2] == expected
        assert sorted(line[16::2]) == sorted(line[:16:2])
        assert max(known) < sizes.symbols <= min(known.values()) < 2 * sizes.symbols
        different.add(len(known))
    assert min(different) <= 2
    assert max(different) > 4


@pytest.mark.torch
@pytest.mark.usefixtures("needs_torch")
def test_runs_differ_in_nothing_but_the_attention() -> None:
    once = replace(EMULATED, steps=1)
    runs = [recall.train(once, recall.pytorchs_attention) for _ in range(2)]
    assert runs[0][0].losses == runs[1][0].losses

    def nothing(q: Any, k: Any, v: Any) -> Any:
        return 0 * q

    other, parameters = recall.train(once, nothing)
    assert parameters == runs[0][1]
    assert other.losses[0] != runs[0][0].losses[0]


@pytest.mark.torch
@pytest.mark.full
@pytest.mark.usefixtures("needs_torch")
def test_it_learns() -> None:
    """With PyTorch's attention on the host, smaller than on a GPU."""
    sizes = replace(ON_A_GPU, pairs=32, symbols=64, batch=16, d=32, rate=3e-3, steps=150)
    training, _ = recall.train(sizes, recall.pytorchs_attention)
    assert training.accuracy > recall.LEAST_ACCURACY
    assert training.losses[-1] < 0.1


LOSSES = tuple(4.0 / (1 + step) for step in range(300))
REPORT = RecallReport(
    sizes=ON_A_GPU,
    device="NVIDIA H200",
    backend="gpu",
    parameters=1_234_567,
    launches=2400,
    pytorch=Training(LOSSES, 1.0, 0.004),
    flashsmith=Training(tuple(loss + 1e-3 for loss in LOSSES), 0.998, 0.003),
)


def printed(report: RecallReport, capsys: pytest.CaptureFixture[str]) -> str:
    from flashsmith.benchmark.table import make_console
    from flashsmith_demos.recall_text import print_recall

    print_recall(make_console(), report)
    return capsys.readouterr().out


def test_a_report_prints_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(REPORT, capsys)
    assert "2 layers, 4 heads over 2, d 64, 1,234,567 parameters" in text
    assert "128 pairs of a key and a value" in text
    assert "(512 tokens)" in text
    assert "device:  NVIDIA H200; attention in bf16\n" in text
    assert "1.0e-03 in the first 10 steps; at most 0.01 is allowed" in text
    assert "99.8% of the answers are right (100.0% with PyTorch's attention; 99%" in text
    assert "+1.0e-03 from PyTorch's" in text
    assert "2400 launched by flashsmith, at least 1800 expected (2 layers x 300 steps" in text
    assert "4.0 ms a step with PyTorch's attention, 3.0 ms with flashsmith's\n" in text
    rows = [line for line in text.splitlines() if "+1.0e-03 |" in line]
    assert len(rows) == 11
    assert text.endswith("passed\n")


def test_a_short_report_is_not_judged_by_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    short = replace(
        REPORT,
        sizes=replace(EMULATED, steps=3),
        backend="emulator",
        pytorch=Training(LOSSES[:3], 0.0, 0.1),
        flashsmith=Training(LOSSES[:3], 0.0, 0.2),
    )
    assert short.ok
    text = printed(short, capsys)
    assert "right" not in text
    assert "in the first 3 steps" in text
    assert "(in the emulator: no measure of a GPU)" in text


def changed(**losses: float) -> Training:
    """flashsmith's training with other losses at some steps, as 'at_5=1.0'."""
    values = list(REPORT.flashsmith.losses)
    for step, loss in losses.items():
        values[int(step.removeprefix("at_"))] = loss
    return replace(REPORT.flashsmith, losses=tuple(values))


@pytest.mark.parametrize(
    "changes",
    [
        {"launches": 1799},
        {"flashsmith": changed(at_0=4.1)},
        {"flashsmith": changed(at_9=0.0)},
        {"flashsmith": changed(at_0=math.nan)},
        {"flashsmith": changed(at_9=math.nan)},
        {"flashsmith": changed(at_299=1.0)},
        {"flashsmith": replace(REPORT.flashsmith, accuracy=0.98)},
    ],
)
def test_a_report_fails(changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(REPORT, **changes)
    assert not report.ok
    assert report.to_json()["ok"] is False
    assert printed(report, capsys).endswith("FAILED\n")


def test_a_large_difference_in_the_middle_is_no_failure() -> None:
    report = replace(REPORT, flashsmith=changed(at_100=3.0))
    assert report.ok
    assert report.to_json()["largest_difference"] > 2


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="steps=0: give a whole number above 0"):
        train_twice(steps=0)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"torch, not installed here; .*\[models\]"):
        train_twice()


@pytest.mark.parametrize(("launches", "status"), [(2400, 0), (0, 1)])
def test_the_command(launches: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashsmith.cli import app

    asked = {}

    def report(**arguments: Any) -> RecallReport:
        asked.update(arguments)
        return replace(REPORT, launches=launches)

    monkeypatch.setattr(recall, "train_twice", report)
    monkeypatch.setattr(recall, "check_dependencies", lambda: None)
    done = CliRunner().invoke(app, ["demo", "train", "--steps", "7", "--emulate", "--json"])
    assert done.exit_code == status, done.output
    assert (asked["steps"], asked["emulate"]) == (7, True)
    shown = json.loads(done.stdout)
    assert shown["ok"] is (status == 0)
    assert shown["sizes"]["pairs"] == ON_A_GPU.pairs
