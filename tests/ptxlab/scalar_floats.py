"""Floating-point formats and their exact arithmetic in plain Python integers and fractions.

The emulator is judged against this file, so it shares nothing with it: no NumPy, one value at a
time. A value is a Python float, which holds every fp16, bf16, fp32 and fp64 value exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class FloatFormat:
    """An IEEE binary format by its field widths in bits."""

    name: str
    exponent_bits: int
    mantissa_bits: int

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def exponent_mask(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def sign_mask(self) -> int:
        return 1 << (self.width - 1)

    @property
    def nan(self) -> int:
        """The canonical NaN of NVIDIA's units: sign clear, every other bit set."""
        return self.sign_mask - 1

    def is_nan(self, bits: int) -> bool:
        return (bits & ~self.sign_mask) > self.exponent_mask

    def decode(self, bits: int) -> float:
        """The value of a bit pattern, exact."""
        negative = bool(bits & self.sign_mask)
        exponent = (bits & self.exponent_mask) >> self.mantissa_bits
        mantissa = bits & ((1 << self.mantissa_bits) - 1)
        if exponent == (1 << self.exponent_bits) - 1:
            value = math.nan if mantissa else math.inf
        elif exponent == 0:
            value = math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        else:
            value = math.ldexp(
                mantissa | (1 << self.mantissa_bits), exponent - self.bias - self.mantissa_bits
            )
        return -value if negative else value

    def encode(self, value: float | Fraction, mode: str = "rn", negative_zero: bool = False) -> int:
        """Round an exact value to this format; ``mode`` is PTX's rn, rz, rm or rp."""
        if isinstance(value, float):
            if math.isnan(value):
                return self.nan
            sign = self.sign_mask if math.copysign(1.0, value) < 0 else 0
            if math.isinf(value):
                return sign | self.exponent_mask
            if value == 0.0:
                return sign
            value = Fraction(value)
        if value == 0:
            return self.sign_mask if negative_zero else 0
        sign = self.sign_mask if value < 0 else 0
        magnitude = abs(value)
        exponent = max(_floor_log2(magnitude), 1 - self.bias)
        quantum = Fraction(2) ** (exponent - self.mantissa_bits)
        steps = round_fraction(magnitude / quantum, _mode_of_magnitude(mode, value < 0))
        # A carry out of the mantissa moves into the exponent by itself: steps are consecutive.
        bits = steps + ((exponent + self.bias - 1) << self.mantissa_bits)
        if bits >= self.exponent_mask:
            to_infinity = _mode_of_magnitude(mode, value < 0) in ("rn", "rp")
            bits = self.exponent_mask if to_infinity else self.exponent_mask - 1
        return sign | bits


FP16 = FloatFormat("f16", 5, 10)
BF16 = FloatFormat("bf16", 8, 7)
FP32 = FloatFormat("f32", 8, 23)
FP64 = FloatFormat("f64", 11, 52)


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def _mode_of_magnitude(mode: str, negative: bool) -> str:
    if not negative:
        return mode
    return {"rm": "rp", "rp": "rm"}.get(mode, mode)


def round_fraction(value: Fraction, mode: str) -> int:
    """To a whole number: rn (ties to even), rz, rm (down) or rp (up)."""
    floor = value.numerator // value.denominator
    rest = value - floor
    if rest == 0:
        return floor
    if mode == "rm" or (mode == "rz" and value > 0):
        return floor
    if mode == "rp" or mode == "rz":
        return floor + 1
    half = Fraction(1, 2)
    return floor + (1 if rest > half or (rest == half and floor % 2) else 0)


def fused_multiply_add(fmt: FloatFormat, a: int, b: int, c: int, mode: str = "rn") -> int:
    """a * b + c with one rounding; bit patterns in and out."""
    x, y, z = fmt.decode(a), fmt.decode(b), fmt.decode(c)
    if not all(map(math.isfinite, (x, y, z))):
        return fmt.encode(x * y + z)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact != 0:
        return fmt.encode(exact, mode)
    product_negative = math.copysign(1.0, x) * math.copysign(1.0, y) < 0
    addend_negative = math.copysign(1.0, z) < 0
    exact_zeros = (x == 0.0 or y == 0.0) and z == 0.0
    if exact_zeros and product_negative == addend_negative:
        return fmt.encode(Fraction(0), mode, product_negative)
    return fmt.encode(Fraction(0), mode, negative_zero=mode == "rm")


