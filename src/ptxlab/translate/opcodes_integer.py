"""Translates integer, logical and bit opcodes."""

from __future__ import annotations

from collections.abc import Callable

from ptxlab.ptx.syntax import CARRY, Immediate, Instruction, Register
from ptxlab.translate.emitter import DTYPES, Emitter, Handler

_WORDS = ("u32", "s32", "u64", "s64")
_INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def unsigned(kind: str) -> str:
    """Returns the unsigned type of the same width."""
    return f"u{kind.lstrip('usbf')}"


def only(
    translator: Emitter, instruction: Instruction, allowed: tuple[str, ...]
) -> tuple[list[str], str]:
    """Returns the modifiers before the type, and the type, which is the last modifier and must be
    in ``allowed``."""
    modifiers = list(instruction.modifiers)
    if not modifiers or modifiers[-1] not in allowed:
        raise translator.error(f"type of {instruction.mnemonic} is not supported")
    return modifiers[:-1], modifiers[-1]


def no_more(translator: Emitter, instruction: Instruction, modifiers: list[str]) -> None:
    """Raises EmulatorError if there are modifiers that are not supported."""
    if modifiers:
        raise translator.error(f"modifier .{modifiers[0]} of {instruction.opcode} is not supported")


def binary(sign: str) -> Callable[[Emitter, Instruction, list[str], str], None]:
    """add, sub: wrap-around arithmetic, which is the same for signed and unsigned types."""

    def handler(t: Emitter, i: Instruction, modifiers: list[str], kind: str) -> None:
        if modifiers == ["sat"] and kind == "s32":
            d, a, b = i.operands
            wide = f"{t.use(a, kind)}.astype(i8) {sign} {t.use(b, kind)}"
            t.define(d, f"clamp_int({wide}, i4)", "i4")
            return
        no_more(t, i, modifiers)
        d, a, b = i.operands
        kind = unsigned(kind)
        t.define(d, f"{t.use(a, kind)} {sign} {t.use(b, kind)}", DTYPES[kind])

    return handler


def multiply(t: Emitter, i: Instruction, modifiers: list[str], kind: str) -> None:
    """mul and mad: lo, hi, wide."""
    d = i.operands[0]
    if not modifiers or modifiers[0] not in ("lo", "hi", "wide"):
        raise t.error(f"{i.mnemonic} is not supported")
    part, *rest = modifiers
    no_more(t, i, rest)
    if part == "lo":
        kind, value = unsigned(kind), product(t, i, part, kind)
    else:
        kind, value = _wide_product(t, i, part, kind)
    if i.opcode == "mad":
        # Wrap-around addition, and the type that holds its result, are the same for signed and
        # unsigned types.
        held = DTYPES[unsigned(kind)]
        value = f"({value})" if kind[0] == "u" else f"({value}).view({held})"
        kind = unsigned(kind)
        value = f"{value} + {t.use(i.operands[3], kind)}"
    t.define(d, f"({value})", DTYPES[kind])


def product(t: Emitter, i: Instruction, part: str, kind: str) -> str:
    """Returns the lower or upper half of a product, as the unsigned type of this width."""
    a, b = i.operands[1:3]
    if part == "lo":
        return f"{t.use(a, unsigned(kind))} * {t.use(b, unsigned(kind))}"
    kind, value = _wide_product(t, i, part, kind)
    return f"({value})" if kind[0] == "u" else f"({value}).view({DTYPES[unsigned(kind)]})"


def _wide_product(t: Emitter, i: Instruction, part: str, kind: str) -> tuple[str, str]:
    a, b = i.operands[1:3]
    sign, width = kind[0], int(kind[1:])
    left, right = t.use(a, kind), t.use(b, kind)
    if width == 64:
        if part == "wide":
            raise t.error(f"{i.mnemonic} is not supported")
        return kind, f"multiply_high{'_signed' if sign == 's' else ''}_64({left}, {right})"
    wide = f"{sign}{2 * width}"
    held = DTYPES[wide]
    product = f"{left}.astype({held}) * {right}.astype({held})"
    if part == "wide":
        return wide, product
    shift = t.constant(width, held)
    return kind, f"(({product}) >> {shift}).astype({DTYPES[kind]})"


