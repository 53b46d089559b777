"""attention() over a group of processes: checks of arguments, agreement between ranks, and
gradients."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import once_differentiable

from flashsmith.chooser.backward import resolve_deterministic
from flashsmith.integrations import traceable
from flashsmith.integrations.pytorch_state import is_cast
from flashsmith.parallel.call_checks import (
    cast_tensors,
    check_call,
    check_rows,
    check_same,
    is_capturing,
)
from flashsmith.parallel.call_options import CallOptions
from flashsmith.parallel.group import Group, Message
from flashsmith.parallel.group_call import GroupCall, GroupSchedule
from flashsmith.parallel.layout import Layout, Limits
from flashsmith.parallel.schedules import schedule_named
from flashsmith.runtime.bits import resolve_bits
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import RepeatableFramework
from flashsmith.semantics import UNLIMITED
from flashsmith.semantics.signature import MaskLimits, check_mask


def attend(given: Any, q: Any, k: Any, v: Any, asked: CallOptions) -> Any:
    """Does the work of parallel.attention(), whose keywords are in ``asked``."""
    group = Group(given)
    # Ranks send the memory of a tensor, which does not contain the flag for lazy negation.
    q, k, v = (it.resolve_neg() if isinstance(it, torch.Tensor) else it for it in (q, k, v))
    before, signature = _latest_like(group, q, k, v, asked), None
    if before is None:
        signature = _signature(q, k, v, asked)
        before = None if signature is None else _before.get(group.handle, {}).get(signature)
        if before is not None:
            _remember_latest(group, q, k, v, asked, before)
    said = None
    if before is not None and not (q.data_ptr() % 16 or is_capturing(q)):
        # This rank sent its message in an earlier call, and now only signals that it repeats that
        # call. While it waits for the others, it does the work that needs no other rank.
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
    """Raised if another rank has a new message, so that all messages must be compared again."""

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
    """A call on which all ranks have agreed, together with this rank's message and the facts that
    all ranks sent."""

    message: Message
    said: list[dict[str, Any]]
    call: GroupCall
    schedule: GroupSchedule


def _agree(
    group: Group, q: Any, k: Any, v: Any, asked: CallOptions, said: list[dict[str, Any]] | None
) -> tuple[Any, Any, Any, _Agreed]:
    """Checks a call on this rank and compares it with the other ranks' calls.

    Returns it with q, k and v as autocast casts them.

    said: the facts that all ranks have sent about this call, if ranks have already exchanged
    messages.
    """
    facts: dict[str, Any] = {"function": "attention"}
    refused: Exception | None = None
    lengths: tuple[Any, Any] = (None, None)
    try:
        q, k, v = cast_tensors(q, k, v)
        lengths = check_call(group, q, k, v, asked, facts)
    except Exception as error:
        # The other ranks are waiting for a message, so this rank sends the error before it raises
        # it.
        refused = error
    message = Message(facts, refused)
    if said is None:
        said = group.agree(message).said()
    check_same(said, apart=("q_rows", "k_rows", "device"))
    layouts = []
    for name, known in zip("qk", lengths, strict=True):
        rows = [facts[f"{name}_rows"] for facts in said]
        layout = Layout((sum(rows),) if known is None else known, group.size)
        check_rows(name, layout, rows)
        layouts.append(layout)
    devices = tuple(facts["device"] for facts in said)
    heads_k, d_v = v.shape[-2:]
    needs_any = any(facts["requires_grad"])
    call = _call(group, layouts[0], layouts[1], q, d_v, asked, needs_any, devices)
    return q, k, v, _Agreed(message, said, call, schedule_named(asked.schedule, call, heads_k))


# For each group, the calls that were agreed on, keyed by signature. A call whose signature is known
# is not checked again.
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
    has_layout: Callable[..., bool]  # whether q, k and v have the same layouts as in that call
    agreed: _Agreed


# Models repeat one call in every layer, and comparing arguments takes half the time of computing a
# signature.
_latest: WeakKeyDictionary[Any, _Latest] = WeakKeyDictionary()


def _latest_like(group: Group, q: Any, k: Any, v: Any, asked: CallOptions) -> _Agreed | None:
    """The ranks' agreement about the latest call, if this call has the same signature; otherwise
    None."""
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
    # A call under autocast is not recorded, because autocast may change dtypes. Neither is a call
    # with sinks, whose properties may change.
    if asked.sinks is None and not torch._C._is_any_autocast_enabled():
        has_layout = framework.layout_check((q, k, v))
        _latest[group.handle] = _Latest(asked, state, has_layout, agreed)


def _state(q: Any, k: Any, v: Any) -> tuple[bool, ...]:
    """The parts of a signature that are neither options nor layouts."""
    return (
        *(torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        torch._C._is_any_autocast_enabled(),
        *(q.requires_grad, k.requires_grad, v.requires_grad),
    )


def _signature(q: Any, k: Any, v: Any, asked: CallOptions) -> Any:
    """Everything that affects the checks, except addresses; None for rare kinds of calls."""
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
        # All ranks must send the same messages, even if the loss of one rank does not depend on o.
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


def limits_of(mask: MaskLimits) -> Limits:
    """The limits of a mask as (left, right), as for a window; None means no limit."""
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
