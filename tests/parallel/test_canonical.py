"""bits='canonical' over processes of gloo: a row has the bits that one process gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from ranks import CANONICAL, CFG, run_ranks  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import Semantics  # noqa: E402
from flashsmith.families.canonical import CHUNK  # noqa: E402
from flashsmith.parallel.layout import Limits, RowRun, ScoreBlock, pieces  # noqa: E402

PART = Semantics("causal", uneven=True, partial=True)
shared_kernels.want([CFG], PART)
shared_kernels.want_chosen(
    "b1 s16 h2:1 d64 fp16 causal uneven canonical",
    f"b1 s8:{CHUNK + 76} h2:1 d64 fp16 window uneven canonical",
)


def test_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    expected: dict[str, Any] = {}
    for name, case in CANONICAL.items():  # builds the kernels, so that no rank waits for them
        q, k, v = (case.draw()[it] for it in "qkv")
        how = {"bits": "canonical", "return_lse": True, **case.semantics}
        expected[name] = flashsmith.attention(q, k, v, **how)
    shared_kernels.load([CFG], PART)
    for rank in run_ranks(2, tmp_path, {}, ("canonical",)):
        found = rank["canonical"]
        assert not isinstance(found, str), found
        for name, both in expected.items():
            for one, other in zip(found[name], both, strict=True):
                assert torch.equal(one, other), name
        assert "bits='canonical': schedule='zigzag': merges parts" in found["zigzag"]
        assert "FLASHSMITH_BITS=canonical: schedule='zigzag': merges parts" in found["variable"]
        assert found["free"] == "no error"
        assert "bits: rank 1 of the group gave 'canonical', and rank 0 'free'" in found["one"]


def test_keys_are_left_out_by_whole_chunks() -> None:
    mask = Limits(20, 0)
    keys = CHUNK + 76
    runs = [RowRun(0, 0, 8)], [RowRun(0, 0, keys)], keys - 8, mask
    assert pieces(*runs) == [ScoreBlock((0, 8), (keys - 28, keys), mask)]
    assert pieces(*runs, CHUNK) == [ScoreBlock((0, 8), (CHUNK, keys), mask)]


def test_their_problems_are_known_ahead() -> None:
    words = "b1 s16 h2:1 d64 fp16 causal canonical"
    ahead = flashsmith.parallel.problems(words, ranks=2, gradients=True)
    assert {one.operation: one.bits for one in ahead} == {"forward": "canonical", "backward": ""}
    with pytest.raises(ArgumentError, match="bits='canonical': schedule='zigzag': merges parts"):
        flashsmith.parallel.problems(words, ranks=2, schedule="zigzag")
