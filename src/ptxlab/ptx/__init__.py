"""PTX as text and as a tree of instructions."""

from __future__ import annotations

from ptxlab.ptx.declarations import parse_number
from ptxlab.ptx.parser import ParsedModule, parse
from ptxlab.ptx.syntax import (
    TYPE_SIZES,
    Address,
    Block,
    Entry,
    Guard,
    Immediate,
    Instruction,
    Label,
    Negated,
    Operand,
    Pair,
    Parameter,
    Register,
    Sink,
    SourceLocation,
    Special,
    Symbol,
    Variable,
    Vector,
)

__all__ = [
    "TYPE_SIZES",
    "Address",
    "Block",
    "Entry",
    "Guard",
    "Immediate",
    "Instruction",
    "Label",
    "Negated",
    "Operand",
    "Pair",
    "Parameter",
    "ParsedModule",
    "Register",
    "Sink",
    "SourceLocation",
    "Special",
    "Symbol",
    "Variable",
    "Vector",
    "parse",
    "parse_number",
]
