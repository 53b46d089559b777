"""The elementwise functions of PyTorch and NumPy, for typed expressions.

Each function takes and returns expressions, Python numbers, or other options of the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flashsmith.semantics.derivatives import power
from flashsmith.semantics.typed import BOOL, FLOAT, INT, LONG, Typed, apply, as_typed, cast
from flashsmith.semantics.typed import where as choose
from flashsmith.tracing.refusals import refuse

Value = Typed | bool | int | float
_WHOLE = (INT, LONG)


def _float(x: Value) -> Typed:
    return cast(x, FLOAT)


def _add(x: Value, other: Value, *, alpha: Value = 1) -> Typed:
    return apply("add", x, other if alpha == 1 else apply("multiply", other, alpha))


def _subtract(x: Value, other: Value, *, alpha: Value = 1) -> Typed:
    return apply("subtract", x, other if alpha == 1 else apply("multiply", other, alpha))


def _divide(x: Value, other: Value, *, rounding_mode: str | None = None) -> Typed:
    if rounding_mode == "floor":
        return apply("floor_divide", x, other)
    if rounding_mode == "trunc":
        return _truncated_divide(x, other)
    return apply("divide", x, other)


def _truncated_divide(x: Value, other: Value) -> Typed:
    down = apply("floor_divide", x, other)
    if down.dtype == FLOAT:
        return apply("trunc", apply("divide", x, other))
    rest = apply("remainder", x, other)
    is_negative = apply("xor", apply("less", x, 0), apply("less", other, 0))
    return down + cast(apply("not_equal", rest, 0) & is_negative, down.dtype)


def _fmod(x: Value, other: Value) -> Typed:
    return apply("subtract", x, apply("multiply", _truncated_divide(x, other), other))


def _power(x: Value, exponent: Value) -> Typed:
    if not isinstance(exponent, Typed):
        base = as_typed(x)
        if isinstance(exponent, float) or exponent < 0:
            base = _float(base)
        return power(base, exponent)
    if exponent.function == "constant":
        return _power(x, exponent.operands[0])
    base = as_typed(x)
    if base.function == "constant" and base.operands[0] > 0:
        return apply("exp2", _float(exponent) * math.log2(base.operands[0]))
    refuse(f"pow('{base}', '{exponent}')", "give a constant exponent, or a constant positive base")


def _where(condition: Value, input: Value, other: Value) -> Typed:
    return choose(condition, input, other)


def _tensor_where(x: Value, condition: Value, other: Value) -> Typed:
    """Makes x.where(condition, other); this method and the function where() order their arguments
    differently."""
    return choose(condition, x, other)


def _clamp(x: Value, min: Value | None = None, max: Value | None = None) -> Typed:
    found = as_typed(x)
    # This is a choice instead of a minimum and a maximum, so that the derivative is 1 at the ends.
    if min is not None:
        found = choose(apply("less", found, min), min, found)
    if max is not None:
        found = choose(apply("less", max, found), max, found)
    return found


def _sign(x: Value) -> Typed:
    it = as_typed(x)
    return choose(apply("less", it, 0), -1, choose(apply("less", 0, it), 1, cast(0, it.dtype)))


def _truth(x: Value) -> Typed:
    return cast(x, BOOL)


def _to(x: Value, *targets: Any, dtype: Any = None, **_: Any) -> Typed:
    it = as_typed(x)
    for target in (*targets, dtype):
        name = getattr(target, "dtype", target)  # of a tensor, in x.to(other) and x.type_as(other)
        kind = target_type(name)
        if kind is not None:
            it = cast(it, kind)
    return it


def target_type(dtype: Any) -> str | None:
    """Returns the type of expressions for PyTorch's dtype; None for other objects, such as a
    device.

    Floats of any width are computed in fp32, and ints of at most 32 bits as int32.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "bool":
        return BOOL
    if name in ("int64", "long", "uint64"):
        return LONG
    if name.startswith(("int", "uint")) and name.lstrip("uint").isdigit():
        return INT
    if name in ("float16", "bfloat16", "float32", "float64", "half", "float", "double"):
        return FLOAT
    return None


def _masked_fill(x: Value, mask: Value, value: Value) -> Typed:
    it = as_typed(x)
    return cast(choose(mask, value, it), it.dtype)


def _round(x: Value, *, decimals: int = 0) -> Typed:
    if decimals == 0:
        return apply("round", x)
    factor = 10.0**decimals
    return apply("round", _float(x) * factor) / factor


