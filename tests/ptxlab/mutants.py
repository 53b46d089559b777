"""Mutants: broken variants of a kernel's PTX, which the emulator's checks must detect.

A mutant differs from the kernel in one instruction. The checks must catch nearly all of them
(tests/mutants/test_mutants.py does), and why the others change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ptxlab.ptx import (
    Address,
    Entry,
    Immediate,
    Instruction,
    Pair,
    Register,
    Vector,
    parse,
)

# What a chunk of shared or global memory is copied and read in.
_CHUNK_BYTES = 16


@dataclass(frozen=True)
class Mutant:
    """One changed instruction: ``begin`` to ``end`` of the module's text became ``replacement``.

    ``id`` is ``<operator>@<PTX line>``; ``source`` the CUDA source's ``file:line``.
    """

    id: str
    operator: str
    mnemonic: str
    ptx_line: int
    source: str
    original: str
    replacement: str
    begin: int
    end: int

    def apply(self, ptx: str) -> str:
        """The mutated module; ``ptx`` is the text that the mutant was made from."""
        return ptx[: self.begin] + self.replacement + ptx[self.end :]


@dataclass(frozen=True)
class MutationSite:
    """An instruction and what the operators need of its surroundings."""

    instruction: Instruction
    text: str
    entry: Entry
    # Earlier instructions of the same basic block with this opcode, latest first.
    earlier: Sequence[Instruction]


Mutation = Callable[[MutationSite], str | None]


@dataclass(frozen=True)
class Operator:
    """A way to break an instruction. ``mutate`` gives the new text, or None where it cannot be."""

    name: str
    beginnings: tuple[str, ...]
    mutate: Mutation

    def applies(self, instruction: Instruction) -> bool:
        """Whether the instruction is of the kind that this operator breaks."""
        return instruction.mnemonic.startswith(self.beginnings)


# Mutations ---------------------------------------------------------------------------------------


def drop(site: MutationSite) -> str:
    """The instruction goes; its results become zero."""
    results = _registers(site.instruction.operands[0]) if _has_results(site.instruction) else []
    return " ".join(_zero(site, register) for register in results)


def _has_results(instruction: Instruction) -> bool:
    return instruction.opcode in ("ldmatrix", "ld", "shfl", "mma")


def _zero(site: MutationSite, register: str) -> str:
    kind = site.entry.register_type(register)
    guard = guard_text(site.instruction)
    if kind.startswith("f"):
        return f"{guard}mov.{kind} {register}, {'0f00000000' if kind == 'f32' else '0d0'};"
    return f"{guard}mov.b{kind.lstrip('busf')} {register}, 0;"


def guard_text(instruction: Instruction) -> str:
    if instruction.guard is None:
        return ""
    return f"@{'!' if instruction.guard.negated else ''}{instruction.guard.register.name} "


def _registers(operand: object) -> list[str]:
    if isinstance(operand, Register):
        return [operand.name]
    if isinstance(operand, Vector):
        return [name for element in operand.elements for name in _registers(element)]
    if isinstance(operand, Pair):
        return _registers(operand.first)
    return []


def bump(position: int, by: int) -> Mutation:
    """Adds to the offset of the address at an operand's place."""

    def mutate(site: MutationSite) -> str | None:
        operands = site.instruction.operands
        operand = operands[position] if position < len(operands) else None
        if not isinstance(operand, Address):
            return None
        skip = sum(isinstance(earlier, Address) for earlier in operands[:position])
        address = list(re.finditer(r"\[([^\]+-]*)[^\]]*\]", site.text))[skip]
        changed = f"[{address[1].strip()}{operand.offset + by:+d}]"
        return site.text[: address.start()] + changed + site.text[address.end() :]

    return mutate


def weaken_wait(site: MutationSite) -> str | None:
    allowed = site.instruction.operands[0] if site.instruction.operands else None
    if not isinstance(allowed, Immediate):
        return None
    return re.sub(r"\d+\s*;$", f"{int(allowed.value) + 1};", site.text)


def _pass_through(site: MutationSite) -> str | None:
    """A shuffle gives back the lane's own value."""
    result, source = _registers(site.instruction.operands[0]), site.instruction.operands[1]
    if not result or not isinstance(source, Register):
        return None
    return f"{guard_text(site.instruction)}mov.b32 {result[0]}, {source.name};"


def _double_lane_mask(site: MutationSite) -> str | None:
    """Exchanges with a lane twice as far away: of another row."""
    mask = site.instruction.operands[2]
    if isinstance(mask, Immediate):
        doubled = str(2 * int(mask.value))
        return replace_operand(site.text, 2, doubled)
    if not isinstance(mask, Register):
        return None
    changed = replace_operand(site.text, 2, "doubled")
    return f"{{ .reg .b32 doubled; shl.b32 doubled, {mask.name}, 1; {changed} }}"


def exchange(operand: int, first: int, second: int, also: int | None = None) -> Mutation:
    """Exchanges two registers of a vector operand (and the same two of another)."""

    def mutate(site: MutationSite) -> str | None:
        text = site.text
        for position in (operand,) if also is None else (operand, also):
            names = _registers(site.instruction.operands[position])
            if len(names) <= second:
                return None
            names[first], names[second] = names[second], names[first]
            text = replace_operand(text, position, "{" + ", ".join(names) + "}")
        return text

    return mutate


