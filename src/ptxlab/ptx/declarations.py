"""Parses the declarations of PTX: numbers, variables, parameters, performance directives."""

from __future__ import annotations

import re
import struct

from ptxlab.errors import EmulatorError
from ptxlab.ptx.syntax import TYPE_SIZES, Parameter, Variable

#: A variable's declaration: space, alignment, type, name, dimensions, initial value.
DECLARATION = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*"
    r"\.(shared|local|global|const)\s+(?:\.attribute\([^)]*\)\s*)?"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$%]+)\s*((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s+(?:\.(?:global|shared|local|const)\s+)?(?:\.align\s+\d+\s+)?)?"
    r"(?:\.align\s+(\d+)\s+)?"
    r"([\w$]+)\s*(\[\d+\])?"
)


def parse_parameters(text: str) -> tuple[Parameter, ...]:
    """Parses the parameters of an entry, which are laid out like the members of a C struct."""
    found, offset = [], 0
    for match in _PARAMETER.finditer(text):
        element = TYPE_SIZES[match[2]]
        size = element * (int(match[5][1:-1]) if match[5] else 1)
        align = int(match[1] or match[3] or element) if match[5] else element
        offset = (offset + align - 1) // align * align
        found.append(Parameter(match[4], align, size, offset, match[2], bool(match[5])))
        offset += size
    return tuple(found)


def parse_variable(text: str) -> Variable:
    """Parses a .shared, .local, .global or .const declaration without its semicolon."""
    match = DECLARATION.match(text.strip())
    if not match:
        raise EmulatorError(f"PTX: cannot read the declaration {text.strip()!r}")
    space, align, kind, name, dimensions, initial = match.groups()
    element = TYPE_SIZES[kind]
    count = 1
    for dimension in re.findall(r"\[(\d*)\]", dimensions):
        count *= int(dimension or 0)
    data = _initial_bytes(initial, kind, element * count) if initial else None
    return Variable(name, space, int(align or element), element * count, data)


def _initial_bytes(text: str, kind: str, size: int) -> bytes:
    element, out = TYPE_SIZES[kind], b""
    for item in re.findall(r"[^\s{},]+", text):
        value = parse_number(item)
        if value is None:
            raise EmulatorError(f"PTX: initial value {item!r} is not a number")
        if isinstance(value, float):
            out += struct.pack("<f" if element == 4 else "<d", value)
        else:
            out += (value % (1 << 8 * element)).to_bytes(element, "little")
    return out.ljust(size, b"\0")


_INTEGER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*|\d*\.\d+|\d+)(?:[eE][-+]?\d+)?$")


def parse_number(text: str) -> int | float | None:
    """Returns the value of a PTX literal, or None if ``text`` is not a literal."""
    if _INTEGER.match(text):
        digits = text.rstrip("U")
        plain = digits.lstrip("+-")
        octal = len(plain) > 1 and plain[0] == "0" and plain.isdecimal()
        return int(digits, 8 if octal else 0)
    negative, plain = text.startswith("-"), text.lstrip("+-")
    if plain[:2] in ("0f", "0F") and len(plain) == 10:
        value = struct.unpack(">f", bytes.fromhex(plain[2:]))[0]
    elif plain[:2] in ("0d", "0D") and len(plain) == 18:
        value = struct.unpack(">d", bytes.fromhex(plain[2:]))[0]
    elif _DECIMAL.match(plain):
        value = float(plain)
    else:
        return None
    return -value if negative else value


def parse_directives(text: str) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of .maxntid, .reqntid and similar directives, by name without the dot."""
    found = {}
    for name, numbers in re.findall(r"\.(\w+)((?:\s*,?\s*\d+)*)", text):
        found[name] = tuple(int(n) for n in re.findall(r"\d+", numbers))
    return found