def with_carry(t: Emitter, i: Instruction) -> None:
    """add, sub and mad with a carry-in (addc, subc, madc) or a carry-out (.cc).

    Each thread has a predicate register for the carry; for subtractions it is the borrow.
    """
    modifiers, kind = only(t, i, _WORDS)
    rest = [m for m in modifiers if m not in ("cc", "lo", "hi")]
    no_more(t, i, rest)
    d, *values = i.operands
    if i.opcode.startswith("mad"):
        part = "hi" if "hi" in modifiers else "lo"
        first = product(t, i, part, kind)
        last = values[2]
    else:
        first, last = t.use(values[0], unsigned(kind)), values[1]
    carried = t.use(Register(CARRY), "pred") if i.opcode.endswith("c") else "FALSE"
    function = "subtract_with_borrow" if i.opcode.startswith("sub") else "add_with_carry"
    result, carry = t.temporary(), t.temporary()
    t.emit(f"{result}, {carry} = {function}({first}, {t.use(last, unsigned(kind))}, {carried})")
    t.define(d, result, DTYPES[unsigned(kind)])
    if "cc" in modifiers:
        t.define(Register(CARRY), carry, "b1")


def absolute_difference(t: Emitter, i: Instruction) -> None:
    """sad: |a - b| + c."""
    modifiers, kind = only(t, i, _INTEGERS)
    no_more(t, i, modifiers)
    d, a, b, c = i.operands
    x, y, held = t.use(a, kind), t.use(b, kind), DTYPES[unsigned(kind)]
    difference = f"(np.maximum({x}, {y}).view({held}) - np.minimum({x}, {y}).view({held}))"
    t.define(d, f"{difference} + {t.use(c, unsigned(kind))}", held)


def dot_product(t: Emitter, i: Instruction) -> None:
    """dp4a, dp2a.lo and dp2a.hi: sums of products of bytes, or of 16-bit numbers with bytes."""
    *part, first, second = i.modifiers
    if part not in ([], ["lo"], ["hi"]) or (i.opcode == "dp2a") != bool(part):
        raise t.error(f"{i.mnemonic} is not supported")
    if not {first, second} <= {"u32", "s32"}:
        raise t.error(f"type of {i.mnemonic} is not supported")
    d, a, b, c = i.operands
    width = 8 if i.opcode == "dp4a" else 16
    begin = 16 if part == ["hi"] else 0
    words = f"{t.use(a, 'u32')}, {t.use(b, 'u32')}, {t.use(c, 'u32')}"
    signs = f"{first == 's32'}, {second == 's32'}"
    t.define(d, f"dot_product({words}, {signs}, {width}, {begin})", "u4")


def divide(t: Emitter, i: Instruction, modifiers: list[str], kind: str) -> None:
    """div and rem."""
    no_more(t, i, modifiers)
    d, a, b = i.operands
    function = "divide" if i.opcode == "div" else "remainder"
    t.define(d, f"{function}({t.use(a, kind)}, {t.use(b, kind)})", DTYPES[kind])


def extremum(t: Emitter, i: Instruction, modifiers: list[str], kind: str) -> None:
    """min and max of integers."""
    no_more(t, i, modifiers)
    d, a, b = i.operands
    function = "np.minimum" if i.opcode == "min" else "np.maximum"
    t.define(d, f"{function}({t.use(a, kind)}, {t.use(b, kind)})", DTYPES[kind])


def negate(t: Emitter, i: Instruction, modifiers: list[str], kind: str) -> None:
    """neg and abs of integers. The most negative number does not change."""
    no_more(t, i, modifiers)
    d, a = i.operands
    zero = t.constant(0, DTYPES[kind])
    value = t.use(a, kind)
    expression = f"({zero} - {value})" if i.opcode == "neg" else f"np.abs({value})"
    t.define(d, expression, DTYPES[kind])


def logical(sign: str) -> Handler:
    """and, or, xor."""

    def handler(t: Emitter, i: Instruction) -> None:
        modifiers, kind = only(t, i, ("pred", "b16", "b32", "b64"))
        no_more(t, i, modifiers)
        d, a, b = i.operands
        t.define(d, f"{t.use(a, kind)} {sign} {t.use(b, kind)}", DTYPES[kind])

    return handler


