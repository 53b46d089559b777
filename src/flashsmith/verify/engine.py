"""The array library that references use: NumPy, or PyTorch on a GPU.

Each formula is written once, for both libraries (as ``xp``): they mostly use the same names, and
this module hides the differences. On a GPU, the float64 scores of long sequences take milliseconds,
not seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

# The maximum size in bytes of the scores in memory at once. Rows are processed in blocks whose
# scores fit in this size, so that long sequences need no more memory.
SCORE_BYTES = 64 << 20
SCORE_BYTES_ON_GPU = 256 << 20
# For fewer scores than this, NumPy finishes in less time than it takes to import PyTorch.
SCORES_WORTH_A_GPU = 1 << 24
# A bit mask for a float64, which clears the 29 significand bits that fp32 does not have.
_BITS_OF_FP32 = -1 << 29
_EXPONENT_OF_FLOAT64 = 0x7FF << 52
# PyTorch's name for the current GPU.
GPU = "cuda"


def gpu_engine_pays(scores: int) -> bool:
    """Whether PyTorch can compute references on a GPU here, and would be faster than NumPy."""
    if scores < SCORES_WORTH_A_GPU and "torch" not in sys.modules:
        return False
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


class NumpyEngine:
    """The engine for NumPy arrays."""

    xp: Any = np
    score_bytes = SCORE_BYTES

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Inside the block, products have full precision, and non-finite values cause no
        warnings."""
        # The LSE of a row that sees no key is log(0), and inputs may be NaN and inf.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            yield

    def to_device(self, array: np.ndarray) -> np.ndarray:
        """Moves a host array to the device of the engine."""
        return array

    def cast(self, array: np.ndarray, dtype: Any) -> np.ndarray:
        """Converts an array to ``dtype``, which is a name or the dtype of another array."""
        return np.ascontiguousarray(array, dtype)

    def truncate(self, array: np.ndarray) -> None:
        """Truncates float64 numbers to the precision of fp32 (towards zero), in place."""
        bits = array.view(np.int64)
        bits &= _BITS_OF_FP32

    def power_of_two(self, array: np.ndarray) -> np.ndarray:
        """For each float64 number, the largest power of two that is not above its magnitude; 0 for
        0."""
        powers: np.ndarray = (array.view(np.int64) & _EXPONENT_OF_FLOAT64).view(np.float64)
        return powers

    def full_like(self, array: np.ndarray, value: float) -> np.ndarray:
        """An array with the same shape and dtype in which each element is ``value``."""
        return np.full_like(array, value)

    def to_host(self, array: np.ndarray) -> np.ndarray:
        """Moves an array back to the host."""
        return array


class TorchEngine:
    """The engine for PyTorch tensors on a GPU, with the same methods as NumpyEngine."""

    score_bytes = SCORE_BYTES_ON_GPU

    def __init__(self, device: str) -> None:
        import torch

        self.xp: Any = torch
        self.device = device

    @contextmanager
    def exactly(self) -> Iterator[None]:
        # fp32 products must not use TF32, whose larger error would make the bound too generous.
        before = self.xp.get_float32_matmul_precision()
        self.xp.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            self.xp.set_float32_matmul_precision(before)

    def to_device(self, array: np.ndarray) -> Any:
        dense = np.array(array)  # a writable copy, because torch warns about read-only memory
        if dense.dtype == ml_dtypes.bfloat16:
            return self.xp.from_numpy(dense.view(np.int16)).view(self.xp.bfloat16).to(self.device)
        return self.xp.from_numpy(dense).to(self.device)

    def cast(self, array: Any, dtype: Any) -> Any:
        return array.to(getattr(self.xp, dtype) if isinstance(dtype, str) else dtype)

    def truncate(self, array: Any) -> None:
        array.view(self.xp.int64).bitwise_and_(_BITS_OF_FP32)

    def power_of_two(self, array: Any) -> Any:
        bits = array.view(self.xp.int64).bitwise_and(_EXPONENT_OF_FLOAT64)
        return bits.view(self.xp.float64)

    def full_like(self, array: Any, value: float) -> Any:
        return self.xp.full_like(array, value)

    def to_host(self, array: Any) -> np.ndarray:
        host = array.cpu()
        if host.dtype is self.xp.bfloat16:
            bits: np.ndarray = host.view(self.xp.int16).numpy()
            return bits.view(ml_dtypes.bfloat16)
        numbers: np.ndarray = host.numpy()
        return numbers


Engine = NumpyEngine | TorchEngine


def engine_for(on_gpu: bool) -> Engine:
    """The engine for the GPU, or for the host."""
    return TorchEngine(GPU) if on_gpu else NumpyEngine()
