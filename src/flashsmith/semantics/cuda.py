"""Generates CUDA C++ for semantics: the mask and score functions that a library's kernels call."""

from __future__ import annotations

from zlib import crc32

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.mask import POSITION, UNLIMITED, Mask
from flashsmith.semantics.program_cuda import INCLUDE, program_struct
from flashsmith.semantics.ranges import factor_of
from flashsmith.semantics.score import ARGUMENT, Score
from flashsmith.semantics.typed import FLOAT, Typed, apply, typed_symbol
from flashsmith.semantics.typed_cuda import CudaPrinter, bool_literal

HEADER = "semantics.cuh"


def semantics_header(semantics: Semantics) -> str:
    """Returns the source text of the header that a library's kernels include first.

    The header's struct Mask computes which keys a row sees and which rows see a key. The struct
    Score computes how scores change. With a program, struct Program computes the caller's
    functions.

    Raises:
        ArgumentError: kernels cannot compute the score.
    """
    mask, score = semantics.key_mask, semantics.score
    program = semantics.caller_program
    includes = "" if score.is_plain else '#include "common/score.cuh"\n\n'
    more = ""
    if program is not None:
        includes, more = f"{INCLUDE}{includes or chr(10)}", f"\n{program_struct(program)}"
    return f"""\
#pragma once

{includes}namespace flashsmith {{

// {mask}: keys and positions of one sequence; a row stands at the key of its position.
struct Mask {{
    // Whether the last key that a row sees is one further on in the next row.
    static constexpr bool kLastIsOneFurther = {bool_literal(_is_one_further(mask))};
{_mask_functions(mask)}}};

// {score}
struct Score {{
{_score_functions(score)}}};
{more}
}}  // namespace flashsmith
"""


def semantics_numbers(semantics: Semantics) -> tuple[int, ...]:
    """Returns the numbers that identify a library's semantics: its header's checksum and csrc's
    fields."""
    return crc32(semantics_header(semantics).encode()), *map(int, semantics.cpp_fields().values())


def _mask_functions(mask: Mask) -> str:
    """Generates the C++ functions that compute the first and last key that a row sees, and the
    first and last row that see a key.

    For an end that the mask does not limit, the function returns an index that is outside of any
    sequence.
    """
    ends = (
        ("first_key", "position", mask.first, -UNLIMITED),
        ("last_key", "position", mask.last, UNLIMITED),
        ("first_row", "key", mask.first_row, -UNLIMITED),
        ("last_row", "key", mask.last_row, UNLIMITED),
    )
    text = ""
    for name, of, end, default in ends:
        body = [f"return {default};"] if end is None else _body(end)
        text += _function(f"int {name}(int {of}, int left, int right)", body)
    return text


def _function(head: str, body: list[str]) -> str:
    lines = "".join(f"        {line}\n" for line in body)
    return f"    __device__ __forceinline__ static {head} {{\n{lines}    }}\n"


def _body(root: Typed) -> list[str]:
    lines, value = CudaPrinter().statements(root)
    return [*lines, f"return {value};"]


def _is_one_further(mask: Mask) -> bool:
    return mask.last is not None and factor_of(POSITION, mask.last) == 1


def _score_functions(score: Score) -> str:
    """Returns the C++ functions that change a raw score and compute the derivative of the change.

    The change omits the score's factor, because the host multiplies log2(e) by it. The derivative
    is with respect to the score, and is computed from the changed score.
    """
    if score.is_plain:
        change = "score"
    elif score.function is apply("tanh", ARGUMENT):
        # The host multiplies the scale, 1 / cap and the 2 log2(e) that e^2x needs into one
        # argument.
        change = "tanh_of_2log2e(__fmul_rn(score, argument))"
    else:
        raise ArgumentError(
            f"score={quoted(score.name)}: kernels compute a * tanh(score / a) only, but this is "
            f"{score.value}"
        )
    slope = score.function_slope.replace({score.function: typed_symbol("changed", FLOAT)})
    return _function("float change(float score, float argument)", [f"return {change};"]) + (
        _function("float slope(float changed)", _body(slope))
    )
