"""attention() over a group of processes: checks of arguments, agreement between ranks, and
gradients."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from flashsmith.chooser.attention import check_attention_config
from flashsmith.chooser.backward import check_backward_config, resolve_deterministic
from flashsmith.errors import ArgumentError
from flashsmith.integrations import traceable
from flashsmith.integrations.pytorch_state import is_cast, under_autocast
from flashsmith.parallel import causal_allgather
from flashsmith.parallel.group import Group, Message
from flashsmith.parallel.layout import CAUSAL, FULL, Layout, Limits
from flashsmith.parallel.schedules import SCHEDULES, GroupCall, GroupSchedule, in_order, padded
from flashsmith.printable import quoted
from flashsmith.runtime.bits import cannot_keep, resolve_bits
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import RepeatableFramework
from flashsmith.semantics import UNLIMITED
from flashsmith.semantics.signature import (
    NO_WINDOW,
    MaskLimits,
    check_flag,
    check_mask,
    check_scale,
    check_softcap,
    whole_number,
)
from flashsmith.semantics.sizes import FREE


class CallOptions(NamedTuple):
    """The keywords of parallel.attention()."""

    schedule: Any = "auto"
    causal: Any = False
    window: Any = NO_WINDOW
    softcap: Any = 0.0
    scale: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    out: Any = None
    return_lse: Any = False
    return_row_max: Any = False
    config: Any = None
    backward_config: Any = None
    deterministic: Any = None
    emulate: Any = False
    bits: Any = None


def attend(given: Any, q: Any, k: Any, v: Any, asked: CallOptions) -> Any:
    """parallel.attention() with its keywords in a CallOptions."""
    group = Group(given)
    # Ranks send the memory of a tensor, without the flag for lazy negation.
    q, k, v = (it.resolve_neg() if isinstance(it, torch.Tensor) else it for it in (q, k, v))
    before, signature = _latest_like(group, q, k, v, asked), None
    if before is None:
        signature = _signature(q, k, v, asked)
        before = None if signature is None else _before.get(group.handle, {}).get(signature)
        if before is not None:
            _remember_latest(group, q, k, v, asked, before)
    said = None
    if before is not None and not (q.data_ptr() % 16 or _is_capturing(q)):
        # This rank has sent its message in an earlier call, and now only says that it makes the
        # same call again. In the meantime it does the work that needs no other rank.
        try:
            return _attend(group, q, k, v, asked, before, group.agree(before.message))
        except _RanksDisagree as others:
            said = others.said
    signature = signature or _signature(q, k, v, asked)
    q, k, v, agreed = _agree(group, q, k, v, asked, said)
    if signature is not None and group.size > 1:
        _remember(group, signature, agreed)
    return _attend(group, q, k, v, asked, agreed, None)


class _RanksDisagree(Exception):
    """Another rank has a new message, so the messages must be compared again."""

    def __init__(self, said: list[dict[str, Any]]) -> None:
        super().__init__()
        self.said = said


def _attend(
    group: Group, q: Any, k: Any, v: Any, asked: CallOptions, agreed: _Agreed, agreement: Any
) -> Any:
    """Computes the outputs of a call on which all ranks agree.

    If an ``agreement`` is given, it is confirmed before anything is sent.
    """

    def confirm() -> None:
        if agreement is not None and (said := agreement.said()) is not agreed.said:
            raise _RanksDisagree(said)

    call = agreed.call._replace(group=group, confirm=confirm)
    if group.size == 1:
        return _alone(q, k, v, call, asked)
    if torch._C._are_functorch_transforms_active():
        o, lse, row_max = _Parallel.apply(q, k, v, asked.sinks, agreed.schedule, call)
    elif call.has_gradients:
        o, lse, row_max = _apply(q, k, v, asked.sinks, agreed.schedule, call)
    else:
        o, lse, row_max, _ = agreed.schedule.forward(call, q, k, v, asked.sinks)
    if asked.out is not None:
        with torch.no_grad():
            o = asked.out.copy_(o)
    statistics = [
        it for it, wish in ((lse, asked.return_lse), (row_max, call.return_row_max)) if wish
    ]
    return (o, *statistics) if statistics else o


class _Agreed(NamedTuple):
    """A call on which all ranks have agreed, with this rank's message and the facts from all
    ranks."""

    message: Message
    said: list[dict[str, Any]]
    call: GroupCall
    schedule: GroupSchedule


def _agree(
    group: Group, q: Any, k: Any, v: Any, asked: CallOptions, said: list[dict[str, Any]] | None
) -> tuple[Any, Any, Any, _Agreed]:
    """Checks a call on this rank and compares it with the other ranks' calls.

    Returns it with q, k and v as autocast casts them.

    said: the facts that all ranks have sent about this call, if they have already exchanged
    messages.
    """
    facts: dict[str, Any] = {"function": "attention"}
    refused: Exception | None = None
    lengths: tuple[Any, Any] = (None, None)
    try:
        q, k, v = _cast(q, k, v)
        lengths = _check(group, q, k, v, asked, facts)
    except Exception as error:
        # The other ranks are waiting for a message, so this rank sends the error before it raises
        # it.
        refused = error
    message = Message(facts, refused)
    if said is None:
        said = group.agree(message).said()
    _check_same(said, apart=("q_rows", "k_rows", "device"))
    layouts = []
    for name, known in zip("qk", lengths, strict=True):
        rows = [facts[f"{name}_rows"] for facts in said]
        layout = Layout((sum(rows),) if known is None else known, group.size)
        _check_rows(name, layout, rows)
        layouts.append(layout)
    devices = tuple(facts["device"] for facts in said)
    heads_k, d_v = v.shape[-2:]
    needs_any = any(facts["requires_grad"])
    call = _call(group, layouts[0], layouts[1], q, d_v, asked, needs_any, devices)
    return q, k, v, _Agreed(message, said, call, schedule_named(asked.schedule, call, heads_k))


# By group: the last calls, by signature. If the signature of a call is known, the call is not
# checked again.
_before: WeakKeyDictionary[Any, dict[Any, _Agreed]] = WeakKeyDictionary()
_MOST_BEFORE = 256


def _remember(group: Group, signature: Any, agreed: _Agreed) -> None:
    _latest.pop(group.handle, None)
    calls = _before.setdefault(group.handle, {})
    if len(calls) >= _MOST_BEFORE:
        calls.clear()
    # The group is not stored here, because the entry would keep it alive.
    without: Any = agreed.call._asdict() | {"group": None, "confirm": None, "launches": {}}
    calls[signature] = agreed._replace(call=GroupCall(**without))


class _Latest(NamedTuple):
    """The latest call of a group that repeated an earlier call."""

    options: CallOptions
    state: tuple[bool, ...]
    has_layout: Callable[..., bool]  # whether q, k and v have its layouts
    agreed: _Agreed


# Models repeat one call in every layer, and comparing arguments takes half the time of computing a
# signature.
_latest: WeakKeyDictionary[Any, _Latest] = WeakKeyDictionary()


def _latest_like(group: Group, q: Any, k: Any, v: Any, asked: CallOptions) -> _Agreed | None:
    """The agreement of the ranks about the latest call, if this call has its signature."""
    latest = _latest.get(group.handle)
    if (
        latest is None
        or not all(map(is_, asked, latest.options))
        or not {type(q), type(k), type(v)} <= _KINDS
        or _state(q, k, v) != latest.state
        or not latest.has_layout(q, k, v)
    ):
        return None
    return latest.agreed


def _remember_latest(
    group: Group, q: Any, k: Any, v: Any, asked: CallOptions, agreed: _Agreed
) -> None:
    framework, state = framework_of(torch.Tensor), _state(q, k, v)
    assert isinstance(framework, RepeatableFramework)
    # Not remembered under autocast, which may change dtypes, or with sinks, whose properties may
    # change.
    if asked.sinks is None and not torch._C._is_any_autocast_enabled():
        has_layout = framework.layout_check((q, k, v))
        _latest[group.handle] = _Latest(asked, state, has_layout, agreed)


def _state(q: Any, k: Any, v: Any) -> tuple[bool, ...]:
    """The parts of a signature besides options and layouts."""
    return (
        *(torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        torch._C._is_any_autocast_enabled(),
        *(q.requires_grad, k.requires_grad, v.requires_grad),
    )


def _signature(q: Any, k: Any, v: Any, asked: CallOptions) -> Any:
    """Everything that the checks depend on, except addresses; None for rare kinds of calls."""
    if asked.cu_seqlens_q is not None or asked.cu_seqlens_k is not None or asked.out is not None:
        return None
    found: list[Any] = [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()]
    for tensor in (q, k, v, asked.sinks):
        if tensor is None:
            found.append(None)
        elif type(tensor) not in _KINDS or (tensor is not asked.sinks and is_cast(tensor)):
            return None
        else:
            found += (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
            found.append(tensor.requires_grad)
    options = (*asked[:_SINKS], *asked[_SINKS + 1 :])
    try:
        hash(options)
        window = asked.window if isinstance(asked.window, tuple) else ()
        return (*found, *options, *map(type, options), *map(type, window))
    except TypeError:  # The checks will raise the error
        return None


_KINDS = {torch.Tensor, torch.nn.Parameter}
_SINKS = CallOptions._fields.index("sinks")


def _is_capturing(q: Any) -> bool:
    return bool(q.is_cuda and torch.cuda.is_current_stream_capturing())


class _Parallel(torch.autograd.Function):
    """The autograd function of a call over a group of ranks.

    It takes q, k, v, sinks, a schedule and a call, and returns this rank's shards of o, lse and
    row_max. lse and row_max may be None.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, sinks: Any, schedule: GroupSchedule, call: GroupCall
    ) -> tuple[Any, Any, Any]:
        # A view of a tensor that requires grad requires grad too, even here. A call on such tensors
        # is checked in full each time.
        q, k, v = q.detach(), k.detach(), v.detach()
        found = schedule.forward(call, q, k, v, None if sinks is None else sinks.detach())
        ctx.set_materialize_grads(False)
        if found.row_max is not None:
            ctx.mark_non_differentiable(found.row_max)
        ctx.save_for_backward(*found.saved)
        ctx.schedule, ctx.call = schedule, call
        return found.o, found.lse, found.row_max

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:
        call: GroupCall = ctx.call
        saved = ctx.saved_tensors
        # All ranks must send the same messages, also if the loss of some rank does not depend on o.
        if do is None:
            do = call.zeros(dlse, dtype=saved[0].dtype)
        if dlse is None and call.return_lse:
            *leading, rows, heads, _d = call.shape
            dlse = do.new_zeros((*leading, heads, rows), dtype=torch.float32)
        needs = ctx.needs_input_grad[:4]
        return (*ctx.schedule.backward(call, saved, do, dlse, needs), None, None)


