"""run_operation(): attention through the path that every operation has, against its own."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, FlashForwardKernelConfig, Problem, Semantics
from flashsmith.runtime import run_forward, run_operation

# What test_forward_semantics.py has, too.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
for _words in ("plain", "window+uneven", "causal+packed+uneven"):
    shared_kernels.want([CFG], Semantics.parse(_words))


def tensors(problem: Problem) -> dict[str, np.ndarray]:
    p, rng = problem, np.random.default_rng(0)
    drawn = {}
    for name, rows, seq, heads in (
        ("q", p.batch * p.seq_q, p.seq_q, p.heads_q),
        ("k", p.batch * p.seq_k, p.seq_k, p.heads_k),
        ("v", p.batch * p.seq_k, p.seq_k, p.heads_k),
    ):
        shape = (rows, heads, p.d) if p.semantics.packed else (p.batch, seq, heads, p.d)
        drawn[name] = rng.standard_normal(shape, dtype=np.float32).astype(np.float16)
    if p.semantics.packed:
        for name, seq in (("cu_seqlens_q", p.seq_q), ("cu_seqlens_k", p.seq_k)):
            drawn[name] = np.arange(p.batch + 1, dtype=np.int32) * seq
    return drawn


@pytest.mark.parametrize(
    ("text", "options", "keywords"),
    [
        ("b2 s64:128 h4:2 d64 fp16", {}, {}),
        ("b1 s70:90 h2 d40 fp16 window", {"left": 20, "right": 5, "scale": 0.25},
         {"window": (20, 5), "scale": 0.25}),
        ("b2 s33:65 h2 d64 fp16 causal packed", {},
         {"causal": True, "max_seqlen_q": 33, "max_seqlen_k": 65}),
    ],
)  # fmt: skip
def test_attention_gives_the_same_bits(
    text: str, options: dict[str, Any], keywords: dict[str, Any]
) -> None:
    problem = Problem.parse(text)
    given = {**tensors(problem), "sinks": np.linspace(-1, 1, problem.heads_q, dtype=np.float32)}
    wanted = ("lse", "row_max")
    ours = run_operation(CFG, problem, given, options=options, wanted=wanted, poisoned=True)
    theirs = run_forward(CFG, **given, **keywords, return_lse=True, return_row_max=True)
    assert list(ours.outputs) == ["o", "lse", "row_max"]
    for name, array in ours.outputs.items():
        np.testing.assert_array_equal(array, getattr(theirs, name))
    assert ours.emulation is not None
    assert ours.ms is None


@pytest.mark.parametrize(
    ("text", "change", "keywords", "message"),
    [
        ("s64 d64 fp16", {"v": None}, {}, "v: missing; forward reads it"),
        ("s64 d64 fp16", {"cu_seqlens_q": np.zeros(2, np.int32)}, {},
         "cu_seqlens_q: given, and 'b1 s64 h1 d64 fp16' has no packed sequences"),
        ("s64 d64 fp16 packed", {"cu_seqlens_k": None}, {}, "cu_seqlens_k: missing"),
        ("s64 d64 fp16 packed", {"cu_seqlens_q": np.zeros(3, np.int32)}, {},
         "cu_seqlens_q: shape (3,); must be (batch+1), (2)"),
        ("s64 d64 fp16 packed", {"v": np.zeros((63, 1, 64), np.float16)}, {},
         "v: shape (63, 1, 64); must be (total_k, heads_k, d_v), (64, 1, 64)"),
        ("s64 d64 fp16", {}, {"options": {"left": 3}}, "left=3, right=None: give the limits of"),
        ("s64 d64 fp16 window", {}, {}, "left=None, right=None: give the limits of a window"),
        ("s64 d64 fp16", {}, {"options": {"sofcap": 3.0}},
         "sofcap=3.0: forward has no such option; did you mean 'softcap'?"),
        ("s64 d64 fp16", {"qq": np.zeros(1)}, {}, "qq: forward has no such tensor; did you mean"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    text: str, change: dict[str, Any], keywords: dict[str, Any], message: str
) -> None:
    problem = Problem.parse(text)
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        run_operation(CFG, problem, {**tensors(problem), **change}, **keywords)
