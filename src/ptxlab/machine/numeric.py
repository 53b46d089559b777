"""The scalar arithmetic of PTX, on NumPy arrays and NumPy scalars.

A register holds unsigned integers, float32, float64 or booleans; 16-bit floats are held as their
bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

f2, f4, f8 = np.float16, np.float32, np.float64
u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64

#: The float32 value of each float16 bit pattern. Looking it up is twice as fast as NumPy's cast.
HALF_TABLE = np.arange(1 << 16, dtype=u2).view(f2).astype(f4)


def select(predicate: Any, yes: Any, no: Any) -> Any:
    """Computes ``predicate ? yes : no`` per thread; both values have one dtype."""
    if predicate.ndim:
        return np.where(predicate, yes, no)
    return yes if predicate else no


# 16-bit floats


def half_to_float(bits: Any) -> Any:
    """Converts float16 bits (uint16) to float32."""
    return HALF_TABLE[bits]


def float_to_half(value: Any) -> Any:
    """Converts float32 or float64 to float16 bits, rounded to nearest even."""
    return value.astype(f2).view(u2)


def bfloat_to_float(bits: Any) -> Any:
    """Converts bfloat16 bits (uint16) to float32."""
    return (bits.astype(u4) << u4(16)).view(f4)


def float_to_bfloat(value: Any) -> Any:
    """Converts float32 to bfloat16 bits, rounded to nearest even; every NaN becomes 0x7FFF."""
    bits = value.view(u4)
    rounded = (bits + u4(0x7FFF) + ((bits >> u4(16)) & u4(1))) >> u4(16)
    return select(np.isnan(value), u2(0x7FFF), rounded.astype(u2))


def float_to_half_rz(value: Any) -> Any:
    """Converts float32 to float16 bits, rounded towards zero."""
    bits = float_to_half(value)
    return select(np.abs(half_to_float(bits)) > np.abs(value), bits - u2(1), bits)


def float_to_bfloat_rz(value: Any) -> Any:
    """Converts float32 to bfloat16 bits, rounded towards zero."""
    bits = (value.view(u4) >> u4(16)).astype(u2)
    return select(np.isnan(value), u2(0x7FFF), bits)


def pack16(low: Any, high: Any) -> Any:
    """Packs two uint16 into a uint32."""
    return low.astype(u4) | (high.astype(u4) << u4(16))


def low16(bits: Any) -> Any:
    """Returns the lower uint16 of a uint32."""
    return bits.astype(u2)


def high16(bits: Any) -> Any:
    """Returns the upper uint16 of a uint32."""
    return (bits >> u4(16)).astype(u2)


# 8-bit floats


def _fp8_values(mantissa_bits: int, bias: int, special: dict[int, float]) -> Any:
    """Returns the float32 values of all 256 codes of an 8-bit float; ``special`` has the codes that
    are not numbers."""
    codes = np.arange(128)
    exponent, fraction = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    normal = exponent > 0
    significand = np.where(normal, (1 << mantissa_bits) + fraction, fraction).astype(f8)
    values = np.ldexp(significand, np.maximum(exponent, 1) - bias - mantissa_bits)
    for code, value in special.items():
        values[code] = value
    return np.concatenate([values, -values]).astype(f4)


#: The float32 value of each code, by the format's name in PTX. e4m3 has no infinities.
FP8_TABLES = {
    "e4m3": _fp8_values(3, 7, {0x7F: np.nan}),
    "e5m2": _fp8_values(2, 15, {0x7C: np.inf, 0x7D: np.nan, 0x7E: np.nan, 0x7F: np.nan}),
}


def fp8_pair_to_halves(codes: Any, name: str) -> Any:
    """Converts two 8-bit floats in a uint16 to float16 bits in a uint32. The conversion is
    exact."""
    low, high = codes & u2(0xFF), codes >> u2(8)
    table = FP8_TABLES[name]
    halves = [float_to_half(table[code]) for code in (low, high)]
    return pack16(*(select(np.isnan(half_to_float(it)), u2(0x7FFF), it) for it in halves))


def float_to_fp8(value: Any, name: str) -> Any:
    """Converts float32 values to codes (uint8), rounded to nearest even. Values beyond the
    range, and infinities, become the largest finite value; NaN becomes 0x7F."""
    table = FP8_TABLES[name][:128]
    finite = table[np.isfinite(table)].astype(f8)
    size = np.minimum(np.abs(value).astype(f8), finite[-1])
    above = np.minimum(np.searchsorted(finite, size), len(finite) - 1)
    below = np.maximum(above - 1, 0)
    up, down = finite[above] - size, size - finite[below]
    is_above = (up < down) | ((up == down) & (above % 2 == 0))
    code = np.where(is_above, above, below) | np.where(np.signbit(value), 0x80, 0)
    return select(np.isnan(value), u1(0x7F), code.astype(u1))


def pack_fp8(low: Any, high: Any, name: str) -> Any:
    """Converts two float32 to codes, and packs both into a uint16."""
    return float_to_fp8(low, name).astype(u2) | (float_to_fp8(high, name).astype(u2) << u2(8))


# Floating point


def round_float(exact: Any, mode: str, dtype: Any = f4) -> Any:
    """Rounds float64 (or wider) to ``dtype``; mode "rn", "rz", "rm" (down) or "rp" (up)."""
    nearest = exact.astype(dtype)
    if mode == "rn":
        return nearest
    back = nearest.astype(exact.dtype)
    up, down = dtype(np.inf), dtype(-np.inf)
    if mode == "rm":
        return select(back > exact, np.nextafter(nearest, down), nearest)
    if mode == "rp":
        return select(back < exact, np.nextafter(nearest, up), nearest)
    return select(np.abs(back) > np.abs(exact), np.nextafter(nearest, dtype(0)), nearest)


def fma32(a: Any, b: Any, c: Any) -> Any:
    """Computes a * b + c in float32.

    The product is exact in float64; the sum is rounded to float64 and then to float32.
    """
    return (np.multiply(a, b, dtype=f8) + c).astype(f4)


def fma32_exact(a: Any, b: Any, c: Any) -> Any:
    """Computes a * b + c in float64, for directed rounding."""
    return np.multiply(a, b, dtype=f8) + c


def fma64(a: Any, b: Any, c: Any) -> Any:
    """Computes a * b + c in float64, through long double on platforms where this is wider."""
    wide = np.multiply(a, b, dtype=np.longdouble) + c
    return wide.astype(f8)


def maximum_number(a: Any, b: Any) -> Any:
    """Computes max of PTX: a number beats NaN, and +0 beats -0."""
    return _ordered_zeros(np.fmax(a, b), a, b, np.minimum)


def minimum_number(a: Any, b: Any) -> Any:
    """Computes min of PTX: a number beats NaN, and -0 beats +0."""
    return _ordered_zeros(np.fmin(a, b), a, b, np.maximum)


def maximum_or_nan(a: Any, b: Any) -> Any:
    """Computes max.NaN of PTX: NaN beats everything, and +0 beats -0."""
    return _ordered_zeros(np.maximum(a, b), a, b, np.minimum)


def minimum_or_nan(a: Any, b: Any) -> Any:
    """Computes min.NaN of PTX: NaN beats everything, and -0 beats +0."""
    return _ordered_zeros(np.minimum(a, b), a, b, np.maximum)


def _ordered_zeros(result: Any, a: Any, b: Any, sign: Any) -> Any:
    """Corrects the result where both arguments are zeros, since NumPy may return a zero of either
    sign.

    ``sign`` combines the sign bits.
    """
    if result.all():
        return result
    signed = sign(np.signbit(a).view(i1), np.signbit(b).view(i1))
    zero = np.copysign(result, (i1(0) - signed - signed + i1(1)).astype(result.dtype))
    return select((a == 0) & (b == 0), zero, result)


def saturate(value: Any) -> Any:
    """Clamps to [0, 1]; NaN becomes 0."""
    one, zero = value.dtype.type(1), value.dtype.type(0)
    return np.fmin(np.fmax(value, zero), one)


# Integers


def divide(a: Any, b: Any) -> Any:
    """Returns the quotient truncated towards zero; division by zero gives all ones, as on GPUs."""
    ones = b.dtype.type(-1) if b.dtype.kind == "i" else ~b.dtype.type(0)
    safe = select(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if b.dtype.kind == "i":
        inexact = (quotient * safe != a) & ((a < 0) != (safe < 0))
        quotient = quotient + inexact.astype(b.dtype)
    return select(b == 0, ones, quotient)


def remainder(a: Any, b: Any) -> Any:
    """Returns the remainder, with the dividend's sign; division by zero gives the dividend."""
    safe = select(b == 0, b.dtype.type(1), b)
    return select(b == 0, a, a - divide(a, safe) * safe)