# Function.apply binds arguments first, and the engine's apply() looks up backward() in every call.
_apply = super(torch.autograd.Function, _Parallel).apply
_Parallel._backward_cls.apply = _Parallel.backward


def _alone(q: Any, k: Any, v: Any, call: GroupCall, asked: CallOptions) -> Any:
    """attention() for a group of one rank, which has the whole sequences."""
    keywords = asked._asdict()
    del keywords["schedule"]
    return traceable.attention(q, k, v, **keywords)


# --- checks --------------------------------------------------------------------------------------


def _cast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    for name, it in (("q", q), ("k", k), ("v", v)):
        if not isinstance(it, torch.Tensor):
            raise ArgumentError(
                f"{name}: got {type(it).__name__}; parallel.attention() takes PyTorch's tensors"
            )
    cast: tuple[Any, Any, Any] = under_autocast(q, k, v)
    return cast


def _check(
    group: Group, q: Any, k: Any, v: Any, asked: CallOptions, facts: dict[str, Any]
) -> tuple[Any, Any]:
    """Checks the arguments of this rank, and enters the values that ranks compare into ``facts``.

    Returns the lengths of the packed sequences of q and of k; each is None if there are none.
    """
    group.check_device("q", q)
    _check_not_capturing(q)
    packed = asked.cu_seqlens_q is not None or asked.cu_seqlens_k is not None
    _check_tensors(q, k, v, packed)
    heads_k, d = k.shape[-2:]
    schedule = _check_schedule(asked.schedule, heads_k, group.size)
    mask = check_mask(asked.causal, asked.window)
    scale = check_scale(asked.scale, d)
    softcap = check_softcap(asked.softcap, scale)
    check_attention_config(asked.config)
    check_backward_config("backward_config", asked.backward_config)
    bits = resolve_bits(asked.bits)
    deterministic = resolve_deterministic(asked.deterministic, q, asked.bits)
    if bits and schedule == "zigzag":
        raise cannot_keep(asked.bits, _NO_BITS)
    flags = {
        name: check_flag(name, getattr(asked, name))
        for name in ("return_lse", "return_row_max", "emulate")
    }
    needs = _check_vectors(q, k, v, asked)
    lens_q, lens_k = _check_lengths(asked, packed)
    configs = {name: getattr(asked, name) for name in ("config", "backward_config")}
    facts.update(
        {
            "schedule": schedule,
            "dtype": str(q.dtype),
            "device": str(q.device),
            "batch": None if packed else q.shape[0],
            "heads": (q.shape[-2], heads_k),
            "d": d,
            "d_v": v.shape[-1],
            "mask": list(mask),
            "scale": scale,
            "softcap": softcap,
            "sinks": asked.sinks is not None,
            "requires_grad": needs,
            # This is before ``deterministic``, which depends on ``bits``, so that an error names
            # ``bits``.
            "bits": bits or FREE,
            "deterministic": deterministic,
            **flags,
            **{name: None if it is None else str(it)[:200] for name, it in configs.items()},
            "cu_seqlens_q": _digest(lens_q),
            "cu_seqlens_k": _digest(lens_k),
            "q_rows": q.shape[-3],
            "k_rows": k.shape[-3],
        }
    )
    return lens_q, lens_k


