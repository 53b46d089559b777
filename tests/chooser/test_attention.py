"""attention() picks a kernel that serves the tensors, or says why none does."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith.chooser import attention, choose, choose_config
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, FlashForwardKernelConfig, Semantics
from flashsmith.runtime import ForwardOptions, forward, kernel_choice
from flashsmith.verify import compare, compute_references

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4)
RNG = np.random.default_rng(0)
RAGGED = choose("b1 s70:90 h1 d64 fp16 uneven", 80).config
for _semantics in ("uneven", "causal+uneven", "window+uneven", "softcap+uneven", "packed+uneven"):
    shared_kernels.want([RAGGED], Semantics.parse(_semantics))
shared_kernels.want([CONFIG])
shared_kernels.want_chosen("b1 s64 h1 d64 fp16")


def tensors(seq_q: int = 64, seq_k: int = 64, d: int = 64, dtype: Any = np.float16) -> list[Any]:
    shapes = [(1, seq_q, 1, d), (1, seq_k, 1, d), (1, seq_k, 1, d)]
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


def test_the_output_is_attention() -> None:
    q, k, v = tensors()
    out = np.full_like(q, np.nan)
    assert attention(q, k, v, scale=0.25, out=out) is out
    assert compare(CONFIG, out, None, compute_references(q, k, v, 0.25)).ok


def test_every_keyword_reaches_the_kernel() -> None:
    """Each changes the output, or what is returned."""
    q, k, v = tensors(70, 90)
    plain = attention(q, k, v)
    sinks = np.ones(1, np.float32)
    changes: list[dict[str, Any]] = [
        {"causal": True},
        {"window": (5, None)},
        {"window": (None, 5)},
        {"softcap": 0.5},
        {"scale": 1.0},
        {"sinks": sinks},
    ]
    outputs = [attention(q, k, v, **change) for change in changes]
    for one, other in itertools.combinations([plain, *outputs], 2):
        assert not np.array_equal(one, other)
    o, lse, row_max = attention(q, k, v, return_lse=True, return_row_max=True)
    assert np.array_equal(o, plain)
    assert (lse > row_max).all()
    assert np.array_equal(attention(q, k, v, return_lse=True)[1], lse)
    assert np.array_equal(attention(q, k, v, return_row_max=True)[1], row_max)
    offsets = [np.array([0, rows], np.int32) for rows in (70, 90)]
    both = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    assert np.array_equal(attention(q[0], k[0], v[0], **both), plain[0])
    with pytest.raises(ArgumentError, match="max_seqlen_q=69: the longest sequence has 70"):
        attention(q[0], k[0], v[0], **both, max_seqlen_q=69)
    with pytest.raises(ArgumentError, match="max_seqlen_k=0: the longest sequence has 90"):
        attention(q[0], k[0], v[0], **both, max_seqlen_k=0)


def test_a_config_given_is_the_one_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    get = kernel_choice.loaded_kernels.get

    def noting(cfg: Any, *options: Any) -> Any:
        used.append(cfg)
        return get(cfg, *options)

    monkeypatch.setattr(kernel_choice, "loaded_kernels", SimpleNamespace(get=noting))
    attention(*tensors(), config=CONFIG)
    attention(*tensors())
    assert used[0] == CONFIG != used[1]


@pytest.mark.parametrize("config", ["(FP16, 64, 64, 32, 4): load_0_0_0_tiles", 3, choose_config])
def test_a_config_of_another_type(config: object) -> None:
    with pytest.raises(ArgumentError, match=r"config: got .*; give a FlashForwardKernelConfig"):
        attention(*tensors(), config=config)  # type: ignore[arg-type]


@pytest.mark.parametrize("d", [12, 59, 111])
def test_head_dimensions_without_a_kernel(d: int) -> None:
    q, k, v = (np.zeros((1, 64, 1, 128), np.float16)[..., :d] for _ in range(3))
    with pytest.raises(ArgumentError, match=f"q: d_head {d} .*must be a multiple of 8"):
        attention(q, k, v)


def test_what_is_said_twice_is_said_alike() -> None:
    """attention() and forward() spell their keywords out; both must mean the same ones."""
    ours, theirs = (inspect.signature(f).parameters for f in (attention, forward))
    options = [p for p in theirs.values() if p.kind is p.KEYWORD_ONLY]
    assert [p for p in ours.values() if p.kind is p.KEYWORD_ONLY and p.name in theirs] == options
    added = [name for name in ours if name not in theirs]
    functions = ["score_mod", "mask_mod", "mask", "bias", "positions"]
    assert added == [*functions, "out", "config", "backward_config", "deterministic"]
    assert [name for name in theirs if name not in ours] == ["cfg", "o"]
    names = [p.name for p in options if p.name != "emulate"]
    # attention() makes the program from its functions; nobody passes one.
    assert [*names, "program"] == list(ForwardOptions._fields)


def test_arguments_are_checked_before_choosing() -> None:
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match="q: rank 3"):
        attention(q[0], k, v)
    with pytest.raises(ArgumentError, match=r"k: got .*NoneType"):
        attention(q, None, v)
    with pytest.raises(ArgumentError, match=r"v: shape .*; must be k's"):
        attention(q, k, v[:, :32])
