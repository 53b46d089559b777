"""Combines mma.sync instructions: chains along k and tiles along m and n become one batched matrix
product.

mma accesses only registers, so it may be executed at any time after its operands are defined and
before its result is used. So the mma instructions of a node are collected until an accumulator is
needed. In a chain, the result of each mma is the addend of the next. Chains with the same A
operands become columns of one product, and chains with the same B operands become rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ptxlab.machine.fragments import matrix_multiply
from ptxlab.machine.tensor_cores import OPERAND_TYPES
from ptxlab.ptx.syntax import Instruction, Operand, Register, Vector
from ptxlab.translate.emitter import Emitter
from ptxlab.translate.flow import Step

Words = tuple[str, ...]
_HALVES = {"m16n8k16": 2, "m16n8k8": 1}
#: The number of 8-column chunks of A, for each operand type and shape.
_CHUNKS = {"f16": _HALVES, "bf16": _HALVES, "tf32": {"m16n8k8": 2, "m16n8k4": 1}}


@dataclass(eq=False)
class _Chain:
    """A chain of mma instructions along k: the operand expressions, the first addend and the result
    registers."""

    instruction: Instruction
    flavour: tuple[str, int]
    addend: Words
    results: tuple[str, ...]
    a: list[Words] = field(default_factory=list)
    b: list[Words] = field(default_factory=list)


class MmaChains:
    """The chains that are collected but not emitted yet."""

    def __init__(self, emitter: Emitter, *, fuse: bool) -> None:
        self.emitter, self.fuse = emitter, fuse
        self.chains: list[_Chain] = []
        self.pending: dict[str, _Chain] = {}
        self.captured: set[str] = set()

    def add(self, instruction: Instruction) -> None:
        """Collects an mma.sync without a guard."""
        flavour = self._flavour(instruction)
        d, a, b, c = instruction.operands
        results = self._registers(d)
        inputs = self._names(a) + self._names(b)
        if any(name in self.pending for name in inputs):
            self.flush()
        addends = self._names(c)
        chain = self.pending.get(addends[0]) if addends else None
        continues = (
            chain is not None
            and chain.flavour == flavour
            and chain.results == addends
            and (results == addends or self._read_once(addends))
        )
        if not continues and any(name in self.pending for name in (*addends, *results)):
            self.flush()
        if not continues or chain is None:
            addend = tuple(self._use(element, "f32") for element in self._elements(c))
            chain = _Chain(instruction, flavour, addend, results)
            self.chains.append(chain)
        self._rename(chain, results)
        chain.a.append(tuple(self._use(element, "b32") for element in self._elements(a)))
        chain.b.append(tuple(self._use(element, "b32") for element in self._elements(b)))
        if not self.fuse:
            self.flush()

    def before(self, step: Step) -> None:
        """Prepares for another instruction: emits the chains whose results it needs, and saves
        operands that it overwrites."""
        if not self.chains:
            return
        if any(name in self.pending for name in (*step.reads, *step.writes)):
            self.flush()
            return
        for name in step.writes:
            if name in self.captured:
                self._keep(name)
            if name in self.emitter.unwritten:
                self.flush()
                return

    def flush(self) -> None:
        """Emits all collected chains."""
        emitter = self.emitter
        current = emitter.instruction
        for product in self._products():
            self._emit_product(product)
        emitter.instruction = current
        self.chains, self.pending = [], {}
        self.captured = set()

    # Operands

    def _elements(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.elements if isinstance(operand, Vector) else (operand,)

    def _names(self, operand: Operand) -> tuple[str, ...]:
        return tuple(e.name for e in self._elements(operand) if isinstance(e, Register))

    def _registers(self, operand: Operand) -> tuple[str, ...]:
        names = self._names(operand)
        if len(names) != 4:
            raise self.emitter.error("mma.sync needs four result registers")
        return names

    def _use(self, operand: Operand, kind: str) -> str:
        if isinstance(operand, Register):
            self.captured.add(operand.name)
        return self.emitter.use(operand, kind)

    def _read_once(self, names: tuple[str, ...]) -> bool:
        counts = self.emitter.flow.read_counts
        return all(counts.get(name, 0) == 1 for name in names)

    def _rename(self, chain: _Chain, results: tuple[str, ...]) -> None:
        for name in chain.results:
            self.pending.pop(name, None)
        chain.results = results
        for name in results:
            self.pending[name] = chain

    def _keep(self, register: str) -> None:
        """Saves a register that a collected chain still needs under another name, before it is
        overwritten."""
        name, copy = self.emitter.name(register), self.emitter.temporary()
        self.emitter.emit(f"{copy} = {name}")

        def renamed(words: Words) -> Words:
            return tuple(_replace_name(word, name, copy) for word in words)

        for chain in self.chains:
            chain.addend = renamed(chain.addend)
            chain.a = [renamed(words) for words in chain.a]
            chain.b = [renamed(words) for words in chain.b]
        self.captured.discard(register)

    def _flavour(self, instruction: Instruction) -> tuple[str, int]:
        """Returns the operand type of an mma mnemonic, and its number of 8-column chunks of A."""
        emitter = self.emitter
        emitter.instruction = instruction
        modifiers = list(instruction.modifiers)
        if modifiers[:2] != ["sync", "aligned"] or len(modifiers) != 9:
            raise emitter.error("this form of mma is not supported")
        _, _, shape, row, column, d, a, b, c = modifiers
        if (row, column, d, c) != ("row", "col", "f32", "f32") or a != b:
            raise emitter.error("this form of mma is not supported")
        if a not in _CHUNKS:
            raise emitter.error(f"mma operand type .{a} is not supported")
        if shape not in _CHUNKS[a]:
            raise emitter.error(f"mma shape .{shape} of .{a} is not supported")
        emitter.namespace["matrix_multiply"] = matrix_multiply
        emitter.namespace[f"operands_{a}"] = OPERAND_TYPES[a]
        return a, _CHUNKS[a][shape]

    # Output

    def _products(self) -> list[list[list[_Chain]]]:
        """Arranges the chains in rectangles of m x n, in which each row has the same A operands and
        each column the same B operands."""
        rows: dict[tuple[tuple[str, int], tuple[Words, ...]], list[_Chain]] = {}
        for chain in self.chains:
            rows.setdefault((chain.flavour, tuple(chain.a)), []).append(chain)
        rectangles: dict[object, list[list[_Chain]]] = {}
        for (flavour, _), chains in rows.items():
            columns = tuple(tuple(chain.b) for chain in chains)
            rectangles.setdefault((flavour, columns), []).append(chains)
        return list(rectangles.values())

    def _emit_product(self, rows: list[list[_Chain]]) -> None:
        emitter = self.emitter
        first = rows[0][0]
        emitter.instruction = first.instruction
        kind, chunks = first.flavour
        a = ", ".join(word for row in rows for words in row[0].a for word in words)
        b = ", ".join(word for chain in rows[0] for words in chain.b for word in words)
        c = ", ".join(word for row in rows for chain in row for word in chain.addend)
        shape = (len(rows), len(rows[0]), len(first.a), chunks)
        results = [name for row in rows for chain in row for name in chain.results]
        targets = ", ".join(emitter.name(name) for name in results)
        emitter.emit("if not G.whole: G.require_whole('mma.sync')")
        operands = f"operands_{kind}, ({a},), ({b},), ({c},)"
        emitter.emit(f"{targets} = matrix_multiply({operands}, {shape}, nt, W.tensor_core)")
        for name in results:
            if emitter.storage_of(name) != "f4":
                python = emitter.name(name)
                emitter.emit(f"{python} = {python}.view({emitter.storage_of(name)})")


def _replace_name(expression: str, name: str, copy: str) -> str:
    head, dot, tail = expression.partition(".")
    return copy + dot + tail if head == name else expression