def _check_not_capturing(q: Any) -> None:
    if _is_capturing(q):
        raise ArgumentError(
            "q: a CUDA graph is being captured, in which ranks cannot agree on a call; leave "
            "parallel.attention() out of the graph"
        )


def _check_schedule(name: str, heads_k: int, ranks: int) -> str:
    schedule = check_schedule(name)
    if schedule == "ulysses" and heads_k % ranks:
        raise ArgumentError(
            f"schedule='ulysses': k has {heads_k} heads, which {ranks} ranks do not divide; take "
            "'zigzag' or 'allgather'"
        )
    return schedule


def _check_tensors(q: Any, k: Any, v: Any, packed: bool) -> None:
    """Checks shapes, dtypes and devices."""
    dims = "(rows, heads, d)" if packed else "(batch, rows, heads, d)"
    for name, it in (("q", q), ("k", k), ("v", v)):
        if it.dim() != (3 if packed else 4):
            raise ArgumentError(f"{name}: has shape {tuple(it.shape)}; must be {dims}")
        if it.dtype not in (torch.float16, torch.bfloat16) or it.dtype != q.dtype:
            raise ArgumentError(
                f"{name}: has dtype {it.dtype}; must be float16 or bfloat16, the same of q, k and v"
            )
        if it.device != q.device:
            raise ArgumentError(f"{name}: on {it.device}, and q on {q.device}; move it there")
    heads_q, d = q.shape[-2:]
    heads_k = k.shape[-2]
    if v.shape[:-1] != k.shape[:-1]:
        raise ArgumentError(
            f"v: has shape {tuple(v.shape)}, and k {tuple(k.shape)}; must be equal, except for the "
            "last dimension"
        )
    if k.shape[-1] != d or (not packed and k.shape[0] != q.shape[0]):
        raise ArgumentError(
            f"k: has shape {tuple(k.shape)}, and q {tuple(q.shape)}; must have q's d"
            f"{'' if packed else ' and batch'}"
        )
    if not 0 < d <= 256 or d % 8:
        raise ArgumentError(f"q: d is {d}; must be a multiple of 8 up to 256")
    if v.shape[-1] != d and (not 0 < v.shape[-1] <= 256 or v.shape[-1] % 8):
        raise ArgumentError(
            f"v: d is {v.shape[-1]}; must be q's, {d}, or a multiple of 8 up to 256"
        )
    if heads_k == 0 or heads_q == 0 or heads_q % heads_k:
        raise ArgumentError(
            f"q: has {heads_q} heads, and k {heads_k}; must be a multiple of k's heads, and not 0"
        )


