"""Dtypes in the words of every framework."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, FlashForwardKernelConfig, Problem
from flashsmith.operations.backward import check_grad_dtype
from flashsmith.semantics.dtype import dtype_name

HALF = [np.float16, np.dtype("float16"), "fp16", "FP16", "float16", "half", "torch.float16", 5, "5",
        np.int64(5), DType.FP16]  # fmt: skip
BF16 = [ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), "bf16", "bfloat16", 15, DType.BF16]
NONE = [np.float32, "float32", None, 7, True, float, 5.0, np.zeros(1), object()]


@pytest.mark.parametrize("value", HALF, ids=repr)
def test_fp16(value: Any) -> None:
    assert DType.parse(value) is DType.FP16
    assert Problem(1, 64, 64, 1, 1, 64, value) == Problem.parse("s64 d64 fp16")
    assert FlashForwardKernelConfig(value, 128, 64, 64, 4).dtype is DType.FP16


@pytest.mark.parametrize("value", BF16, ids=repr)
def test_bf16(value: Any) -> None:
    assert DType.parse(value) is DType.BF16


@pytest.mark.parametrize("value", NONE)
def test_others_are_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^dtype=.*PyTorch's and NumPy's float16 and bfloat16"):
        DType.parse(value)


@pytest.mark.torch
def test_pytorchs() -> None:
    import torch

    assert DType.parse(torch.half) is DType.FP16
    assert DType.parse(torch.bfloat16) is DType.BF16
    assert dtype_name(torch.float32) == "float32"
    for value in (torch.float32, torch.zeros(1), torch.zeros(2)):
        with pytest.raises(ArgumentError):
            DType.parse(value)
    assert check_grad_dtype(torch.float32) == "float32"


def test_those_of_problems_in_words() -> None:
    assert Problem.parse("s64 d64 float16") == Problem.parse("s64 d64 fp16")
    assert str(Problem.parse("s64 d64 bfloat16")) == "b1 s64 h1 d64 bf16"


@pytest.mark.parametrize("value", ["float32", "fp32", np.float32, np.dtype("float32")], ids=str)
def test_gradients_of_fp32(value: Any) -> None:
    assert check_grad_dtype(value) == "float32"


@pytest.mark.parametrize("value", ["float16", np.float64, 3, np.zeros(1)], ids=str)
def test_of_no_other_dtype(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^grad_dtype=.*: give 'float32'"):
        check_grad_dtype(value)
