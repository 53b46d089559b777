"""Replaces calls and bar.red with simpler instructions.

- A call to a function of the module is replaced by the function's body. The .param variables of
  calls become local memory of the thread.
- ``bar.red`` becomes a barrier with a vote, followed by the pseudo-instruction ``barrier_result``,
  which reads the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ptxlab.errors import EmulatorError
from ptxlab.ptx.parser import ParsedModule
from ptxlab.ptx.syntax import (
    Address,
    Entry,
    Guard,
    Instruction,
    Label,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)

#: The opcode of the second half of a bar.red, which does not count as an instruction.
BARRIER_RESULT = "barrier_result"


def lowered(module: ParsedModule, entry: Entry) -> Entry:
    """Returns the entry with calls and bar.red replaced; ``entry`` itself if it contains neither.

    Raises EmulatorError for a recursive function.
    """
    if not any(_is_call(i) or _reduces(i) for i in entry.instructions):
        return entry
    lowering = _Lowering(module)
    lowering.add(entry, _Names("", entry, {}), end=None, callers=(entry.name,))
    for number, instruction in enumerate(i for i in lowering.body if isinstance(i, Instruction)):
        instruction.index = number
    return Entry(
        entry.name,
        entry.parameters,
        tuple(lowering.variables.values()),
        lowering.registers,
        lowering.body,
        entry.directives,
    )


def _is_call(instruction: Instruction) -> bool:
    return instruction.opcode == "call"


def _reduces(instruction: Instruction) -> bool:
    return instruction.opcode in ("bar", "barrier") and "red" in instruction.modifiers


@dataclass(frozen=True)
class _Names:
    """Maps the names in a function's body to the names in one copy of the body.

    ``symbols`` maps the function's parameters to variables of the caller.
    """

    suffix: str
    entry: Entry
    symbols: Mapping[str, str]

    def register(self, name: str) -> str:
        if not self.suffix:
            return name
        plain, _, scope = name.partition("@")
        return f"{plain}@{scope}{self.suffix}"

    def symbol(self, name: str) -> str:
        return self.symbols.get(name, name)

    def operand(self, operand: Operand) -> Operand:
        if isinstance(operand, Register):
            return Register(self.register(operand.name))
        if isinstance(operand, Symbol):
            return Symbol(self.symbol(operand.name))
        if isinstance(operand, Negated):
            return Negated(Register(self.register(operand.operand.name)))
        if isinstance(operand, Pair):
            return Pair(self.operand(operand.first), self.operand(operand.second))
        if isinstance(operand, Vector):
            return Vector(tuple(map(self.operand, operand.elements)))
        if isinstance(operand, Address):
            coordinates = tuple(map(self.operand, operand.coordinates))
            return Address(self.operand(operand.base), operand.offset, coordinates)
        return operand


class _Lowering:
    """Builds the lowered entry."""

    def __init__(self, module: ParsedModule) -> None:
        self.module = module
        self.body: list[Instruction | Label] = []
        self.variables: dict[str, Variable] = {}
        self.registers: dict[str, str] = {}
        self.copies = 0

    def add(self, entry: Entry, names: _Names, end: str | None, callers: tuple[str, ...]) -> None:
        """Adds a copy of the body of an entry or function.

        For a function, ``end`` is the label after the copy.
        """
        own = dict(names.symbols)
        for variable in entry.variables:
            # A function's shared variable exists only once, even if the function is called several
            # times.
            if variable.space in ("local", "param"):
                own[variable.name] = variable.name + names.suffix
                variable = replace(variable, name=own[variable.name], space="local")
            self.variables[variable.name] = variable
        own |= {item.name: item.name + names.suffix for item in entry.body if type(item) is Label}
        names = replace(names, symbols=own)
        for name, kind in entry.registers.items():
            self.registers[names.register(name)] = kind
        for item in entry.body:
            if isinstance(item, Label):
                self.body.append(Label(names.symbol(item.name)))
            elif _is_call(item):
                self._call(item, names, callers)
            elif _reduces(item):
                self._reduce(item, names)
            elif item.opcode == "ret" and end is not None:
                self._emit(item, names, "bra", (Symbol(end),))
            else:
                self._emit(item, names)

    def _emit(
        self,
        item: Instruction,
        names: _Names,
        mnemonic: str = "",
        operands: tuple[Operand, ...] | None = None,
    ) -> None:
        """Adds a copy of an instruction, or a replacement with the same location and guard."""
        if operands is None:
            operands = tuple(map(names.operand, item.operands))
        mnemonic = mnemonic or item.mnemonic
        if any(self._is_parameter_of_a_call(operand) for operand in operands):
            mnemonic = mnemonic.replace(".param", ".local")
        guard = item.guard and Guard(
            Register(names.register(item.guard.register.name)), item.guard.negated
        )
        opcode, *modifiers = mnemonic.split(".")
        self.body.append(
            replace(
                item,
                mnemonic=mnemonic,
                opcode=opcode,
                modifiers=tuple(modifiers),
                operands=operands,
                guard=guard,
            )
        )

    def _is_parameter_of_a_call(self, operand: Operand) -> bool:
        base = operand.base if isinstance(operand, Address) else None
        return isinstance(base, Symbol) and base.name in self.variables

    def _call(self, item: Instruction, names: _Names, callers: tuple[str, ...]) -> None:
        callee, *rest = item.operands
        if not isinstance(callee, Symbol):
            raise EmulatorError(
                f"PTX line {item.ptx_line}: calls through pointers are not supported"
            )
        name = callee.name
        if name not in self.module.function_heads:
            self._emit(item, names, operands=(callee,))
            return
        if name in callers:
            raise EmulatorError(
                f"PTX line {item.ptx_line}: {name} calls itself; recursive functions are not "
                "supported"
            )
        function = self.module.function(name)
        formal = [p.name for p in (*function.results, *function.parameters)]
        given = [one for part in rest if isinstance(part, Vector) for one in part.elements]
        if len(formal) != len(given) or not all(isinstance(one, Symbol) for one in given):
            raise EmulatorError(f"PTX line {item.ptx_line}: this call of {name} is not supported")
        self.copies += 1
        suffix = f"~{self.copies}"
        end = f"end{suffix}"
        if item.guard is not None:
            skip = replace(item, guard=replace(item.guard, negated=not item.guard.negated))
            self._emit(skip, names, "bra", (Symbol(end),))
        symbols = {
            name: names.symbol(one.name)
            for name, one in zip(formal, given, strict=True)
            if isinstance(one, Symbol)
        }
        self.add(function, _Names(suffix, function, symbols), end, (*callers, name))
        self.body.append(Label(end))

    def _reduce(self, item: Instruction, names: _Names) -> None:
        result, *arguments = item.operands
        self._emit(item, names, operands=tuple(map(names.operand, arguments)))
        mode = next((m for m in item.modifiers if m in ("popc", "and", "or")), "")
        operands = names.operand(result), names.operand(arguments[0])
        self._emit(item, names, f"{BARRIER_RESULT}.{mode}", operands)