def _check_lengths(asked: CallOptions, packed: bool) -> list[Any]:
    """The lengths of the packed sequences of q and of k; each is None if there are none."""
    lengths: list[Any] = [None, None]
    for place, name in enumerate("qk"):
        limit = getattr(asked, f"max_seqlen_{name}")
        if packed:
            lengths[place] = _lengths(f"cu_seqlens_{name}", getattr(asked, f"cu_seqlens_{name}"))
            _check_longest(name, limit, lengths[place])
        elif limit is not None:
            raise ArgumentError(f"max_seqlen_{name}: of packed sequences only; leave it out")
    if packed and len(lengths[0]) != len(lengths[1]):
        raise ArgumentError(
            f"cu_seqlens_k: describes {len(lengths[1])} sequences and cu_seqlens_q "
            f"{len(lengths[0])}; must be the same number"
        )
    return lengths


def _check_vectors(q: Any, k: Any, v: Any, asked: CallOptions) -> list[bool]:
    """Checks sinks, out and the memory layout of q. Returns which tensors require a gradient."""
    sinks, out = asked.sinks, asked.out
    heads = q.shape[-2]
    if sinks is not None:
        if not isinstance(sinks, torch.Tensor) or sinks.dtype is not torch.float32:
            what = sinks.dtype if isinstance(sinks, torch.Tensor) else type(sinks).__name__
            raise ArgumentError(f"sinks: got {what}; give a float32 tensor of PyTorch")
        if tuple(sinks.shape) != (heads,) or sinks.device != q.device or not sinks.is_contiguous():
            raise ArgumentError(
                f"sinks: has shape {tuple(sinks.shape)} on {sinks.device}; must be ({heads},), "
                f"one logit a head of q, dense, on {q.device}"
            )
    size = q.element_size()
    if q.numel() and (
        q.stride(-1) != 1 or q.data_ptr() % 16 or any(step * size % 16 for step in q.stride()[:-1])
    ):
        raise ArgumentError(
            f"q: has strides {q.stride()} at address {q.data_ptr():#x}; its last dimension must be "
            "contiguous and its rows 16-byte aligned: give q.contiguous()"
        )
    tensors = q, k, v, sinks
    needs = [torch.is_grad_enabled() and it is not None and it.requires_grad for it in tensors]
    if out is not None:
        if any(needs):
            raise ArgumentError(
                "out: given, and an input requires grad: autograd makes its own outputs; leave it "
                "out, or call under torch.no_grad()"
            )
        if (
            not isinstance(out, torch.Tensor)
            or out.shape != (*q.shape[:-1], v.shape[-1])
            or out.dtype != q.dtype
            or out.device != q.device
        ):
            raise ArgumentError(
                "out: must be a tensor of q's shape with v's last dimension, of q's dtype and "
                "on its device"
            )
    return needs


