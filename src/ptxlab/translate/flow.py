"""Analyses the control flow and data flow of an entry, before code is generated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ptxlab.ptx.syntax import (
    CARRY,
    Address,
    Entry,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Vector,
)

#: Opcodes whose first operand is read, not written.
WITHOUT_RESULT = frozenset(
    ["st", "red", "bra", "ret", "exit", "trap", "bar", "barrier", "membar", "fence", "prefetch"]
) | frozenset(["prefetchu", "stmatrix", "call", "nanosleep", "discard", "applypriority"])


def blocks(instruction: Instruction) -> bool:
    """Whether threads may have to wait at an instruction. A node ends after such an instruction."""
    if instruction.opcode in ("bar", "barrier"):
        return "warp" not in instruction.modifiers
    return may_refuse(instruction)


def may_refuse(instruction: Instruction) -> bool:
    """Whether an instruction that waits may give up; its result predicate is then false."""
    return instruction.opcode == "mbarrier" and bool(
        {"try_wait", "test_wait"}.intersection(instruction.modifiers)
    )


def is_wgmma_mma(instruction: Instruction) -> bool:
    """Whether this is wgmma.mma_async, which reads and writes its accumulators."""
    return instruction.opcode == "wgmma" and instruction.modifiers[:1] == ("mma_async",)


def registers_in(operand: Operand) -> list[str]:
    """Returns the names of the registers in an operand."""
    if isinstance(operand, Register):
        return [operand.name]
    if isinstance(operand, Address):
        parts = (operand.base, *operand.coordinates)
        return [name for part in parts for name in registers_in(part)]
    if isinstance(operand, Vector):
        return [name for part in operand.elements for name in registers_in(part)]
    if isinstance(operand, Negated):
        return [operand.operand.name]
    if isinstance(operand, Pair):
        return registers_in(operand.first) + registers_in(operand.second)
    return []


def has_result(instruction: Instruction) -> bool:
    """Whether an instruction writes its first operand."""
    if instruction.opcode in WITHOUT_RESULT or not instruction.operands:
        return False
    return not (instruction.opcode == "cp" or isinstance(instruction.operands[0], Address))


def reads_and_writes(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Returns the registers that an instruction reads, and the registers that it writes.

    An instruction reads its guard. If it has a guard, it also reads its results.
    """
    operands = instruction.operands
    writes: list[str] = []
    reads: list[str] = []
    if has_result(instruction):
        writes = registers_in(operands[0])
        operands = operands[1:]
    for operand in operands:
        reads += registers_in(operand)
    if "cc" in instruction.modifiers:
        writes.append(CARRY)
    if instruction.opcode in ("addc", "subc", "madc"):
        reads.append(CARRY)
    if instruction.guard is not None:
        reads.append(instruction.guard.register.name)
        reads += writes
    elif is_wgmma_mma(instruction):
        reads += writes
    return reads, writes


@dataclass(slots=True)
class Step:
    """An instruction and the registers that it reads and writes."""

    instruction: Instruction
    reads: list[str]
    writes: list[str]


@dataclass(eq=False)
class Node:
    """A basic block that ends at a branch or right after a barrier."""

    index: int
    steps: list[Step]
    successors: tuple[int, ...] = ()
    defines: frozenset[str] = frozenset()
    live_in: frozenset[str] = frozenset()
    ipdom: int = -1

    @cached_property
    def live_order(self) -> tuple[str, ...]:
        """The live-in registers, in the order in which generated code packs and unpacks them."""
        return tuple(sorted(self.live_in))


@dataclass(eq=False)
class Flow:
    """The nodes of an entry; ``exit`` is the index of the exit."""

    nodes: list[Node]
    read_counts: dict[str, int] = field(default_factory=dict)
    #: Polling loops, which wait for a word of global memory: (last node, first node) -> nodes of
    #: the loop.
    spins: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)

    def polls(self, body: Iterable[int]) -> tuple[int, ...]:
        """Returns the indices of the strong loads in the given nodes."""
        steps = (step.instruction for index in sorted(body) for step in self.nodes[index].steps)
        return tuple(one.index for one in steps if _reads_strongly(one))

    @property
    def exit(self) -> int:
        """The index after the last node, which stands for the exit."""
        return len(self.nodes)

    def live_in(self, index: int) -> tuple[str, ...]:
        """Returns the registers that are live at the beginning of a node; none at the exit."""
        return () if index == self.exit else self.nodes[index].live_order

    def region_writes(self, branch: int) -> frozenset[str]:
        """Returns the registers that are written between a branch and its immediate
        post-dominator."""
        merge = self.nodes[branch].ipdom
        seen: set[int] = set()
        written: set[str] = set()
        pending = list(self.nodes[branch].successors)
        while pending:
            index = pending.pop()
            if index in seen or index in (merge, self.exit):
                continue
            seen.add(index)
            written |= self.nodes[index].defines
            pending += self.nodes[index].successors
        return frozenset(written)


def analyse(entry: Entry) -> Flow:
    """Determines the nodes, the live registers and the immediate post-dominators of an entry."""
    flow = Flow(_nodes(entry))
    for node in flow.nodes:
        for step in node.steps:
            for name in step.reads:
                flow.read_counts[name] = flow.read_counts.get(name, 0) + 1
    _liveness(flow)
    _post_dominators(flow)
    for node in flow.nodes:
        for target in node.successors:
            if target <= node.index and (body := _spins(flow, node.index, target)):
                flow.spins[node.index, target] = body
    return flow