def _log(base: float) -> Callable[[Value], Typed]:
    return lambda x: apply("log", x) / math.log(base)


def _is_infinite(x: Value) -> Typed:
    return apply("equal", apply("abs", _float(x)), math.inf)


def _is_finite(x: Value) -> Typed:
    return apply("less", apply("abs", _float(x)), math.inf)


def _softplus(x: Value, beta: float = 1.0, threshold: float = 20.0) -> Typed:
    scaled = _float(x) * beta
    small = apply("log1p", apply("exp", scaled)) / beta
    return choose(apply("less", threshold, scaled), _float(x), small)


def _between(x: Value, lowest: Value, highest: Value) -> Typed:
    """Returns a clamp whose derivative is 0 at both limits, as in hardtanh and relu6."""
    found = choose(apply("less_equal", x, lowest), lowest, x)
    return choose(apply("less_equal", highest, x), highest, found)


def _leaky_relu(x: Value, negative_slope: float = 0.01, inplace: bool = False) -> Typed:
    return choose(apply("less", 0.0, x), x, _float(x) * negative_slope)


def _elu(x: Value, alpha: float = 1.0, inplace: bool = False) -> Typed:
    # exp of a positive number may be infinite; its product with a derivative of 0 would be NaN.
    below = apply("exp", choose(apply("less", 0.0, x), 0.0, x)) - 1.0
    return choose(apply("less", 0.0, x), _float(x), below * alpha)


def _log_sigmoid(x: Value) -> Typed:
    return apply("negative", _softplus(apply("negative", _float(x))))


def _gelu(x: Value, approximate: str = "none") -> Typed:
    it = _float(x)
    if approximate == "tanh":
        inner = (it + it * it * it * 0.044715) * math.sqrt(2 / math.pi)
        return it * 0.5 * (apply("tanh", inner) + 1.0)
    return it * 0.5 * (apply("erf", it * math.sqrt(0.5)) + 1.0)


def _filled(x: Value, value: Value, dtype: Any = None) -> Typed:
    return _to(cast(value, as_typed(x).dtype), dtype=dtype)


def _new(value: Value) -> Callable[..., Typed]:
    """Makes x.new_zeros(size) and similar methods; for a single element only the dtype matters."""
    return lambda x, *_, dtype=None, **__: _filled(x, value, dtype)


def _unary(name: str) -> Callable[[Value], Typed]:
    return lambda x: apply(name, x)


def _binary(name: str) -> Callable[[Value, Value], Typed]:
    return lambda x, other: apply(name, x, other)


def _swapped(name: str) -> Callable[[Value, Value], Typed]:
    return lambda x, other: apply(name, other, x)


def _logical(name: str) -> Callable[[Value, Value], Typed]:
    return lambda x, other: apply(name, _truth(x), _truth(other))


def _same(x: Value, *_: Any, **__: Any) -> Typed:
    return as_typed(x)