def check_schedule(schedule: Any) -> str:
    if isinstance(schedule, str) and schedule in ("auto", *SCHEDULES):
        return schedule
    names = ", ".join(repr(name) for name in ("auto", *SCHEDULES))
    raise ArgumentError(f"schedule={quoted(schedule)}: allowed are {names}")


# A model passes the same offsets to every layer, so each tensor of offsets is read from the GPU
# only once.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _lengths(name: str, offsets: Any) -> tuple[int, ...]:
    """The lengths of packed sequences, computed from the offsets of the whole sequences."""
    if not isinstance(offsets, torch.Tensor) or offsets.dtype is not torch.int32:
        what = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise ArgumentError(
            f"{name}: got {what}; packed sequences need both, int32 tensors of the whole "
            "sequences' offsets"
        )
    if offsets.dim() != 1 or len(offsets) == 0:
        raise ArgumentError(f"{name}: has shape {tuple(offsets.shape)}; must be (sequences + 1,)")
    version, lengths = _known.get(offsets, (None, None))
    if version is None or version != offsets._version:
        numbers = offsets.tolist()
        lengths = tuple(b - a for a, b in itertools.pairwise(numbers))
        if numbers[0] != 0 or min(lengths, default=0) < 0:
            raise ArgumentError(f"{name}: must begin with 0 and not decrease; got {numbers[:8]}")
        _known[offsets] = offsets._version, lengths
    return lengths


