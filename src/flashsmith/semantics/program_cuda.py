"""CUDA C++ for programs: the struct Program that a library's kernels call for each score."""

from __future__ import annotations

import math

from flashsmith.semantics.program import INDICES, SCORE, K, Program
from flashsmith.semantics.typed import BOOL, FLOAT, INT, LONG, Typed, all_parts, typed_constant

INCLUDE = '#include "common/program.cuh"\n'
_TYPES = {BOOL: "bool", INT: "int", LONG: "int64_t", FLOAT: "float"}
_ELEMENTS = {
    "bool": "bool",
    "uint8": "uint8_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
}
# Operators that C++ has. Others are functions of namespace program.
_FLOAT_INFIX = {"add": "+", "subtract": "-", "multiply": "*"}
_INFIX = {
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "not_equal": "!=",
    "and": "&",
    "or": "|",
    "xor": "^",
}
_INDEX_ARGUMENTS = "int b, int h, int q, Key key, int seq_q, int seq_k"
# Templates that take operands of one type. Lazy floats are computed for them.
_OF_ONE_TYPE = ("minimum", "maximum", "abs", "floor_divide", "remainder")


def program_struct(program: Program) -> str:
    """The text of struct Program. docs: csrc/common/program.cuh says what each member means."""
    slope = program.slope
    comment = "".join(
        f"//   {name}: {line}\n"
        for name, it in (("score", program.score), ("mask", program.mask))
        if it is not None
        for line in [str(it)]
    )
    return f"""\
// {program}
{comment}struct Program {{
{_function("float", "change", program, program.score, "score")}
{_function("float", "slope", program, slope, "1.0f")}
{_function("bool", "sees", program, program.mask, "true")}}};
"""


def _function(result: str, name: str, program: Program, root: Typed | None, otherwise: str) -> str:
    classes, score = "class Score, class Key", "Score score, "
    if result == "bool":
        classes, score = "class Key", ""
    head = (
        f"    template <{classes}>\n"
        f"    FS_DEVICE static {result} {name}(const ProgramArgs& args, {score}"
        f"{_INDEX_ARGUMENTS}) {{\n"
    )
    lines, value = ([], otherwise) if root is None else _statements(root, program)
    lines = ["[[maybe_unused]] const int k = key;", *lines]
    body = "".join(f"        {line}\n" for line in [*lines, f"return {value};"])
    return f"{head}{body}    }}\n"


def _statements(root: Typed, program: Program) -> tuple[list[str], str]:
    """Definitions of the parts that are used more than once, and the root's value."""
    uses: dict[Typed, int] = {}
    for it in all_parts([root]):
        for part in it.arguments:
            uses[part] = uses.get(part, 0) + 1
    texts: dict[Typed, str] = {}
    lines: list[str] = []
    for it in all_parts([root]):
        text = _text(it, texts, program)
        is_leaf = it.function == "constant" or it in (SCORE, *INDICES)
        if uses.get(it, 0) > 1 and not is_leaf:
            name = f"x{len(lines)}"
            kind = "auto" if it.dtype == FLOAT else _TYPES[it.dtype]
            lines.append(f"const {kind} {name} = {text};")
            text = name
        texts[it] = text
    return lines, texts[root]


def _text(it: Typed, texts: dict[Typed, str], program: Program) -> str:
    if it.function == "symbol":
        return _symbol(it, program)
    if it.function == "constant":
        return _literal(it)
    parts = [texts[part] for part in it.arguments]
    if it.function == "read":
        place = [read.name for read in program.reads].index(it.operands[0])
        arguments = ", ".join([f"args.reads[{place}]", *parts])
        return f"program::read<{_TYPES[it.dtype]}, {_ELEMENTS[it.operands[1]]}>({arguments})"
    if it.function == "cast" and it.dtype == FLOAT:
        (whole,) = it.arguments
        if whole.function == "subtract" and whole.dtype == INT:
            one, other = whole.arguments
            if one is K and K not in other.parts():
                return f"program::key_minus(key, {texts[other]})"
            if other is K and K not in one.parts():
                return f"program::minus_key({texts[one]}, key)"
    if it.function == "cast":
        return f"program::cast<{_TYPES[it.dtype]}>({parts[0]})"
    if it.dtype == FLOAT and it.function in (*_OF_ONE_TYPE, "where"):
        parts = [*parts[:-2], *(f"float({part})" for part in parts[-2:])]
    if it.function == "where":
        return f"({parts[0]} ? {parts[1]} : {parts[2]})"
    if it.function in _INFIX or (it.function in _FLOAT_INFIX and it.dtype == FLOAT):
        sign = {**_INFIX, **_FLOAT_INFIX}[it.function]
        return f"({parts[0]} {sign} {parts[1]})"
    if it.function == "negative" and it.dtype == FLOAT:
        return f"(-{parts[0]})"
    if it.function == "divide" and it.arguments[1].function == "constant":
        # A division takes about ten instructions, and the product is off by one rounding more.
        return f"({parts[0]} * {_reciprocal(it.arguments[1])})"
    if it.function == "not":
        return f"({'!' if it.dtype == BOOL else '~'}{parts[0]})"
    return f"program::{it.function}({', '.join(parts)})"


def _symbol(it: Typed, program: Program) -> str:
    name = str(it.operands[0])
    names = [number.name for number in program.numbers]
    if name not in names:
        return name
    return f"program::number<{_TYPES[it.dtype]}>(args.numbers[{names.index(name)}])"


def _literal(it: Typed) -> str:
    (value,) = it.operands
    if it.dtype == BOOL:
        return _bool(value)
    if it.dtype == FLOAT:
        if math.isnan(value):
            return "NAN"
        if math.isinf(value) or abs(value) >= 2.0**128 * (1 - 2.0**-25):
            return "INFINITY" if value > 0 else "(-INFINITY)"
        return f"{value!r}f" if math.copysign(1, value) > 0 else f"({value!r}f)"
    if it.dtype == LONG:
        return f"int64_t({value}LL)" if value != -(2**63) else "INT64_MIN"
    return f"({value})" if value < 0 else str(value)


def _reciprocal(it: Typed) -> str:
    (value,) = it.operands
    inverse = 1.0 / value if value else math.copysign(math.inf, value)
    return _literal(typed_constant(inverse))


def _bool(value: bool) -> str:
    return "true" if value else "false"
