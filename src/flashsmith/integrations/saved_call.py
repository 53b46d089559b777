"""Defines SavedCall, a forward pass that a backward pass may follow, and runs both passes by
calling the kernels directly."""

from __future__ import annotations

from typing import Any

import torch

from flashsmith.chooser.backward import CHOOSERS, backward_ahead
from flashsmith.chooser.choice import choose_config
from flashsmith.integrations.op_options import OpOptions
from flashsmith.runtime import cached_calls, run_backward, run_call
from flashsmith.runtime.backward_pass import backward_call
from flashsmith.runtime.cached_calls import CachedCall
from flashsmith.semantics.signature import BackwardOptions

_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active


class SavedCall:
    """The options of a forward pass, and the cached call that computes it, if there is one.

    Calls that are served by the same cached call share one SavedCall. If ``swapped``, inputs and
    outputs are (batch, heads, length, d), as for sdpa().
    """

    __slots__ = ("call", "opts", "return_lse", "swapped")

    def __init__(self, opts: OpOptions, return_lse: bool) -> None:
        self.opts, self.return_lse = opts, return_lse
        self.call: CachedCall | None = None
        self.swapped = False

    def returned(self, o: Any, lse: Any, row_max: Any = None) -> Any:
        """Returns the results, in the form in which attention() returns them."""
        if self.return_lse:
            return (o, lse) if row_max is None else (o, lse, row_max)
        return o if row_max is None else (o, row_max)


def required(*tensors: Any) -> tuple[bool, ...]:
    """Returns, for each argument, whether it is a tensor that requires a gradient.

    The result is False for other objects, which the checks refuse later.
    """
    return tuple(getattr(it, "requires_grad", False) for it in tensors)


def forward_arguments(
    q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_k: Any, opts: OpOptions
) -> Any:
    """Returns the arguments of run_call and attention_call: a config or its chooser, the tensors,
    the options, emulate, and the backward pass that follows."""
    _, config, after, repeatable, emulate = opts
    options = opts.options.with_tensors(sinks, cu_q, cu_k)
    ahead = backward_ahead(after, repeatable, *required(q, k, v))
    return config or choose_config, (q, k, v, None), options, emulate, ahead


def forward_directly(
    q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_k: Any, this: SavedCall
) -> tuple[Any, Any, Any]:
    """Runs the kernel; returns the output, its log-sum-exp, and the row maximum or None.

    The kernel of the backward pass is prepared, too.
    """
    chosen, tensors, options, emulate, ahead = forward_arguments(
        q, k, v, sinks, cu_q, cu_k, this.opts
    )
    results = run_call(chosen, tensors, options, emulate, "out", ahead)
    return results if this.opts.options.return_row_max else (*results, None)


def backward_arguments(
    tensors: tuple[Any, ...], dlse: Any, sinks: Any, cu_q: Any, cu_k: Any, opts: OpOptions,
    needs: tuple[bool, bool, bool, bool], fp32_gradients: bool,
) -> Any:  # fmt: skip
    """Returns the arguments of run_backward and backward_call; ``tensors`` are do, q, k, v, o and
    lse."""
    _, _, config, repeatable, emulate = opts
    dtype = "float32" if fp32_gradients else None
    options = BackwardOptions(
        opts.options.with_tensors(sinks, cu_q, cu_k), dlse, repeatable, needs, dtype
    )
    return config or CHOOSERS[repeatable], tensors, options, emulate


def backward_directly(
    tensors: tuple[Any, ...],
    opts: OpOptions,
    needs: tuple[bool, bool, bool, bool],
    fp32_gradients: bool = False,
    this: SavedCall | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Computes dq, dk, dv and dsinks, each None if not needed; ``this`` is the forward pass.

    ``tensors`` are do, q, k, v, o, lse, and dlse, sinks, cu_q and cu_k or None for each.
    """
    given, (dlse, sinks, cu_q, cu_k) = tensors[:6], tensors[6:]
    call = backward_arguments(given, dlse, sinks, cu_q, cu_k, opts, needs, fp32_gradients)
    found = run_backward(*call)
    if this is not None and not this.swapped and dlse is None and sinks is None:
        # RepeatedAttention will make the next lookup, and RepeatedAttention saves a detached lse.
        remember_gradients(this, needs, given, (*given[:5], given[5].detach()))
    return found


def remember_gradients(
    this: SavedCall, needs: Any, tensors: tuple[Any, ...], like: tuple[Any, ...]
) -> None:
    """Records the backward call that has just computed gradients from do, q, k, v, o and lse, so
    that RepeatedAttention finds it. ``like`` are these tensors as RepeatedAttention gets them: with
    dimensions 1 and 2 swapped if the call is ``swapped``."""
    if this.call is None:
        return
    groups = cached_calls.repeated
    call = backward_arguments(tensors, None, None, None, None, this.opts, needs, False)
    _, repeated = cached_calls.find(backward_call(*call))
    if repeated is not None:
        if this.swapped:
            repeated = repeated.swapped(like[0])
        cached_calls.remember_repeated(groups, like, (this, needs), like, repeated.run)


def is_plain(*tensors: Any) -> bool:
    """Whether nothing but autograd intercepts operations on the tensors."""
    if _dispatch_modes() or _transforms():
        return False
    for tensor in tensors:  # a loop takes half the time of all()
        if getattr(type(tensor), "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH:
            return False
    return True