def invert(t: Emitter, i: Instruction) -> None:
    """not, cnot."""
    modifiers, kind = only(t, i, ("pred", "b16", "b32", "b64"))
    no_more(t, i, modifiers)
    d, a = i.operands
    value = t.use(a, kind)
    if i.opcode == "cnot":
        value = f"({value} == {t.constant(0, DTYPES[kind])}).astype({DTYPES[kind]})"
        t.define(d, value, DTYPES[kind])
    else:
        t.define(d, f"~{value}", DTYPES[kind])


def shift(t: Emitter, i: Instruction) -> None:
    """shl and shr. Amounts above the width count as the width."""
    kinds = ("b16", "b32", "b64") if i.opcode == "shl" else (*_INTEGERS, "b16", "b32", "b64")
    modifiers, kind = only(t, i, kinds)
    no_more(t, i, modifiers)
    d, a, b = i.operands
    kind = kind if kind[0] == "s" else unsigned(kind)
    value, width = t.use(a, kind), int(kind[1:])
    sign = "<<" if i.opcode == "shl" else ">>"
    if isinstance(b, Immediate) and 0 <= int(b.value) < width:
        t.define(d, f"{value} {sign} {t.constant(b.value, DTYPES[kind])}", DTYPES[kind])
        return
    function = "shift_left" if i.opcode == "shl" else "shift_right"
    t.define(d, f"{function}({value}, {t.use(b, 'u32')})", DTYPES[kind])


def funnel(t: Emitter, i: Instruction) -> None:
    """shf.l and shf.r."""
    modifiers, _ = only(t, i, ("b32",))
    if len(modifiers) != 2 or modifiers[0] not in "lr" or modifiers[1] not in ("clamp", "wrap"):
        raise t.error(f"{i.mnemonic} is not supported")
    d, a, b, c = i.operands
    flags = f"{modifiers[0] == 'l'}, {modifiers[1] == 'clamp'}"
    words = f"{t.use(a, 'u32')}, {t.use(b, 'u32')}, {t.use(c, 'u32')}"
    t.define(d, f"funnel_shift({words}, {flags})", "u4")


def lookup3(t: Emitter, i: Instruction) -> None:
    """lop3.b32; forms with a predicate are not supported."""
    modifiers, kind = only(t, i, ("b32",))
    no_more(t, i, modifiers)
    d, a, b, c, table = i.operands
    if not isinstance(table, Immediate):
        raise t.error("the truth table must be a literal")
    x, y, z = (t.use(operand, kind) for operand in (a, b, c))
    known = _LOOKUPS.get(int(table.value))
    if known:
        t.define(d, known.format(a=x, b=y, c=z), "u4")
    else:
        t.define(d, f"lookup3({x}, {y}, {z}, {int(table.value)})", "u4")


#: Truth tables for which there is a short formula. A row's number has a as bit 2, b as bit 1, c as
#: bit 0.
_LOOKUPS = {
    0x80: "({a} & {b} & {c})",
    0xFE: "({a} | {b} | {c})",
    0x96: "({a} ^ {b} ^ {c})",
    0xF8: "({a} | ({b} & {c}))",
    0xEA: "(({a} & {b}) | {c})",
    0xE0: "({a} & ({b} | {c}))",
    0xA8: "(({a} | {b}) & {c})",
    0x6A: "(({a} & {b}) ^ {c})",
    0x78: "({a} ^ ({b} & {c}))",
    0xCA: "(({a} & {b}) | (~{a} & {c}))",
    0xC0: "({a} & {b})",
    0xFC: "({a} | {b})",
    0x3C: "({a} ^ {b})",
}


def permute(t: Emitter, i: Instruction) -> None:
    """prmt.b32 in its default mode."""
    modifiers, kind = only(t, i, ("b32",))
    no_more(t, i, modifiers)
    d, a, b, c = i.operands
    t.define(d, f"permute({t.use(a, kind)}, {t.use(b, kind)}, {t.use(c, kind)})", "u4")


