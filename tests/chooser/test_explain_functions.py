"""explain() of score and mask functions, and `flashsmith explain` of a problem with them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import flashsmith
from flashsmith import masks, scores
from flashsmith.chooser.function_problems import parse_with_functions
from flashsmith.cli import app
from flashsmith.errors import ArgumentError, TraceError

SLOPES, IDS = np.ones(4, np.float32), np.zeros((2, 70), np.int64)


def test_a_score() -> None:
    found = flashsmith.explain(scores.alibi(SLOPES) + scores.softcap(30.0))
    assert "read0[h]" in found.score
    assert set(found.derivatives) == {"score", "read0[h]"}
    assert "tanh" in found.derivatives["score"]
    assert "FS_DEVICE static float slope" in found.cpp
    assert found.intervals == "there is no mask"
    text = str(found)
    for part in (found.score, *found.derivatives.values(), "float32 (4,)", "number0", "30.0"):
        assert part in text
    assert "// program_" in text


@pytest.mark.parametrize(
    ("keywords", "kernel", "found"),
    [
        ({"mask": masks.causal()}, "causal", "the mask is causal"),
        ({"mask_mod": lambda b, h, q, k: abs(q - k) <= 9}, "window: 9 before and 9", "a window"),
        ({"mask": masks.causal(), "causal": True}, "causal", "hides nothing more than causal"),
        ({"causal": True}, "causal", "there is no mask"),
        ({"mask": masks.documents(IDS)}, "all", "partial or full, for each sequence; kernels"),
        ({"mask": masks.chunks(64)}, "all", "partial or full, once for all sequences and heads"),
        (
            {"mask": lambda b, h, q, k: k % 3 != h, "window": (4, None)},
            "window: 4 before and all",
            "full, for each head; kernels",
        ),
    ],
)
def test_what_the_analysis_found(keywords: dict[str, Any], kernel: str, found: str) -> None:
    explained = flashsmith.explain(**keywords, lengths=(70, 70))
    assert found in explained.intervals
    assert kernel in explained.to_json()["limits"]
    assert (explained.mask == "") == ("lists" not in found and "full" not in found)


def test_lengths_decide_whether_it_is_a_window() -> None:
    """q_idx counts from the first query, causal from the last one."""
    for lengths, kernel in (((70, 70), "causal"), ((70, 90), "all"), (None, "all")):
        explained = flashsmith.explain(mask=masks.causal(), lengths=lengths)
        assert explained.to_json()["limits"] == kernel, lengths
    ended = flashsmith.explain(mask=masks.causal(), positions="end")
    assert ended.to_json()["limits"] == "causal"


def test_the_names_of_tensors() -> None:
    found = flashsmith.explain(bias=np.zeros((1, 4, 7, 9), np.float16), lengths=(7, 9))
    assert found.to_json()["tensors"] == {"read0": "float16 (1, 4, 7, 9), the bias"}


def test_errors_are_those_of_calls() -> None:
    with pytest.raises(TraceError, match="'if'"):
        flashsmith.explain(lambda s, b, h, q, k: s if q > k else -s)
    with pytest.raises(ArgumentError, match=r"bias: shape \(7, 8\)"):
        flashsmith.explain(bias=np.zeros((7, 8), np.float32), lengths=(7, 9))


def test_over_a_cache() -> None:
    """Indices are positions in the whole sequence."""
    text = "b1 s1:70 h4 d64 fp16 decode mask=causal score=alibi"
    result = CliRunner().invoke(app, ["explain", text, "--arch", "80", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["limits"] == "causal"
    assert "seq_k - seq_q" in found["score"]
    assert "decode" in found["kernel"]["config"]


def test_over_a_latent_cache() -> None:
    """The program is the one that calls run, and its kernels skip no blocks."""
    text = "b1 s1:70 h4:1 d320:256 fp16 latent_decode causal mask=documents"
    result = CliRunner().invoke(app, ["explain", text, "--arch", "80"])
    assert result.exit_code == 0, result.output
    program = parse_with_functions(text).problem.semantics.program
    assert program.startswith("program_")
    assert program in result.stdout
    assert "kernels evaluate it for every key" in result.stdout
    assert "absent blocks" not in result.stdout


def test_the_command() -> None:
    text = "b1 s70 h4 d64 bf16 score=alibi mask=documents&causal"
    result = CliRunner().invoke(app, ["explain", text, "--arch", "90"])
    assert result.exit_code == 0, result.output
    slopes = scores.alibi(np.zeros(4, np.float32))
    ids = np.zeros(70, np.int64)
    found = flashsmith.explain(slopes, masks.documents(ids) & masks.causal(), lengths=(70, 70))
    assert str(found) in result.stdout
    assert "kernel      (BF16" in result.stdout
    as_json = CliRunner().invoke(app, ["explain", text, "--arch", "90", "--json"])
    assert json.loads(as_json.stdout)["cpp"] == found.cpp
    assert json.loads(as_json.stdout)["kernel"]["arch"] == "sm_90"
