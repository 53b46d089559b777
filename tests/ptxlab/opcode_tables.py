"""Every instruction under test: the tables behind test_opcodes*.py."""

from __future__ import annotations

from float_opcodes import approximations, float_arithmetic, float_conversions
from integer_opcodes import (
    bit_operations,
    dot_products,
    extended_precision,
    integer_arithmetic,
    integer_conversions,
    moves,
)
from micro_kernels import Case
from predicate_opcodes import comparisons

TABLES = {
    "integer arithmetic": integer_arithmetic,
    "extended precision": extended_precision,
    "dot products": dot_products,
    "bit operations": bit_operations,
    "comparisons": comparisons,
    "float arithmetic": float_arithmetic,
    "approximations": approximations,
    "integer conversions": integer_conversions,
    "float conversions": float_conversions,
    "moves": moves,
}


def all_cases() -> list[Case]:
    return [case for table in TABLES.values() for case in table()]
