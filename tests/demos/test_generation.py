"""The generation demo: a trained model answers from a paged cache as it does without one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import shared_kernels
from typer.testing import CliRunner

from flashsmith.chooser import choose
from flashsmith.cli import app
from flashsmith.families import Problem
from flashsmith_demos import generation
from flashsmith_demos.generation import SIZES, WEIGHTS, GenerationReport, generate_twice

PROBLEM = Problem.parse(
    f"b4 s2:32 h{SIZES.heads}:{SIZES.heads_k} d{SIZES.d} bf16 causal+uneven decode page16"
)
CONFIG = choose(PROBLEM, 80).config
shared_kernels.want([CONFIG], PROBLEM.required_semantics(CONFIG))

REPORT = GenerationReport(
    device="the host",
    backend="emulator",
    parameters=10,
    page=16,
    pages=2,
    launches=8,
    prompts=((1, 17), (2, 18)),
    questions=((1,), (2,)),
    right=((17,), (18,)),
    pytorch=((17,), (18,)),
    flashsmith=((17,), (18,)),
)


@pytest.fixture
def needs_torch() -> None:
    pytest.importorskip("torch", reason="needs PyTorch: it is not installed")


@pytest.mark.torch
@pytest.mark.usefixtures("needs_torch")
def test_the_same_tokens_from_a_paged_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernels of other tests' library serve.
    monkeypatch.setattr(generation, "build_for", lambda problem, **_: None)
    report = generate_twice(answers=3, emulate=True)
    assert report.backend == "emulator"
    assert report.flashsmith == report.pytorch
    assert all(len(answers) == 3 for answers in report.flashsmith)
    assert report.accuracy == 1.0
    assert report.launches >= report.least_launches
    assert report.ok


@pytest.mark.torch
@pytest.mark.usefixtures("needs_torch")
def test_a_page_of_another_sequence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "build_for", lambda problem, **_: None)
    end = generation._PagedCache.end

    def ends(cache: Any, appended: int) -> None:
        """The prompts stay where they are; what follows is read from pages of others."""
        end(cache, appended)
        if cache._rows.stop == cache._rows.start + 1 == len(generation.PAIRS):
            cache._table[:, 0] = cache._table.flip(0)[:, 0].clone()

    monkeypatch.setattr(generation._PagedCache, "end", ends)
    report = generate_twice(answers=3, emulate=True)
    assert not report.ok
    assert report.flashsmith != report.pytorch


def test_what_fails_the_demo() -> None:
    assert REPORT.ok
    assert not replace(REPORT, flashsmith=((17,), (19,))).ok
    assert not replace(REPORT, launches=REPORT.least_launches - 1).ok
    wrong = ((19,), (19,))
    assert not replace(REPORT, flashsmith=wrong, pytorch=wrong).ok, "knows nothing"


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def run(report: GenerationReport, *options: str) -> Any:
        monkeypatch.setattr(
            generation, "generate_twice", lambda **how: (asked.update(how), report)[1]
        )
        return CliRunner().invoke(app, ["demo", "generate", *options])

    said = run(REPORT, "--answers", "1", "--emulate")
    assert said.exit_code == 0, said.output
    assert (asked["answers"], asked["emulate"]) == (1, True)
    assert "the same tokens" in said.output
    assert "passed" in said.output
    other = run(replace(REPORT, flashsmith=((17,), (19,))))
    assert other.exit_code == 1
    assert "OTHER TOKENS" in other.output
    assert json.loads(run(REPORT, "--json").stdout)["ok"] is True


def test_the_model_is_small() -> None:
    assert WEIGHTS.stat().st_size < 1_000_000
