"""`flashsmith run --score ... --mask ...`: proofs of score and mask functions without a GPU."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flashsmith.benchmark import run_functions as module
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.cli import app
from flashsmith.errors import ArgumentError, FlashsmithError
from flashsmith.runtime.target import choose_target
from flashsmith.verify import function_values as values

HERE = __name__
slopes = np.array([0.5, -0.25], np.float32)
ids = np.repeat(np.arange(3), 30)


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """With a kink, and the slope of each head."""
    return score.clip(max=2.0) * 0.5 + slopes[h] * (kv_idx - q_idx) / 16


def own_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def two_faced(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score if type(score).__name__ == "Symbol" else score + 1


def two_faced_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx if type(q_idx).__name__ == "Symbol" else q_idx > kv_idx


TEXT = "b1 s70 h2 d32 fp16"
PROBLEM = f"{TEXT} score={HERE}:capped mask={HERE}:own_documents"


def run(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["run", *words])
    if isinstance(result.exception, FlashsmithError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout


def test_the_kernels_that_attention_uses() -> None:
    """On sm_80; in all, ten checks of functions, kernels, bits and accesses."""
    text = run("--problem", TEXT, "--score", f"{HERE}:capped", "--mask", f"{HERE}:own_documents")
    assert "10 of 10 checks passed" in text
    for name in (
        *("score as called", "mask as called", "d score / d score", "d score / d read0[h]"),
        *("output", "gradients", "same bits", "races, bounds", "backward+columns"),
    ):
        assert name in text, name


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kernels", lambda *_: ([], {}))


def checks(words: str) -> dict[str, str]:
    """The verdicts by name."""
    found = module.read_functions(f"{TEXT} {words}")
    with ProgressReporter() as reporter:
        report = module.run_functions(found, None, choose_target("80"), reporter=reporter)
    return {row.name: "; ".join(row.problems) for row in report.rows}


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    "words",
    [
        "score=alibi+softcap(3.0) mask=documents&causal positions=end",
        "mask=window(9)|chunks(16)",
        "mask=causal causal",
        "mask=bool[1,h,q,1] bias=float16[q,k] positions=end score=relative",
        "packed mask=prefix_lm",
        "score=t5 mask=intervals",
    ],
)
def test_values_of_ready_functions(words: str) -> None:
    for sizes in ("b1 s70", "b2 s50:70", "b2 s70:50"):
        found = module.read_functions(f"{sizes} h2 d32 fp16 {words}", seed=1)
        rows = list(module._value_checks(found, 0))
        assert rows
        assert [row.problems for row in rows] == [()] * len(rows)


@pytest.mark.usefixtures("without_kernels")
def test_what_is_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the function gives" in checks(f"score={HERE}:two_faced")["score as called"]
    assert "gives False" in checks(f"mask={HERE}:two_faced_mask")["mask as called"]
    slope = values.derivative
    monkeypatch.setattr(values, "derivative", lambda *it: slope(*it) * 1.01)
    found = checks("score=softcap(3.0)")
    assert "difference quotients" in found["d score / d score"]
    assert run("--problem", TEXT, "--score", "softcap(3.0)", status=1)


@pytest.mark.usefixtures("without_kernels")
def test_tensors_that_are_too_short() -> None:
    found = module.read_functions(f"b1 s200 h2 d32 fp16 mask={HERE}:own_documents")
    (row,) = module._value_checks(found, 0)
    assert "raises IndexError" in row.problems[0]


@pytest.mark.parametrize(
    ("what", "name"), [("value", "output"), ("bits", "same bits"), ("finding", "races, bounds")]
)
def test_wrong_kernels_fail(monkeypatch: pytest.MonkeyPatch, what: str, name: str) -> None:
    """Outputs that are wrong, that differ between two runs, and findings of the emulator."""
    forward, times = module._Case._forward, []

    def spoiled(self: Any, *arguments: Any) -> Any:
        outputs, findings = forward(self, *arguments)
        times.append(1)
        if what == "value" or (what == "bits" and len(times) == 2):
            outputs["o"][0, 3, 1, 5] += 1
        return outputs, [*findings, *["a race"] * (what == "finding")]

    monkeypatch.setattr(module._Case, "_forward", spoiled)
    chosen = module._kernels
    monkeypatch.setattr(module, "_kernels", lambda *it: (chosen(*it)[0][:1], {}))
    words = PROBLEM.partition(" fp16 ")[2]
    assert {it for it, problems in checks(words).items() if problems} == {name}


def test_selected_kernels_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Case, "checks", lambda *_: [])
    monkeypatch.setattr(module, "library_for", lambda *_, **__: None)
    good = "(FP16, 32, 64, 64, 4): async+eager+swizzled+load_0_0_0_tiles+opt_softmax"
    other = "(BF16, 32, 64, 64, 4): async+eager+swizzled+load_0_0_0_tiles+opt_softmax"
    found = json.loads(run("-k", f"{good};{other}", "--problem", PROBLEM, "--json"))
    assert found["skipped"] == [{"config": other, "reason": "is for bf16"}]
    assert {it["verdict"] for it in found["checks"]} == {"pass"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--score", "alibi", "--softcap", "3"], "--softcap: given with a score or mask function"),
        (["--mask", "causal", "--check"], "--check: given with"),
        (["--mask", "causal", "--problem", TEXT, "--seq", "9"], "--problem: already sets"),
        (["--mask", "causal", "--problem", f"{TEXT} decode"], "leave out decode"),
        (["--mask", "nowhere_at_all:f"], "cannot be loaded"),
        (["--mask", "causal", "--semantics", "partial+uneven"], "leave out partial"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(*words)
