"""Computes the sums of products of tensor cores, exact to the last bit.

mma.sync and wgmma run in steps. A step adds up to ``depth`` products of elements to the
accumulator. The products are exact. All terms are aligned to the largest exponent among them, and
truncated at a fixed number of bits below it. The sum of these terms is exact, and is then truncated
to float32.

- The exponent of a number is its exponent field minus the bias. The exponent of a product is the
  sum of the factors' exponents, so that its significand is between 1 and 4. A subnormal has the
  exponent of the smallest normal number. A zero counts with a very low exponent (-133 on Hopper).
  Products far below it are lost when they are added to a zero accumulator.
- A result of zero is +0, whatever the signs of its terms. A result of at least 2**128 is infinity.
- Infinities and NaN follow IEEE 754, and every NaN result is 0x7FFFFFFF.

The model is MMA-Sim's (arXiv 2511.10909, version 2.1). Its authors compared it with GPUs of
these generations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ptxlab.machine.numeric import HALF_TABLE, f4, f8, i4, i8, u2, u4


def halves_to_floats(words: np.ndarray) -> np.ndarray:
    """Converts contiguous float16x2 words to float32; the last axis becomes twice as long."""
    return HALF_TABLE.take(words.view(u2))


def bfloats_to_floats(words: np.ndarray) -> np.ndarray:
    """Converts contiguous bfloat16x2 words to float32; the last axis becomes twice as long."""
    return (words.view(u2).astype(u4) << u4(16)).view(f4)


def tf32_to_floats(words: np.ndarray) -> np.ndarray:
    """Converts tf32 words to float32; their lower 13 bits are ignored."""
    return (words & u4(0xFFFFE000)).view(f4)


@dataclass(frozen=True)
class OperandType:
    """A type of operands: its name in PTX, its conversion to float32, its bytes per element, and
    its least exponent."""

    name: str
    floats: Callable[[np.ndarray], np.ndarray]
    nbytes: int
    least_exponent: int


OPERAND_TYPES = {
    "f16": OperandType("f16", halves_to_floats, 2, -14),
    "bf16": OperandType("bf16", bfloats_to_floats, 2, -126),
    "tf32": OperandType("tf32", tf32_to_floats, 4, -126),
}

_LEAST_EXPONENT, _MANTISSA_BITS, _FIELD = -126, 23, 255
_LEAST_NORMAL, _LEAST_SUBNORMAL = 2.0**-126, 2.0**-149
_NAN = u4(0x7FFFFFFF).view(f4)
#: How many more mantissa bits a float64 has than a float32.
_BITS_TOO_MANY = 29

#: The number of accumulators that are computed together. It is so small that the products of a step
#: fit in the L2 cache.
_BLOCK = 8192

#: If the sum of the factors' exponents is within these bounds, a product is exact in float32, even
#: after scaling.
_LOWEST_IN_FLOAT32, _HIGHEST_IN_FLOAT32 = -100, 125


@dataclass(frozen=True)
class TensorCore:
    """The arithmetic of the tensor cores of one GPU generation.

    - ``step_bytes``: how many bytes of an operand's row one step takes;
    - ``fraction_bits``: how many bits of a term below the largest exponent are kept;
    - ``zero_exponent``: the exponent of a zero.
    """

    step_bytes: int
    fraction_bits: int
    zero_exponent: int

    def multiply_add(
        self, a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: OperandType, depth: int
    ) -> np.ndarray:
        """Computes c + a b in float32, where a is (units, m, k), b is (units, k, n) and c is
        (units, m, n).

        ``depth`` is the extent of k in one instruction.
        """
        units, rows, columns = c.shape
        sums = np.empty_like(c)
        height = min(rows, max(1, _BLOCK // columns))
        together = min(units, max(1, _BLOCK // (height * columns)))
        scratch = _Scratch(min(depth, self.step_bytes // kind.nbytes), together * height * columns)
        with np.errstate(all="ignore"):
            for unit in range(0, units, together):
                some = slice(unit, unit + together)
                right = _Factors(b[some], kind)
                for row in range(0, rows, height):
                    part = (some, slice(row, row + height))
                    block = _Block(_Factors(a[part], kind), right, self, scratch)
                    sums[part] = block.added_to(c[part])
        return sums


#: The tensor cores of Ampere and Ada, and the tensor cores of Hopper and Blackwell.
_AMPERE, _HOPPER = TensorCore(16, 24, -132), TensorCore(32, 25, -133)
#: The known tensor cores, by compute capability.
TENSOR_CORES = {
    **dict.fromkeys((80, 86, 87, 89), _AMPERE),
    **dict.fromkeys((90, 100, 103, 120, 121), _HOPPER),
}


class _Scratch:
    """Memory for the products of a step, as float32 and truncated to integers.

    It is allocated only once: memory allocated separately for each step would be returned to the
    system after every step.
    """

    def __init__(self, depth: int, accumulators: int) -> None:
        self.depth = depth
        self.products = np.empty(depth * accumulators, f4)
        self.integers = np.empty(depth * accumulators, i4)

    def of(self, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns views of both arrays in the given shape, which must not have more elements than
        the arrays."""
        size = int(np.prod(shape))
        return self.products[:size].reshape(shape), self.integers[:size].reshape(shape)


