"""Translates wmma: products of 16 x 16 matrices, and the loads and stores of the matrices'
fragments.

PTX does not define which register holds which element. Here fragments have the layout of mma.sync
m16n8k16, and two of these instructions compute one wmma. PTX gives some fragments twice as many
registers as needed; the upper half then holds copies.
"""

from __future__ import annotations

from typing import Any

from ptxlab.machine.fragments import matrix_multiply
from ptxlab.machine.numeric import u4
from ptxlab.machine.tensor_cores import OPERAND_TYPES
from ptxlab.ptx.syntax import TYPE_SIZES, Instruction, Operand, Vector
from ptxlab.translate.emitter import DTYPES, Emitter, Handler
from ptxlab.translate.opcodes_memory import kept, see

_SPACES = ("global", "shared")
_FORMATS = ("f16", "bf16")


def matrix(t: Emitter, i: Instruction) -> None:
    """wmma.load, wmma.store and wmma.mma of m16n16k16."""
    modifiers = ["shared" if m == "shared::cta" else m for m in i.modifiers]
    if "m16n16k16" not in modifiers or modifiers[:1] not in (["load"], ["store"], ["mma"]):
        raise t.error(f"{i.mnemonic} is not supported")
    if i.guard is not None:
        raise t.error(f"{i.mnemonic} under a guard is not supported")
    t.emit(f"if not G.whole: G.require_whole('wmma.{modifiers[0]}')")
    if modifiers[0] == "mma":
        _multiply(t, i)
    else:
        _transfer(t, i, modifiers)


def _elements(t: Emitter, operand: Operand, *counts: int) -> tuple[Operand, ...]:
    elements = operand.elements if isinstance(operand, Vector) else ()
    if len(elements) not in counts:
        raise t.error(f"{' or '.join(map(str, counts))} registers expected, got {len(elements)}")
    return elements


# Loads and stores


def _transfer(t: Emitter, i: Instruction, modifiers: list[str]) -> None:
    action, which, *rest = modifiers
    layout = [m for m in rest if m in ("row", "col")]
    space = next((m for m in rest if m in _SPACES), "generic")
    kind = rest[-1]
    known = {"sync", "aligned", "m16n16k16", *layout, space, kind}
    wide = kind == "f32"
    if len(layout) != 1 or set(rest) - known or (kind not in _FORMATS and not wide):
        raise t.error(f"{i.mnemonic} is not supported")
    if which not in (("d",) if action == "store" else ("a", "b", "c")) or (which in "ab" and wide):
        raise t.error(f"{i.mnemonic} is not supported")
    fragment, target, *stride = i.operands if action == "load" else (
        i.operands[1], i.operands[0], *i.operands[2:]
    )  # fmt: skip
    counts = (4, 8) if which in "ab" else (8,) if wide else (4,)
    registers = _elements(t, fragment, *counts)
    address, held = t.address(target)
    begin, step, lane = t.temporary(), t.temporary(), t.temporary()
    t.emit(f"{begin} = {address}")
    t.emit(f"{step} = {t.use(stride[0], 'u32') if stride else t.constant(16, 'u4')}")
    t.emit(f"{lane} = G.special('%laneid')")
    by_row = layout[0] == "row"
    # The two values of a register are neighbours in a row of A, C and D, but in a column of B.
    whole = wide or by_row == (which != "b")
    size = TYPE_SIZES[kind] if wide or not whole else 4
    for number, register in enumerate(registers):
        places = []
        for half in range(1 if whole else 2):
            offset = f"wmma_offset({which!r}, {number}, {half}, {wide}, {by_row}, {lane}, {step})"
            place = kept(t, f"({begin} + ({offset} * u4({TYPE_SIZES[kind]})).astype({held}))")
            mask = see(t, space, "read" if action == "load" else "write", place, str(size))
            places.append((place, mask))
        if action == "load":
            _load(t, register, space, size, places, wide)
        else:
            _store(t, register, space, size, places, wide)


def _load(
    t: Emitter, register: Operand, space: str, size: int, places: list[Any], wide: bool
) -> None:
    words = [f"W.load(G, {space!r}, {place}, {size}, {mask})" for place, mask in places]
    if wide:
        t.define(register, f"{words[0]}.view(f4)", "f4")
    else:
        t.define(register, words[0] if size == 4 else f"pack16({words[0]}, {words[1]})", "u4")