def add(fmt: FloatFormat, a: int, b: int, mode: str = "rn") -> int:
    return fused_multiply_add(fmt, a, fmt.encode(1.0), b, mode)


def subtract(fmt: FloatFormat, a: int, b: int, mode: str = "rn") -> int:
    return add(fmt, a, b if fmt.is_nan(b) else b ^ fmt.sign_mask, mode)


def multiply(fmt: FloatFormat, a: int, b: int, mode: str = "rn") -> int:
    x, y = fmt.decode(a), fmt.decode(b)
    negative = math.copysign(1.0, x) * math.copysign(1.0, y) < 0
    if not (math.isfinite(x) and math.isfinite(y)):
        return fmt.encode(x * y)
    return fmt.encode(Fraction(x) * Fraction(y), mode, negative)


def divide(fmt: FloatFormat, a: int, b: int, mode: str = "rn") -> int:
    x, y = fmt.decode(a), fmt.decode(b)
    negative = math.copysign(1.0, x) * math.copysign(1.0, y) < 0
    if math.isnan(x) or math.isnan(y) or (x == y == 0.0) or (math.isinf(x) and math.isinf(y)):
        return fmt.nan
    if math.isinf(x) or y == 0.0:
        return fmt.encode(-math.inf if negative else math.inf)
    if math.isinf(y):
        return fmt.encode(Fraction(0), mode, negative)
    return fmt.encode(Fraction(x) / Fraction(y), mode, negative)


def extreme(fmt: FloatFormat, a: int, b: int, larger: bool, propagate_nan: bool = False) -> int:
    """PTX min and max: a lone NaN loses unless ``.NaN`` is given, and -0 is below +0."""
    if fmt.is_nan(a) or fmt.is_nan(b):
        if propagate_nan or (fmt.is_nan(a) and fmt.is_nan(b)):
            return fmt.nan
        return b if fmt.is_nan(a) else a

    def key(bits: int) -> tuple[float, bool]:
        return fmt.decode(bits), not bits & fmt.sign_mask

    return max(a, b, key=key) if larger else min(a, b, key=key)


_ORDERED: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x < y or x > y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
FLOAT_COMPARISONS = (*_ORDERED, *(f"{name}u" for name in _ORDERED), "num", "nan")


def compare(fmt: FloatFormat, name: str, a: int, b: int) -> bool:
    """setp on floats: the plain names are false, the ``u`` names true, when a NaN takes part."""
    unordered = fmt.is_nan(a) or fmt.is_nan(b)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if name.endswith("u"):
        return unordered or _ORDERED[name[:-1]](fmt.decode(a), fmt.decode(b))
    return not unordered and _ORDERED[name](fmt.decode(a), fmt.decode(b))


def convert(source: FloatFormat, target: FloatFormat, bits: int, mode: str = "rn") -> int:
    return target.encode(source.decode(bits), mode)


def to_integer(fmt: FloatFormat, bits: int, mode: str, width: int, signed: bool) -> int:
    """cvt to an integer: rounds by rni, rzi, rmi or rpi, and saturates.

    NaN gives 0, but the top bit alone when a 64-bit type takes part.
    """
    low = -(1 << (width - 1)) if signed else 0
    high = (1 << (width - 1)) - 1 if signed else (1 << width) - 1
    value = fmt.decode(bits)
    if math.isnan(value):
        return 1 << (width - 1) if fmt is FP64 or width == 64 else 0
    elif math.isinf(value):
        whole = high if value > 0 else low
    else:
        whole = round_fraction(Fraction(value), mode[:2])
    return min(max(whole, low), high) & ((1 << width) - 1)


def round_to_integral(fmt: FloatFormat, bits: int, mode: str) -> int:
    """cvt.rni/rzi/rmi/rpi between equal float types: a whole number, kept as a float."""
    value = fmt.decode(bits)
    if not math.isfinite(value):
        return fmt.encode(value)
    whole = round_fraction(Fraction(value), mode[:2])
    return fmt.encode(Fraction(whole), negative_zero=bool(bits & fmt.sign_mask))


def ulps_apart(fmt: FloatFormat, a: int, b: int) -> int:
    """How many representable values lie between two non-NaN patterns (0 when equal)."""

    def line(bits: int) -> int:
        magnitude = bits & ~fmt.sign_mask
        return -magnitude if bits & fmt.sign_mask else magnitude

    return abs(line(a) - line(b))