class _Factors:
    """One operand (a or b) of a block of accumulators."""

    def __init__(self, given: np.ndarray, kind: OperandType) -> None:
        self.given = given
        #: The argument's values, with 0 in place of infinities and NaN.
        self.values, self.all_finite = _finite(np.ascontiguousarray(given))
        self.zeros = self.values == 0
        self.exponents = _exponents(self.values, kind.least_exponent)
        counted = np.where(self.zeros, 0, self.exponents)
        #: The lowest and the highest exponent, where a zero counts as having the exponent 0.
        self.lowest, self.highest = int(counted.min()), int(counted.max())

    @cached_property
    def powers(self) -> np.ndarray:
        """256**exponent as float64, and 0 for a zero."""
        return np.where(self.zeros, 0.0, _power_of_two(8 * self.exponents))

    @cached_property
    def far_exponents(self) -> np.ndarray:
        """The exponents.

        A zero has such a low exponent that a product with it never has the largest exponent.
        """
        return np.where(self.zeros, -1024, self.exponents)


class _Block:
    """A block of accumulators that are computed together."""

    def __init__(self, a: _Factors, b: _Factors, core: TensorCore, scratch: _Scratch) -> None:
        self.a, self.b, self.core, self.scratch = a, b, core, scratch
        self.in_float32 = (
            a.lowest + b.lowest >= _LOWEST_IN_FLOAT32
            and a.highest + b.highest <= _HIGHEST_IN_FLOAT32
        )

    def added_to(self, c: np.ndarray) -> np.ndarray:
        """Runs all steps; ``c`` is the accumulator of the first step."""
        depth = self.scratch.depth
        for first in range(0, self.a.given.shape[2], depth):
            c = self._step(slice(first, first + depth), c)
        return c

    def _step(self, k: slice, c: np.ndarray) -> np.ndarray:
        addend, finite = _finite(c)
        sums = self._finite_step(k, addend)
        if finite and self.a.all_finite and self.b.all_finite:
            return sums
        # No sum of products overflows float64, so a non-finite result can only come from a
        # non-finite term.
        a, b = self.a.given[:, :, k].astype(f8), self.b.given[:, k].astype(f8)
        special = np.matmul(a, b) + c
        finite = np.isfinite(special)
        return np.where(finite, sums, np.where(np.isnan(special), _NAN, special.astype(f4)))

    def _finite_step(self, k: slice, c: np.ndarray) -> np.ndarray:
        bits, largest = self.core.fraction_bits, self._largest_exponents(k)
        of_c = np.where(c == 0, self.core.zero_exponent, _exponents(c, _LEAST_EXPONENT))
        np.maximum(largest, of_c, out=largest)
        scale = _power_of_two(bits - largest)
        sums = np.trunc(c * scale)
        sums += self._sums_of_products(k, scale)
        sums *= _power_of_two(largest - bits)
        lowest = int(largest.min()) - bits
        return _cut_to_float32(sums, has_subnormals=lowest < _LEAST_EXPONENT)

    def _largest_exponents(self, k: slice) -> np.ndarray:
        """Returns, for each accumulator, the largest exponent of its products (int64); very low if
        all products are 0."""
        if not self.in_float32:
            rows = self.a.far_exponents[:, :, k].transpose(2, 0, 1)
            columns = self.b.far_exponents[:, k].transpose(1, 0, 2)
            return np.max(rows[..., None] + columns[:, :, None], axis=0)
        # Each factor is replaced by 256**exponent. The sum of 16 such products is less than 16
        # times the largest one. So the exponent of the sum gives the exponent of the largest
        # product.
        powers = np.matmul(self.a.powers[:, :, k], self.b.powers[:, k]).view(i8)
        powers >>= 52
        powers -= 1023
        powers >>= 3
        return powers

    def _sums_of_products(self, k: slice, scale: np.ndarray) -> np.ndarray:
        """Returns the sums of the truncated products, in units of the last bit that is kept."""
        a, b = self.a.values[:, :, k], self.b.values[:, k]
        if not self.in_float32:
            wide = np.einsum("umk,ukn->kumn", a.astype(f8), b.astype(f8))
            return np.trunc(wide * scale).sum(axis=0)
        products, integers = self.scratch.of(a.shape[2], *scale.shape)
        np.einsum("umk,ukn->kumn", a, b, out=products)
        # If all products are zero, the scale may be too large for float32.
        products *= np.minimum(scale, 2.0**127).astype(f4)
        np.copyto(integers, products, casting="unsafe")
        # There are 16 terms. Each is at most 2**27 minus the last of its 22 bits, so the sum fits
        # in an int32.
        return np.add.reduce(integers, axis=0, dtype=i4)


def _finite(x: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns ``x`` with 0 instead of infinities and NaN, and whether all values were finite."""
    finite = np.isfinite(x)
    every = bool(finite.all())
    return (x if every else np.where(finite, x, f4(0))), every


def _exponents(x: np.ndarray, least: int) -> np.ndarray:
    """Returns the exponents (int64) of finite float32 numbers, but at least ``least``."""
    field = (x.view(i4) >> _MANTISSA_BITS) & _FIELD
    return np.maximum(field - 127, least).astype(i8)


def _power_of_two(exponents: np.ndarray) -> np.ndarray:
    """Returns 2**exponent as float64, for exponents from -1022 to 1023."""
    return ((exponents + 1023) << 52).view(f8)


def _cut_to_float32(x: np.ndarray, *, has_subnormals: bool) -> np.ndarray:
    """Rounds float64 towards zero to float32; overwrites ``x``."""
    bits = x.view(i8)
    bits &= -1 << _BITS_TOO_MANY
    if has_subnormals:
        small = np.abs(x) < _LEAST_NORMAL
        x[small] = np.trunc(x[small] / _LEAST_SUBNORMAL) * _LEAST_SUBNORMAL
        x += 0.0  # -0 becomes +0
    return x.astype(f4)
