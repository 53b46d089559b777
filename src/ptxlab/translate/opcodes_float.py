"""Translates floating-point opcodes, and the arithmetic opcodes that also exist for integers."""

from __future__ import annotations

from ptxlab.ptx.syntax import Instruction, Operand
from ptxlab.translate.emitter import Emitter, Handler
from ptxlab.translate.opcodes_integer import integer, no_more

FLOATS = ("f16", "bf16", "f32", "f64")
PACKED = ("f16x2", "bf16x2")
_ROUNDINGS = ("rn", "rz", "rm", "rp")
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def arithmetic(t: Emitter, i: Instruction) -> None:
    """add, sub, mul, div, min, max, neg, abs, fma of any type."""
    kind = i.modifiers[-1] if i.modifiers else ""
    if kind in PACKED:
        _packed(t, i, kind)
    elif kind in FLOATS:
        _scalar(t, i, kind)
    elif i.opcode == "fma":
        raise t.error(f"type of {i.mnemonic} is not supported")
    else:
        integer(t, i)


class _Flags:
    """The rounding and other modifiers of a float instruction. An unknown modifier is an error."""

    def __init__(self, t: Emitter, i: Instruction, allowed: tuple[str, ...]) -> None:
        # Subnormals are not flushed to zero, since results are compared within tolerances.
        modifiers = [m for m in i.modifiers[:-1] if m != "ftz"]
        self.rounding = next((m for m in modifiers if m in _ROUNDINGS), "rn")
        self.rest = {m for m in modifiers if m not in _ROUNDINGS}
        unknown = sorted(self.rest - set(allowed))
        no_more(t, i, unknown)


def _scalar(t: Emitter, i: Instruction, kind: str) -> None:
    d, *inputs = i.operands
    values = [t.use_float(operand, kind) for operand in inputs]
    flags = _Flags(t, i, _ALLOWED[i.opcode])
    if len(values) != _ARITY[i.opcode]:
        raise t.error(f"{i.mnemonic} with {len(values)} inputs is not supported")
    expression = _formula(i.opcode, values, kind, flags)
    if "sat" in flags.rest:
        expression = f"saturate({expression})"
    if "relu" in flags.rest:
        expression = f"np.maximum({expression}, {t.constant(0.0, _held(kind))})"
    t.define_float(d, expression, kind)


_ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2, "min": 2, "max": 2, "neg": 1, "abs": 1, "fma": 3}
_ALLOWED = {
    "add": ("sat",),
    "sub": ("sat",),
    "mul": ("sat",),
    "div": ("approx", "full"),
    "min": ("NaN",),
    "max": ("NaN",),
    "neg": (),
    "abs": (),
    "fma": ("sat", "relu"),
}


def _held(kind: str) -> str:
    return "f8" if kind == "f64" else "f4"


def _formula(opcode: str, values: list[str], kind: str, flags: _Flags) -> str:
    """Returns the expression in float32 (for f64: in float64).

    The caller rounds it if the result is a 16-bit float.

    One addition or product of 16-bit floats is correctly rounded if computed in float32, and an fma
    if computed in float64.
    """
    if opcode in ("min", "max"):
        kind_of_nan = "or_nan" if "NaN" in flags.rest else "number"
        return f"{opcode}imum_{kind_of_nan}({values[0]}, {values[1]})"
    if opcode == "neg":
        return f"(-{values[0]})"
    if opcode == "abs":
        return f"np.abs({values[0]})"
    if opcode == "fma":
        return _fma(values, kind, flags.rounding)
    sign = _SIGNS[opcode]
    if flags.rounding == "rn" or kind == "f64":
        return f"({values[0]} {sign} {values[1]})"
    return f"round_float({values[0]}.astype(f8) {sign} {values[1]}, {flags.rounding!r})"


def _fma(values: list[str], kind: str, rounding: str) -> str:
    joined = ", ".join(values)
    if kind == "f64":
        return f"fma64({joined})"
    if kind in ("f16", "bf16"):
        # bfloat16 uses float32; double rounding causes an error below all tolerances.
        return f"fma32_exact({joined})" if kind == "f16" else f"fma32({joined})"
    if rounding == "rn":
        return f"fma32({joined})"
    return f"round_float(fma32_exact({joined}), {rounding!r})"


