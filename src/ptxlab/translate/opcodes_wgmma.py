"""Translates wgmma: matrix products, groups and fences."""

from __future__ import annotations

import re

from ptxlab.machine.tensor_cores import OPERAND_TYPES
from ptxlab.machine.warpgroup_mma import Form
from ptxlab.ptx.syntax import Immediate, Instruction, Operand, Register, Vector
from ptxlab.translate.emitter import Emitter, Handler
from ptxlab.translate.register_hazards import fragment_of

_SHAPE = re.compile(r"m64n(\d+)k16$")


def wgmma(t: Emitter, i: Instruction) -> None:
    """wgmma.mma_async, .fence, .commit_group and .wait_group."""
    action, *rest = i.modifiers
    if i.guard is not None:
        raise t.error(f"{i.mnemonic} under a guard is not supported")
    if rest[:2] != ["sync", "aligned"]:
        raise t.error(f"{i.mnemonic} is not supported")
    if action == "mma_async":
        _product(t, i, rest[2:])
    elif action == "fence":
        t.emit("G.require_whole('wgmma.fence')")
    elif action == "commit_group":
        t.emit("W.wgmma.commit(G)")
    elif action == "wait_group":
        _wait(t, i)
    else:
        raise t.error(f"{i.mnemonic} is not supported")


def _product(t: Emitter, i: Instruction, modifiers: list[str]) -> None:
    shape = _SHAPE.match(modifiers[0]) if modifiers else None
    if not shape or modifiers[1:] not in (["f32", "f16", "f16"], ["f32", "bf16", "bf16"]):
        raise t.error(f"{i.mnemonic} is not supported")
    n = int(shape[1])
    d, a, b, scale_d, *literals = i.operands
    registers = _names(d)
    in_registers = isinstance(a, Vector)
    if n % 8 or not 8 <= n <= 256 or len(registers) != n // 2:
        raise t.error(f"a product with {len(registers)} accumulators and n = {n}")
    numbers = [int(x.value) for x in literals if isinstance(x, Immediate)]
    if len(numbers) != (3 if in_registers else 4) or len(numbers) != len(literals):
        raise t.error("scales and transpositions must be literals")
    negate_a, negate_b, *major = numbers
    major_a = 0 if in_registers else major[0]
    form = Form(
        n, OPERAND_TYPES[modifiers[2]], negate_a == -1, negate_b == -1, major_a == 0,
        major[-1] == 0, fragment_of(i),
    )  # fmt: skip
    name = f"F{i.index}"
    t.namespace[name] = form
    unfenced = t.hazards.unfenced.get(i.index) if t.hazards else None
    if unfenced:
        t.emit(f"W.wgmma.unfenced(G, {t.site()}, {_words(unfenced)!r})")
    left = "".join(f"{t.name(register)}, " for register in registers)
    if in_registers:
        first = "(" + "".join(f"{t.use(e, 'b32')}, " for e in a.elements) + ")"  # type: ignore[union-attr]
    else:
        first = t.use(a, "b64")
    accumulate = t.use(scale_d, "pred")
    t.emit(
        f"({left}) = W.wgmma.issue(G, {t.site()}, {name}, ({left}), {first}, "
        f"{t.use(b, 'b64')}, {accumulate})"
    )


def _words(registers: tuple[str, ...]) -> str:
    if "no fence" in registers:
        return "the kernel's beginning and its first wgmma on some path"
    shown = ", ".join(registers[:4]) + (", ..." if len(registers) > 4 else "")
    return f"accesses to {shown} and this wgmma on some path"


def _names(operand: Operand) -> tuple[str, ...]:
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    return tuple(e.name for e in elements if isinstance(e, Register))


def _wait(t: Emitter, i: Instruction) -> None:
    count = i.operands[0]
    if not isinstance(count, Immediate):
        raise t.error("the number of groups must be a literal")
    registers = t.hazards.waits.get(i.index, ()) if t.hazards else ()
    left = "".join(f"{t.name(register)}, " for register in registers)
    target = f"({left}) = " if left else ""
    t.emit("if W.interrupted(): yield None")
    t.emit(f"{target}W.wgmma.wait(G, {t.site()}, {int(count.value)}, ({left}))")
    for register in registers:
        if t.storage_of(register) == "u4":
            name = t.name(register)
            t.emit(f"if type({name}) is not InFlight: {name} = {name}.view(u4)")


HANDLERS: dict[str, Handler] = {"wgmma": wgmma}
