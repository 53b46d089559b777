"""Translates barriers, lane exchange, votes, and instructions that stop a kernel."""

from __future__ import annotations

from ptxlab.ptx.lowering import BARRIER_RESULT
from ptxlab.ptx.syntax import Instruction, Pair, Sink
from ptxlab.translate.emitter import DTYPES, Emitter, Handler
from ptxlab.translate.opcodes_integer import no_more
from ptxlab.translate.opcodes_memory import nothing


def barrier(t: Emitter, i: Instruction) -> None:
    """bar and barrier: .sync, .arrive, .red, .cluster and bar.warp.sync."""
    modifiers = [m for m in i.modifiers if m not in ("aligned", "cta")]
    if modifiers == ["warp", "sync"]:
        t.emit(f"W.warp_sync(G, {t.site()}, {t.use(i.operands[0], 'b32')})")
        return
    if modifiers[:1] == ["cluster"] and i.guard is None:
        _cluster_barrier(t, i, modifiers[1:])
        return
    reduces = modifiers in (["red", "popc", "u32"], ["red", "and", "pred"], ["red", "or", "pred"])
    if not reduces and modifiers not in (["sync"], ["arrive"]):
        raise t.error(f"{i.mnemonic} is not supported")
    if i.guard is not None:
        raise t.error(f"{i.mnemonic} under a guard is not supported")
    given, vote = i.operands, "None"
    if reduces:
        given, vote = i.operands[:-1], t.use(i.operands[-1], "pred")
    operands = [t.use(operand, "u32") for operand in given]
    number = operands[0]
    count = operands[1] if len(operands) > 1 else "None"
    blocks = modifiers != ["arrive"]
    t.emit(f"{t.barrier_result} = W.barrier(G, {t.site()}, {number}, {count}, {blocks}, {vote})")


def barrier_result(t: Emitter, i: Instruction) -> None:
    """The result of the bar.red before it."""
    d, number = i.operands
    held = "u4" if i.modifiers[0] == "popc" else "b1"
    t.define(d, f"W.barriers.result(G, {t.use(number, 'u32')}, {i.modifiers[0]!r})", held)


def _cluster_barrier(t: Emitter, i: Instruction, modifiers: list[str]) -> None:
    if modifiers in (["arrive"], ["arrive", "release"], ["arrive", "relaxed"]):
        relaxed = "relaxed" in modifiers
        t.emit(f"W.cluster_barrier.arrive(G, {t.site()}, relaxed={relaxed})")
    elif modifiers in (["wait"], ["wait", "acquire"]):
        t.emit(f"{t.barrier_result} = W.cluster_barrier.wait(G, {t.site()})")
    else:
        raise t.error(f"{i.mnemonic} is not supported")


def shuffle(t: Emitter, i: Instruction) -> None:
    """shfl.sync.idx/up/down/bfly.b32, with or without a predicate."""
    modifiers = list(i.modifiers)
    if len(modifiers) != 3 or modifiers[0] != "sync" or modifiers[2] != "b32":
        raise t.error(f"{i.mnemonic} is not supported")
    mode = modifiers[1]
    if mode not in ("idx", "up", "down", "bfly"):
        raise t.error(f"{i.mnemonic} is not supported")
    d, *rest = i.operands
    a, b, c, members = (t.use(operand, "b32") for operand in rest)
    value, good = t.temporary(), t.temporary()
    t.emit(f"{value}, {good} = W.shuffle(G, {mode!r}, {a}, {b}, {c}, {members})")
    target = d.first if isinstance(d, Pair) else d
    if not isinstance(target, Sink):
        t.define(target, value, "u4")
    if isinstance(d, Pair):
        t.define(d.second, good, "b1")


def vote(t: Emitter, i: Instruction) -> None:
    """vote.sync.all/any/uni.pred and vote.sync.ballot.b32."""
    modifiers = list(i.modifiers)
    forms = (["all", "pred"], ["any", "pred"], ["uni", "pred"], ["ballot", "b32"])
    if modifiers[:1] != ["sync"] or modifiers[1:] not in forms:
        raise t.error(f"{i.mnemonic} is not supported")
    d, a, members = i.operands
    call = f"W.vote(G, {modifiers[1]!r}, {t.use(a, 'pred')}, {t.use(members, 'b32')})"
    t.define(d, call, "b1" if modifiers[2] == "pred" else "u4")


