"""Conversions of 8-bit floats in the emulator: every code, and every value where rounding turns."""

from __future__ import annotations

from fractions import Fraction

import emulator_executor
import ml_dtypes
import numpy as np
import pytest
from micro_kernels import pack, run_columns, unpack

from ptxlab.errors import EmulatorError

FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
CODES = np.arange(256, dtype=np.uint8)


def run(body: str, inputs: tuple[str, ...], output: str, *columns: list[int]) -> list[int]:
    """One column of results, for any number of vectors."""
    found: list[int] = []
    for first in range(0, len(columns[0]), 1024):
        part = [column[first : first + 1024] for column in columns]
        (got,) = run_columns(emulator_executor.execute, body, inputs, (output,), part)
        found += got
    return found


def values_of(name: str) -> np.ndarray:
    return CODES.view(FORMATS[name]).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_every_pair_of_codes_becomes_the_halves_of_its_values(name: str) -> None:
    pairs = [low | high << 8 for low in range(256) for high in (low ^ 0x5A, 255 - low)]
    body = f"cvt.rn.f16x2.{name}x2 {{d}}, {{a}};"
    got = run(body, ("b16",), "f16x2", pairs)
    halves = np.array(got, np.uint32).view(np.float16).astype(np.float32).reshape(-1, 2)
    want = values_of(name)[np.array([[pair & 255, pair >> 8] for pair in pairs])]
    np.testing.assert_array_equal(halves, want)
    np.testing.assert_array_equal(np.signbit(halves), np.signbit(want) & ~np.isnan(want))


def nearest_code(value: float, name: str) -> int:
    """By exact arithmetic: the nearest finite value's code, the even one of two."""
    if np.isnan(value):
        return 0x7F
    finite = [(i, Fraction(float(it))) for i, it in enumerate(values_of(name)[:128]) if it < np.inf]
    size = Fraction(abs(value)) if abs(value) < np.inf else Fraction(2) ** 200
    code = min(finite, key=lambda it: (abs(it[1] - size), it[0] % 2))[0]
    return code | (0x80 if np.signbit(value) else 0)


def turning_values(name: str) -> np.ndarray:
    """All finite values, the middles between neighbours and their float32 neighbours, and values
    beyond the largest."""
    finite = values_of(name)[:128]
    finite = finite[np.isfinite(finite)]
    middles = (finite[1:] + finite[:-1]) / 2
    beyond = finite[-1] * np.array([1.01, 1.05, 1.1, 4.0, 1e30], np.float32)
    some = np.concatenate([finite, middles, beyond, [np.inf, np.nan, 1e-30]]).astype(np.float32)
    with np.errstate(over="ignore"):
        near = [np.nextafter(some, np.float32(side)) for side in (-np.inf, np.inf)]
    every = np.concatenate([some, *near])
    return np.concatenate([every, -every])


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_nearest_even_and_saturates(name: str) -> None:
    values = turning_values(name)
    bits = [int(it) for it in values.view(np.uint32)]
    # The first source lands in the upper byte.
    body = f"cvt.rn.satfinite.{name}x2.f32 {{d}}, {{a}}, {{b}};"
    got = run(body, ("f32", "f32"), "b16", bits, bits[::-1])
    codes = [nearest_code(float(it), name) for it in values]
    want = [high << 8 | low for high, low in zip(codes, codes[::-1], strict=True)]
    assert got == want


@pytest.mark.parametrize("name", FORMATS)
def test_halves_round_as_their_float32_values_do(name: str) -> None:
    with np.errstate(over="ignore"):
        halves = turning_values(name).astype(np.float16)
    pairs = unpack(pack([int(it) for it in halves.view(np.uint16)], 16), 32)
    body = f"cvt.rn.satfinite.{name}x2.f16x2 {{d}}, {{a}};"
    got = run(body, ("f16x2",), "b16", pairs)
    codes = np.array([nearest_code(float(it), name) for it in halves], np.uint8)
    assert got == [int(it) for it in codes.view(np.uint16)]


def test_a_conversion_that_ptx_lacks_is_refused() -> None:
    body = "cvt.rn.e4m3x2.f32 {d}, {a}, {a};"
    with pytest.raises(EmulatorError, match=r"cvt\.rn\.e4m3x2\.f32 is not supported"):
        run(body, ("f32",), "b16", [0])