def _check_longest(name: str, limit: Any, lengths: Sequence[int]) -> None:
    if limit is None:
        return
    longest, value = max(lengths, default=0), whole_number(limit)
    if value is None or value < longest:
        raise ArgumentError(
            f"max_seqlen_{name}={quoted(limit)}: the longest sequence has {longest} rows; give at "
            "least as many, or None: over a group no sequence is cut off"
        )


def _digest(lengths: Sequence[int] | None) -> str | None:
    return None if lengths is None else hashlib.sha256(repr(lengths).encode()).hexdigest()[:32]


def _check_same(said: Sequence[dict[str, Any]], apart: Sequence[str]) -> None:
    """Raises ArgumentError unless all ranks gave the same values.

    The error is the same on every rank.

    Only the values that ``apart`` names may differ.
    """
    for rank, facts in enumerate(said):
        for name in {**said[0], **facts}:
            mine, first = facts.get(name), said[0].get(name)
            if name not in apart and mine != first:
                raise ArgumentError(
                    f"{name}: rank {rank} of the group gave {_shown(mine)}, and rank 0 "
                    f"{_shown(first)}; every rank must give the same"
                )


def _shown(value: Any) -> str:
    return quoted(tuple(value) if isinstance(value, list) else value)


def _check_rows(name: str, layout: Layout, rows: Sequence[int]) -> None:
    """Raises ArgumentError unless every rank has exactly the rows of its shard."""
    for rank, count in enumerate(rows):
        if count != layout.rows(rank):
            raise ArgumentError(
                f"{name}: rank {rank} of the group holds {count} rows, and its shard of "
                f"{layout.starts[-1]} over {layout.ranks} ranks has {layout.rows(rank)} (all hold "
                f"{list(rows)}); give what flashsmith.parallel.shard() returns"
            )


# Under a causal mask, 'auto' gathers K and V if they have at most this many bytes over the whole
# sequences. On two GPUs, gathering 32, 128 or 512 MiB is faster than the ring. Larger sizes were
# not measured and would take more memory.
MOST_GATHERED = 512 << 20


def _bytes_of_keys(call: GroupCall, heads_k: int) -> int:
    """The bytes of K and V of a dense batch, over the whole sequences."""
    batch, _, _, d = call.shape
    return 2 * batch * call.k_layout.starts[-1] * heads_k * (d + call.d_v)


_NO_BITS = (
    "schedule='zigzag': merges parts of the keys in another order; take 'allgather' or 'ulysses'"
)


def schedule_named(name: str, call: GroupCall, heads_k: int) -> GroupSchedule:
    """The schedule with this name.

    For 'auto' it depends only on facts that are the same on all ranks.
    """
    count = 2 * call.group.size
    sides = (("q", call.q_layout), ("k", call.k_layout))
    uneven = [
        (side, place, length)
        for side, layout in sides
        for place, length in enumerate(layout.lengths)
        if length % count
    ]
    if name == "auto":
        same = call.q_layout == call.k_layout
        gathered = causal_allgather.serves(call) and _bytes_of_keys(call, heads_k) <= MOST_GATHERED
        ring = call.limits == FULL or (call.limits == CAUSAL and same)
        ring = ring and not (uneven or call.return_row_max or call.bits)
        name = "zigzag" if ring and not gathered else "allgather"
    if name == "zigzag" and call.bits:
        raise cannot_keep(call.bits, _NO_BITS)
    if name == "zigzag" and uneven:
        side, place, length = uneven[0]
        which = f"sequence {place} of {side}" if call.packed else f"{side}'s sequence"
        raise ArgumentError(
            f"schedule='zigzag': {which} has {length} rows; must be a multiple of {count}, twice "
            "the ranks: pad it, or take 'allgather'"
        )
    if name == "zigzag" and call.return_row_max:
        raise ArgumentError(
            "return_row_max: given with schedule='zigzag', which has no row maximum; take "
            "'allgather'"
        )
    if name == "allgather" and causal_allgather.serves(call):
        return causal_allgather.PREFIXES
    return SCHEDULES[name]


