"""Translates a PTX entry to one Python generator function.

Registers are local variables, and control-flow nodes are ``if pc == k`` sections of one loop. The
``opcodes_*`` modules define single opcodes. This module handles branches, forks, the points where
threads resume after barriers, and the time at which deferred mma chains are emitted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ptxlab.interface import Site
from ptxlab.ptx import ParsedModule, parse
from ptxlab.ptx.lowering import BARRIER_RESULT, lowered
from ptxlab.ptx.syntax import Entry, Instruction, Variable
from ptxlab.translate import (
    opcodes_convert,
    opcodes_float,
    opcodes_integer,
    opcodes_mbarrier,
    opcodes_memory,
    opcodes_tiles,
    opcodes_warp,
    opcodes_wgmma,
    opcodes_wmma,
)
from ptxlab.translate.branches import Branch, CarriedRegisters
from ptxlab.translate.emitter import Emitter, Handler
from ptxlab.translate.flow import Node, Step, blocks, may_refuse
from ptxlab.translate.mma_chains import MmaChains

HANDLERS: dict[str, Handler] = {
    **opcodes_integer.HANDLERS,
    **opcodes_float.HANDLERS,
    **opcodes_convert.HANDLERS,
    **opcodes_memory.HANDLERS,
    **opcodes_tiles.HANDLERS,
    **opcodes_warp.HANDLERS,
    **opcodes_mbarrier.HANDLERS,
    **opcodes_wgmma.HANDLERS,
    **opcodes_wmma.HANDLERS,
}

#: Values of ``pc`` for which generated code forks its group, or ends at the join ``stop``.
_FORK, _LEAVE = -1, -2


@dataclass(eq=False)
class Translated:
    """The generated code of one entry, and the properties of the entry that a launch needs."""

    entry: Entry
    function: Callable[..., Any]
    code: str
    sites: tuple[Site, ...]
    line_sites: dict[int, Site]
    block_mnemonics: tuple[dict[str, int], ...]
    exit: int
    static_shared_bytes: int
    dynamic_shared_offset: int
    local_bytes: int
    module_symbols: tuple[str, ...]
    #: Whether the entry contains no instruction that a whole warpgroup executes.
    warps_are_free: bool
    #: Whether threads wait for other threads through global memory.
    spins: bool

    @property
    def parameter_bytes(self) -> int:
        """Size of the argument buffer."""
        return self.entry.parameter_bytes


class Translator(Emitter):
    """Generates the Python function of one entry."""

    def __init__(
        self,
        entry: Entry,
        variables: Iterable[Variable],
        *,
        observed: bool,
        fuse: bool,
    ) -> None:
        super().__init__(entry, variables, observed=observed)
        self.namespace |= opcodes_memory.CALLED | opcodes_wmma.CALLED
        self.chains = MmaChains(self, fuse=fuse)
        #: The registers that pass between coroutines, which start and end at these nodes alone.
        self.carried = CarriedRegisters(
            register for node in self.flow.nodes for register in node.live_in
        )
        #: The nodes at which the parts of forked groups join, the exit among them.
        self.joins = {node.ipdom for node in self.flow.nodes if len(node.successors) > 1}
        #: Jumps from a join back to a node at or before its branch.
        self.ways_back: list[tuple[Node, int]] = []

    # The function

    def translate(self) -> Translated:
        """Generates and compiles the function."""
        flow = self.flow
        if flow.nodes:
            self.unwritten = flow.nodes[0].live_in
        self.emit("def kernel(W, G, pc, stop, values):")
        self.indent = 1
        self.emit("C = W.counts; T = W.thread_counts; nw = G.warps; nt = G.n")
        for register in sorted(self.unwritten.union(self.carried.order)):
            self.emit(f"{self.name(register)} = UNDEFINED")
        self._emit_start()
        self.emit("while True:")
        self.indent = 2
        self._emit_crossing()
        for node in flow.nodes:
            self._emit_node(node)
        for index, (node, target) in enumerate(self.ways_back, flow.exit + 1):
            self.instruction = node.steps[-1].instruction
            self.emit(f"if pc == {index}:")
            self.indent = 3
            self._jump(node, target)
            self.indent = 2
        self.emit(f"if pc == {flow.exit}:")
        self.emit("    W.exited(G)")
        self.emit("    return None")
        self.indent = 1
        self.emit("yield")  # This line never runs; it makes a kernel without forks a generator too
        code = "\n".join(self.lines) + "\n"
        exec(compile(code, f"<emulated {self.entry.name}>", "exec"), self.namespace)
        return Translated(
            self.entry,
            self.namespace["kernel"],
            code,
            self.sites,
            self.line_sites,
            tuple(_count_mnemonics(node) for node in flow.nodes),
            flow.exit,
            self.static_shared_bytes,
            self.dynamic_shared_offset,
            self.local_bytes,
            tuple(sorted(self.module_symbols)),
            self.hazards is None,
            bool(flow.spins),
        )

    def _emit_start(self) -> None:
        """Emits the code that unpacks live registers wherever a coroutine may start.

        These places are after a fork, after a barrier that opened only for some of the threads, and
        at a join from which threads were released.
        """
        flow = self.flow
        starts = {
            start: self.carried.spread(live)
            for start in range(flow.exit)
            if (live := flow.live_in(start))
        }
        if starts:
            self.namespace["STARTS"] = starts
            self.emit(f"if values: ({self._pack(self.carried.order)}) = STARTS[pc](values)")

    def _emit_crossing(self) -> None:
        """Emits what all branches and joins share: the code that forks a group at the branch
        ``branch``, and the code that leaves at the join ``stop``. Its size counts: Python takes
        longer to compile the lists of live registers than all else."""
        flow, carried = self.flow, self._pack(self.carried.order)
        if not self.joins:
            return
        self.namespace["LEAVE"] = {
            join: self.carried.pick(flow.live_in(join)) for join in self.joins
        }
        for line in (
            "if pc < 0:",
            f"    carried = ({carried})",
            f"    if pc == {_LEAVE}: return LEAVE[stop](carried)",
            "    fork = branch.fork(W, G, taken_by, carried)",
            f"    if branch.merge == {flow.exit}:",
            "        yield fork",
            "        return None",
            # The scheduler may release threads from the join. It then requests the live registers
            # and continues from there.
            "    if (yield fork): yield (branch.before(carried), stop)",
            f"    ({carried}) = branch.join(fork, carried)",
            "    pc = branch.then",
            "    fork = carried = None",
        ):
            self.emit(line)

    def _pack(self, registers: Iterable[str]) -> str:
        return "".join(f"{self.name(register)}, " for register in registers)

    def _emit_node(self, node: Node) -> None:
        self.instruction = None
        self.shared_rows = {}
        self.polls = any(node.index in body for body in self.flow.spins.values())
        self.emit(f"if pc == {node.index}:")
        self.indent += 1
        if node.index in self.joins:
            self.emit(f"if stop == {node.index}:")
            self.emit(f"    pc = {_LEAVE}")
            self.emit("    continue")
        self.emit(f"C[{node.index}] += nw; T[{node.index}] += nt")
        self._emit_forgotten_polls(node)
        last = node.steps[-1] if node.steps else None
        for step in node.steps:
            if step is last and (_branches(step) or blocks(step.instruction)):
                break
            self._emit_step(step)
        self.chains.flush()
        self._emit_ending(node, last)
        self.indent -= 1

    def _emit_forgotten_polls(self, node: Node) -> None:
        """Emits the code that forgets recorded polls, at the beginning of each iteration of a
        polling loop and after the loop."""
        spins = self.flow.spins
        rounds = [body for (_, first), body in spins.items() if first == node.index]
        if rounds:
            self.emit(f"W.forget(G, {self.flow.polls(frozenset().union(*rounds))!r})")
        elif not self.polls and any(
            node.index in self.flow.nodes[index].successors
            for body in spins.values()
            for index in body
        ):
            self.emit("G.polls = {}")

    def _emit_step(self, step: Step) -> None:
        instruction = step.instruction
        self.instruction = instruction
        self._emit_hazards(instruction)
        if instruction.opcode == "mma" and instruction.guard is None:
            self.chains.add(instruction)
        else:
            self.chains.before(step)
            self.instruction = instruction
            handler = HANDLERS.get(instruction.opcode)
            if handler is None:
                raise self.error(f"opcode {instruction.opcode} is not supported")
            handler(self, instruction)
        for register in step.writes:
            self.shared_rows.pop(register, None)

    def _emit_hazards(self, instruction: Instruction) -> None:
        """Emits checks before an instruction writes registers that a wgmma may be using."""
        hazards = self.hazards
        if hazards is None:
            return
        for register in hazards.overwrites.get(instruction.index, ()):
            self.emit(f"W.wgmma.overwritten(G, {self.name(register)})")
        for register in hazards.fragments.get(instruction.index, ()):
            self.emit(f"W.wgmma.fragment_written(G, {self.site()}, {register!r})")

    # Node endings

    def _emit_ending(self, node: Node, last: Step | None) -> None:
        following = node.successors[-1] if node.successors else self.flow.exit
        if last is None:
            self._jump(node, following)
            return
        self.instruction = last.instruction
        if blocks(last.instruction):
            self._emit_barrier(node, last.instruction, following)
        elif last.instruction.opcode == "trap":
            self._emit_trap(node, following)
        elif not _branches(last) or len(node.successors) == 1:
            self._jump(node, following)
        else:
            self._emit_branch(node)

    def _jump(self, node: Node, target: int) -> None:
        self.emit(f"pc = {target}")
        body = self.flow.spins.get((node.index, target))
        if body is not None:
            wait, passed = self.temporary(), self.temporary()
            pack = self._pack(self.flow.live_in(target))
            self.emit(f"{wait} = W.unchanged(G, {self.flow.polls(body)!r})")
            self.emit(f"if {wait} is None:")
            self.emit("    if W.looped(): yield None")
            self.emit("else:")
            self.emit(f"    {passed} = yield {wait}")
            self.emit(f"    if {passed} is not None:")
            self.emit(
                f"        yield W.part(G, {passed}, {target}, ({pack}), {target}, ({pack}), {wait})"
            )
            self.emit("continue")
        elif target <= node.index:
            self.emit("if W.looped(): yield None")
            self.emit("continue")

    def _emit_trap(self, node: Node, following: int) -> None:
        mask = self.mask()
        condition = "True" if mask is None else f"np.any({mask})"
        self.emit(f"if {condition}: W.trapped(G)")
        if mask is not None:
            self._jump(node, following)
        else:
            self.emit("return None")

    def _emit_branch(self, node: Node) -> None:
        target, following = node.successors
        mask, choice, name = self.temporary(), self.temporary(), f"B{node.index}"
        self.namespace[name] = self._branch(node)
        self.emit(f"{mask} = {self.mask()}")
        self.emit(f"{choice} = taken({mask})")
        self.emit(f"if {choice} < 0:")
        self.emit(f"    branch = {name}; taken_by = {mask}; pc = {_FORK}")
        self.emit("    continue")
        self.emit(f"elif {choice}:")
        self.indent += 1
        self._jump(node, target)
        self.indent -= 1
        self.emit("else:")
        self.indent += 1
        self._jump(node, following)
        self.indent -= 1

    def _branch(self, node: Node) -> Branch:
        """Returns the fork and join of a node's threads."""
        flow, merge, carried = self.flow, node.ipdom, self.carried
        live = flow.live_in(merge)
        written = flow.region_writes(node.index)
        then = merge
        if merge <= node.index:
            then = flow.exit + 1 + len(self.ways_back)
            self.ways_back.append((node, merge))
        target, following = node.successors
        return Branch(
            self.sites[self.instruction.index] if self.instruction else None,
            target,
            carried.pick(() if target == merge else flow.live_in(target)),
            following,
            carried.pick(() if following == merge else flow.live_in(following)),
            merge,
            # Only a part that goes straight to the join needs the values from before the fork.
            carried.pick(live) if merge in node.successors else carried.undefined(live),
            tuple(i for i, register in enumerate(live) if register in written),
            carried.places(live),
            then,
        )

    def _emit_barrier(self, node: Node, instruction: Instruction, following: int) -> None:
        handler = HANDLERS[instruction.opcode]
        wait, passed = self.temporary(), self.temporary()
        self.emit(f"{wait} = None")
        self.barrier_result = wait
        handler(self, instruction)
        self.emit(f"if {wait} is not None:")
        self.emit(f"    {passed} = yield {wait}")
        if may_refuse(instruction):
            self.emit(f"    if {passed} is REFUSED:")
            self.indent += 2
            self.define(instruction.operands[0], "FALSE", "b1")
            self.indent -= 2
            self.emit(f"    elif {passed} is not None:")
        else:
            self.emit(f"    if {passed} is not None:")
        pack = self._pack(self.flow.live_in(following))
        if may_refuse(instruction):
            again = self._pack(node.live_order)
            left = f"{node.index}, ({again}), None"
        else:
            left = f"{following}, ({pack}), {wait}"
        self.emit(f"        yield W.part(G, {passed}, {following}, ({pack}), {left})")
        self._jump(node, following)


