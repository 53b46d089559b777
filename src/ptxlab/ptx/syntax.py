"""The syntax tree of PTX: operands, instructions, declarations, entries and their basic blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ptxlab.errors import EmulatorError

#: Bytes of every scalar PTX type.
TYPE_SIZES = {
    "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8,
    "b128": 16,
}  # fmt: skip


#: The name of the carry of extended-precision arithmetic, which is an undeclared predicate
#: register.
CARRY = "%carry"
#: A register name that ends in a number. ``.reg .b32 %r<9>`` declares the names with its prefix.
NUMBERED = re.compile(r"(.*?[A-Za-z_$%])\d+$")


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The location of an instruction in the CUDA C++ source; ``inlined_at`` is the call of an
    inlined function."""

    file: str
    line: int
    column: int = 0
    inlined_at: SourceLocation | None = None

    @property
    def depth(self) -> int:
        """How many functions are inlined into each other at this location."""
        return 0 if self.inlined_at is None else 1 + self.inlined_at.depth

    @property
    def outermost(self) -> SourceLocation:
        """The location in the kernel itself, outside all inlined functions."""
        return self if self.inlined_at is None else self.inlined_at.outermost

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Register:
    """A register. Its name is unique in its entry; names of inner scopes end in ``@scope``."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal: a Python int, or a float for ``0f``, ``0d`` and decimal literals."""

    value: int | float
    text: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name other than a register: a variable, a parameter, a label or a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``, a result that is discarded."""


@dataclass(frozen=True, slots=True)
class Negated:
    """``!%p``."""

    operand: Register


@dataclass(frozen=True, slots=True)
class Pair:
    """``%r|%p``, the two results of one instruction."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``, several operands."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``, an address in bytes; ``coordinates`` may follow in the brackets, after a
    comma."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Special | Immediate | Symbol | Sink | Negated | Pair | Vector | Address


@dataclass(frozen=True, slots=True)
class Guard:
    """``@%p`` or ``@!%p`` in front of an instruction."""

    register: Register
    negated: bool


@dataclass(slots=True)
class Instruction:
    """One instruction of an entry.

    ``mnemonic`` is the whole dotted name (``ld.global.v2.f32``), ``opcode`` its first part, and
    ``modifiers`` the other parts. ``span`` is the range of the statement in the module's text,
    half-open and with guard and semicolon. A mutant is therefore ``text[:begin] + replacement +
    text[end:]``.
    """

    index: int
    mnemonic: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    ptx_line: int
    location: SourceLocation | None
    span: tuple[int, int]

    @property
    def source(self) -> str:
        """``file:line`` of the CUDA source, or an empty string without line info."""
        return str(self.location) if self.location else ""


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target in an entry's body; the name is unique in the entry."""

    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that is not a register. ``size`` is in bytes; it is 0 for an ``extern`` array."""

    name: str
    space: str
    align: int
    size: int
    initial: bytes | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an entry. ``offset`` and ``size`` are in bytes, within the argument buffer.

    ``kind`` is its PTX type. For an array (``is_array``), such as a struct, ``kind`` is the type of
    one element.
    """

    name: str
    align: int
    size: int
    offset: int
    kind: str
    is_array: bool = False

    def __str__(self) -> str:
        return (
            f".{self.kind}[{self.size // TYPE_SIZES[self.kind]}]"
            if self.is_array
            else f".{self.kind}"
        )


@dataclass(slots=True)
class Block:
    """A basic block.

    ``successors`` are the indices of blocks; the block that follows without a jump is last.

    The index ``len(blocks)`` stands for the exit.
    """

    index: int
    labels: tuple[str, ...]
    instructions: list[Instruction]
    successors: tuple[int, ...] = ()


@dataclass(eq=False)
class Entry:
    """One ``.entry`` or ``.func`` with its parameters, declarations and body.

    Only a ``.func`` has ``results``.
    """

    name: str
    parameters: tuple[Parameter, ...]
    variables: tuple[Variable, ...]
    registers: dict[str, str]
    body: list[Instruction | Label]
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    results: tuple[Parameter, ...] = ()

    @property
    def instructions(self) -> Iterator[Instruction]:
        """The instructions, in source order."""
        return (item for item in self.body if isinstance(item, Instruction))

    @property
    def parameter_bytes(self) -> int:
        """Size of the argument buffer."""
        return max((p.offset + p.size for p in self.parameters), default=0)

    def register_type(self, name: str) -> str:
        """Returns the declared type of a register (``pred``, ``b32``, ``f32``, ...)."""
        if name == CARRY:
            return "pred"
        if name in self.registers:
            return self.registers[name]
        plain, at, scope = name.partition("@")
        match = NUMBERED.match(plain)
        if match and match.group(1) + at + scope in self.registers:
            return self.registers[match.group(1) + at + scope]
        raise EmulatorError(f"entry {self.name}: register {name} is not declared")

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The basic blocks, in source order."""
        return _split_blocks(self)


_ENDS = ("bra", "ret", "exit", "trap", "brx")


def _split_blocks(entry: Entry) -> tuple[Block, ...]:
    blocks: list[Block] = []
    labels: list[str] = []
    current: list[Instruction] = []

    def close() -> None:
        nonlocal labels, current
        if current or labels:
            blocks.append(Block(len(blocks), tuple(labels), current))
            labels, current = [], []

    for item in entry.body:
        if isinstance(item, Label):
            if current:
                close()
            labels.append(item.name)
        else:
            current.append(item)
            if item.opcode in _ENDS:
                close()
    close()
    targets = {label: block.index for block in blocks for label in block.labels}
    for block in blocks:
        block.successors = _successors(block, targets, len(blocks))
    return tuple(blocks)


def _successors(block: Block, targets: dict[str, int], exit_block: int) -> tuple[int, ...]:
    following = block.index + 1
    last = block.instructions[-1] if block.instructions else None
    if last is None or last.opcode not in _ENDS:
        return (following,)
    if last.opcode == "brx":
        raise EmulatorError(f"PTX line {last.ptx_line}: {last.mnemonic} is not supported")
    if last.opcode == "bra":
        target = last.operands[0]
        taken = targets[target.name] if isinstance(target, Symbol) else exit_block
    else:
        taken = exit_block
    if last.guard is None or taken == following:
        return (taken,)
    return (taken, following)