def _store(
    t: Emitter, register: Operand, space: str, size: int, places: list[Any], wide: bool
) -> None:
    value = t.use(register, "b32")
    values = [value] if wide or size == 4 else [f"low16({value})", f"high16({value})"]
    for (place, mask), each in zip(places, values, strict=True):
        t.emit(f"W.store(G, {space!r}, {place}, {size}, {each}, {mask})")


def wmma_offset(
    which: str, register: int, half: int, wide: bool, by_row: bool, lane: Any, stride: Any
) -> Any:
    """Returns, for each thread, the position in the matrix, in elements, of the value in a register
    or in one half of a register.

    As in mma.sync, g = lane // 4 and t = lane % 4. Tiles of B, C and D are eight columns wide.
    """
    g, t = lane >> u4(2), lane & u4(3)
    pair = t * u4(2) + u4(half)
    if which == "a":
        r = register % 4
        row, column = g + u4(8 * (r % 2)), pair + u4(8 * (r // 2))
    elif which == "b":
        r = register % 4
        row, column = pair + u4(8 * (r % 2)), g + u4(8 * (r // 2))
    elif wide:
        tile, r = divmod(register, 4)
        row, column = g + u4(8 * (r // 2)), t * u4(2) + u4(r % 2 + 8 * tile)
    else:
        tile, r = divmod(register, 2)
        row, column = g + u4(8 * r), pair + u4(8 * tile)
    return row * stride + column if by_row else column * stride + row


# Products


def _multiply(t: Emitter, i: Instruction) -> None:
    types = [m for m in i.modifiers if m in TYPE_SIZES]
    rest = [m for m in i.modifiers if m not in types]
    # If the mnemonic has only two types, these are the types of D and C; A and B are then f16.
    given = {2: "f16", 4: types[1] if len(types) == 4 else ""}.get(len(types), "")
    layouts = rest[3:5]
    if given not in _FORMATS or rest[1:3] != ["sync", "aligned"] or len(rest) != 6:
        raise t.error(f"{i.mnemonic} is not supported")
    if not set(layouts) <= {"row", "col"} or not {types[0], types[-1]} <= {"f16", "f32"}:
        raise t.error(f"{i.mnemonic} is not supported")
    d, a, b, c = i.operands
    t.namespace["matrix_multiply"] = matrix_multiply
    t.namespace[f"operands_{given}"] = OPERAND_TYPES[given]
    if "f16" in (types[0], types[-1]):
        t.emit("W.require_float_sums('wmma.mma with .f16 sums')")
    left = ", ".join(t.use(e, "b32") for e in _elements(t, a, 4, 8)[:4])
    right = ", ".join(t.use(e, "b32") for e in _elements(t, b, 4, 8)[:4])
    sums = ", ".join(_sums(t, c, types[-1]))
    rows = t.temporary()
    operands = f"({left},), ({right},), ({sums},)"
    t.emit(
        f"{rows} = matrix_multiply(operands_{given}, {operands}, (1, 2, 1, 2), nt, W.tensor_core)"
    )
    if types[0] == "f32":
        for number, register in enumerate(_elements(t, d, 8)):
            t.define(register, f"{rows}[{number}]", DTYPES["f32"])
        return
    for number, register in enumerate(_elements(t, d, 4)):
        halves = ", ".join(f"float_to_half({rows}[{2 * number + k}])" for k in (0, 1))
        t.define(register, f"pack16({halves})", "u4")


def _sums(t: Emitter, c: Operand, kind: str) -> list[str]:
    if kind == "f32":
        return [t.use(element, "f32") for element in _elements(t, c, 8)]
    found = []
    for element in _elements(t, c, 4):
        pair = t.temporary()
        t.emit(f"{pair} = unpack_halves({t.use(element, 'b32')})")
        found += [f"{pair}[0]", f"{pair}[1]"]
    return found


HANDLERS: dict[str, Handler] = {"wmma": matrix}
CALLED = {"wmma_offset": wmma_offset}
