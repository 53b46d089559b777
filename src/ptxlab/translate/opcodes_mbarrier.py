"""Translates mbarrier and setmaxnreg, the instructions for specialised warps."""

from __future__ import annotations

from ptxlab.ptx.syntax import Address, Immediate, Instruction, Sink
from ptxlab.translate.emitter import Emitter, Handler

#: Modifiers for ordering and scope. They are ignored, because every arrival releases and every wait
#: acquires, which is the default.
_ORDER = frozenset(["release", "acquire", "cta", "cluster"])
_SPACES = frozenset(["shared", "shared::cta", "shared::cluster"])
_REMOTE = frozenset(["arrive", "expect_tx", "complete_tx"])


def mbarrier(t: Emitter, i: Instruction) -> None:
    """All instructions that begin with mbarrier."""
    modifiers = [m for m in i.modifiers if m not in _ORDER]
    spaces = [m for m in modifiers if m in _SPACES]
    action, *rest = [m for m in modifiers if m not in _SPACES]
    if rest[-1:] != ["b64"] or len(spaces) != 1:
        raise t.error(f"{i.mnemonic} is not supported; name the space, such as .shared::cta")
    if spaces == ["shared::cluster"] and action not in _REMOTE:
        raise t.error(f"{i.mnemonic} does not exist")
    handler = _ACTIONS.get((action, *rest[:-1]))
    if handler is None:
        raise t.error(f"{i.mnemonic} is not supported")
    handler(t, i)


def _init(t: Emitter, i: Instruction) -> None:
    address, count = i.operands
    t.emit(f"W.mbarriers.init({_who(t)}, {t.address(address)[0]}, {t.use(count, 'u32')}, {_on(t)})")


def _invalidate(t: Emitter, i: Instruction) -> None:
    t.emit(f"W.mbarriers.invalidate({_who(t)}, {t.address(i.operands[0])[0]}, {_on(t)})")


def _arrive(t: Emitter, i: Instruction) -> None:
    operands = list(i.operands)
    state = Sink() if isinstance(operands[0], Address) else operands.pop(0)
    address, *rest = operands
    count, size = t.constant(1, "u4"), "None"
    if "expect_tx" in i.modifiers:
        size = t.use(rest[0], "u32")
    elif rest:
        count = t.use(rest[0], "u32")
    call = f"W.mbarriers.arrive({_who(t)}, {t.address(address)[0]}, {count}, {size}, {_on(t)})"
    t.define(state, call, "u8")


def _transact(t: Emitter, i: Instruction) -> None:
    address, size = i.operands
    method = "expect" if "expect_tx" in i.modifiers else "complete"
    t.emit(
        f"W.mbarriers.{method}({_who(t)}, {t.address(address)[0]}, {t.use(size, 'u32')}, {_on(t)})"
    )


def _wait(t: Emitter, i: Instruction) -> None:
    done, address, token = i.operands[:3]
    by_parity = "parity" in i.modifiers
    method = "wait_parity" if by_parity else "wait_state"
    given = t.use(token, "u32" if by_parity else "u64")
    t.emit("if W.interrupted(): yield None")
    t.emit(
        f"{t.barrier_result} = W.mbarriers.{method}({_who(t)}, {t.address(address)[0]}, {given}, "
        f"{_on(t)})"
    )
    # A thread that continues at once has observed the end of the phase. A thread whose wait is
    # refused gets the predicate after the wait.
    t.define(done, "TRUE", "b1")


def _who(t: Emitter) -> str:
    return f"G, {t.site()}"


def _on(t: Emitter) -> str:
    return t.mask() or "None"


_ACTIONS: dict[tuple[str, ...], Handler] = {
    ("init",): _init,
    ("inval",): _invalidate,
    ("arrive",): _arrive,
    ("arrive", "expect_tx"): _arrive,
    ("expect_tx", "relaxed"): _transact,
    ("expect_tx",): _transact,
    ("complete_tx", "relaxed"): _transact,
    ("complete_tx",): _transact,
    ("try_wait",): _wait,
    ("try_wait", "parity"): _wait,
    ("test_wait",): _wait,
    ("test_wait", "parity"): _wait,
}


def set_registers(t: Emitter, i: Instruction) -> None:
    """setmaxnreg.inc and .dec."""
    modifiers = list(i.modifiers)
    count = i.operands[0]
    if modifiers[1:] != ["sync", "aligned", "u32"] or modifiers[0] not in ("inc", "dec"):
        raise t.error(f"{i.mnemonic} is not supported")
    if not isinstance(count, Immediate) or i.guard is not None:
        raise t.error("setmaxnreg takes a literal and no guard")
    t.emit(f"W.registers.set({_who(t)}, {int(count.value)}, more={modifiers[0] == 'inc'})")


def shared_address_of_peer(t: Emitter, i: Instruction) -> None:
    """mapa.shared::cluster: the same shared address in the CTA with a given rank."""
    modifiers = list(i.modifiers)
    if modifiers[:1] != ["shared::cluster"] or modifiers[1:] not in (["u32"], ["u64"]):
        raise t.error(f"{i.mnemonic} is not supported")
    d, address, rank = i.operands
    kind = modifiers[1]
    held = "u4" if kind == "u32" else "u8"
    one, shift = t.constant(1, held), t.constant(24, held)
    ranks = t.use(rank, "u32")
    if held == "u8":
        ranks = f"({ranks}).astype(u8)"
    t.define(d, f"{t.use(address, kind)} | (({ranks} + {one}) << {shift})", held)


HANDLERS: dict[str, Handler] = {
    "mbarrier": mbarrier,
    "setmaxnreg": set_registers,
    "mapa": shared_address_of_peer,
}
