"""Translates mov, cvt, cvta, comparisons and selections."""

from __future__ import annotations

from ptxlab.ptx.syntax import TYPE_SIZES, Instruction, Operand, Pair, Sink, Vector
from ptxlab.translate.emitter import DTYPES, Emitter, Handler
from ptxlab.translate.opcodes_float import FLOATS, PACKED
from ptxlab.translate.opcodes_integer import no_more, only, unsigned

_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_MOVED = ("pred", "b16", "b32", "b64", "u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64")


def move(t: Emitter, i: Instruction) -> None:
    """mov: copies, addresses of symbols, packing and unpacking of vectors."""
    modifiers, kind = only(t, i, _MOVED)
    no_more(t, i, modifiers)
    d, a = i.operands
    if isinstance(d, Vector):
        _unpack(t, d, t.use(a, unsigned(kind)), kind)
    elif isinstance(a, Vector):
        t.define(d, _pack(t, a, kind), DTYPES[unsigned(kind)])
    else:
        t.define(d, t.use(a, kind), DTYPES[kind])


def _piece(t: Emitter, vector: Vector, kind: str) -> tuple[str, int]:
    width = 8 * TYPE_SIZES[kind] // len(vector.elements)
    if f"u{width}" not in DTYPES:
        raise t.error(f"a vector of {len(vector.elements)} does not fit .{kind}")
    return f"u{width}", width


def _unpack(t: Emitter, vector: Vector, value: str, kind: str) -> None:
    piece, width = _piece(t, vector, kind)
    whole, held = t.temporary(), DTYPES[unsigned(kind)]
    t.emit(f"{whole} = {value}")
    for number, element in enumerate(vector.elements):
        if not isinstance(element, Sink):
            shifted = f"({whole} >> {t.constant(number * width, held)})" if number else whole
            t.define(element, f"{shifted}.astype({DTYPES[piece]})", DTYPES[piece])


def _pack(t: Emitter, vector: Vector, kind: str) -> str:
    """Returns the value of a vector of registers; some of them, but not all, may be unwritten.

    Compilers pack a register that is never written together with a register that is written, and
    then use only the half from the written one.
    """
    piece, width = _piece(t, vector, kind)
    held = DTYPES[unsigned(kind)]
    is_written = any(t.is_written(element) for element in vector.elements)
    use = t.use_if_written if is_written else t.use
    terms = []
    for number, element in enumerate(vector.elements):
        term = f"{use(element, piece)}.astype({held})"
        terms.append(f"({term} << {t.constant(number * width, held)})" if number else term)
    return f"({' | '.join(terms)})"


def convert(t: Emitter, i: Instruction) -> None:
    """cvt between integers and floats, including packed forms."""
    if any(m in _FP8_PAIRS for m in i.modifiers):
        _convert_fp8(t, i)
        return
    modifiers = [m for m in i.modifiers if m != "ftz"]
    types = [m for m in modifiers if m in TYPE_SIZES]
    rest = [m for m in modifiers if m not in TYPE_SIZES]
    if len(types) != 2 or modifiers[-2:] != types:
        raise t.error(f"{i.mnemonic} is not supported")
    target, source = types
    if target in ("f16x2", "bf16x2"):
        _convert_packed(t, i, target, source, rest)
    elif source in FLOATS and target in FLOATS:
        _float_to_float(t, i, target, source, rest)
    elif source in FLOATS and target in _INTEGERS:
        _float_to_int(t, i, target, source, rest)
    elif source in _INTEGERS and target in FLOATS:
        _int_to_float(t, i, target, source, rest)
    elif source in _INTEGERS and target in _INTEGERS:
        _int_to_int(t, i, target, source, rest)
    else:
        raise t.error(f"{i.mnemonic} is not supported")


def _rounding(t: Emitter, i: Instruction, rest: list[str], allowed: tuple[str, ...]) -> str:
    chosen = [m for m in rest if m in allowed]
    no_more(t, i, [m for m in rest if m not in (*allowed, "sat", "relu")])
    return chosen[0] if chosen else allowed[0]


_TO_SHORT = {"f16": "float_to_half", "bf16": "float_to_bfloat"}


