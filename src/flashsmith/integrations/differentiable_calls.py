"""attention() under autograd: runs calls that may have gradients, and lets run_repeated repeat
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from flashsmith.chooser.attention import check_attention_config
from flashsmith.chooser.backward import check_backward_config, resolve_deterministic
from flashsmith.integrations.autograd_functions import (
    FlashsmithAttention,
    RepeatedAttention,
    UnusableAddress,
)
from flashsmith.integrations.op_options import OpOptions
from flashsmith.integrations.saved_call import SavedCall, forward_arguments, is_plain
from flashsmith.integrations.torch_ops import no_out
from flashsmith.runtime import cached_calls
from flashsmith.runtime.bits import resolve_bits
from flashsmith.runtime.cached_calls import CachedCall
from flashsmith.runtime.forward_pass import attention_call, waits_for
from flashsmith.runtime.frameworks import framework_of
from flashsmith.semantics.signature import (
    ATTENTION,
    TENSORS,
    ForwardOptions,
    check_flag,
    tensors_of,
)

_transforms = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
_prefers_repeatable = torch.are_deterministic_algorithms_enabled
_apply = super(torch.autograd.Function, FlashsmithAttention).apply
_apply_repeated = super(torch.autograd.Function, RepeatedAttention).apply


def differentiable_attention(
    q: Any, k: Any, v: Any, **keywords: Any
) -> tuple[Any, Callable[..., None]]:
    """Computes attention() under autograd; refuses calls that cannot have gradients.

    It takes the arguments of attention(). Returns the result of attention(), and a function that
    makes run_repeated serve equivalent calls.
    """
    this, tensors, follows_pytorch = saved_call(q, k, v, keywords)
    if _transforms():
        return this.returned(*FlashsmithAttention.apply(*tensors, this)), _not_repeated
    # Function.apply spends more time on binding arguments than a launch takes.
    returned = this.returned(*_apply(*tensors, this))
    if tensors[3:] != (None,) * 3:
        return returned, _not_repeated
    return returned, partial(_remember, this, follows_pytorch)


def saved_call(
    q: Any, k: Any, v: Any, keywords: Mapping[str, Any], program: Any = None
) -> tuple[SavedCall, tuple[Any, ...], bool]:
    """Prepares a call to attention() that may have gradients. Returns the SavedCall that both
    passes share; the tensors q, k, v, sinks and the two cu_seqlens; and whether PyTorch's settings
    decide if gradients must be repeatable.

    Raises ArgumentError for a call that cannot have gradients.
    """
    bound = {**ATTENTION.bind(keywords), "program": program}
    out, config, backward_config, deterministic, emulate = _apart(bound)
    options = ForwardOptions(*_in_order(bound))
    sinks, cu_q, cu_k = tensors_of(options)[:3]
    if out is not None:
        raise no_out(q=q, k=k, v=v, sinks=sinks)
    if config is not None or backward_config is not None:
        check_attention_config(config)
        check_backward_config("backward_config", backward_config)
    if cu_q is not None and waits_for(options):
        limits = _longest((cu_q, cu_k), (options.max_seqlen_q, options.max_seqlen_k))
        bound["max_seqlen_q"], bound["max_seqlen_k"] = limits
    repeatable = resolve_deterministic(deterministic, q, options.bits)
    follows_pytorch = deterministic is None and not resolve_bits(options.bits)
    return_lse = check_flag("return_lse", options.return_lse)
    # Autograd saves the tensors, so the SavedCall need not save them.
    bound |= {**dict.fromkeys(TENSORS), "return_lse": True}
    opts = OpOptions(
        ForwardOptions(*_in_order(bound)), config, backward_config, repeatable, emulate
    )
    return SavedCall(opts, return_lse), (q, k, v, sinks, cu_q, cu_k), follows_pytorch


_apart = itemgetter("out", "config", "backward_config", "deterministic", "emulate")
_in_order = itemgetter(*ForwardOptions._fields)


def _not_repeated(*_: Any) -> None:
    """Records nothing, so that run_repeated does not serve the call."""


def _remember(
    this: SavedCall, follows_pytorch: bool, arguments: tuple[Any, ...], names: tuple[str, ...]
) -> None:
    """Makes run_repeated serve calls with equivalent arguments, by the cached call of ``this``."""
    groups, tensors = cached_calls.repeated, arguments[:3]
    this.call = _cached_forward(tensors, this)
    if this.call is not None:
        run = _run_of(this, follows_pytorch)
        cached_calls.remember_repeated(groups, arguments, names, tensors, run)


def remember_swapped(
    arguments: tuple[Any, ...], names: Any, tensors: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """Makes run_repeated serve calls with equivalent arguments. The arguments begin with three
    tensors (batch, heads, length, d), and such calls may have gradients.

    ``tensors`` and ``keywords`` are the arguments of the attention() call that has just served this
    one. The tensors are views of all of the arguments' elements.
    """
    groups, given = cached_calls.repeated, arguments[:3]
    q, k, v = tensors
    this, _, follows_pytorch = saved_call(q, k, v, keywords)
    call = _cached_forward(tensors, this)
    if call is not None:
        this.call, this.swapped = call.swapped(given[0]), True
        run = _run_of(this, follows_pytorch)
        cached_calls.remember_repeated(groups, arguments, names, given, run)


def _cached_forward(tensors: tuple[Any, ...], this: SavedCall) -> CachedCall | None:
    """Returns the cached call of the forward pass that has just run on q, k and v."""
    q, k, v = tensors
    with torch.no_grad():  # the mode within an autograd function
        signature = attention_call(*forward_arguments(q, k, v, None, None, None, this.opts))
        return cached_calls.find(signature)[1]


def _run_of(this: SavedCall, follows_pytorch: bool) -> Callable[[tuple[Any, ...]], Any]:
    """Returns the function that run_repeated calls for a pass with gradients."""

    def run(given: tuple[Any, ...]) -> Any:
        if not _grad_enabled() or (
            follows_pytorch and _prefers_repeatable() is not this.opts.deterministic
        ):
            return None
        try:
            return _apply_repeated(*given, this)
        except UnusableAddress:
            return None

    return run


def _longest(offsets: tuple[Any, Any], limits: tuple[Any, Any]) -> Any:
    """Returns upper bounds on the lengths: ``limits``, in which each bound that the caller did not
    give is replaced by the greatest length, read from the GPU.

    Reading a length synchronizes with the GPU, so this is done once for both passes. The limits are
    returned unchanged if the offsets are on the host or unusable (the checks report that later), or
    if a CUDA graph is being captured.
    """
    framework = framework_of(torch.Tensor)
    assert framework is not None
    for offset in offsets:
        is_vector = type(offset) is torch.Tensor and offset.dtype is torch.int32
        if not is_vector or offset.dim() != 1 or not is_plain(offset):
            return limits
    device = framework.view("cu_seqlens_q", offsets[0]).device
    if device.kind == "cpu" or framework.is_capturing(device.ordinal):
        return limits
    missing = [it for it, limit in zip(offsets, limits, strict=True) if limit is None]
    found = iter(framework.longest_steps(missing))
    return tuple(next(found) if limit is None else limit for limit in limits)
