"""PTX text to syntax tree.

Only the structure is understood here; what an opcode means is the translator's business. Registers
and labels that inline assembly declares in a ``{ ... }`` scope of its own are renamed, so that a
name means one thing in a whole entry.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from flashsmith.emulator.syntax import (
    NUMBERED,
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
from flashsmith.errors import EmulatorError

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

_THREAD = ("%tid", "%ntid", "%laneid", "%warpid", "%nwarpid")
_GRID = ("%ctaid", "%nctaid", "%smid", "%nsmid", "%gridid")
_CLUSTER = ("%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid")
_CLUSTER_RANK = ("%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster")
_LANE_MASKS = tuple(f"%lanemask_{relation}" for relation in ("eq", "lt", "le", "gt", "ge"))
_OTHERS = ("%clock", "%clock64", "%globaltimer", "%dynamic_smem_size", "%total_smem_size")
SPECIAL_REGISTERS = frozenset((*_THREAD, *_GRID, *_CLUSTER, *_CLUSTER_RANK, *_LANE_MASKS, *_OTHERS))


@dataclass(eq=False)
class Module:
    """A PTX module. Entries are parsed when first asked for."""

    text: str
    version: str
    target: str
    variables: tuple[Variable, ...]
    files: dict[int, str]
    entry_heads: dict[str, _Head]
    _entries: dict[str, Entry] = field(default_factory=dict, repr=False)

    @property
    def entry_names(self) -> tuple[str, ...]:
        """Mangled names of all entries, in text order."""
        return tuple(self.entry_heads)

    def entry(self, name: str) -> Entry:
        """The parsed entry; EmulatorError lists what exists when ``name`` does not."""
        if name not in self._entries:
            if name not in self.entry_heads:
                known = ", ".join(self.entry_heads) or "none"
                raise EmulatorError(f"entry {name!r} is not in this PTX; its entries: {known}")
            self._entries[name] = _EntryParser(self, self.entry_heads[name]).parse()
        return self._entries[name]


@dataclass(slots=True)
class _Head:
    name: str
    parameters: str
    directives: str
    body_begin: int
    body_end: int
    clean: str
    line_starts: list[int]


_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_DECLARATION = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*"
    r"\.(shared|local|global|const)\s+(?:\.attribute\([^)]*\)\s*)?"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$%]+)\s*((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s*(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?(?:\.align\s+(\d+)\s+)?"
    r"([\w$]+)\s*(\[\d+\])?"
)
_TOP = re.compile(
    r"\.version\s+(?P<version>\S+)"
    r"|\.target\s+(?P<target>[^\n]+)"
    r"|\.address_size\s+\d+"
    r'|\.file\s+(?P<file>\d+)\s+"(?P<path>[^"]*)"[^\n]*'
    r"|(?P<section>\.section\s+[^{]*\{)"
    r"|(?:\.(?:visible|weak|extern)\s+)*\.entry\s+(?P<entry>[\w$]+)\s*"
    r"|(?P<func>(?:\.(?:visible|weak|extern)\s+)*\.func\b)"
    r"|(?P<variable>(?:\.(?:visible|weak|extern|common)\s+)*\.(?:shared|global|const)\b[^;]*;)"
    r"|(?P<other>\.pragma[^;]*;|\.alias[^;]*;)"
)


def parse(text: str) -> Module:
    """Parse a PTX module. EmulatorError names the line where the text makes no sense."""
    clean = _COMMENT.sub(_blank_comment, text)
    module = Module(text, "", "", (), {}, {})
    variables: list[Variable] = []
    line_starts = [0] + [m.end() for m in re.finditer("\n", clean)]
    position = _skip_blank(clean, 0)
    while position < len(clean):
        match = _TOP.match(clean, position)
        if not match:
            line = clean.count("\n", 0, position) + 1
            raise EmulatorError(f"PTX line {line}: cannot read {clean[position : position + 60]!r}")
        position = match.end()
        if match["version"]:
            module.version = match["version"]
        elif match["target"]:
            module.target = match["target"].split(",")[0].strip()
        elif match["file"]:
            module.files[int(match["file"])] = match["path"]
        elif match["section"]:
            position = clean.index("}", position) + 1
        elif match["variable"]:
            variables.append(_parse_variable(match["variable"].rstrip(";")))
        elif match["func"]:
            position = _skip_function(clean, position)
        elif match["entry"]:
            head = _parse_head(match["entry"], clean, position, line_starts)
            module.entry_heads[head.name] = head
            position = head.body_end + 1
        position = _skip_blank(clean, position)
    module.variables = tuple(variables)
    return module


def _blank_comment(match: re.Match[str]) -> str:
    found = match.group(0)
    if found[0] == '"':
        return found
    return re.sub(r"[^\n]", " ", found) if "\n" in found else " " * len(found)


_BLANK = re.compile(r"\s*")


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _matching_brace(text: str, position: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, position):
        depth += 1 if match.group(0) == "{" else -1
        if depth == 0:
            return match.start()
    line = text.count("\n", 0, position) + 1
    raise EmulatorError(f"PTX line {line}: this brace is never closed")


def _skip_function(text: str, position: int) -> int:
    brace, semicolon = text.find("{", position), text.find(";", position)
    if semicolon >= 0 and (brace < 0 or semicolon < brace):
        return semicolon + 1
    return _matching_brace(text, brace) + 1


def _parse_head(name: str, clean: str, position: int, line_starts: list[int]) -> _Head:
    parameters = ""
    if clean.startswith("(", position):
        close = clean.index(")", position)
        parameters = clean[position + 1 : close]
        position = close + 1
    brace = clean.index("{", position)
    end = _matching_brace(clean, brace)
    return _Head(name, parameters, clean[position:brace], brace + 1, end, clean, line_starts)


def _parse_parameters(text: str) -> tuple[Parameter, ...]:
    found, offset = [], 0
    for match in _PARAMETER.finditer(text):
        element = TYPE_SIZES[match[2]]
        size = element * (int(match[5][1:-1]) if match[5] else 1)
        align = int(match[1] or match[3] or element) if match[5] else element
        offset = (offset + align - 1) // align * align
        found.append(Parameter(match[4], align, size, offset))
        offset += size
    return tuple(found)


def _parse_variable(text: str) -> Variable:
    match = _DECLARATION.match(text.strip())
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
    """Value of a PTX literal, or None when ``text`` is none."""
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


_STATEMENT = re.compile(
    r"\s*(?:"
    r"(?P<loc>\.loc[ \t][^\n]*)"
    r"|(?P<label>[\w$]+)[ \t]*:(?!:)"
    r"|(?P<open>\{)"
    r"|(?P<close>\})"
    r"|(?P<directive>\.[^;]*);"
    r"|(?:@(?P<not>!?)\s*(?P<guard>[%\w$]+)\s*)?(?P<mnemonic>[A-Za-z][\w.:]*)\s*(?P<operands>[^;]*);"
    r"|(?P<empty>;)"
    r"|(?P<end>\Z))"
)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_REGISTERS = re.compile(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)", re.S)


class _Scope:
    """Names declared between one pair of braces."""

    __slots__ = ("cache", "labels", "number", "parent", "registers", "variables")

    def __init__(self, number: int, parent: _Scope | None) -> None:
        self.number, self.parent = number, parent
        self.registers: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        self.variables: set[str] = set()
        self.cache: dict[str, Operand] = {}

    def unique(self, name: str) -> str:
        return f"{name}@{self.number}" if self.parent else name

    def find_register(self, name: str) -> str | None:
        match = NUMBERED.match(name)
        prefix = match.group(1) if match else ""
        scope: _Scope | None = self
        while scope:
            if name in scope.registers or f"{prefix}<" in scope.registers:
                return scope.unique(name)
            scope = scope.parent
        return None

    def find_label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class _EntryParser:
    """Walks the statements of one entry body."""

    def __init__(self, module: Module, head: _Head) -> None:
        self.module, self.head = module, head
        self.body: list[Instruction | Label] = []
        self.variables: list[Variable] = []
        self.registers: dict[str, str] = {}
        self.scope = _Scope(0, None)
        self.scopes = 1
        self.location: SourceLocation | None = None
        self.locations: dict[str, SourceLocation] = {}
        self.branches: list[tuple[Instruction, _Scope]] = []
        self.split_mnemonics: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.count = 0

    def parse(self) -> Entry:
        head = self.head
        text, position, end = head.clean, head.body_begin, head.body_end
        line, starts = 0, head.line_starts
        while position < end:
            match = _STATEMENT.match(text, position, end)
            if not match:
                number = text.count("\n", 0, position) + 1
                raise EmulatorError(f"PTX line {number}: cannot read {text[position:][:60]!r}")
            position, kind = match.end(), match.lastgroup
            if kind == "operands":
                begin = match.start("guard") if match["guard"] else match.start("mnemonic")
                while line < len(starts) and starts[line] <= begin:
                    line += 1
                self._instruction(match, line)
            elif kind == "loc":
                self._locate(match["loc"])
            elif kind == "label":
                unique = self.scope.unique(match["label"])
                self.scope.labels[match["label"]] = unique
                self.body.append(Label(unique))
            elif kind == "directive":
                self._directive(match["directive"].strip())
            elif kind == "open":
                self.scope = _Scope(self.scopes, self.scope)
                self.scopes += 1
            elif kind == "close":
                self.scope = self.scope.parent or self.scope
        for instruction, scope in self.branches:
            self._resolve_target(instruction, scope)
        return Entry(
            head.name,
            _parse_parameters(head.parameters),
            tuple(self.variables),
            self.registers,
            self.body,
            _parse_directives(head.directives),
        )

    def _instruction(self, match: re.Match[str], line: int) -> None:
        mnemonic = match["mnemonic"]
        if mnemonic not in self.split_mnemonics:
            opcode, *modifiers = mnemonic.split(".")
            self.split_mnemonics[mnemonic] = (opcode, tuple(modifiers))
        opcode, modifiers = self.split_mnemonics[mnemonic]
        guard, begin = None, match.start("mnemonic")
        if match["guard"]:
            register = self._operand(match["guard"])
            if not isinstance(register, Register):
                raise EmulatorError(f"PTX line {line}: guard {match['guard']} is no register")
            guard = Guard(register, bool(match["not"]))
            begin = match.string.rindex("@", 0, match.start("guard"))
        try:
            texts = _split_operands(match["operands"])
            if opcode == "call":
                # Only the callee's name matters: a call is never executed.
                texts = [text for text in texts if not text.strip().startswith("(")][:1]
            operands = tuple(self._operand(t) for t in texts)
        except EmulatorError as error:
            raise EmulatorError(f"PTX line {line}: {mnemonic}: {error}") from None
        instruction = Instruction(
            self.count, mnemonic, opcode, modifiers, operands, guard, line, self.location,
            (begin, match.end()),
        )  # fmt: skip
        self.count += 1
        self.body.append(instruction)
        if opcode == "bra":
            self.branches.append((instruction, self.scope))

    def _resolve_target(self, instruction: Instruction, scope: _Scope) -> None:
        target = instruction.operands[0]
        name = scope.find_label(target.name) if isinstance(target, Symbol | Register) else None
        if name is None:
            raise EmulatorError(f"PTX line {instruction.ptx_line}: branch to an unknown label")
        instruction.operands = (Symbol(name),)

    def _locate(self, text: str) -> None:
        if text not in self.locations:
            match = _LOC.match(text)
            if not match:
                raise EmulatorError(f"PTX: cannot read {text!r}")
            outer = None
            if match[4]:
                outer = SourceLocation(self._file(match[4]), int(match[5]), int(match[6]))
            self.locations[text] = SourceLocation(
                self._file(match[1]), int(match[2]), int(match[3]), outer
            )
        self.location = self.locations[text]

    def _file(self, number: str) -> str:
        return self.module.files.get(int(number), f"file {number}")

    def _directive(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare_registers(text)
        elif _DECLARATION.match(text):
            self.variables.append(_parse_variable(text))
        elif not text.startswith((".pragma", ".param", ".branchtargets", ".callprototype")):
            raise EmulatorError(f"entry {self.head.name}: unknown directive {text!r}")

    def _declare_registers(self, text: str) -> None:
        match = _REGISTERS.match(text)
        if not match:
            raise EmulatorError(f"entry {self.head.name}: cannot read {text!r}")
        for name in match[2].split(","):
            name = name.strip()
            prefix = name.split("<")[0]
            self.scope.registers[prefix + "<" if "<" in name else name] = match[1]
            self.registers[self.scope.unique(prefix)] = match[1]

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        cached = self.scope.cache.get(text)
        if cached is None:
            cached = self.scope.cache[text] = self._parse_operand(text)
        return cached

    def _parse_operand(self, text: str) -> Operand:
        if text == "_":
            return Sink()
        if text.startswith("{"):
            return Vector(tuple(self._operand(t) for t in _split_operands(text[1:-1])))
        if text.startswith("["):
            return self._parse_address(text[1:-1])
        if text.startswith("!"):
            inner = self._operand(text[1:])
            if not isinstance(inner, Register):
                raise EmulatorError(f"{text!r} negates what is no register")
            return Negated(inner)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first), self._operand(second))
        name = self.scope.find_register(text)
        if name is not None:
            return Register(name)
        if text.startswith("%"):
            if text.split(".")[0] in SPECIAL_REGISTERS:
                return Special(text)
            raise EmulatorError(f"{text} is neither declared nor a known special register")
        value = parse_number(text)
        if value is not None:
            return Immediate(value, text)
        if re.match(r"[\w$]+$", text):
            return Symbol(text)
        raise EmulatorError(f"cannot read the operand {text!r}")

    def _parse_address(self, text: str) -> Address:
        first, *rest = _split_operands(text)
        coordinates = tuple(self._operand(t) for t in rest)
        match = re.match(r"^(.*?[^+\-\s])\s*([+-])\s*([+-]?\w+)$", first.strip())
        if not match:
            return Address(self._operand(first), 0, coordinates)
        offset = parse_number(match[3])
        if not isinstance(offset, int):
            raise EmulatorError(f"cannot read the address [{text}]")
        return Address(self._operand(match[1]), -offset if match[2] == "-" else offset, coordinates)


def _split_operands(text: str) -> list[str]:
    text = text.strip()
    if not text:
        return []
    if "{" not in text and "[" not in text and "(" not in text:
        return text.split(",")
    parts, depth, begin = [], 0, 0
    for match in re.finditer(r"[{}\[\](),]", text):
        sign = match.group(0)
        if sign in "{[(":
            depth += 1
        elif sign in "}])":
            depth -= 1
        elif depth == 0:
            parts.append(text[begin : match.start()])
            begin = match.end()
    parts.append(text[begin:])
    return parts


def _parse_directives(text: str) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, numbers in re.findall(r"\.(\w+)((?:\s*,?\s*\d+)*)", text):
        found[name] = tuple(int(n) for n in re.findall(r"\d+", numbers))
    return found