def multiply_high_64(a: Any, b: Any) -> Any:
    """Returns the upper 64 bits of the 128-bit product of two uint64."""
    mask, shift = u8(0xFFFFFFFF), u8(32)
    a_low, a_high, b_low, b_high = a & mask, a >> shift, b & mask, b >> shift
    middle = a_high * b_low + ((a_low * b_low) >> shift)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> shift) + (other >> shift)


def multiply_high_signed_64(a: Any, b: Any) -> Any:
    """Returns the upper 64 bits of the 128-bit product of two int64."""
    high = multiply_high_64(a.view(u8), b.view(u8))
    zero = u8(0)
    high = high - select(a < 0, b.view(u8), zero) - select(b < 0, a.view(u8), zero)
    return high.view(i8)


def on_halves(operation: Any, a: Any, b: Any, dtype: Any) -> Any:
    """Applies an operation to the two 16-bit integers of each word. The result is uint32."""
    low = operation(low16(a).view(dtype), low16(b).view(dtype)).view(u2)
    return pack16(low, operation(high16(a).view(dtype), high16(b).view(dtype)).view(u2))


def add_halves(a: Any, b: Any) -> Any:
    """Adds a and b, which are float16 bits."""
    return float_to_half(half_to_float(a) + half_to_float(b))


