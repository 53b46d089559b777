"""Translates the opcodes that move tiles: ldmatrix, stmatrix and asynchronous copies."""

from __future__ import annotations

from ptxlab.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Vector,
)
from ptxlab.translate.emitter import Emitter, Handler
from ptxlab.translate.opcodes_bulk import bulk
from ptxlab.translate.opcodes_integer import no_more
from ptxlab.translate.opcodes_memory import define_rows, kept, see


def _matrix_form(t: Emitter, i: Instruction) -> tuple[int, bool]:
    modifiers = list(i.modifiers)
    counts = [m for m in modifiers if m in ("x1", "x2", "x4")]
    transposed = "trans" in modifiers
    known = {"sync", "aligned", "m8n8", "shared", "shared::cta", "b16", "trans", *counts}
    no_more(t, i, [m for m in modifiers if m not in known])
    if len(counts) != 1 or "m8n8" not in modifiers:
        raise t.error(f"{i.mnemonic} is not supported")
    return int(counts[0][1]), transposed


def load_matrix(t: Emitter, i: Instruction) -> None:
    """ldmatrix.sync.aligned.m8n8.x1/x2/x4, with .trans."""
    count, transposed = _matrix_form(t, i)
    d, source = i.operands
    mask = t.mask()
    rows = t.temporary()
    if count == 4 and mask is None and not t.observed and isinstance(source, Address):
        base = _row_base(t, source)
        t.emit(f"{rows} = W.load_rows(G, {base}, {source.offset}, {transposed})")
    else:
        address = kept(t, t.address(source)[0])
        allowed = see(t, "shared", "read", address, str(8 * count), "matrix")
        t.emit(f"{rows} = W.load_matrix(G, {address}, {count}, {transposed}, {allowed})")
    define_rows(t, d, rows, "u4")


def _row_base(t: Emitter, source: Address) -> str:
    """Returns the checked rows of an address register; all matrices that are read through the
    register share them."""
    base = source.base
    if not isinstance(base, Register):
        return f"W.rows(G, {t.address(Address(base))[0]})"
    name = t.shared_rows.get(base.name)
    if name is None:
        name = t.shared_rows[base.name] = t.temporary()
        t.emit(f"{name} = W.rows(G, {t.address(Address(base))[0]})")
    return name


def store_matrix(t: Emitter, i: Instruction) -> None:
    """stmatrix.sync.aligned.m8n8.x1/x2/x4, with .trans."""
    count, transposed = _matrix_form(t, i)
    target, source = i.operands
    elements = source.elements if isinstance(source, Vector) else (source,)
    if len(elements) != count:
        raise t.error(f"{count} registers expected, got {len(elements)}")
    address = kept(t, t.address(target)[0])
    mask = see(t, "shared", "write", address, str(8 * count), "matrix")
    values = ", ".join(t.use(element, "b32") for element in elements)
    t.emit(f"W.store_matrix(G, {address}, ({values},), {transposed}, {mask})")


# Asynchronous copies


def copy_async(t: Emitter, i: Instruction) -> None:
    """cp.async.ca, cp.async.cg and their groups; opcodes_bulk handles bulk copies."""
    modifiers = [m for m in i.modifiers if not m.startswith("L2::")]
    if "bulk" in modifiers[1:3]:
        bulk(t, i)
    elif modifiers == ["async", "commit_group"]:
        _only_unguarded(t, i)
        t.emit(f"W.commit(G, {t.site()})")
    elif modifiers == ["async", "wait_all"]:
        _only_unguarded(t, i)
        t.emit(f"W.wait_async(G, {t.site()}, -1)")
    elif modifiers == ["async", "wait_group"]:
        _only_unguarded(t, i)
        count = i.operands[0]
        if not isinstance(count, Immediate):
            raise t.error("the number of groups must be a literal")
        t.emit(f"W.wait_async(G, {t.site()}, {int(count.value)})")
    elif modifiers[1:2] and modifiers[1] in ("ca", "cg"):
        _copy(t, i, modifiers)
    else:
        raise t.error(f"{i.mnemonic} is not supported")


def _only_unguarded(t: Emitter, i: Instruction) -> None:
    if i.guard is not None:
        raise t.error(f"{i.mnemonic} under a guard is not supported")


def _copy(t: Emitter, i: Instruction, modifiers: list[str]) -> None:
    known = ("async", "ca", "cg", "shared", "shared::cta", "global")
    no_more(t, i, [m for m in modifiers if m not in known])
    target, source, length, *rest = i.operands
    if "L2::cache_hint" in i.modifiers:
        rest = rest[:-1]
    if not isinstance(length, Immediate) or length.value not in (4, 8, 16):
        raise t.error("cp.async copies 4, 8 or 16 bytes")
    size = int(length.value)
    source_size = _source_size(t, size, rest)
    to, of = t.temporary(), t.temporary()
    t.emit(f"{to} = {t.address(target)[0]}")
    t.emit(f"{of} = {t.address(source)[0]}")
    mask = see(t, "shared", "async_write", to, str(size))
    if t.observed:
        # The check of the source removes further threads from the mask that the check of the
        # destination returned.
        read = source_size if source_size != "None" else str(size)
        mask_after = t.temporary()
        t.emit(
            f"{mask_after} = W.see(G, {t.site()}, 'global', 'async_read', {of}, {read}, 'plain', "
            f"{mask})"
        )
        mask = mask_after
    t.emit(f"W.copy_async(G, {t.site()}, {to}, {of}, {size}, {source_size}, {mask})")


def _source_size(t: Emitter, size: int, rest: list[Operand]) -> str:
    """Returns the Python expression for the bytes to read ("None": all), given by src-size or by an
    ignore-src predicate."""
    if not rest:
        return "None"
    operand = rest[0]
    ignores = isinstance(operand, Register) and t.storage_of(operand.name) == "b1"
    if ignores:
        zero, full = t.constant(0, "u4"), t.constant(size, "u4")
        return f"select({t.use(operand, 'pred')}, {zero}, {full})"
    if isinstance(operand, Immediate) and operand.value == size:
        return "None"
    return t.use(operand, "u32")


HANDLERS: dict[str, Handler] = {
    "ldmatrix": load_matrix,
    "stmatrix": store_matrix,
    "cp": copy_async,
}
