"""PTX as text and as a tree of instructions."""

from __future__ import annotations

from flashsmith.emulator.ptx.declarations import parse_number
from flashsmith.emulator.ptx.parser import Module, parse
from flashsmith.emulator.ptx.syntax import (
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
    "Module",
    "Negated",
    "Operand",
    "Pair",
    "Parameter",
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
