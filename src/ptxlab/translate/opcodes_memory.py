"""Translates loads, stores, atomics, fences and hints."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxlab.machine.memory import WORDS
from ptxlab.ptx.syntax import (
    TYPE_SIZES,
    Address,
    Instruction,
    Operand,
    Register,
    Sink,
    Symbol,
    Vector,
)
from ptxlab.translate.emitter import DTYPES, Emitter, Handler
from ptxlab.translate.opcodes_bulk import store_to_peer
from ptxlab.translate.opcodes_integer import no_more

_SPACES = ("global", "shared", "local", "param", "const")
#: Modifiers for memory order. All accesses are sequentially consistent in the emulator; only
#: observers use these modifiers.
_SCOPES = ("cta", "cluster", "gpu", "sys")
_ORDERS = {
    "ld": ("weak", "relaxed", "acquire", "volatile"),
    "st": ("weak", "relaxed", "release", "volatile"),
    "red": ("relaxed", "release"),
    "atom": ("relaxed", "acquire", "release", "acq_rel"),
}
_ORDER_WORDS = frozenset(["weak", "relaxed", "acquire", "release", "acq_rel", "volatile"])
#: Hints that the emulator ignores.
_HINTS = frozenset(["ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L2::cache_hint", "unified"])
_PREFETCH = ("L1::", "L2::")


def _order(t: Emitter, i: Instruction) -> tuple[str, list[str]]:
    """Returns the order and scope, such as 'acquire.gpu' (empty for a weak access), and the other
    modifiers."""
    modifiers = [m for m in i.modifiers if m not in _HINTS and not m.startswith(_PREFETCH)]
    orders = [m for m in modifiers if m in _ORDER_WORDS]
    scopes = [m for m in modifiers if m in _SCOPES]
    rest = [m for m in modifiers if m not in _ORDER_WORDS and m not in _SCOPES]
    allowed = _ORDERS.get(i.opcode, ("weak",))
    if len(orders) > 1 or len(scopes) > 1 or not set(orders) <= set(allowed):
        raise t.error(f"{i.mnemonic} does not exist")
    atomic = i.opcode in ("atom", "red")
    order = orders[0] if orders else "relaxed" if atomic else "weak"
    if order == "volatile":
        return "relaxed.sys", rest
    if order == "weak":
        return "", rest
    if not scopes and not atomic:
        raise t.error(f"{i.mnemonic} names no scope; add one, such as {order}.gpu")
    return f"{order}.{scopes[0] if scopes else 'gpu'}", rest


class _Access:
    """The space, vector length, element type and order of an ld or st."""

    def __init__(self, t: Emitter, i: Instruction) -> None:
        self.order, modifiers = _order(t, i)
        # shared::cta is the CTA's own shared memory; access to another CTA's memory is not
        # supported.
        if "shared::cluster" in modifiers:
            raise t.error("shared memory of other CTAs (.shared::cluster) is not supported")
        modifiers = ["shared" if m == "shared::cta" else m for m in modifiers]
        self.space = next((m for m in modifiers if m in _SPACES), "generic")
        self.vector = next((m for m in modifiers if m in ("v2", "v4")), "v1")
        self.kind = i.modifiers[-1]
        no_more(t, i, [m for m in modifiers if m not in (self.space, self.vector, self.kind)])
        if self.kind not in DTYPES or self.kind == "pred":
            raise t.error(f"type of {i.mnemonic} is not supported")
        self.element = TYPE_SIZES[self.kind]
        self.count = int(self.vector[1])
        self.bytes = self.element * self.count
        self.held = DTYPES[self.kind]
        if self.bytes not in WORDS:
            raise t.error(f"{i.mnemonic} moves {self.bytes} bytes, which is not supported")
        # Constant and parameter memory are ranges of host memory, like global memory.
        self.memory = "global" if self.space in ("const", "param") else self.space


def see(
    t: Emitter,
    space: str,
    kind: str,
    address: str,
    sizes: str,
    shape: str = "plain",
    order: str = "",
) -> str:
    """Sends an access to the observers, if there are any.

    Returns the mask under which it is executed.
    """
    mask = t.mask() or "None"
    if not t.observed:
        return mask
    name = t.temporary()
    said = f", {order!r}" if order else ""
    t.emit(
        f"{name} = W.see(G, {t.site()}, {space!r}, {kind!r}, {address}, {sizes}, {shape!r}, "
        f"{mask}{said})"
    )
    return name


def kept(t: Emitter, address: str) -> str:
    """Returns the expression for an address. If the generated code uses it twice, it is first
    assigned to a variable."""
    if not t.observed and not t.polls:
        return address
    name = t.temporary()
    t.emit(f"{name} = {address}")
    return name


def load(t: Emitter, i: Instruction) -> None:
    """ld, ldu: scalars and vectors, which are zero- or sign-extended to the width of the
    registers."""
    access = _Access(t, i)
    d, source = i.operands[:2]
    if access.space == "param" and _static_parameter(t, source):
        _load_parameter(t, access, d, source)
        return
    address = kept(t, t.address(source)[0])
    if access.space in ("param", "const") and isinstance(source, Address):
        mask = t.mask() or "None"
    else:
        mask = see(t, access.memory, "read", address, str(access.bytes), order=access.order)
    words = f"W.load(G, {access.memory!r}, {address}, {access.bytes}, {mask})"
    if t.polls and access.order:
        name = t.temporary()
        t.emit(f"{name} = {words}")
        t.emit(
            f"W.poll(G, {t.site()}, {access.memory!r}, {address}, {access.element}, "
            f"{access.count}, {name}, {mask})"
        )
        words = name
    if access.count == 1:
        value = words if access.held[0] == "u" else f"{words}.view({access.held})"
        t.define(d, value, access.held)
        return
    rows = t.temporary()
    t.emit(f"{rows} = columns({words}, {access.held}, {access.count})")
    define_rows(t, d, rows, access.held)


def _static_parameter(t: Emitter, source: Operand) -> bool:
    names = {parameter.name for parameter in t.entry.parameters}
    return (
        isinstance(source, Address)
        and isinstance(source.base, Symbol)
        and source.base.name in names
    )


def _load_parameter(t: Emitter, access: _Access, d: Operand, source: Operand) -> None:
    if not (isinstance(source, Address) and isinstance(source.base, Symbol)):
        raise t.error("expected a parameter's address")
    name = source.base.name
    offset = next(p.offset for p in t.entry.parameters if p.name == name) + source.offset
    if not 0 <= offset <= t.entry.parameter_bytes - access.bytes or offset % access.bytes:
        raise t.error(f"parameter bytes {offset}..{offset + access.bytes} do not exist")
    elements = d.elements if isinstance(d, Vector) else (d,)
    for number, element in enumerate(elements):
        index = offset // access.element + number
        value = f"W.parameters[{access.held!r}][{index}]"
        t.define(element, value, access.held)


def define_rows(t: Emitter, d: Operand, rows: str, held: str) -> None:
    """Assigns each row of an array to one register of a vector."""
    elements = d.elements if isinstance(d, Vector) else (d,)
    plain = all(isinstance(e, Register) and t.storage_of(e.name) == held for e in elements)
    if plain and t.mask() is None and len(elements) > 1:
        names = ", ".join(t.name(e.name) for e in elements if isinstance(e, Register))
        t.emit(f"{names} = {rows}")
        return
    for number, element in enumerate(elements):
        if not isinstance(element, Sink):
            t.define(element, f"{rows}[{number}]", held)


def store(t: Emitter, i: Instruction) -> None:
    """st: scalars and vectors."""
    if "async" in i.modifiers:
        store_to_peer(t, i)
        return
    access = _Access(t, i)
    target, source = i.operands[:2]
    if access.space in ("param", "const"):
        raise t.error(f"{i.mnemonic} is not supported")
    address = kept(t, t.address(target)[0])
    mask = see(t, access.memory, "write", address, str(access.bytes), order=access.order)
    elements = source.elements if isinstance(source, Vector) else (source,)
    if len(elements) != access.count:
        raise t.error(f"{access.count} values expected, got {len(elements)}")
    word = f"u{access.element}"
    values = [f"{t.use(e, 'b' + str(8 * access.element))}" for e in elements]
    value = values[0] if len(values) == 1 else f"joined(({', '.join(values)}), nt, {word})"
    t.emit(f"W.store(G, {access.memory!r}, {address}, {access.bytes}, {value}, {mask})")


_ATOMIC = {
    "add": "np.add",
    "min": "np.minimum",
    "max": "np.maximum",
    "and": "np.bitwise_and",
    "or": "np.bitwise_or",
    "xor": "np.bitwise_xor",
    "exch": "exchange",
    "cas": "compare_and_swap",
    "inc": "increment",
    "dec": "decrement",
}


#: Additions of 16-bit floats.
_SHORT_SUMS = {
    "f16": "add_halves",
    "bf16": "add_bfloats",
    "f16x2": "add_half_pairs",
    "bf16x2": "add_bfloat_pairs",
}


def atomic(t: Emitter, i: Instruction) -> None:
    """atom and red on 32- and 64-bit values; also add on vectors of fp32 in global memory."""
    order, modifiers = _order(t, i)
    modifiers = ["shared" if m == "shared::cta" else m for m in modifiers]
    space = next((m for m in modifiers if m in ("global", "shared")), "generic")
    operation = next((m for m in modifiers if m in _ATOMIC), "")
    vector = next((m for m in modifiers if m in ("v2", "v4")), "")
    kind = modifiers[-1]
    if kind in _SHORT_SUMS:
        # noftz has no effect, because the emulator always keeps subnormals.
        modifiers = [m for m in modifiers if m != "noftz"]
    no_more(t, i, [m for m in modifiers if m not in (space, operation, vector, kind)])
    function = _ATOMIC.get(operation, "")
    known = kind in ("u32", "s32", "b32", "u64", "s64", "b64", "f32", "f64")
    if kind in _SHORT_SUMS:
        known, function = operation == "add" and not vector, _SHORT_SUMS[kind]
    elif kind == "b16":
        known = operation in ("cas", "exch")
    if not operation or not known:
        raise t.error(f"{i.mnemonic} is not supported")
    d, target, *values = i.operands if i.opcode == "atom" else (Sink(), *i.operands)
    if vector:
        if (operation, kind) != ("add", "f32") or space == "shared":
            raise t.error(f"{i.mnemonic} is not supported")
        _add_vector(t, d, target, values[0], space, int(vector[1]), order)
        return
    address = kept(t, t.address(target)[0])
    mask = see(t, space, "atomic", address, str(TYPE_SIZES[kind]), order=order)
    given = ", ".join(t.use(value, kind) for value in values)
    call = f"W.atomic(G, {space!r}, {address}, {function}, ({given},), {mask})"
    t.define(d, call, DTYPES[kind])


def _add_vector(
    t: Emitter, d: Operand, target: Operand, values: Operand, space: str, count: int, order: str
) -> None:
    elements = values.elements if isinstance(values, Vector) else (values,)
    results = d.elements if isinstance(d, Vector) else ()
    if len(elements) != count or len(results) not in (0, count):
        raise t.error(f"{count} values expected, got {len(elements)}")
    address = kept(t, t.address(target)[0])
    mask = see(t, space, "atomic", address, str(4 * count), order=order)
    given = ", ".join(t.use(element, "f32") for element in elements)
    rows = t.temporary()
    t.emit(f"{rows} = W.add_vectors(G, {space!r}, {address}, ({given}), {mask})")
    if results:
        define_rows(t, d, rows, "f4")


def nothing(t: Emitter, i: Instruction) -> None:
    """Prefetches and hints do nothing."""


_MEMBAR_SCOPES = {"cta": "cta", "gl": "gpu", "sys": "sys"}


def membar(t: Emitter, i: Instruction) -> None:
    """membar.cta, .gl, .sys."""
    (level,) = i.modifiers if len(i.modifiers) == 1 else ("",)
    if level not in _MEMBAR_SCOPES:
        raise t.error(f"{i.mnemonic} is not supported")
    _memory_fence(t, _MEMBAR_SCOPES[level])


def _memory_fence(t: Emitter, scope: str) -> None:
    if t.observed:
        t.emit(f"W.memory_fence(G, {t.site()}, {scope!r}, {t.mask() or 'None'})")


def fence(t: Emitter, i: Instruction) -> None:
    """fence of memory or of proxies; only observers use it."""
    proxies = ("proxy", "mbarrier_init")
    if not any(m in proxies for m in i.modifiers):
        no_more(t, i, [m for m in i.modifiers if m not in ("sc", "acq_rel", *_SCOPES)])
        _memory_fence(t, next((m for m in i.modifiers if m in _SCOPES), "sys"))
        return
    spaces = ("global", "shared::cta", "shared::cluster")
    known = ["mbarrier_init", "release", "cluster", "proxy", "async", *spaces]
    no_more(t, i, [m for m in i.modifiers if m not in known])
    if t.observed:
        t.emit(f"W.proxy_fence(G, {t.site()}, {t.mask() or 'None'})")


def grid_dependency(t: Emitter, i: Instruction) -> None:
    """griddepcontrol; only observers use it.

    In the emulator a launch begins when the previous one has finished, so ``wait`` and
    ``launch_dependents`` do nothing.
    """
    if tuple(i.modifiers) not in (("wait",), ("launch_dependents",)):
        raise t.error(f"{i.mnemonic} does not exist")
    if t.observed:
        event = "grid_wait" if i.modifiers[0] == "wait" else "grid_allow"
        t.emit(f"W.{event}(G, {t.site()}, {t.mask() or 'None'})")


def create_policy(t: Emitter, i: Instruction) -> None:
    """createpolicy: cache policies are not modelled, but the value must exist."""
    t.define(i.operands[0], t.constant(0, "u8"), "u8")


HANDLERS: dict[str, Handler] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "prefetch": nothing,
    "prefetchu": nothing,
    "membar": membar,
    "fence": fence,
    "discard": nothing,
    "applypriority": nothing,
    "createpolicy": create_policy,
    "griddepcontrol": grid_dependency,
}


# Functions that generated code calls


def columns(words: np.ndarray, dtype: Any, count: int) -> np.ndarray:
    """Returns the elements of a vector load as ``count`` rows, one for each register."""
    if words.ndim == 0:
        return np.frombuffer(words.tobytes(), dtype)
    return np.ascontiguousarray(words.view(dtype).reshape(-1, count).T)


def joined(values: tuple, threads: int, dtype: Any) -> np.ndarray:
    """Returns the registers of a vector store, joined to one word per thread."""
    rows: np.ndarray = np.empty((threads, len(values)), dtype)
    for column, value in enumerate(values):
        rows[:, column] = value
    word = WORDS[rows.itemsize * len(values)]
    return rows.view(word).reshape(-1)


def exchange(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Computes atom.exch."""
    return new


def compare_and_swap(old: np.ndarray, expected: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Computes atom.cas."""
    return np.where(old == expected, new, old)


def increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Computes atom.inc, which counts up to ``limit``, then restarts at 0."""
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Computes atom.dec, which counts down to 0, then restarts at ``limit``."""
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


CALLED = {
    function.__name__: function
    for function in (columns, joined, exchange, compare_and_swap, increment, decrement)
}