def bit_field(t: Emitter, i: Instruction) -> None:
    """bfe and bfi."""
    allowed = ("u32", "s32", "u64", "s64") if i.opcode == "bfe" else ("b32", "b64")
    modifiers, kind = only(t, i, allowed)
    no_more(t, i, modifiers)
    d, *values, position, length = i.operands
    kind = kind if kind[0] == "s" else unsigned(kind)
    function = "extract_bits" if i.opcode == "bfe" else "insert_bits"
    inputs = ", ".join(t.use(value, kind) for value in values)
    amounts = f"{t.use(position, 'u32')}, {t.use(length, 'u32')}"
    t.define(d, f"{function}({inputs}, {amounts})", DTYPES[kind])


def count_bits(t: Emitter, i: Instruction) -> None:
    """popc, clz, brev, bfind."""
    allowed = ("u32", "s32", "u64", "s64") if i.opcode == "bfind" else ("b32", "b64")
    modifiers, kind = only(t, i, allowed)
    shifts = i.opcode == "bfind" and modifiers == ["shiftamt"]
    no_more(t, i, [] if shifts else modifiers)
    d, a = i.operands
    kind = kind if kind[0] == "s" else unsigned(kind)
    function, held = {
        "popc": ("population", "u4"),
        "clz": ("leading_zeros", "u4"),
        "bfind": ("find_leading", "u4"),
        "brev": ("reverse_bits", DTYPES[kind]),
    }[i.opcode]
    value = f"{function}({t.use(a, kind)})"
    if shifts:
        # The distance from the highest bit to the bit that was found, or all ones if no bit was
        # found.
        none, top = t.constant(0xFFFFFFFF, "u4"), t.constant(int(kind[1:]) - 1, "u4")
        place = t.temporary()
        t.emit(f"{place} = {value}")
        value = f"select({place} == {none}, {none}, {top} - {place})"
    t.define(d, value, held)


_PAIRS = {"add": "np.add", "min": "np.minimum", "max": "np.maximum"}


def packed_integers(t: Emitter, i: Instruction) -> None:
    """add, min and max of pairs of 16-bit integers (.u16x2, .s16x2)."""
    kind = i.modifiers[-1]
    no_more(t, i, list(i.modifiers[:-1]))
    if i.opcode not in _PAIRS:
        raise t.error(f"type of {i.mnemonic} is not supported")
    d, a, b = i.operands
    held = "i2" if kind[0] == "s" else "u2"
    words = f"{t.use(a, 'u32')}, {t.use(b, 'u32')}"
    t.define(d, f"on_halves({_PAIRS[i.opcode]}, {words}, {held})", "u4")


INTEGER_BINARY = {
    "add": binary("+"),
    "sub": binary("-"),
    "mul": multiply,
    "mad": multiply,
    "div": divide,
    "rem": divide,
    "min": extremum,
    "max": extremum,
    "neg": negate,
    "abs": negate,
}


def integer(t: Emitter, i: Instruction) -> None:
    """Arithmetic whose last modifier is an integer type; calls the handler of the opcode."""
    if i.modifiers[-1:] in (("u16x2",), ("s16x2",)):
        packed_integers(t, i)
        return
    if "cc" in i.modifiers and i.opcode in ("add", "sub", "mad"):
        with_carry(t, i)
        return
    modifiers, kind = only(t, i, _INTEGERS)
    INTEGER_BINARY[i.opcode](t, i, modifiers, kind)


HANDLERS: dict[str, Handler] = {
    "and": logical("&"),
    "or": logical("|"),
    "xor": logical("^"),
    "not": invert,
    "cnot": invert,
    "shl": shift,
    "shr": shift,
    "shf": funnel,
    "lop3": lookup3,
    "prmt": permute,
    "bfe": bit_field,
    "bfi": bit_field,
    "popc": count_bits,
    "clz": count_bits,
    "brev": count_bits,
    "bfind": count_bits,
    "rem": integer,
    "mad": integer,
    "addc": with_carry,
    "subc": with_carry,
    "madc": with_carry,
    "sad": absolute_difference,
    "dp4a": dot_product,
    "dp2a": dot_product,
}