def limits_of(mask: MaskLimits) -> Limits:
    """The limits of a mask as the (left, right) of a window; None stands for no limit."""
    left, right = (None if limit >= UNLIMITED else limit for limit in mask[1:])
    return Limits(left, right)


def _call(
    group: Group,
    q_layout: Layout,
    k_layout: Layout,
    q: Any,
    d_v: int,
    asked: CallOptions,
    has_gradients: bool,
    devices: tuple[str, ...],
) -> GroupCall:
    return GroupCall(
        group,
        q_layout,
        k_layout,
        asked.cu_seqlens_q is not None,
        limits_of(check_mask(asked.causal, asked.window)),
        {"softcap": asked.softcap, "scale": asked.scale, "emulate": asked.emulate},
        asked.config,
        asked.backward_config,
        resolve_deterministic(asked.deterministic, q, asked.bits),
        has_gradients,
        bool(asked.return_lse),
        bool(asked.return_row_max),
        tuple(q.shape),
        d_v,
        lambda: None,
        devices,
        resolve_bits(asked.bits),
    )


# --- shards --------------------------------------------------------------------------------------


def layout_of(length: Any, cu_seqlens: Any, ranks: int) -> Layout:
    """How one sequence, or packed sequences, are divided among the ranks."""
    if cu_seqlens is not None:
        if length is not None:
            raise ArgumentError(f"length={quoted(length)}: given with cu_seqlens; give one of them")
        return Layout(_lengths("cu_seqlens", cu_seqlens), ranks)
    value = whole_number(length)
    if value is None or value < 0:
        raise ArgumentError(
            f"length={quoted(length)}: give how many rows the whole sequence has, or cu_seqlens"
        )
    return Layout((value,), ranks)


def row_dim(tensor: Any, dim: Any, packed: bool) -> int:
    """The dimension of rows as a number that is not negative."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"tensor: got {type(tensor).__name__}; give a tensor of PyTorch")
    if dim is None:
        dim = 0 if packed else 1
    value = whole_number(dim)
    if value is None or not -tensor.dim() <= value < tensor.dim():
        raise ArgumentError(
            f"dim={quoted(dim)}: the tensor has shape {tuple(tensor.shape)}; name its dimension of "
            "rows"
        )
    return value % tensor.dim()


def check_whole(tensor: Any, dim: int, layout: Layout) -> None:
    if tensor.shape[dim] != layout.starts[-1]:
        raise ArgumentError(
            f"tensor: has {tensor.shape[dim]} rows, and cu_seqlens describes {layout.starts[-1]}; "
            "give the whole sequences"
        )


def unsharded(given: Any, tensor: Any, dim: Any, cu_seqlens: Any) -> Any:
    """parallel.unshard()."""
    group = Group(given)
    facts: dict[str, Any] = {"function": "unshard"}
    refused: Exception | None = None
    lengths = None
    try:
        dim = row_dim(tensor, dim, cu_seqlens is not None)
        group.check_device("tensor", tensor)
        if cu_seqlens is not None:
            lengths = _lengths("cu_seqlens", cu_seqlens)
        shape = list(tensor.shape)
        rows, shape[dim] = shape[dim], None
        facts.update(
            dim=dim, rows=rows, shape=shape, dtype=str(tensor.dtype), cu_seqlens=_digest(lengths)
        )
    except Exception as error:
        refused = error
    said = group.agree(Message(facts, refused)).said()
    _check_same(said, apart=("rows",))
    counts = [facts["rows"] for facts in said]
    layout = Layout((sum(counts),) if lengths is None else lengths, group.size)
    _check_rows("tensor", layout, counts)
    mine = padded(tensor.detach().resolve_neg(), dim, layout.most_rows)
    return in_order(group.all_gather(mine).wait(), layout, dim)