def take_from_earlier(operand: int) -> Mutation:
    """Uses the fragment of the nearest earlier product of the block that has another one."""

    def mutate(site: MutationSite) -> str | None:
        own = _registers(site.instruction.operands[operand])
        for other in site.earlier:
            names = _registers(other.operands[operand])
            # Of wgmma A may be a descriptor.
            if isinstance(other.operands[operand], Vector) and names != own:
                return replace_operand(site.text, operand, "{" + ", ".join(names) + "}")
        return None

    return mutate


def replace_operand(text: str, position: int, new: str) -> str:
    """The statement with one of its operands rewritten."""
    pieces = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,;{}\[\]]+", text)
    head = 2 if text.startswith("@") else 1
    old = pieces[head + position]
    begin = _operand_begin(text, pieces[: head + position])
    begin = text.index(old, begin)
    return text[:begin] + new + text[begin + len(old) :]


def _operand_begin(text: str, before: Sequence[str]) -> int:
    place = 0
    for piece in before:
        place = text.index(piece, place) + len(piece)
    return place


_BARRIERS = ("bar.", "barrier.")
_WAITS = ("cp.async.wait",)
_COPIES = ("cp.async.cg", "cp.async.ca")
_SHARED_LOADS, _SHARED_STORES = ("ld.shared",), ("st.shared",)
_GLOBAL_LOADS, _GLOBAL_STORES = ("ld.global",), ("st.global",)


def operators(row_bytes: int) -> tuple[Operator, ...]:
    """Every operator; ``row_bytes`` is the length of a tile's row in shared memory."""
    return (
        Operator("drop barrier", _BARRIERS, drop),
        Operator("drop wait", _WAITS, drop),
        Operator("weaken wait", ("cp.async.wait_group",), weaken_wait),
        Operator("drop commit", ("cp.async.commit",), drop),
        Operator("shuffle nothing", ("shfl.",), _pass_through),
        Operator("double lane mask", ("shfl.sync.bfly",), _double_lane_mask),
        Operator("drop ldmatrix", ("ldmatrix",), drop),
        Operator("ldmatrix next chunk", ("ldmatrix",), bump(1, _CHUNK_BYTES)),
        Operator("ldmatrix next row", ("ldmatrix",), bump(1, row_bytes)),
        Operator("drop copy", _COPIES, drop),
        Operator("copy to next chunk", _COPIES, bump(0, _CHUNK_BYTES)),
        Operator("copy to next row", _COPIES, bump(0, row_bytes)),
        Operator("copy from next chunk", _COPIES, bump(1, _CHUNK_BYTES)),
        Operator("drop global load", _GLOBAL_LOADS, drop),
        Operator("load global next chunk", _GLOBAL_LOADS, bump(1, _CHUNK_BYTES)),
        Operator("drop shared store", _SHARED_STORES, drop),
        Operator("store shared next chunk", _SHARED_STORES, bump(0, _CHUNK_BYTES)),
        Operator("drop shared load", _SHARED_LOADS, drop),
        Operator("load shared next row", _SHARED_LOADS, bump(1, row_bytes)),
        Operator("drop global store", _GLOBAL_STORES, drop),
        Operator("store global next chunk", _GLOBAL_STORES, bump(0, _CHUNK_BYTES)),
        Operator("drop mma", ("mma.sync",), lambda site: ""),
        Operator("exchange A rows", ("mma.sync",), exchange(1, 0, 1)),
        Operator("exchange A halves of k", ("mma.sync",), exchange(1, 0, 2)),
        Operator("exchange B halves of k", ("mma.sync",), exchange(2, 0, 1)),
        Operator("exchange accumulator rows", ("mma.sync",), exchange(0, 0, 2, also=3)),
        Operator("A of another step", ("mma.sync",), take_from_earlier(1)),
        Operator("B of another tile", ("mma.sync",), take_from_earlier(2)),
    )


def mutants(ptx: str, entry: str, *, row_bytes: int) -> Iterator[Mutant]:
    """Every site of an entry times every operator that applies there, in text order.

    ``row_bytes`` is the length of a tile's row in shared memory (d_head elements). EmulatorError
    when ``ptx`` cannot be parsed or has no such entry.
    """
    return mutants_by(operators(row_bytes), ptx, entry)


def mutants_by(table: Sequence[Operator], ptx: str, entry: str) -> Iterator[Mutant]:
    """The same for operators of one's choice."""
    parsed = parse(ptx).entry(entry)
    for block in parsed.blocks:
        for place, instruction in enumerate(block.instructions):
            applicable = [operator for operator in table if operator.applies(instruction)]
            if not applicable:
                continue
            begin, end = instruction.span
            before = block.instructions[:place][::-1]
            earlier = [other for other in before if other.mnemonic == instruction.mnemonic]
            site = MutationSite(instruction, ptx[begin:end], parsed, earlier)
            for operator in applicable:
                replacement = operator.mutate(site)
                if replacement is None:
                    continue
                yield Mutant(
                    f"{operator.name}@{instruction.ptx_line}", operator.name,
                    instruction.mnemonic, instruction.ptx_line, instruction.source, site.text,
                    replacement, begin, end,
                )  # fmt: skip
