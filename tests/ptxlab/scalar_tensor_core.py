"""One step of a tensor core in Python's fractions, one accumulator at a time.

The emulator's sums are judged against this file, so it shares nothing with them: it follows the
model as it is published (MMA-Sim, arXiv 2511.10909), with numbers of any length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

NAN = 0x7FFFFFFF
INFINITY = 0x7F800000
SIGN = 0x80000000
LEAST = {"f16": -14, "bf16": -126, "tf32": -126, "f32": -126}


def exponent(value: Fraction, least: int) -> int:
    """The exponent of a number of a format; of what is less than normal, the format's least."""
    if not value:
        return least
    # All denominators here are powers of two.
    return max(least, abs(value.numerator).bit_length() - value.denominator.bit_length())


def cut(value: Fraction, unit: Fraction) -> Fraction:
    """The multiple of ``unit`` next to ``value`` on the way to zero."""
    return math.trunc(value / unit) * unit


def float32_bits(value: Fraction) -> int:
    """The bits of a number other than zero, rounded towards zero; infinity from 2**128 on."""
    sign = SIGN if value < 0 else 0
    if abs(value) >= Fraction(2) ** 128:
        return sign | INFINITY
    power = exponent(value, LEAST["f32"])
    steps = math.trunc(abs(value) / Fraction(2) ** (power - 23))
    # A subnormal has no leading bit, and its field is 0.
    return sign | ((power + 126 << 23) + steps if steps >> 23 else steps)


def step(
    a: Sequence[float],
    b: Sequence[float],
    c: float,
    kind: str,
    fraction_bits: int,
    zero_exponent: int,
) -> int:
    """The bits of c + a[0] b[0] + a[1] b[1] + ... of one step."""
    terms = [x * y for x, y in zip(a, b, strict=True)] + [c]  # float64: exact
    if any(math.isnan(term) for term in terms) or {math.inf, -math.inf} <= set(terms):
        return NAN
    if math.inf in terms or -math.inf in terms:
        return INFINITY | (SIGN if -math.inf in terms else 0)
    exact = [(Fraction(c), exponent(Fraction(c), LEAST["f32"]) if c else zero_exponent)]
    for factors in zip(a, b, strict=True):
        x, y = map(Fraction, factors)
        power = exponent(x, LEAST[kind]) + exponent(y, LEAST[kind])
        exact.append((x * y, power if x and y else zero_exponent))
    unit = Fraction(2) ** (max(power for _, power in exact) - fraction_bits)
    total = sum((cut(value, unit) for value, _ in exact), Fraction(0))
    bits = float32_bits(total) if total else 0
    return 0 if bits == SIGN else bits