def _convert_packed(t: Emitter, i: Instruction, target: str, source: str, rest: list[str]) -> None:
    rounding = _rounding(t, i, rest, ("rn", "rz"))
    if source != "f32" or "sat" in rest or len(i.operands) != 3:
        raise t.error(f"{i.mnemonic} is not supported")
    d, high, low = i.operands
    values = [t.use(low, "f32"), t.use(high, "f32")]
    if "relu" in rest:
        zero = t.constant(0.0, "f4")
        values = [f"np.maximum({value}, {zero})" for value in values]
    function = _TO_SHORT[target[:-2]] + ("_rz" if rounding == "rz" else "")
    t.define(d, f"pack16({function}({values[0]}), {function}({values[1]}))", "u4")


# A pair of 8-bit floats is held in 16 bits.
_FP8_PAIRS = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}


def _convert_fp8(t: Emitter, i: Instruction) -> None:
    """cvt between pairs of 8-bit floats and f16x2, and from two f32."""
    modifiers = list(i.modifiers)
    d, *sources = i.operands
    if modifiers[:-1] == ["rn", "f16x2"] and len(sources) == 1:
        name = _FP8_PAIRS[modifiers[-1]]
        t.define(d, f"fp8_pair_to_halves({t.use(sources[0], 'b16')}, {name!r})", "u4")
    elif modifiers[:2] == ["rn", "satfinite"] and modifiers[2] in _FP8_PAIRS:
        name = _FP8_PAIRS[modifiers[2]]
        if modifiers[3:] == ["f32"] and len(sources) == 2:
            high, low = (t.use(source, "f32") for source in sources)
        elif modifiers[3:] == ["f16x2"] and len(sources) == 1:
            pair = t.temporary()
            t.emit(f"{pair} = {t.use(sources[0], 'u32')}")
            low, high = (f"half_to_float({part}16({pair}))" for part in ("low", "high"))
        else:
            raise t.error(f"{i.mnemonic} is not supported")
        t.define(d, f"pack_fp8({low}, {high}, {name!r})", "u2")
    else:
        raise t.error(f"{i.mnemonic} is not supported")


def _float_to_float(t: Emitter, i: Instruction, target: str, source: str, rest: list[str]) -> None:
    d, a = i.operands
    value = t.use_float(a, source)
    to_integral = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
    rounding = _rounding(t, i, rest, ("rn", "rz", "rm", "rp", *to_integral))
    if rounding in to_integral:
        value = f"{to_integral[rounding]}({value})"
    if "sat" in rest:
        value = f"saturate({value})"
    if "relu" in rest:
        value = (
            f"np.maximum({value}, {t.constant(0.0, DTYPES[source] if source == 'f64' else 'f4')})"
        )
    narrows = TYPE_SIZES[target] < TYPE_SIZES[source] and rounding in ("rz", "rm", "rp")
    if narrows and target != "f32":
        if rounding != "rz" or source != "f32":
            raise t.error(f"{i.mnemonic}: this rounding is not supported")
        t.define(d, f"{_TO_SHORT[target]}_rz({value})", "u2")
        return
    if narrows:
        value = f"round_float({value}, {rounding!r})"
    elif target == "f64" and source != "f64":
        value = f"{value}.astype(f8)"
    elif source == "f64" and target == "f32":
        value = f"{value}.astype(f4)"
    elif source == "f64" and target == "bf16":
        raise t.error(f"{i.mnemonic} is not supported")
    t.define_float(d, value, target)


def _float_to_int(t: Emitter, i: Instruction, target: str, source: str, rest: list[str]) -> None:
    d, a = i.operands
    rounding = _rounding(t, i, rest, ("rzi", "rni", "rmi", "rpi"))
    value = f"float_to_int({t.use_float(a, source)}, {DTYPES[target]}, {rounding!r})"
    t.define(d, value, DTYPES[target])


