"""Generates CUDA C++ for programs: the struct Program, whose functions a library's kernels call for
each score."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from flashsmith.semantics.key_reads import KeyRead, key_reads, with_symbols
from flashsmith.semantics.program import INDICES, SCORE, K, Program, Q, is_uniform
from flashsmith.semantics.ranges import factors_of_indices, is_not_negative, keys_alike
from flashsmith.semantics.typed import FLOAT, INT, Typed, typed_constant
from flashsmith.semantics.typed_cuda import (
    ARITHMETIC,
    INFIX,
    TYPES,
    CudaPrinter,
    bool_literal,
    literal,
)

INCLUDE = '#include "common/program.cuh"\n'
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
_INDEX_ARGUMENTS = "int b, int h, Place row, Place key, int seq_q, int seq_k"
# Values that a generated function computes itself, at the place where it needs them.
_LOCALS = {
    "score": "const float score = {score};",
    "q": "const int q = row.base + row.column;",
    "k": "const int k = key.base + key.column;",
}
_TWICE_LOG2_E = typed_constant(2 * math.log2(math.e))


def program_struct(program: Program) -> str:
    """Returns the C++ of struct Program; csrc/common/program.cuh explains each function."""
    comment = "".join(
        f"//   {name}: {line}\n"
        for name, it in (("score", program.score), ("mask", program.mask))
        if it is not None
        for line in [str(it)]
    )
    along = key_reads(program.score)
    return f"""\
