"""PTX integer instructions on Python integers, one value at a time, from the ISA's text."""

from __future__ import annotations

# (PTX type, width in bits, signed)
INTEGER_TYPES = [(f"{sign}{width}", width, sign == "s") for width in (16, 32, 64) for sign in "us"]


def signed(bits: int, width: int) -> int:
    """The two's complement value of a bit pattern."""
    return bits - (1 << width) if bits >> (width - 1) else bits


def wrap(value: int, width: int) -> int:
    return value & ((1 << width) - 1)


def value_of(bits: int, width: int, is_signed: bool) -> int:
    return signed(bits, width) if is_signed else bits


def saturate(value: int, width: int, is_signed: bool) -> int:
    low = -(1 << (width - 1)) if is_signed else 0
    high = (1 << (width - is_signed)) - 1
    return wrap(min(max(value, low), high), width)


def shift_left(bits: int, amount: int, width: int) -> int:
    return wrap(bits << min(amount, width), width)


def shift_right(bits: int, amount: int, width: int, is_signed: bool) -> int:
    return wrap(value_of(bits, width, is_signed) >> min(amount, width), width)


def funnel_shift(low: int, high: int, amount: int, left: bool, clamp: bool) -> int:
    amount = min(amount, 32) if clamp else amount & 31
    pair = (high << 32) | low
    return wrap(pair << amount >> 32, 32) if left else wrap(pair >> amount, 32)


def truncating_divide(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


def truncating_remainder(a: int, b: int) -> int:
    return a - b * truncating_divide(a, b)


def find_shift(bits: int, width: int, is_signed: bool) -> int:
    """bfind.shiftamt: by how much the bit that bfind finds is to be shifted to the top."""
    place = find_leading(bits, width, is_signed)
    return place if place == 0xFFFFFFFF else width - 1 - place


def dot_product(
    a: int, b: int, c: int, width: int, begin: int, a_signed: bool, b_signed: bool
) -> int:
    """dp4a and dp2a: parts of a, of ``width`` bits, times bytes of b from bit ``begin`` on."""
    for k in range(32 // width):
        x = value_of(wrap(a >> width * k, width), width, a_signed)
        c += x * value_of(wrap(b >> begin + 8 * k, 8), 8, b_signed)
    return wrap(c, 32)


def extract_field(bits: int, position: int, length: int, width: int, is_signed: bool) -> int:
    """bfe: ``length`` bits from ``position`` on, filled with the sign where signed."""
    position, length = position & 255, length & 255
    if length == 0:
        return 0
    top = min(position + length - 1, width - 1)
    fill = (bits >> top) & 1 if is_signed else 0
    result = 0
    for i in range(width):
        inside = i < length and position + i < width
        result |= ((bits >> (position + i)) & 1 if inside else fill) << i
    return result


def insert_field(field: int, base: int, position: int, length: int, width: int) -> int:
    """bfi: the low ``length`` bits of ``field`` over ``base`` from ``position`` on."""
    position, length = position & 255, length & 255
    for i in range(length):
        if position + i >= width:
            break
        mask = 1 << (position + i)
        base = base & ~mask | (mask if (field >> i) & 1 else 0)
    return base


def permute_bytes(low: int, high: int, selector: int) -> int:
    """prmt in its default mode: nibble i picks byte i; its top bit replicates the byte's sign."""
    source = [(low >> 8 * i) & 255 for i in range(4)] + [(high >> 8 * i) & 255 for i in range(4)]
    result = 0
    for i in range(4):
        nibble = (selector >> 4 * i) & 15
        byte = source[nibble & 7]
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << 8 * i
    return result


def lookup3(a: int, b: int, c: int, table: int) -> int:
    """lop3: bit i of the result is the table's entry at (a_i, b_i, c_i)."""
    result = 0
    for i in range(32):
        index = ((a >> i) & 1) << 2 | ((b >> i) & 1) << 1 | ((c >> i) & 1)
        result |= ((table >> index) & 1) << i
    return result


def leading_zeros(bits: int, width: int) -> int:
    return width - bits.bit_length()


def reverse_bits(bits: int, width: int) -> int:
    return sum(((bits >> i) & 1) << (width - 1 - i) for i in range(width))


def find_leading(bits: int, width: int, is_signed: bool) -> int:
    """bfind: position of the highest bit unlike the sign; all ones without one."""
    if is_signed and bits >> (width - 1):
        bits = wrap(~bits, width)
    return wrap(bits.bit_length() - 1, 32)


INTEGER_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs")


def compare(name: str, a: int, b: int) -> bool:
    return {
        "eq": a == b,
        "ne": a != b,
        "lt": a < b,
        "le": a <= b,
        "gt": a > b,
        "ge": a >= b,
        "lo": a < b,
        "ls": a <= b,
        "hi": a > b,
        "hs": a >= b,
    }[name]
