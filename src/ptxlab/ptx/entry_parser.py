"""Parses the body of a PTX entry: statements, scopes of inline assembly, operands."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ptxlab.errors import EmulatorError
from ptxlab.ptx.declarations import (
    DECLARATION,
    parse_directives,
    parse_number,
    parse_parameters,
    parse_variable,
)
from ptxlab.ptx.syntax import (
    NUMBERED,
    Address,
    Entry,
    Guard,
    Immediate,
    Instruction,
    Label,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    SourceLocation,
    Special,
    Symbol,
    Variable,
    Vector,
)

_THREAD = ("%tid", "%ntid", "%laneid", "%warpid", "%nwarpid")
_GRID = ("%ctaid", "%nctaid", "%smid", "%nsmid", "%gridid")
_CLUSTER = ("%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid")
_CLUSTER_RANK = ("%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster")
_LANE_MASKS = tuple(f"%lanemask_{relation}" for relation in ("eq", "lt", "le", "gt", "ge"))
_OTHERS = ("%clock", "%clock64", "%globaltimer", "%dynamic_smem_size", "%total_smem_size")
SPECIAL_REGISTERS = frozenset((*_THREAD, *_GRID, *_CLUSTER, *_CLUSTER_RANK, *_LANE_MASKS, *_OTHERS))


@dataclass(slots=True)
class Head:
    """The position of an entry or function in the module, and the source text of its parts.

    Comments are blanked out.
    """

    name: str
    parameters: str
    directives: str
    body_begin: int
    body_end: int
    clean: str
    line_starts: list[int]
    results: str = ""


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
#: The largest depth of inlined functions that is accepted. A larger depth means that a function is
#: inlined into itself.
_DEEPEST_INLINING = 32
_REGISTERS = re.compile(r"\.reg\s*(?:\.v\d\s+)?\.(\w+)\s+(.*)", re.S)


class _Scope:
    """The names that are declared between one pair of braces."""

    __slots__ = ("cache", "labels", "number", "parent", "registers", "variables")

    def __init__(self, number: int, parent: _Scope | None) -> None:
        self.number, self.parent = number, parent
        self.registers: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        #: The variables that pass the parameters of a call. Every call declares them under the same
        #: names.
        self.variables: dict[str, str] = {}
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

    def find_variable(self, name: str) -> str:
        scope: _Scope | None = self
        while scope:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.parent
        return name

    def find_label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class EntryParser:
    """Parses the statements of an entry's body, one after the other."""

    def __init__(self, head: Head, files: dict[int, str]) -> None:
        self.head, self.files = head, files
        self.body: list[Instruction | Label] = []
        self.variables: list[Variable] = []
        self.registers: dict[str, str] = {}
        self.scope = _Scope(0, None)
        self.scopes = 1
        self.location: SourceLocation | None = None
        #: The three numbers (file, line, column) in each text of a .loc, and the latest location at
        #: three such numbers. A .loc refers to the caller of an inlined function only by these
        #: three numbers.
        self.loc_numbers: dict[str, tuple[tuple[str, int, int], tuple[str, int, int] | None]] = {}
        self.locations: dict[tuple[str, int, int], SourceLocation] = {}
        self.branches: list[tuple[Instruction, _Scope]] = []
        self.split_mnemonics: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.count = 0

    def parse(self) -> Entry:
        """Returns the syntax tree of the entry."""
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
            parse_parameters(head.parameters),
            tuple(self.variables),
            self.registers,
            self.body,
            parse_directives(head.directives),
            parse_parameters(head.results),
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
                raise EmulatorError(f"PTX line {line}: guard {match['guard']} is not a register")
            guard = Guard(register, bool(match["not"]))
            begin = match.string.rindex("@", 0, match.start("guard"))
        try:
            texts = _split_operands(match["operands"])
            if opcode == "call":
                operands = self._call_operands(texts)
            else:
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

    def _call_operands(self, texts: list[str]) -> tuple[Operand, ...]:
        """Returns the callee, followed by one vector of its results and one of its arguments.

        A list of possible callees may follow; it is ignored.
        """
        texts = [text.strip() for text in texts]
        lists = {
            place: Vector(tuple(self._operand(one) for one in _split_operands(text[1:-1])))
            for place, text in enumerate(texts[:3])
            if text.startswith("(")
        }
        callee = 1 if 0 in lists else 0
        empty = Vector(())
        return self._operand(texts[callee]), lists.get(0, empty), lists.get(callee + 1, empty)

    def _resolve_target(self, instruction: Instruction, scope: _Scope) -> None:
        target = instruction.operands[0]
        name = scope.find_label(target.name) if isinstance(target, Symbol | Register) else None
        if name is None:
            raise EmulatorError(f"PTX line {instruction.ptx_line}: branch to an unknown label")
        instruction.operands = (Symbol(name),)

    def _locate(self, text: str) -> None:
        if text not in self.loc_numbers:
            match = _LOC.match(text)
            if not match:
                raise EmulatorError(f"PTX: cannot read {text!r}")
            here = self._file(match[1]), int(match[2]), int(match[3])
            there = (self._file(match[4]), int(match[5]), int(match[6])) if match[4] else None
            self.loc_numbers[text] = here, there
        here, there = self.loc_numbers[text]
        outer = None if there is None else self.locations.get(there) or SourceLocation(*there)
        if outer is not None and outer.depth > _DEEPEST_INLINING:
            outer = SourceLocation(*there)  # type: ignore[misc]
        known = self.locations.get(here)
        if known is None or known.inlined_at is not outer:
            known = self.locations[here] = SourceLocation(*here, outer)
        self.location = known

    def _file(self, number: str) -> str:
        return self.files.get(int(number), f"file {number}")

    def _directive(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare_registers(text)
        elif DECLARATION.match(text):
            self.variables.append(parse_variable(text))
        elif text.startswith(".param"):
            for each in parse_parameters(text):
                name = self.scope.variables[each.name] = self.scope.unique(each.name)
                self.variables.append(Variable(name, "param", each.align, each.size))
        elif not text.startswith((".pragma", ".branchtargets", ".callprototype")):
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
                raise EmulatorError(f"{text!r} negates something that is not a register")
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
            return Symbol(self.scope.find_variable(text))
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