#: Opcodes that do more than write registers; fences are left out.
_WITH_EFFECT = frozenset(
    ["st", "red", "atom", "bar", "barrier", "mbarrier", "cp", "wgmma", "call", "trap", "ret"]
) | frozenset(["exit", "stmatrix", "setmaxnreg", "griddepcontrol", "mma", "wmma"])
_STRONG_LOADS = frozenset(["volatile", "relaxed", "acquire"])


def _spins(flow: Flow, last: int, first: int) -> frozenset[int]:
    """Returns the nodes of the loop from ``first`` to ``last`` if the loop only polls memory;
    otherwise the empty set.

    A polling loop only reads with .volatile, .relaxed or .acquire, and passes no register value
    from one iteration to the next. It therefore repeats until one of the words that
    it reads has changed.
    """
    body, pending = {first}, [last]
    before: dict[int, list[int]] = {}
    for node in flow.nodes:
        for successor in node.successors:
            before.setdefault(successor, []).append(node.index)
    while pending:
        index = pending.pop()
        if index not in body:
            body.add(index)
            pending += before.get(index, [])
    steps = [step for index in body for step in flow.nodes[index].steps]
    if any(step.instruction.opcode in _WITH_EFFECT for step in steps):
        return frozenset()
    written = {name for step in steps for name in step.writes}
    if written & flow.nodes[first].live_in:
        return frozenset()
    strong = any(_reads_strongly(step.instruction) for step in steps)
    return frozenset(body) if strong else frozenset()


def _reads_strongly(instruction: Instruction) -> bool:
    return (
        instruction.opcode == "ld"
        and bool(_STRONG_LOADS.intersection(instruction.modifiers))
        and not any(m.startswith("shared") for m in instruction.modifiers)
    )


def _nodes(entry: Entry) -> list[Node]:
    """Returns the basic blocks, split after every barrier so that a thread can resume there.

    An instruction that may give up has its own node, which is run again by threads that keep
    waiting.
    """
    pieces: list[list[list[Step]]] = []
    for block in entry.blocks:
        cuts: list[list[Step]] = [[]]
        for instruction in block.instructions:
            if may_refuse(instruction) and cuts[-1]:
                cuts.append([])
            cuts[-1].append(Step(instruction, *reads_and_writes(instruction)))
            last = instruction is block.instructions[-1]
            if blocks(instruction) and not last:
                cuts.append([])
        pieces.append(cuts)
    first = [0]
    for cuts in pieces:
        first.append(first[-1] + len(cuts))
    nodes: list[Node] = []
    for block, cuts in zip(entry.blocks, pieces, strict=True):
        for number, steps in enumerate(cuts):
            if number + 1 < len(cuts):
                successors: tuple[int, ...] = (len(nodes) + 1,)
            else:
                successors = tuple(first[s] for s in block.successors)
            nodes.append(Node(len(nodes), steps, successors))
    return nodes


def _liveness(flow: Flow) -> None:
    before: list[frozenset[str]] = []
    for node in flow.nodes:
        exposed: set[str] = set()
        defined: set[str] = set()
        for step in node.steps:
            exposed.update(name for name in step.reads if name not in defined)
            if step.instruction.guard is None:
                defined.update(step.writes)
        node.defines = frozenset(name for step in node.steps for name in step.writes)
        node.live_in = frozenset(exposed)
        before.append(frozenset(defined))
    changed = True
    while changed:
        changed = False
        for node in reversed(flow.nodes):
            out: frozenset[str] = frozenset()
            for successor in node.successors:
                if successor != flow.exit:
                    out |= flow.nodes[successor].live_in
            live = node.live_in | (out - before[node.index])
            if live != node.live_in:
                node.live_in, changed = live, True


def _post_dominators(flow: Flow) -> None:
    everything = (1 << (flow.exit + 1)) - 1
    sets = [everything] * flow.exit + [1 << flow.exit]
    changed = True
    while changed:
        changed = False
        for node in reversed(flow.nodes):
            common = everything
            if not _traps(node):
                for successor in node.successors:
                    common &= sets[successor]
            found = common | 1 << node.index
            if found != sets[node.index]:
                sets[node.index], changed = found, True
    sizes = [bin(found).count("1") for found in sets]
    for node in flow.nodes:
        strict = sets[node.index] & ~(1 << node.index)
        candidates = [i for i in range(flow.exit + 1) if strict >> i & 1]
        # The set of post-dominators never shrank; perhaps the exit cannot be reached from the node.
        endless = sets[node.index] == everything and not _reaches_exit(flow, node.index)
        node.ipdom = flow.exit if endless else max(candidates, key=lambda i: sizes[i])


def _traps(node: Node) -> bool:
    """Whether a node ends the launch.

    No thread leaves such a node, so it is ignored for post-dominators.
    """
    last = node.steps[-1].instruction if node.steps else None
    return last is not None and last.opcode == "trap" and last.guard is None


def _reaches_exit(flow: Flow, start: int) -> bool:
    seen: set[int] = set()
    pending = [start]
    while pending:
        index = pending.pop()
        if index == flow.exit:
            return True
        if index not in seen and not _traps(flow.nodes[index]):
            seen.add(index)
            pending += flow.nodes[index].successors
    return False
