"""Broken variants of kernels that use bulk copies, mbarriers, wgmma and clusters."""

from __future__ import annotations

import re

from mutants import (
    Mutation,
    MutationSite,
    Operator,
    bump,
    drop,
    exchange,
    guard_text,
    replace_operand,
    take_from_earlier,
    weaken_wait,
)

from ptxlab.ptx.syntax import Address, Immediate, Register, Vector

_BARRIER_BYTES = 8
_BOX_STEP = 128
# What ldmatrix reads in, and a row of a swizzled panel.
_CHUNK_BYTES, _PANEL_ROW_BYTES = 16, 128
_LEADING, _STRIDE, _BASE, _SWIZZLE = 16, 32, 49, 62


def _written(register: Register) -> str:
    """A register as the text has it; the parser adds the scope to names of inline assembly."""
    return register.name.partition("@")[0]


def _without(*texts: str) -> Mutation:
    """Drops the instruction unless one of these is in its mnemonic."""

    def mutate(site: MutationSite) -> str | None:
        return None if any(t in site.instruction.mnemonic for t in texts) else drop(site)

    return mutate


def _twice(site: MutationSite) -> str | None:
    if "expect_tx" in site.instruction.mnemonic:
        return None
    return f"{site.text} {site.text}"


def _reads_only(site: MutationSite) -> str | None:
    """A wait for bulk copies that lets their writes be under way."""
    if ".read" in site.instruction.mnemonic:
        return None
    return site.text.replace("wait_group", "wait_group.read")


def _true(operand: int) -> Mutation:
    """The predicate at an operand's place is true, without the instruction."""

    def mutate(site: MutationSite) -> str | None:
        result = site.instruction.operands[operand]
        if not isinstance(result, Register):
            return None
        return f"{guard_text(site.instruction)}setp.eq.u32 {_written(result)}, 0, 0;"

    return mutate


def _changed(operand: int, kind: str, instruction: str, constant: int) -> Mutation:
    """An operand goes through another instruction with a constant first."""

    def mutate(site: MutationSite) -> str | None:
        operands = site.instruction.operands
        value = operands[operand] if operand < len(operands) else None
        if isinstance(value, Immediate):
            name = value.text
        elif isinstance(value, Register):
            name = _written(value)
        else:
            return None
        text = replace_operand(site.text, operand, "changed")
        return f"{{ .reg .{kind} changed; {instruction} changed, {name}, {constant}; {text} }}"

    return mutate


def _descriptor(operand: int, instruction: str, constant: int) -> Mutation:
    return _changed(operand, "b64", instruction, constant)


def _leading_offset(site: MutationSite) -> str | None:
    """A K-major B in a swizzle does not use its leading offset."""
    if _majors(site)[1] == 0:
        return None
    return _descriptor(2, "add.s64", 8 << _LEADING)(site)


def _majors(site: MutationSite) -> tuple[int, int]:
    """The literals of a wgmma that say which operands are transposed."""
    instruction = site.instruction
    literals = [int(x.value) for x in instruction.operands if isinstance(x, Immediate)]
    in_registers = isinstance(instruction.operands[1], Vector)
    return (0 if in_registers else literals[-2], literals[-1])


def _transpose_b(site: MutationSite) -> str | None:
    flipped = 1 - _majors(site)[1]
    return re.sub(r"\d+\s*;$", f"{flipped};", site.text)


def _scale_d(value: int) -> Mutation:
    """The product always, or never, adds to its accumulators."""

    def mutate(site: MutationSite) -> str | None:
        text = replace_operand(site.text, 3, "always")
        return f"{{ .reg .pred always; setp.eq.u32 always, {value}, 1; {text} }}"

    return mutate


def _coordinate(place: int) -> Mutation:
    """A bulk copy's box moves by one along a dimension."""

    def mutate(site: MutationSite) -> str | None:
        match = re.search(r"\{([^}]*)\}", site.text)
        if not match:
            return None
        parts = [part.strip() for part in match[1].split(",")]
        if place >= len(parts):
            return None
        old, parts[place] = parts[place], "moved"
        text = site.text[: match.start(1)] + ", ".join(parts) + site.text[match.end(1) :]
        return f"{{ .reg .b32 moved; add.s32 moved, {old}, 1; {text} }}"

    return mutate


def _own_address(site: MutationSite) -> str | None:
    result, address = site.instruction.operands[:2]
    if not isinstance(result, Register) or not isinstance(address, Register):
        return None
    return f"{guard_text(site.instruction)}mov.b32 {_written(result)}, {_written(address)};"


def _only_if(text: str, mutation: Mutation) -> Mutation:
    def mutate(site: MutationSite) -> str | None:
        return mutation(site) if text in site.instruction.mnemonic else None

    return mutate


def _arrival_elsewhere(site: MutationSite) -> str | None:
    if not any(isinstance(operand, Address) for operand in site.instruction.operands[1:2]):
        return None
    return bump(1, _BARRIER_BYTES)(site)


_FENCES = ("wgmma.fence", "fence.proxy.async", "fence.mbarrier_init")
_COMMITS = ("wgmma.commit_group", "cp.async.bulk.commit_group")
_WAITS = ("wgmma.wait_group", "cp.async.bulk.wait_group")
_PHASE = ("mbarrier.try_wait.parity", "mbarrier.test_wait.parity")
_ARRIVE = ("mbarrier.arrive",)
_LOADS = tuple(f"cp.async.bulk.tensor.{d}d.shared" for d in range(1, 6))
_STORES = tuple(
    f"cp.{kind}async.bulk.tensor.{d}d.global" for kind in ("", "reduce.") for d in range(1, 6)
)
_PRODUCT = ("wgmma.mma_async",)
_SUMS = ("red.global.add", "atom.global.add.v", "cp.reduce.async.bulk.global")