def _packed(t: Emitter, i: Instruction, kind: str) -> None:
    """Pairs of 16-bit floats: applies the scalar formula to both halves."""
    half = kind[:-2]
    d, *inputs = i.operands
    flags = _Flags(t, i, _ALLOWED[i.opcode])
    if len(inputs) != _ARITY[i.opcode]:
        raise t.error(f"{i.mnemonic} with {len(inputs)} inputs is not supported")
    halves = [_unpack(t, operand, half) for operand in inputs]
    results = []
    for part in (0, 1):
        expression = _formula(i.opcode, [pair[part] for pair in halves], half, flags)
        if "sat" in flags.rest:
            expression = f"saturate({expression})"
        if "relu" in flags.rest:
            expression = f"np.maximum({expression}, {t.constant(0.0, 'f4')})"
        convert = "float_to_half" if half == "f16" else "float_to_bfloat"
        results.append(f"{convert}({expression})")
    t.define(d, f"pack16({results[0]}, {results[1]})", "u4")


def _unpack(t: Emitter, operand: Operand, half: str) -> tuple[str, str]:
    low, high = t.temporary(), t.temporary()
    function = "unpack_halves" if half == "f16" else "unpack_bfloats"
    t.emit(f"{low}, {high} = {function}({t.use(operand, 'b32')})")
    return low, high


def transcendental(template: str) -> Handler:
    """ex2, lg2, rcp, sqrt, rsqrt, tanh, sin, cos: computed by NumPy, also with .approx."""

    def handler(t: Emitter, i: Instruction) -> None:
        kind = i.modifiers[-1] if i.modifiers else ""
        rest = [m for m in i.modifiers[:-1] if m not in ("approx", "ftz", "full", *_ROUNDINGS)]
        no_more(t, i, rest)
        d, a = i.operands
        if kind in PACKED:
            pair = _unpack(t, a, kind[:-2])
            convert = "float_to_half" if kind == "f16x2" else "float_to_bfloat"
            low, high = (f"{convert}({template.format(half, 'f4')})" for half in pair)
            t.define(d, f"pack16({low}, {high})", "u4")
        elif kind in FLOATS:
            t.define_float(d, template.format(t.use_float(a, kind), _held(kind)), kind)
        else:
            raise t.error(f"type of {i.mnemonic} is not supported")

    return handler


def copysign(t: Emitter, i: Instruction) -> None:
    """copysign.f32 and .f64: the sign of the first operand with the magnitude of the second."""
    kind = i.modifiers[-1]
    if i.modifiers[:-1] or kind not in ("f32", "f64"):
        raise t.error(f"{i.mnemonic} is not supported")
    d, a, b = i.operands
    t.define_float(d, f"np.copysign({t.use_float(b, kind)}, {t.use_float(a, kind)})", kind)


def classify(t: Emitter, i: Instruction) -> None:
    """testp: finite, infinite, number, notanumber, normal, subnormal."""
    tests = {
        "finite": "np.isfinite({0})",
        "infinite": "np.isinf({0})",
        "number": "~np.isnan({0})",
        "notanumber": "np.isnan({0})",
        "normal": "(np.isfinite({0}) & (np.abs({0}) >= np.finfo({0}.dtype).tiny))",
        "subnormal": "(({0} != 0) & (np.abs({0}) < np.finfo({0}.dtype).tiny))",
    }
    if len(i.modifiers) != 2 or i.modifiers[0] not in tests or i.modifiers[1] not in ("f32", "f64"):
        raise t.error(f"{i.mnemonic} is not supported")
    d, a = i.operands
    t.define(d, tests[i.modifiers[0]].format(t.use_float(a, i.modifiers[1])), "b1")


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_ARITY, arithmetic),
    "ex2": transcendental("np.exp2({0})"),
    "lg2": transcendental("np.log2({0})"),
    "rcp": transcendental("({1}(1) / {0})"),
    "sqrt": transcendental("np.sqrt({0})"),
    "rsqrt": transcendental("({1}(1) / np.sqrt({0}))"),
    "tanh": transcendental("np.tanh({0})"),
    "sin": transcendental("np.sin({0})"),
    "cos": transcendental("np.cos({0})"),
    "copysign": copysign,
    "testp": classify,
}
