"""Finds, for each point of an entry, the registers that a wgmma may be using there.

wgmma accesses registers asynchronously. Between its issue and the wait, a program may not access
these registers. Between an access of the program to these registers and the next wgmma, the program
must execute wgmma.fence. Generated code cannot track all registers at run time. So data-flow
analysis finds the instructions where a hazard is possible. A ``mov`` between registers counts as a
renaming, because compilers use it as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ptxlab.ptx.syntax import Immediate, Instruction, Register, Vector
from ptxlab.translate.flow import Flow, Node, Step, is_wgmma_mma

_NEVER_FENCED = "no fence"


@dataclass
class Hazards:
    """The registers with possible hazards, keyed by the index of the instruction."""

    #: For wait_group: the registers that may be in flight before the instruction and are read after
    #: it.
    waits: dict[int, tuple[str, ...]] = field(default_factory=dict)
    #: For wgmma: which of its registers were accessed since the last fence, or "no fence" if
    #: there was none.
    unfenced: dict[int, tuple[str, ...]] = field(default_factory=dict)
    #: For any instruction: the registers that it writes although they may be in flight as
    #: accumulators or in A.
    overwrites: dict[int, tuple[str, ...]] = field(default_factory=dict)
    fragments: dict[int, tuple[str, ...]] = field(default_factory=dict)


def fragment_of(instruction: Instruction) -> tuple[str, ...]:
    """Returns the registers of A; empty if A is in shared memory."""
    a = instruction.operands[1]
    elements = a.elements if isinstance(a, Vector) else ()
    return tuple(e.name for e in elements if isinstance(e, Register))


def find_hazards(flow: Flow) -> Hazards | None:
    """Returns the hazards of an entry; None if the entry has no wgmma.

    Also enters in each wait_group step the registers that it writes.
    """
    steps = [step for node in flow.nodes for step in node.steps]
    products = [step for step in steps if is_wgmma_mma(step.instruction)]
    if not products:
        return None
    names = _Names()
    for step in steps:
        for name in (*step.reads, *step.writes):
            names.bit(name)
    analysis = _Analysis(flow, names)
    analysis.solve()
    return analysis.report()


class _Names:
    """Represents sets of registers as the bits of an int."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.texts: list[str] = []
        self.bit(_NEVER_FENCED)

    def bit(self, name: str) -> int:
        if name not in self.numbers:
            self.numbers[name] = len(self.texts)
            self.texts.append(name)
        return 1 << self.numbers[name]

    def mask(self, names: list[str] | tuple[str, ...]) -> int:
        found = 0
        for name in names:
            found |= self.bit(name)
        return found

    def of(self, mask: int) -> tuple[str, ...]:
        found = []
        while mask:
            low = mask & -mask
            found.append(self.texts[low.bit_length() - 1])
            mask ^= low
        return tuple(found)


#: Three sets: registers in flight as accumulators, registers in flight in A, and registers accessed
#: since the last fence.
_State = tuple[int, int, int]


class _Analysis:
    """Forward data-flow analysis over the nodes, which finds hazards that are possible on some
    path."""

    def __init__(self, flow: Flow, names: _Names) -> None:
        self.flow, self.names = flow, names
        self.before: list[_State] = [(0, 0, 0)] * len(flow.nodes)
        self.before[0] = (0, 0, names.bit(_NEVER_FENCED))
        self.effects = [[self._effect(step) for step in node.steps] for node in flow.nodes]

    def solve(self) -> None:
        pending = [node.index for node in self.flow.nodes]
        while pending:
            node = self.flow.nodes[pending.pop(0)]
            state = self.before[node.index]
            for effect in self.effects[node.index]:
                state = effect(state)
            for successor in node.successors:
                if successor == self.flow.exit:
                    continue
                old = self.before[successor]
                new = (old[0] | state[0], old[1] | state[1], old[2] | state[2])
                if new != old:
                    self.before[successor] = new
                    if successor not in pending:
                        pending.append(successor)

    def _effect(self, step: Step) -> Callable[[_State], _State]:
        instruction = step.instruction
        reads, writes = self.names.mask(step.reads), self.names.mask(step.writes)
        if instruction.opcode == "wgmma":
            if is_wgmma_mma(instruction):
                fragment = self.names.mask(fragment_of(instruction))
                return lambda s: (s[0] | writes, s[1] | fragment, s[2])
            if instruction.modifiers[0] == "fence":
                return lambda s: (s[0], s[1], 0)
            if instruction.modifiers[0] == "wait_group" and _literal(instruction) == 0:
                return lambda s: (0, 0, s[2])
            return lambda s: s
        if instruction.opcode == "mov" and instruction.guard is None:
            if len(step.reads) == 1 and len(step.writes) == 1:
                return lambda s: (
                    s[0] & ~writes | (writes if s[0] & reads else 0),
                    s[1] & ~writes,
                    s[2] & ~writes | (writes if s[2] & reads else 0),
                )
            if not step.reads:
                return lambda s: (s[0] & ~writes, s[1] & ~writes, s[2] & ~writes)
        touched = reads | writes
        return lambda s: (s[0] & ~writes, s[1] & ~writes, s[2] | touched)

    def report(self) -> Hazards:
        found = Hazards()
        for node in self.flow.nodes:
            state = self.before[node.index]
            for step, effect in zip(node.steps, self.effects[node.index], strict=True):
                self._report_step(found, node, step, state)
                state = effect(state)
        return found

    def _report_step(self, found: Hazards, node: Node, step: Step, state: _State) -> None:
        instruction, names = step.instruction, self.names
        flight, fragments, accessed = state
        if is_wgmma_mma(instruction):
            own = names.mask([*step.writes, *fragment_of(instruction)])
            bad = accessed & (own | names.bit(_NEVER_FENCED))
            if bad:
                found.unfenced[instruction.index] = names.of(bad)
            return
        if instruction.opcode == "wgmma":
            if instruction.modifiers[0] == "wait_group":
                later = names.mask(tuple(_live_after(self.flow, node, step)))
                registers = names.of(flight & later)
                found.waits[instruction.index] = registers
                step.reads = [*step.reads, *registers]
                step.writes = [*step.writes, *registers]
                node.defines |= frozenset(registers)
            return
        writes = names.mask(step.writes)
        if flight & writes:
            found.overwrites[instruction.index] = names.of(flight & writes)
        if fragments & writes:
            found.fragments[instruction.index] = names.of(fragments & writes)


def _literal(instruction: Instruction) -> int:
    count = instruction.operands[0]
    return int(count.value) if isinstance(count, Immediate) else -1


def _live_after(flow: Flow, node: Node, step: Step) -> set[str]:
    """Returns the registers that are read after a step."""
    live = {name for s in node.successors for name in flow.live_in(s)}
    for later in reversed(node.steps):
        if later is step:
            return live
        if later.instruction.guard is None:
            live.difference_update(later.writes)
        live.update(later.reads)
    return live