FUNCTIONS: dict[str, Callable[..., Typed]] = {
    "add": _add,
    "sub": _subtract,
    "subtract": _subtract,
    "rsub": lambda x, other: apply("subtract", other, x),
    "mul": _binary("multiply"),
    "multiply": _binary("multiply"),
    "div": _divide,
    "divide": _divide,
    "true_divide": _binary("divide"),
    "floor_divide": _binary("floor_divide"),
    "remainder": _binary("remainder"),
    "mod": _binary("remainder"),
    "fmod": _fmod,
    "pow": _power,
    "power": _power,
    "float_power": lambda x, exponent: _power(_float(x), exponent),
    "square": lambda x: apply("multiply", x, x),
    "reciprocal": lambda x: apply("divide", 1.0, x),
    "neg": _unary("negative"),
    "negative": _unary("negative"),
    "positive": _same,
    "abs": _unary("abs"),
    "absolute": _unary("abs"),
    "sign": _sign,
    "sgn": _sign,
    **{
        name: _unary(name)
        for name in ("exp", "exp2", "log", "log2", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt")
    },
    **{name: _unary(name) for name in ("sin", "cos", "erf", "floor", "ceil", "trunc")},
    "expit": _unary("sigmoid"),
    "special_expit": _unary("sigmoid"),
    "expm1": lambda x: apply("exp", x) - 1.0,
    "log10": _log(10.0),
    "round": _round,
    "rint": _round,
    "fix": _unary("trunc"),
    # This is a choice, so that the derivative at 0 is 0.
    "relu": lambda x, inplace=False: choose(apply("less_equal", x, 0), 0, x),
    "softplus": _softplus,
    "gelu": _gelu,
    "relu6": lambda x, inplace=False: _between(x, 0.0, 6.0),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0, inplace=False: _between(x, min_val, max_val),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "silu": lambda x, inplace=False: apply("multiply", x, apply("sigmoid", x)),
    "mish": lambda x, inplace=False: apply("multiply", x, apply("tanh", _softplus(x))),
    "log_sigmoid": _log_sigmoid,
    "softsign": lambda x: apply("divide", x, apply("abs", x) + 1.0),
    "addcmul": lambda x, one, other, *, value=1: _add(
        x, apply("multiply", one, other), alpha=value
    ),
    "addcdiv": lambda x, one, other, *, value=1: _add(x, apply("divide", one, other), alpha=value),
    "lerp": lambda x, end, weight: _add(x, apply("multiply", weight, _subtract(end, x))),
    "frac": lambda x: apply("subtract", x, apply("trunc", x)),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "minimum": _binary("minimum"),
    "maximum": _binary("maximum"),
    "min": _binary("minimum"),
    "max": _binary("maximum"),
    "where": _where,
    "Tensor.where": _tensor_where,
    "masked_fill": _masked_fill,
    "lt": _binary("less"),
    "less": _binary("less"),
    "le": _binary("less_equal"),
    "less_equal": _binary("less_equal"),
    "gt": _swapped("less"),
    "greater": _swapped("less"),
    "ge": _swapped("less_equal"),
    "greater_equal": _swapped("less_equal"),
    "eq": _binary("equal"),
    "equal": _binary("equal"),
    "ne": _binary("not_equal"),
    "not_equal": _binary("not_equal"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": lambda x: apply("not", _truth(x)),
    "bitwise_and": _binary("and"),
    "bitwise_or": _binary("or"),
    "bitwise_xor": _binary("xor"),
    "bitwise_not": _unary("not"),
    "invert": _unary("not"),
    "bitwise_left_shift": _binary("left_shift"),
    "left_shift": _binary("left_shift"),
    "bitwise_right_shift": _binary("right_shift"),
    "right_shift": _binary("right_shift"),
    "isnan": lambda x: apply("not_equal", _float(x), _float(x)),
    "isinf": _is_infinite,
    "isfinite": _is_finite,
    "to": _to,
    "type": _to,
    "type_as": _to,
    "astype": _to,
    "bool": lambda x, **_: cast(x, BOOL),
    "int": lambda x, **_: cast(x, INT),
    "long": lambda x, **_: cast(x, LONG),
    **{name: lambda x, **_: _float(x) for name in ("float", "double", "half", "bfloat16")},
    **dict.fromkeys(("clone", "detach", "contiguous", "view", "reshape", "squeeze"), _same),
    "zeros_like": _new(0),
    "ones_like": _new(1),
    "full_like": lambda x, fill_value, *, dtype=None, **_: _filled(x, fill_value, dtype),
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": lambda x, size, fill_value, *, dtype=None, **_: _filled(x, fill_value, dtype),
    # The approximate tanh of attn-gym, and the name of its op.
    "tanh_approx": _unary("tanh"),
    "approx::tanh": _unary("tanh"),
}
# Methods of tensors that differ from the function of the same name.
METHODS = {"where": "Tensor.where"}
# Functions that do not compute a single element, each with the text that says what to write
# instead.
REFUSED = {
    **dict.fromkeys(
        ("dot", "matmul", "mm", "bmm", "einsum", "inner", "vdot", "linear"),
        "a dot product is not a function of one element; append its vectors to q and k",
    ),
    **dict.fromkeys(
        ("unsqueeze", "expand", "broadcast_to", "repeat", "permute", "stack", "cat"),
        "a function computes one element and has no dimensions; write loops over Python numbers",
    ),
    **dict.fromkeys(
        ("sum", "mean", "prod", "cumsum", "any", "all", "softmax", "sort", "topk"),
        "a function computes one element; precompute the result as a tensor and read it",
    ),
    **dict.fromkeys(
        ("gather", "take", "index_select", "take_along_dim", "embedding"),
        "read one element: tensor[index]",
    ),
    **dict.fromkeys(
        ("rand", "rand_like", "randn_like", "bernoulli", "dropout"),
        "draw random numbers as a tensor outside and read it",
    ),
    "setitem": "a function writes to no tensor; return the result",
}