#: For sums in global memory, of any kernels.
SUM_OPERATORS = (
    Operator("drop sum", _SUMS, drop),
    Operator("sum elsewhere", _SUMS, bump(0, 16)),
    Operator("sum twice", _SUMS, _twice),
)


def _if_in_registers(mutation: Mutation) -> Mutation:
    """Of products alone that have A in registers."""

    def mutate(site: MutationSite) -> str | None:
        return mutation(site) if isinstance(site.instruction.operands[1], Vector) else None

    return mutate


#: For what feeds a product's A in registers.
REGISTER_A_OPERATORS = (
    Operator("drop ldmatrix", ("ldmatrix",), drop),
    Operator("ldmatrix next chunk", ("ldmatrix",), bump(1, _CHUNK_BYTES)),
    Operator("ldmatrix next row", ("ldmatrix",), bump(1, _PANEL_ROW_BYTES)),
    Operator("exchange A rows", _PRODUCT, _if_in_registers(exchange(1, 0, 1))),
    Operator("exchange A halves of k", _PRODUCT, _if_in_registers(exchange(1, 0, 2))),
    Operator("A of another step", _PRODUCT, _if_in_registers(take_from_earlier(1))),
)


def hopper_operators() -> tuple[Operator, ...]:
    """Every operator for what synchronises and what feeds the tensor cores."""
    return (
        Operator("drop fence", _FENCES, drop),
        Operator("drop commit", _COMMITS, drop),
        Operator("drop wait", _WAITS, drop),
        Operator("weaken wait", _WAITS, weaken_wait),
        Operator("flip parity", _PHASE, _changed(2, "b32", "xor.b32", 1)),
        Operator("do not wait", _PHASE, _true(0)),
        Operator("wait for the next barrier", _PHASE, bump(1, _BARRIER_BYTES)),
        Operator("drop arrival", _ARRIVE, _without("expect_tx")),
        Operator("arrive twice", _ARRIVE, _twice),
        Operator("arrive at the next barrier", _ARRIVE, _arrival_elsewhere),
        Operator("drop expect", ("mbarrier.arrive.expect_tx",), drop),
        Operator("expect less", ("mbarrier.arrive.expect_tx",), _changed(2, "b32", "add.s32", -16)),
        Operator("expect more", ("mbarrier.arrive.expect_tx",), _changed(2, "b32", "add.s32", 16)),
        Operator("drop mbarrier", ("mbarrier.init",), drop),
        Operator("count one more", ("mbarrier.init",), _changed(1, "b32", "add.s32", 1)),
        Operator("count one less", ("mbarrier.init",), _changed(1, "b32", "add.s32", -1)),
        Operator("drop load", _LOADS, drop),
        Operator("load elsewhere", _LOADS, bump(0, _BOX_STEP)),
        Operator("load the next row", _LOADS, _coordinate(1)),
        Operator("load for the next barrier", _LOADS, bump(2, _BARRIER_BYTES)),
        Operator(
            "load for one CTA", _LOADS, _only_if("multicast", _changed(3, "b16", "and.b16", 1))
        ),
        Operator("drop store", _STORES, drop),
        Operator("store the next row", _STORES, _coordinate(1)),
        Operator("store from elsewhere", _STORES, bump(1, _BOX_STEP)),
        Operator("wait for reads", ("cp.async.bulk.wait_group",), _reads_only),
        *SUM_OPERATORS,
        Operator("sum from elsewhere", ("cp.reduce.async.bulk.global",), bump(1, _BOX_STEP)),
        Operator("drop product", _PRODUCT, drop),
        Operator("A of the next step", _PRODUCT, _descriptor(1, "add.s64", 2)),
        Operator("B of the next step", _PRODUCT, _descriptor(2, "add.s64", 2)),
        Operator("A's stride", _PRODUCT, _descriptor(1, "add.s64", 8 << _STRIDE)),
        Operator("B's stride", _PRODUCT, _descriptor(2, "add.s64", 8 << _STRIDE)),
        Operator("B's leading offset", _PRODUCT, _leading_offset),
        Operator("A's swizzle", _PRODUCT, _descriptor(1, "xor.b64", 3 << _SWIZZLE)),
        Operator("B's swizzle", _PRODUCT, _descriptor(2, "xor.b64", 3 << _SWIZZLE)),
        Operator("A's base offset", _PRODUCT, _descriptor(1, "xor.b64", 1 << _BASE)),
        Operator("B's base offset", _PRODUCT, _descriptor(2, "xor.b64", 1 << _BASE)),
        Operator("transpose B", _PRODUCT, _transpose_b),
        Operator("always accumulate", _PRODUCT, _scale_d(1)),
        Operator("never accumulate", _PRODUCT, _scale_d(0)),
        Operator("drop barrier", ("bar.", "barrier."), drop),
        Operator("another barrier", ("bar.sync", "bar.arrive"), _changed(0, "b32", "add.s32", 1)),
        Operator("arrive at the own CTA", ("mapa.",), _own_address),
        Operator("take more registers", ("setmaxnreg.inc",), _more_registers),
        Operator("keep registers", ("setmaxnreg.dec",), drop),
        Operator("drop stmatrix", ("stmatrix",), drop),
        Operator("stmatrix next chunk", ("stmatrix",), bump(0, 16)),
    )


def _more_registers(site: MutationSite) -> str | None:
    count = site.instruction.operands[0]
    if not isinstance(count, Immediate):
        return None
    return re.sub(r"\d+\s*;$", f"{int(count.value) + 8};", site.text)