def _branches(step: Step) -> bool:
    return step.instruction.opcode in ("bra", "ret", "exit", "trap")


def _count_mnemonics(node: Node) -> dict[str, int]:
    counts: dict[str, int] = {}
    for step in node.steps:
        mnemonic = step.instruction.mnemonic
        if step.instruction.opcode == BARRIER_RESULT:
            continue
        counts[mnemonic] = counts.get(mnemonic, 0) + 1
    return counts


#: The number of cached translations, each of which takes about 3 MiB.
_CACHED_TRANSLATIONS = 32
_translations: OrderedDict[tuple[str, str, bool, bool], tuple[Translated, ParsedModule]] = (
    OrderedDict()
)


def translate(
    ptx: str, entry: str, *, observed: bool = False, fuse: bool = True
) -> tuple[Translated, ParsedModule]:
    """Returns the generated code of an entry. It is cached by the PTX.

    If ``fuse`` is false, every mma.sync is executed separately, in program order. The EmulatorError
    names the opcode or modifier that is not supported.
    """
    key = (hashlib.blake2b(ptx.encode(), digest_size=16).hexdigest(), entry, observed, fuse)
    if key in _translations:
        _translations.move_to_end(key)
        return _translations[key]
    module = parse(ptx)
    simple = lowered(module, module.entry(entry))
    translator = Translator(simple, module.variables, observed=observed, fuse=fuse)
    _translations[key] = (translator.translate(), module)
    while len(_translations) > _CACHED_TRANSLATIONS:
        _translations.popitem(last=False)
    return _translations[key]
