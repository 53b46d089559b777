"""Outputs as bits, for tests of calls that must agree in every bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def plain_bits(x: np.ndarray) -> np.ndarray:
    """The bits of fp16, bf16 or fp32 numbers, with every NaN alike."""
    bits = x.view(np.uint16 if x.itemsize == 2 else np.uint32)
    return np.where(np.isnan(x.astype(np.float32)), bits.dtype.type(0xFFFF), bits)


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Every output of ``expected`` has the same bits in ``found``."""
    for name, bits in expected.items():
        np.testing.assert_array_equal(found[name], bits, err_msg=name)