def match(t: Emitter, i: Instruction) -> None:
    """match.any.sync and match.all.sync of .b32 and .b64."""
    modifiers = list(i.modifiers)
    if len(modifiers) != 3 or modifiers[0] not in ("any", "all") or modifiers[1] != "sync":
        raise t.error(f"{i.mnemonic} is not supported")
    if modifiers[2] not in ("b32", "b64"):
        raise t.error(f"type of {i.mnemonic} is not supported")
    d, a, members = i.operands
    lanes = t.temporary()
    t.emit(f"{lanes} = W.match(G, {t.use(a, modifiers[2])}, {t.use(members, 'b32')})")
    if modifiers[0] == "all":
        t.emit(f"{lanes} = select({lanes} == G.ballot(TRUE), {lanes}, np.uint32(0))")
    target = d.first if isinstance(d, Pair) else d
    if not isinstance(target, Sink):
        t.define(target, lanes, "u4")
    if isinstance(d, Pair):
        t.define(d.second, f"{lanes} != 0", "b1")


def active_mask(t: Emitter, i: Instruction) -> None:
    """activemask.b32."""
    no_more(t, i, [m for m in i.modifiers if m != "b32"])
    t.define(i.operands[0], "G.ballot(np.bool_(True))", "u4")


_REDUCTIONS = {
    "add": "np.add",
    "min": "np.minimum",
    "max": "np.maximum",
    "and": "np.bitwise_and",
    "or": "np.bitwise_or",
    "xor": "np.bitwise_xor",
}


def reduce(t: Emitter, i: Instruction) -> None:
    """redux.sync on 32-bit integers."""
    modifiers = list(i.modifiers)
    if len(modifiers) != 3 or modifiers[0] != "sync" or modifiers[1] not in _REDUCTIONS:
        raise t.error(f"{i.mnemonic} is not supported")
    kind = modifiers[2]
    if kind not in ("u32", "s32", "b32"):
        raise t.error(f"{i.mnemonic} is not supported")
    d, a, members = i.operands
    operation = _REDUCTIONS[modifiers[1]]
    call = f"W.reduce(G, {operation}, {t.use(a, kind)}, {t.use(members, 'b32')})"
    t.define(d, call, DTYPES[kind])


def elect(t: Emitter, i: Instruction) -> None:
    """elect.sync: the lowest member lane is the leader."""
    if list(i.modifiers) != ["sync"] or not isinstance(i.operands[0], Pair):
        raise t.error(f"{i.mnemonic} is not supported")
    pair, members = i.operands
    lane = t.temporary()
    t.emit(f"{lane} = W.elect(G, {t.use(members, 'b32')})")
    if isinstance(pair, Pair):
        if not isinstance(pair.first, Sink):
            t.define(pair.first, lane, "u4")
        t.define(pair.second, f"{lane} == G.special('%laneid')", "b1")


def call(t: Emitter, i: Instruction) -> None:
    """A call to a function that the module declares without a body; executing it is an error."""
    callee = i.operands[0]
    name = getattr(callee, "name", str(callee))
    mask = t.mask()
    condition = "True" if mask is None else f"np.any({mask})"
    t.emit(f"if {condition}: W.called(G, {name!r})")


def guarded_mma(t: Emitter, i: Instruction) -> None:
    """mma.sync with a guard, which is not supported. MmaChains handles mma.sync without a guard."""
    raise t.error("mma under a guard is not supported")


HANDLERS: dict[str, Handler] = {
    "bar": barrier,
    "barrier": barrier,
    BARRIER_RESULT: barrier_result,
    "shfl": shuffle,
    "vote": vote,
    "match": match,
    "activemask": active_mask,
    "redux": reduce,
    "elect": elect,
    "call": call,
    "mma": guarded_mma,
    "nanosleep": nothing,
}
