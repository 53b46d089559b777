"""Translates all forms of cp.async.bulk."""

from __future__ import annotations

import re

from ptxlab.ptx.syntax import Address, Immediate, Instruction, Operand, Vector
from ptxlab.translate.emitter import Emitter
from ptxlab.translate.opcodes_integer import no_more

_DIMENSIONS = re.compile(r"[1-5]d$")
_TO_SHARED = ["mbarrier::complete_tx::bytes"]
_HINT, _MULTICAST = "L2::cache_hint", "multicast::cluster"


def bulk(t: Emitter, i: Instruction) -> None:
    """Copies, reductions and bulk groups. Prefetches have no effect."""
    modifiers = [m for m in i.modifiers if m not in ("reduce", "async", "bulk")]
    if modifiers[:1] == ["prefetch"]:
        return
    if modifiers == ["commit_group"]:
        t.emit(f"W.bulk.commit(G, {t.mask() or 'None'})")
    elif modifiers[:1] == ["wait_group"]:
        read = modifiers[1:2] == ["read"]
        no_more(t, i, modifiers[2:] if read else modifiers[1:])
        count = i.operands[0]
        if not isinstance(count, Immediate):
            raise t.error("the number of groups must be a literal")
        on = t.mask() or "None"
        t.emit(f"W.bulk.wait(G, {t.site()}, {int(count.value)}, {on}, read={read})")
    elif i.modifiers[0] == "reduce":
        _reduce(t, i, modifiers)
    else:
        _copy(t, i, modifiers)


def _reduce(t: Emitter, i: Instruction, modifiers: list[str]) -> None:
    """Adds fp32 numbers from shared memory to global memory. No other reduction is supported."""
    operands = list(i.operands)
    dimensions, modifiers = _dimensions(t, i, modifiers)
    if _HINT in modifiers:
        operands.pop()
    rest = [m for m in modifiers if m != _HINT]
    # With a tensor map, the map defines the element type, and the operation comes before the
    # completion mechanism.
    wanted = ["add", "bulk_group"] if dimensions else ["bulk_group", "add", "f32"]
    if rest != ["global", "shared::cta", *wanted]:
        raise t.error(f"{i.mnemonic} is not supported; use .add on .f32")
    _store(t, operands, dimensions, add=True)


def _dimensions(t: Emitter, i: Instruction, modifiers: list[str]) -> tuple[int, list[str]]:
    """Returns the dimensions of the tensor's box (0 for plain bytes) and the remaining
    modifiers."""
    if modifiers[:1] != ["tensor"]:
        return 0, modifiers
    if not _DIMENSIONS.match(modifiers[1]):
        raise t.error(f"{i.mnemonic} is not supported")
    return int(modifiers[1][0]), [m for m in modifiers[2:] if m != "tile"]


def _copy(t: Emitter, i: Instruction, modifiers: list[str]) -> None:
    dimensions, modifiers = _dimensions(t, i, modifiers)
    operands = list(i.operands)
    if _HINT in modifiers:
        operands.pop()
    rest = [m for m in modifiers if m not in (_HINT, _MULTICAST)]
    spaces, completion = rest[:2], rest[2:]
    if spaces[1:] == ["global"] and spaces[0] in ("shared::cluster", "shared::cta"):
        if completion != _TO_SHARED:
            raise t.error(f"{i.mnemonic} is not supported")
        ranks = t.use(operands.pop(), "u16") if _MULTICAST in modifiers else "None"
        _load(t, operands, dimensions, ranks)
    elif spaces == ["shared::cluster", "shared::cta"] and modifiers == [*spaces, *_TO_SHARED]:
        _copy_shared(t, operands)
    elif spaces == ["global", "shared::cta"] and completion == ["bulk_group"]:
        _store(t, operands, dimensions, add=False)
    else:
        raise t.error(f"{i.mnemonic} is not supported")


def _load(t: Emitter, operands: list[Operand], dimensions: int, ranks: str) -> None:
    to = t.address(operands[0])[0]
    barrier = t.address(operands[-1])[0]
    on = t.mask() or "None"
    if dimensions:
        tensor_map, coordinates = _tensor_operand(t, operands[1], dimensions)
        t.emit(
            f"W.bulk.load_tensor(G, {t.site()}, {dimensions}, {to}, {tensor_map}, {coordinates}, "
            f"{barrier}, {on}, {ranks})"
        )
    else:
        source, size = t.address(operands[1])[0], t.use(operands[2], "u32")
        t.emit(
            f"W.bulk.load_range(G, {t.site()}, {to}, {source}, {size}, {barrier}, {on}, {ranks})"
        )


def _copy_shared(t: Emitter, operands: list[Operand]) -> None:
    """Copies plain bytes to another CTA's shared memory and completes on an mbarrier there."""
    to, source, barrier = (t.address(operands[i])[0] for i in (0, 1, 3))
    size = t.use(operands[2], "u32")
    t.emit(
        f"W.bulk.copy_shared(G, {t.site()}, {to}, {source}, {size}, {barrier}, "
        f"{t.mask() or 'None'})"
    )


def _store(t: Emitter, operands: list[Operand], dimensions: int, *, add: bool) -> None:
    source = t.address(operands[1])[0]
    on = t.mask() or "None"
    if dimensions:
        tensor_map, coordinates = _tensor_operand(t, operands[0], dimensions)
        t.emit(
            f"W.bulk.store_tensor(G, {t.site()}, {dimensions}, {tensor_map}, {coordinates}, "
            f"{source}, {on}, add={add})"
        )
    else:
        target, size = t.address(operands[0])[0], t.use(operands[2], "u32")
        t.emit(f"W.bulk.store_range(G, {t.site()}, {target}, {source}, {size}, {on}, add={add})")


def store_to_peer(t: Emitter, i: Instruction) -> None:
    """st.async: copies 16 bytes from registers to shared memory of the cluster and completes on an
    mbarrier there."""
    modifiers = [m for m in i.modifiers if m not in ("async", "weak")]
    if modifiers != ["shared::cluster", *_TO_SHARED, "v4", "b32"]:
        raise t.error(f"{i.mnemonic} is not supported; use .v4.b32")
    target, source, barrier = i.operands
    elements = source.elements if isinstance(source, Vector) else ()
    if len(elements) != 4:
        raise t.error(f"4 values expected, got {len(elements)}")
    words = "".join(f"{t.use(element, 'b32')}, " for element in elements)
    t.emit(
        f"W.bulk.store_words(G, {t.site()}, {t.address(target)[0]}, ({words}), "
        f"{t.address(barrier)[0]}, {t.mask() or 'None'})"
    )


def _tensor_operand(t: Emitter, operand: Operand, dimensions: int) -> tuple[str, str]:
    """Returns the Python expressions for ``[map, {coordinates}]``."""
    if not isinstance(operand, Address) or len(operand.coordinates) != 1:
        raise t.error("expected a tensor map with coordinates")
    (vector,) = operand.coordinates
    elements = vector.elements if isinstance(vector, Vector) else (vector,)
    if len(elements) != dimensions:
        raise t.error(f"{dimensions} coordinates expected, got {len(elements)}")
    tensor_map = t.address(Address(operand.base, operand.offset))[0]
    return tensor_map, "(" + "".join(f"{t.use(e, 'u32')}, " for e in elements) + ")"