def _int_to_float(t: Emitter, i: Instruction, target: str, source: str, rest: list[str]) -> None:
    d, a = i.operands
    rounding = _rounding(t, i, rest, ("rn", "rz", "rm", "rp"))
    value = t.use(a, source)
    if target == "f64":
        expression = f"{value}.astype(f8)"
    elif rounding == "rn" and target == "f32":
        expression = f"{value}.astype(f4)"
    elif target == "f32":
        # All 64-bit integers are exact in the long double of x86-64.
        expression = f"round_float({value}.astype(np.longdouble), {rounding!r})"
    elif rounding == "rn":
        expression = f"{value}.astype({'f8' if target == 'f16' else 'f4'})"
    else:
        raise t.error(f"{i.mnemonic}: this rounding is not supported")
    if "sat" in rest:
        expression = f"saturate({expression})"
    t.define_float(d, expression, target)


def _int_to_int(t: Emitter, i: Instruction, target: str, source: str, rest: list[str]) -> None:
    no_more(t, i, [m for m in rest if m != "sat"])
    d, a = i.operands
    value, held = t.use(a, source), DTYPES[target]
    if "sat" in rest:
        t.define(d, f"clamp_int({value}, {held})", held)
    elif held == DTYPES[source]:
        t.define(d, value, held)
    else:
        t.define(d, f"{value}.astype({held})", held)


def convert_address(t: Emitter, i: Instruction) -> None:
    """cvta: the windows of generic addresses for shared and local memory lie above all host
    addresses."""
    modifiers = list(i.modifiers)
    to_space = modifiers[0] == "to"
    if to_space:
        modifiers = modifiers[1:]
    space = modifiers[0].split("::")[0]
    if space not in ("global", "shared", "local", "const", "param") or modifiers[1] != "u64":
        raise t.error(f"{i.mnemonic} is not supported")
    d, a = i.operands
    value = t.use(a, "u64")
    if space in t.windows:
        window = t.constant(t.windows[space], "u8")
        value = f"({value} {'-' if to_space else '+'} {window})"
    t.define(d, value, "u8")


def address_space(t: Emitter, i: Instruction) -> None:
    """isspacep.shared, .local, .global."""
    space = i.modifiers[0].split("::")[0]
    if space not in ("global", "shared", "local"):
        raise t.error(f"{i.mnemonic} is not supported")
    d, a = i.operands
    top = f"({t.use(a, 'u64')} >> {t.constant(56, 'u8')})"
    windows = {name: t.constant(value >> 56, "u8") for name, value in t.windows.items()}
    if space == "global":
        shared, local = windows["shared"], windows["local"]
        t.define(d, f"({top} != {shared}) & ({top} != {local})", "b1")
    else:
        t.define(d, f"{top} == {windows[space]}", "b1")


# Comparisons

_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}
_COMBINE = {"and": "&", "or": "|", "xor": "^"}
_COMPARED = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", *FLOATS)


def compare(t: Emitter, i: Instruction) -> None:
    """setp, which may have a second result and a boolean operand."""
    modifiers, kind = only(t, i, _COMPARED)
    modifiers = [m for m in modifiers if m != "ftz"]
    comparison, *combination = modifiers
    d, a, b, *other = i.operands
    value = _comparison(t, comparison, kind, a, b)
    opposite = f"~({value})"
    if combination:
        if combination[0] not in _COMBINE or len(combination) > 1 or len(other) != 1:
            raise t.error(f"{i.mnemonic} is not supported")
        sign, extra = _COMBINE[combination[0]], t.use(other[0], "pred")
        value, opposite = f"({value}) {sign} {extra}", f"({opposite}) {sign} {extra}"
    if isinstance(d, Pair):
        first, second = t.temporary(), t.temporary()
        t.emit(f"{first} = {value}")
        t.emit(f"{second} = {opposite}")
        t.define(d.first, first, "b1")
        t.define(d.second, second, "b1")
    else:
        t.define(d, value, "b1")


def _comparison(t: Emitter, comparison: str, kind: str, a: Operand, b: Operand) -> str:
    if kind in FLOATS:
        return _compared_floats(t, comparison, kind, t.use_float(a, kind), t.use_float(b, kind))
    if comparison in _COMPARE:
        return f"{t.use(a, kind)} {_COMPARE[comparison]} {t.use(b, kind)}"
    elif comparison in _UNSIGNED and kind[0] == "u":
        return f"{t.use(a, kind)} {_UNSIGNED[comparison]} {t.use(b, kind)}"
    raise t.error(f"comparison .{comparison}.{kind} is not supported")