def add_bfloats(a: Any, b: Any) -> Any:
    """Adds a and b, which are bfloat16 bits."""
    return float_to_bfloat(bfloat_to_float(a) + bfloat_to_float(b))


def add_half_pairs(a: Any, b: Any) -> Any:
    """Adds a and b, which are float16x2 bits."""
    return pack16(add_halves(low16(a), low16(b)), add_halves(high16(a), high16(b)))


def add_bfloat_pairs(a: Any, b: Any) -> Any:
    """Adds a and b, which are bfloat16x2 bits."""
    return pack16(add_bfloats(low16(a), low16(b)), add_bfloats(high16(a), high16(b)))


def add_with_carry(a: Any, b: Any, carry: Any) -> tuple[Any, Any]:
    """Returns a + b + carry of unsigned words, and the carry-out."""
    half = a + b
    total = half + carry.astype(half.dtype)
    return total, (half < a) | (total < half)


def subtract_with_borrow(a: Any, b: Any, borrow: Any) -> tuple[Any, Any]:
    """Returns a - b - borrow of unsigned words, and the borrow-out."""
    half = a - b
    total = half - borrow.astype(half.dtype)
    return total, (a < b) | (total > half)


def dot_product(
    a: Any, b: Any, c: Any, a_signed: bool, b_signed: bool, width: int, begin: int
) -> Any:
    """Returns c plus the dot product of the parts of a, which have ``width`` bits each, and the
    bytes of b from bit ``begin`` on."""
    for k in range(32 // width):
        x = _part(a, width * k, width, a_signed)
        y = _part(b, begin + 8 * k, 8, b_signed)
        c = c + (x * y).view(u4)
    return c


def _part(word: Any, begin: int, width: int, signed: bool) -> Any:
    """Returns ``width`` bits of a word, from bit ``begin`` on, as int32."""
    if signed:
        return (word << u4(32 - width - begin)).view(i4) >> i4(32 - width)
    return ((word >> u4(begin)) & u4((1 << width) - 1)).view(i4)


def shift_left(value: Any, amount: Any) -> Any:
    """Computes value << amount; amounts (uint32) at or above the width give 0."""
    width = value.dtype.itemsize * 8
    shifted = value << np.minimum(amount, u4(width - 1)).astype(value.dtype)
    return select(amount >= u4(width), value.dtype.type(0), shifted)


def shift_right(value: Any, amount: Any) -> Any:
    """Computes value >> amount, arithmetic for signed values; amounts (uint32) larger than the
    width are treated as the width."""
    width = value.dtype.itemsize * 8
    shifted = value >> np.minimum(amount, u4(width - 1)).astype(value.dtype)
    if value.dtype.kind == "i":
        return shifted
    return select(amount >= u4(width), value.dtype.type(0), shifted)


def funnel_shift(low: Any, high: Any, amount: Any, left: bool, clamp: bool) -> Any:
    """Computes shf, which shifts the 64-bit value {high, low}.

    A left shift returns the upper word, a right shift the lower.
    """
    amount = np.minimum(amount, u4(32)) if clamp else amount & u4(31)
    wide = low.astype(u8) | (high.astype(u8) << u8(32))
    amount = amount.astype(u8)
    return (((wide << amount) >> u8(32)) if left else (wide >> amount)).astype(u4)


def lookup3(a: Any, b: Any, c: Any, table: int) -> Any:
    """Computes lop3; ``table`` is its 8-bit truth table."""
    result = a & ~a
    for row in range(8):
        if table >> row & 1:
            term = a if row & 4 else ~a
            term = term & (b if row & 2 else ~b)
            result = result | (term & (c if row & 1 else ~c))
    return result


def permute(a: Any, b: Any, selector: Any) -> Any:
    """Computes prmt in its default mode."""
    wide = a.astype(u8) | (b.astype(u8) << u8(32))
    result = u4(0)
    for place in range(4):
        nibble = (selector >> u4(4 * place)) & u4(0xF)
        byte = (wide >> ((nibble & u4(7)).astype(u8) * u8(8))) & u8(0xFF)
        sign = select(byte >= u8(0x80), u8(0xFF), u8(0))
        byte = select(nibble >= u4(8), sign, byte)
        result = result | (byte.astype(u4) << u4(8 * place))
    return result


def extract_bits(value: Any, position: Any, length: Any) -> Any:
    """bfe: ``length`` bits from ``position``, sign-extended if ``value`` is signed; position and
    length are uint32."""
    width = value.dtype.itemsize * 8
    position, length = position & u4(0xFF), length & u4(0xFF)
    if value.dtype.kind == "u":
        return shift_right(value, position) & low_mask(length, value.dtype.type)
    top = np.minimum(position + length - u4(1), u4(width - 1))
    sign = (value >> top.astype(value.dtype)) & value.dtype.type(1)
    mask = low_mask(length, value.dtype.type)
    inside = low_mask(
        np.minimum(length, u4(width) - np.minimum(position, u4(width))), mask.dtype.type
    )
    bits = shift_right(value, position) & inside
    filled = bits | select(sign != 0, ~inside, value.dtype.type(0))
    return select(length == u4(0), value.dtype.type(0), filled)


def low_mask(length: Any, dtype: Any) -> Any:
    """Returns a mask of the ``length`` (uint32) lowest bits."""
    width = np.dtype(dtype).itemsize * 8
    wide = shift_left(u8(1), np.minimum(length, u4(width))) - u8(1)
    return wide.astype(f"u{width // 8}").view(dtype)


def insert_bits(source: Any, target: Any, position: Any, length: Any) -> Any:
    """bfi: inserts the ``length`` low bits of ``source`` into ``target`` at ``position``."""
    mask = shift_left(low_mask(length & u4(0xFF), source.dtype.type), position & u4(0xFF))
    return (target & ~mask) | (shift_left(source, position & u4(0xFF)) & mask)


def population(value: Any) -> Any:
    """Computes popc, the number of set bits, as uint32."""
    total = u4(0)
    for shift in range(0, value.dtype.itemsize * 8, 8):
        byte = (value >> value.dtype.type(shift)) & value.dtype.type(0xFF)
        total = total + _BYTE_POPULATION[byte.astype(u1)]
    return total


_BYTE_POPULATION = np.array([bin(byte).count("1") for byte in range(256)], u4)


def leading_zeros(value: Any) -> Any:
    """Computes clz, the number of leading zeros of an unsigned value, as uint32."""
    width = value.dtype.itemsize * 8
    count = u4(0)
    seen = u4(1)
    for shift in range(width - 1, -1, -1):
        bit = ((value >> value.dtype.type(shift)) & value.dtype.type(1)).astype(u4)
        seen = seen & (bit ^ u4(1))
        count = count + seen
    return count


def find_leading(value: Any) -> Any:
    """Computes bfind, the position of the highest set bit, or 0xFFFFFFFF if no bit is set."""
    if value.dtype.kind == "i":
        value = select(value < 0, ~value, value).view(f"u{value.dtype.itemsize}")
    width = u4(value.dtype.itemsize * 8)
    return width - u4(1) - leading_zeros(value)


def reverse_bits(value: Any) -> Any:
    """Computes brev, which reverses the order of the bits."""
    kind = value.dtype.type
    width = value.dtype.itemsize * 8
    result = kind(0)
    for shift in range(width):
        result = result | (((value >> kind(shift)) & kind(1)) << kind(width - 1 - shift))
    return result


# Conversions

_LIMITS = {dtype: (np.iinfo(dtype).min, np.iinfo(dtype).max) for dtype in (i1, i2, i4, u1, u2, u4)}


def float_to_int(value: Any, dtype: Any, mode: str) -> Any:
    """Computes cvt from float to integer, which saturates; mode is "rni", "rzi", "rmi" or "rpi".

    NaN becomes 0, or 1 << 63 in 64-bit types.
    """
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    rounded = rounding(value.astype(f8))
    nan = np.isnan(rounded)
    rounded = select(nan, f8(0), rounded)
    if dtype in _LIMITS:
        low, high = _LIMITS[dtype]
        return np.minimum(np.maximum(rounded, f8(low)), f8(high)).astype(i8).astype(dtype)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    over, under = rounded >= f8(2.0 ** (63 if dtype is i8 else 64)), rounded <= f8(low)
    inner = select(over | under, f8(0), rounded).astype(dtype)
    clamped = select(over, dtype(high), select(under, dtype(low), inner))
    return select(nan, np.uint64(1 << 63).astype(dtype), clamped)


def clamp_int(value: Any, dtype: Any) -> Any:
    """Computes cvt.sat between integers."""
    info = np.iinfo(dtype)
    low = max(int(info.min), int(np.iinfo(value.dtype).min))
    high = min(int(info.max), int(np.iinfo(value.dtype).max))
    kind = value.dtype.type
    return np.minimum(np.maximum(value, kind(low)), kind(high)).astype(dtype)


# Packed pairs of 16-bit floats: the arguments are two float32, the result is bits


def unpack_halves(bits: Any) -> tuple[Any, Any]:
    """Converts float16x2 bits to two float32 (low, high)."""
    return half_to_float(low16(bits)), half_to_float(high16(bits))


def unpack_bfloats(bits: Any) -> tuple[Any, Any]:
    """Converts bfloat16x2 bits to two float32 (low, high)."""
    return bfloat_to_float(low16(bits)), bfloat_to_float(high16(bits))