// {program}
{comment}struct Program {{
    using Place = program::Place;

    static constexpr bool kSlopeIsOne = {bool_literal(_is_one(program.slope))};
    static constexpr int kKeysAlike = {keys_alike(program.mask)};
    static constexpr bool kReadsAlongKeys = {bool_literal(bool(along))};
{_key_read_functions(program, along)}\
{_change(program, along)}
{_function("float", "slope", program, program.slope, "1.0f")}
{_function("bool", "sees", program, program.mask, "true")}}};
"""


def _is_one(slope: Typed | None) -> bool:
    return slope is None or slope is typed_constant(1.0)


def _function(result: str, name: str, program: Program, root: Typed | None, otherwise: str) -> str:
    raw = "float raw, " if result == "float" else ""
    head = f"{result} {name}(const ProgramArgs& args, {raw}{_INDEX_ARGUMENTS})"
    lines = [f"return {otherwise};"] if root is None else _printer(program).function_body(root)
    return _defined(head, lines)


def _printer(program: Program, along: Mapping[Typed, KeyRead] | None = None) -> _Printer:
    return (_ExactPrinter if program.is_exact else _Printer)(program, along)


def _defined(head: str, lines: list[str]) -> str:
    body = "".join(f"        {line}\n" for line in lines)
    return f"    FS_DEVICE static {head} {{\n{body}    }}\n"


def _change(program: Program, along: list[KeyRead]) -> str:
    """Returns the C++ of the score function. If there are key reads, the function is a template,
    and its parameter says what is known about the indices of these reads."""
    if program.score is None or not along:
        return _function("float", "change", program, program.score, "raw * args.scale")
    root, symbols = with_symbols(program.score, along)
    head = f"float change(const ProgramArgs& args, float raw, {_INDEX_ARGUMENTS})"
    lines = _printer(program, symbols).function_body(root)
    return "    template <int kReach = program::kAnywhere>\n" + _defined(head, lines)


def _key_read_functions(program: Program, along: list[KeyRead]) -> str:
    """Returns the C++ of index0, index1, ..., which compute the indices of key reads, and of
    reach(), which says what is known about these indices for the keys of one row."""
    if not along:
        return ""
    text, known = "", []
    for i, it in enumerate(along):
        text += _function("int", f"index{i}", program, it.index, "")
        text += _function("int", f"unclamped{i}", program, it.unclamped, "")
        place = [one.name for one in program.reads].index(it.read.operands[0])
        ends = ", ".join(
            f"{name}{i}(args, b, h, row, {key}, seq_q, seq_k)"
            for name in ("index", "unclamped")
            for key in ("key", "last")
        )
        known.append(f"program::reach<{it.dim}>(args.reads[{place}], {ends})")
    may_be_beyond = all(it.depends_on_query for it in along)
    text += f"    static constexpr bool kMayBeBeyond = {bool_literal(may_be_beyond)};\n"
    head = f"int reach(const ProgramArgs& args, {_INDEX_ARGUMENTS}, Place last)"
    return text + _defined(head, [f"return {' & '.join(known)};"])


class _Printer(CudaPrinter):
    """Prints one function of a program. Operators that C++ lacks, or computes differently from
    PyTorch, are functions of namespace program."""

    def __init__(self, program: Program, along: Mapping[Typed, KeyRead] | None = None) -> None:
        super().__init__()
        self._along = along or {}
        self._reads = [it.name for it in program.reads]
        self._numbers = [it.name for it in program.numbers]

    def function_body(self, root: Typed) -> list[str]:
        """Returns the statements of the function that returns the root's value."""
        lines, value = self.statements(root)
        whole = " ".join([*lines, value])
        names = [name for name in _LOCALS if re.search(rf"\b{name}\b", whole)]
        score = self._times("raw", "args.scale")
        first = [_LOCALS[name].replace("{score}", score) for name in names]
        return [*first, *lines, f"return {value};"]

    def _times(self, a: str, b: str) -> str:
        """Returns the C++ of a product of floats."""
        return f"{a} * {b}"

    def _is_name(self, it: Typed) -> bool:
        return it.function == "constant" or it in (SCORE, *INDICES)

    def _constant(self, it: Typed) -> str:
        return literal(it)

    def _operator(self, it: Typed, parts: list[str]) -> str:
        if it.function == "read":
            return self._read(it, parts)
        if it.function == "cast":
            return self._split_cast(it) or f"program::cast<{TYPES[it.dtype]}>({parts[0]})"
        if it.dtype == FLOAT and (found := self._float(it, parts)):
            return found
        if it.function in INFIX or it.function == "not":
            return super()._operator(it, parts)
        return f"program::{it.function}({', '.join(parts)})"

    def _float(self, it: Typed, parts: list[str]) -> str | None:
        """Returns the C++ of a float operator for which there is a faster form than calling the
        function named after it; None for other operators."""
        if it.function == "tanh":
            product, factor = self._product(it.arguments[0], _TWICE_LOG2_E)
            return f"tanh_of_2log2e({self._times(product, factor)})"
        if it.function == "multiply" and (found := self._step(it)):
            return found
        if it.function in ("multiply", "divide") and self._factor_of(it) is not None:
            product, factor = self._product(it)
            return f"({self._times(product, factor)})"
        if it.function in ARITHMETIC or it.function == "negative":
            return super()._operator(it, parts)
        return None

    def _factor_of(self, it: Typed) -> tuple[Typed, str] | None:
        """For a product with, or a quotient by, a value that is the same in the whole call, returns
        the other operand and the C++ of the factor; returns None for other expressions."""
        if it.function == "multiply":
            for one, other in (it.arguments, it.arguments[::-1]):
                if is_uniform(other) and not is_uniform(one):
                    return one, self._texts[other]
        if it.function == "divide" and is_uniform(it.arguments[1]):
            one, other = it.arguments
            # A division takes about ten instructions. Multiplying by the inverse is faster, but
            # rounds once more.
            is_constant = other.function == "constant"
            return one, _reciprocal(
                other
            ) if is_constant else f"program::inverse({self._texts[other]})"
        return None

    def _product(self, it: Typed, *more: Typed) -> tuple[str, str]:
        """Returns the product of a value and the constants ``more``, as two C++ expressions: the
        varying part, and one factor, which the compiled code computes once per thread."""
        factors = [literal(factor) for factor in more]
        found = self._factor_of(it) if it.function in ("multiply", "divide") else None
        if found is not None:
            it, factor = found
            factors.insert(0, factor)
        varying = self._texts[it]
        if it is SCORE:
            varying = "raw"
            factors.insert(0, "args.scale")
        text = factors[0]
        for factor in factors[1:]:
            text = f"({self._times(text, factor)})"
        return varying, text

    def _symbol(self, it: Typed) -> str:
        name = str(it.operands[0])
        if name not in self._numbers:
            return name
        place = self._numbers.index(name)
        return f"program::number<{TYPES[it.dtype]}>(args.numbers[{place}])"

    def _read(self, it: Typed, parts: list[str]) -> str:
        place = self._reads.index(it.operands[0])
        indices = []
        for index, text in zip(it.arguments, parts, strict=True):
            if index in self._along:
                indices.append(self._along_key(index))
            elif index.dtype == INT:
                counts = bool_literal(is_not_negative(index))
                narrow = bool_literal(K in index.parts())
                indices.append(f"program::Index<{counts}, {narrow}>{{{text}}}")
            else:
                indices.append(f"program::LongIndex{{{text}}}")
        arguments = ", ".join([f"args.reads[{place}]", *indices])
        return f"program::read<{TYPES[it.dtype]}, {_ELEMENTS[it.operands[1]]}>({arguments})"

    def _along_key(self, symbol: Typed) -> str:
        """Returns the C++ of the index of a key read."""
        place, it = list(self._along).index(symbol), self._along[symbol]
        factors = factors_of_indices(it.unclamped)
        assert factors is not None
        index = f"index{place}(args, b, h, row, program::read_key<kReach>(key), seq_q, seq_k)"
        base = f"unclamped{place}(args, b, h, row.base, key.base, seq_q, seq_k)"
        counts = bool_literal(is_not_negative(it.index))
        return f"program::KeyIndex<{counts}, kReach>{{{index}, {{{base}, {_columns(factors)}}}}}"

    def _step(self, it: Typed) -> str | None:
        """Returns the C++ for a sum of q and k, as a float, times a value that does not depend on
        the key. The C++ adds two products: one that many elements share, and one with a
        compile-time constant."""
        for one, other in (it.arguments, it.arguments[::-1]):
            if one.function == "cast" and K not in other.parts() and SCORE not in other.parts():
                parts = self._parts_of_sum(one, one.arguments[0])
                if parts is not None:
                    factor = self._texts[other]
                    return f"fmaf({factor}, {parts[1]}, ({factor} * {parts[0]}))"
        return None

    def _split_cast(self, it: Typed) -> str | None:
        """Returns the C++ for a sum of q and k as a float. The C++ adds the value at the tile's
        first indices, which many elements share, and the remainder, which is a compile-time
        constant."""
        (inner,) = it.arguments
        is_abs = inner.function == "abs"
        parts = self._parts_of_sum(it, inner.arguments[0] if is_abs else inner)
        if parts is None:
            return None
        text = f"({parts[0]} + {parts[1]})"
        return f"program::abs{text}" if is_abs else text

    def _parts_of_sum(self, it: Typed, inner: Typed) -> tuple[str, str] | None:
        """Returns the C++ of the two floats that add up to an int sum of q and k; None for other
        casts."""
        if it.dtype != FLOAT or inner.dtype != INT:
            return None
        factors = factors_of_indices(inner)
        if factors is None or factors == (0, 0):
            return None
        base = f"program::cast<float>({self._base(inner)})"
        return base, f"program::cast<float>({_columns(factors)})"

    def _base(self, it: Typed) -> str:
        """Returns the C++ of a sum's value at the first indices of the tile."""
        if it is Q:
            return "row.base"
        if it is K:
            return "key.base"
        if it.function in ("add", "subtract", "negative"):
            return f"program::{it.function}({', '.join(map(self._base, it.arguments))})"
        return self._texts[it]