def _compared_floats(t: Emitter, comparison: str, kind: str, x: str, y: str) -> str:
    nan = f"(np.isnan({x}) | np.isnan({y}))"
    if comparison == "ne":
        # In PTX, ne is an ordered comparison: a NaN makes it false, unlike in NumPy.
        return f"(({x} != {y}) & ~{nan})"
    if comparison in _COMPARE:
        return f"({x} {_COMPARE[comparison]} {y})"
    if comparison in _UNORDERED:
        return f"(({x} {_UNORDERED[comparison]} {y}) | {nan})"
    if comparison in ("num", "nan"):
        return nan if comparison == "nan" else f"(~{nan})"
    raise t.error(f"comparison .{comparison}.{kind} is not supported")


def set_value(t: Emitter, i: Instruction) -> None:
    """set: all ones, or 1.0, where a comparison is true."""
    modifiers = [m for m in i.modifiers if m != "ftz"]
    if len(modifiers) == 3 and modifiers[1] == modifiers[2] and modifiers[1] in PACKED:
        _set_pair(t, i, modifiers[0], modifiers[1])
        return
    if len(modifiers) != 3 or modifiers[1] not in ("u32", "s32", "f32"):
        raise t.error(f"{i.mnemonic} is not supported")
    comparison, target, kind = modifiers
    if kind not in _COMPARED:
        raise t.error(f"{i.mnemonic} is not supported")
    d, a, b = i.operands
    held = DTYPES[target]
    truth = t.constant(1.0 if target == "f32" else -1, held)
    zero = t.constant(0, held) if held != "f4" else t.constant(0.0, held)
    value = _comparison(t, comparison, kind, a, b)
    t.define(d, f"select({value}, {truth}, {zero})", held)


def _set_pair(t: Emitter, i: Instruction, comparison: str, kind: str) -> None:
    """set on pairs of 16-bit floats: 1.0 for each half for which the comparison is true."""
    d, a, b = i.operands
    one = t.constant(0x3C00 if kind == "f16x2" else 0x3F80, "u2")
    unpack = "unpack_halves" if kind == "f16x2" else "unpack_bfloats"
    x, y, halves = t.temporary(), t.temporary(), []
    t.emit(f"{x} = {unpack}({t.use(a, 'u32')})")
    t.emit(f"{y} = {unpack}({t.use(b, 'u32')})")
    for half in (0, 1):
        truth = _compared_floats(t, comparison, kind, f"{x}[{half}]", f"{y}[{half}]")
        halves.append(f"select({truth}, {one}, {t.constant(0, 'u2')})")
    t.define(d, f"pack16({halves[0]}, {halves[1]})", "u4")


def choose(t: Emitter, i: Instruction) -> None:
    """selp: selects one of two operands by the third.

    The operand that is not selected may be unwritten, since compilers turn branches into
    selections.
    """
    allowed = tuple(kind for kind in _MOVED if kind != "pred")
    modifiers, kind = only(t, i, allowed)
    no_more(t, i, modifiers)
    d, a, b, predicate = i.operands
    yes, no = t.use_if_written(a, kind), t.use_if_written(b, kind)
    t.define(d, f"select({t.use(predicate, 'pred')}, {yes}, {no})", DTYPES[kind])


def choose_by_sign(t: Emitter, i: Instruction) -> None:
    """slct: a where c >= 0, else b."""
    modifiers = [m for m in i.modifiers if m != "ftz"]
    if len(modifiers) != 2 or modifiers[0] not in _MOVED or modifiers[1] not in ("s32", "f32"):
        raise t.error(f"{i.mnemonic} is not supported")
    kind, by = modifiers
    d, a, b, c = i.operands
    zero = t.constant(0, "i4") if by == "s32" else t.constant(0.0, "f4")
    test = f"({t.use(c, by)} >= {zero})"
    t.define(d, f"select({test}, {t.use(a, kind)}, {t.use(b, kind)})", DTYPES[kind])


HANDLERS: dict[str, Handler] = {
    "mov": move,
    "cvt": convert,
    "cvta": convert_address,
    "isspacep": address_space,
    "setp": compare,
    "set": set_value,
    "selp": choose,
    "slct": choose_by_sign,
}
