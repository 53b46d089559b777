"""attention() picks a kernel that serves the tensors, or says why none does."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashsmith.configs import DType, FlashForwardKernelConfig, is_legal
from flashsmith.errors import ArgumentError
from flashsmith.tuning import attention, choose_config
from flashsmith.verify import compare, compute_references

RNG = np.random.default_rng(0)


def tensors(seq_q: int = 64, seq_k: int = 64, d: int = 64, dtype: Any = np.float16) -> list[Any]:
    shapes = [(1, seq_q, 1, d), (1, seq_k, 1, d), (1, seq_k, 1, d)]
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("seq_q", [64, 128, 192, 4096])
@pytest.mark.parametrize("seq_k", [32, 64, 96, 4096])
def test_the_choice_is_legal_and_fits(seq_q: int, seq_k: int, d: int, dtype: Any) -> None:
    q, k = (np.broadcast_to(np.zeros(d, dtype), (1, seq, 1, d)) for seq in (seq_q, seq_k))
    config = choose_config(q, k)
    assert is_legal(config)
    assert config.d_head == d
    assert config.dtype.numpy_name == np.dtype(dtype).name
    assert seq_q % config.B_r == 0
    assert seq_k % config.B_c == 0


def test_large_tiles_are_preferred() -> None:
    q = np.broadcast_to(np.zeros(64, np.float16), (1, 4096, 1, 64))
    assert (choose_config(q, q).B_r, choose_config(q, q).B_c) == (128, 64)


def test_the_output_is_attention() -> None:
    q, k, v = tensors()
    out = np.full_like(q, np.nan)
    assert attention(q, k, v, scale=0.25, out=out) is out
    assert compare(choose_config(q, k), out, None, compute_references(q, k, v, 0.25)).ok


def test_a_config_given_is_the_one_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    config = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4)
    module = importlib.import_module("flashsmith.tuning.attention")
    monkeypatch.setattr(module, "forward", lambda cfg, *args, **kwargs: used.append(cfg))
    attention(*tensors(), config=config)
    assert used == [config]


@pytest.mark.parametrize("d", [8, 59, 96, 256])
def test_head_dimensions_without_a_kernel(d: int) -> None:
    with pytest.raises(ArgumentError, match=f"q: d_head {d}; kernels exist for 64 and 128"):
        attention(*tensors(d=d))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(65, 64), (64, 33), (32, 32)])
def test_lengths_without_a_kernel(seq_q: int, seq_k: int) -> None:
    with pytest.raises(ArgumentError, match=f"lengths {seq_q} and {seq_k}; kernels exist for"):
        attention(*tensors(seq_q, seq_k))


def test_arguments_are_checked_before_choosing() -> None:
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match="q: rank 3"):
        attention(q[0], k, v)
    with pytest.raises(ArgumentError, match=r"k: got .*NoneType"):
        attention(q, None, v)
    with pytest.raises(ArgumentError, match=r"v: shape .*; must be k's"):
        attention(q, k, v[:, :32])