class _ExactPrinter(_Printer):
    """Prints a function whose value depends neither on where a key is in a tile nor on what the
    compiler fuses, because each float operation names its rounding mode."""

    def _times(self, a: str, b: str) -> str:
        return f"__fmul_rn({a}, {b})"

    def _float(self, it: Typed, parts: list[str]) -> str | None:
        if it.function not in _ROUNDED:
            return super()._float(it, parts)
        if it.function == "multiply" and self._factor_of(it) is not None:
            return self._times(*self._product(it))
        return _ROUNDED[it.function].format(*parts)

    def _step(self, it: Typed) -> str | None:
        return None

    def _split_cast(self, it: Typed) -> str | None:
        return None


_ROUNDED = {
    "add": "__fadd_rn({0}, {1})",
    "subtract": "__fsub_rn({0}, {1})",
    "multiply": "__fmul_rn({0}, {1})",
    "sigmoid": "__fdividef(1.0f, __fadd_rn(1.0f, expf(-{0})))",
}


def _columns(factors: tuple[int, int]) -> str:
    """Returns the C++ of the amount that an element's offsets within its tile add to a sum with
    these factors of q and k."""
    return " + ".join(
        f"({factor}) * {name}.column"
        for factor, name in zip(factors, ("row", "key"), strict=True)
        if factor
    )


def _reciprocal(it: Typed) -> str:
    (value,) = it.operands
    inverse = 1.0 / value if value else math.copysign(math.inf, value)
    return literal(typed_constant(inverse))
