"""sdpa(): scaled_dot_product_attention on flashsmith's kernels, with PyTorch as the fallback."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from flashsmith.chooser import cached_attention
from flashsmith.errors import UnservedError
from flashsmith.integrations.fallbacks import Reason, note_fallback
from flashsmith.integrations.pytorch_state import (
    assume_constant_result,
    check_emulate,
    is_direct,
    is_on_host,
    needs_gradients,
    reads_environment,
    under_autocast,
    why_not_now,
    why_not_on,
    without_transforms,
)
from flashsmith.integrations.sdpa_problem import (
    SdpaProblem,
    TensorFacts,
    mask_arguments,
    why_not,
    why_not_mask,
)
from flashsmith.integrations.traceable import (
    attention,
    is_tracing,
    without_torchscript,
)
from flashsmith.runtime import cached_calls
from flashsmith.runtime.arguments import ALIGNMENT_BYTES
from flashsmith.runtime.bits import cannot_keep, resolve_bits
from flashsmith.runtime.cached_calls import is_constant, run_repeated, swapped_sizes
from flashsmith.tracing import table_function

# PyTorch's own function. The name in torch.nn.functional may already be replaced by a function that
# calls sdpa().
pytorch_sdpa = torch._C._nn.scaled_dot_product_attention
_NAME = "sdpa"  # the name of sdpa()'s repeated calls
_flash_enabled = torch._C._get_flash_sdp_enabled
# Warns while a call is traced, not when the traced code runs.
_note_fallback_when_traced = assume_constant_result(note_fallback)
_resolved_bits = assume_constant_result(resolve_bits)
# Cached, because a model has few distinct problems. Not used while tracing: tracers reject
# lru_cache.
known_why_not = lru_cache(maxsize=1024)(why_not)
# The tensors and keywords of a call to attention().
_Called = tuple[tuple[Any, Any, Any], dict[str, Any]]
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@without_torchscript
def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    strict: bool = False,
    emulate: bool | None = None,
    bits: str | None = None,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its signature and meaning.

    flashsmith's kernels also compute the gradients. Calls that they cannot serve fall back to
    PyTorch, with one FallbackWarning per reason. Examples are calls with dropout, a dtype other
    than fp16 and bf16, a d that is not a multiple of 8 or is above 512 (256 except on sm_90), and a
    mask tensor that requires grad, or any mask tensor under torch.compile.

    Some calls fall back with any arguments. These are calls on the host without the emulator, and
    calls on sm_100 and later unless FLASHSMITH_UNTUNED is 1. Calls inside torch.jit.trace,
    torch.onnx.export and torch.func's transforms other than one grad or vjp also fall back. Calls
    under a torch.nn.attention.sdpa_kernel without flash attention fall back, too.

    Args:
        query: (batch, heads, length_q, d); batch, or both batch and heads, may be missing.
        key, value: (batch, heads_k, length_k, d); heads_k below heads needs enable_gqa, or is 1.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as in PyTorch; is_causal aligns to the
            top left.
        strict: raise instead of leaving the call to PyTorch.
        emulate: run host tensors in the slow emulator instead of leaving them to PyTorch. None
            reads the variable FLASHSMITH_EMULATE, 0 unless set, at every call.
        bits: as for attention(). 'canonical' also raises instead of leaving the call to PyTorch.

    Returns:
        The output, like query with the last dimension of value.

    Raises:
        ArgumentError: the kernels cannot serve the call, under strict or with canonical bits; names
            the argument. It is also raised if emulate or bits has an invalid value.
        PyTorch's own errors for calls that it refuses.
        The errors of building and launching a kernel.
    """
    arguments: Any = None
    if attn_mask is None and emulate is None and is_direct() and _flash_enabled():
        # A call that the kernels serve does not depend on the other arguments.
        arguments = query, key, value, is_causal, scale, enable_gqa, bits
        if dropout_p == 0.0 and (output := run_repeated(arguments, _NAME)) is not None:
            return output
    query, key, value = under_autocast(query, key, value)
    call = _SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    found = _by_kernel_or_reason(call, emulate, bits, arguments)
    if not isinstance(found, Reason):
        return found
    _check_fallback(found, bits, strict=strict)
    # The warning names the line that called this function, so it must be issued here.
    (_note_fallback_when_traced if is_tracing() else note_fallback)("sdpa()", *found)
    return pytorch_sdpa(*call[:6], scale=scale, enable_gqa=enable_gqa)


class _SdpaCall(NamedTuple):
    """The arguments of sdpa() that define the result, as cast by autocast."""

    query: Any
    key: Any
    value: Any
    mask: Any
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def _by_kernel_or_reason(
    call: _SdpaCall, emulate: bool | None, bits: str | None, arguments: tuple[Any, ...] | None
) -> Any:
    """Returns the kernels' output, or the reason that the kernels cannot serve the call.

    If ``arguments``, the arguments of sdpa(), are given, the call is recorded under them.
    """
    if (reason := _why_not(call, emulate)) is not None:
        return reason
    try:
        output, called = _by_kernel(call, bits)
        if arguments is not None:
            _remember(arguments, *called)
        return output
    except UnservedError:
        device = call.query.device
        return Reason("attn_mask", f"a mask tensor on {device}; its kernels are for other devices")


def _why_not(call: _SdpaCall, emulate: bool | None) -> Reason | None:
    """Returns why the kernels cannot serve a call, or None.

    Raises ArgumentError for an unknown value of ``emulate``.
    """
    if emulate is not None:
        check_emulate(emulate)
    tracing = is_tracing()
    if (reason := why_not_now(tracing) or _why_not_types(call, tracing)) is not None:
        return reason
    problem = SdpaProblem(
        tensor_facts(call.query, tracing),
        tensor_facts(call.key, tracing),
        tensor_facts(call.value, tracing),
        call.mask is not None and tracing,
        call.dropout_p,
        call.is_causal,
        call.scale,
        call.enable_gqa,
    )
    reason = (why_not if tracing else known_why_not)(problem)
    if reason is None and call.mask is not None:
        reason = _why_not_mask(call.mask, problem)
    if reason is not None:
        return reason
    with_gradients = needs_gradients(call.query, call.key, call.value)
    width = call.query.shape[-1]
    return why_not_on(call.query.device, emulate, width, with_gradients=with_gradients)


def _why_not_types(call: _SdpaCall, tracing: bool) -> Reason | None:
    """Returns which argument has a type that PyTorch refuses, so that its error is raised.

    A scale is not checked while tracing, when it may be a symbol.
    """
    query, key, value, mask = call[:4]
    tensors = (("query", query), ("key", key), ("value", value), ("attn_mask", mask))
    for name, it in tensors:
        if not isinstance(it, torch.Tensor) and (name != "attn_mask" or it is not None):
            return Reason(name, f"no tensor, but {type(it).__name__}")
    for name, flag in (("is_causal", call.is_causal), ("enable_gqa", call.enable_gqa)):
        if not isinstance(flag, (bool, torch.SymBool)):
            return Reason(name, f"{flag!r}; must be True or False")
    if not tracing and call.scale is not None:
        is_number = hasattr(call.scale, "__float__") and not getattr(call.scale, "shape", ())
        if not is_number or type(call.scale).__hash__ is None:
            return Reason("scale", f"no number, but {type(call.scale).__name__}")
    return None


def _check_fallback(reason: Reason, bits: str | None, *, strict: bool) -> None:
    """Raises ArgumentError if ``strict`` or canonical bits forbid a fallback to PyTorch."""
    if strict:
        raise reason.error()
    if _resolved_bits(bits):
        raise cannot_keep(
            bits, f"{reason}; and PyTorch's attention, which would take over, has other bits"
        )


def tensor_facts(tensor: Any, tracing: bool) -> TensorFacts:
    """Returns the properties of a tensor that decide whether a kernel can take it."""
    name = str if tracing else _name
    dtype, device = name(tensor.dtype).removeprefix("torch."), name(tensor.device)
    if tensor.is_nested:  # some nested tensors have no shape
        return TensorFacts((), (), dtype, device, kind="nested tensor")
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        return TensorFacts(shape, (), dtype, device, kind=f"tensor of layout {tensor.layout}")
    if tracing:
        return TensorFacts(shape, tensor.stride(), dtype, device)
    # The address is checked only for plain tensors, because tensors of other types may have no
    # memory.
    if torch._C._are_functorch_transforms_active():
        tensor = without_transforms(tensor)
    plain = type(tensor) in _PLAIN_TYPES
    aligned = not plain or tensor.data_ptr() % ALIGNMENT_BYTES == 0
    kind = "Tensor" if plain else type(tensor).__name__
    return TensorFacts(shape, tensor.stride(), dtype, device, aligned, kind)


@cache
def _name(dtype_or_device: Any) -> str:
    return str(dtype_or_device)


def _why_not_mask(mask: Any, problem: SdpaProblem) -> Reason | None:
    # PyTorch is faster than our kernels at computing a mask's gradients.
    needs_grad = torch.is_grad_enabled() and mask.requires_grad
    return why_not_mask(tensor_facts(mask, tracing=False), problem, needs_grad=needs_grad)


def mask_keywords(mask: Any, query: Any, key: Any) -> dict[str, Any]:
    """Returns the keywords with which attention() applies a mask tensor that is broadcast to the
    scores."""
    if mask is None:
        return {}
    # The kernel broadcasts batch and heads.
    full = mask.expand(*mask.shape[:-2], query.shape[2], key.shape[2])
    return {"mask": full} if mask.dtype is torch.bool else {"score_mod": _added(full)}


def _added(mask: Any) -> Callable[..., Any]:
    """Returns a score function that adds a mask tensor, which may contain its dtype's lowest
    number.

    All scores to which the lowest number is added become the same number: a row of only such scores
    gives the mean of v, as in PyTorch. An -inf in the mask stays, and hides the key.
    """
    at = table_function(mask)
    infinity = float("inf")

    def added(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        value = at(b, h, q_idx, kv_idx)
        hidden = torch.where(value == -infinity, value, _LOWEST)
        return torch.where(value < _LOWEST, hidden, score + value)

    return added


# A number in a mask that is below this hides a key. This limit is far from -2**28, at which
# rounding alone would make an exponent too large.
_LOWEST = -1e6


def _by_kernel(call: _SdpaCall, bits: str | None) -> tuple[Any, _Called]:
    """Returns the output, and the arguments of the attention() call that computed it."""
    query, key, value = call.query, call.key, call.value
    missing = 4 - query.dim()
    for _ in range(missing):
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    length_q, length_k = query.shape[2], key.shape[2]
    if call.is_causal and length_k > length_q:
        key, value = key[:, :, :length_q], value[:, :, :length_q]
    if key.shape[0] != query.shape[0]:
        key = key.expand(query.shape[0], -1, -1, -1)
        value = value.expand(query.shape[0], -1, -1, -1)
    causal, window = mask_arguments(call.is_causal, length_q, length_k)
    tensors = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    keywords = {
        "causal": causal,
        "window": window,
        "scale": call.scale,
        "bits": bits,
        **mask_keywords(call.mask, query, key),
        # Host tensors get here only if the emulator is to compute the call.
        "emulate": is_on_host(query.device),
    }
    output = attention(*tensors, **keywords).transpose(1, 2)
    for _ in range(missing):
        output = output.squeeze(0)
    return output, (tensors, keywords)


def _remember(arguments: tuple[Any, ...], tensors: tuple[Any, ...], keywords: Any) -> None:
    """Records a call to sdpa(), so that run_repeated serves later calls with equivalent arguments.

    ``tensors`` and ``keywords`` are the arguments of the attention() call that computed this one.
    Calls without a batch and calls that depend on the environment are not recorded.
    """
    groups, given = cached_calls.repeated, arguments[:3]
    if not all(map(is_constant, arguments[3:])) or given[0].dim() != 4:
        return
    if reads_environment(given[0].device):
        return
    if any(tensor.requires_grad for tensor in given):
        # Other calls are not remembered: if grad mode is off, later calls may enable it, and a
        # sliced or expanded tensor needs the gradients of these steps, too.
        if torch.is_grad_enabled() and all(map(_is_swapped, given, tensors)):
            from flashsmith.integrations.differentiable_calls import remember_swapped

            remember_swapped(arguments, _NAME, tensors, keywords)
        return
    found = cached_attention((*tensors, *keywords.values()), tuple(keywords))
    if found is not None:
        call = found[0].swapped(given[0])
        cached_calls.remember_repeated(groups, arguments, _NAME, given, call.run)


def _is_swapped(tensor: Any, view: Any) -> bool:
    """Whether ``view`` has all elements of ``tensor``, with dimensions 1 and 2 swapped."""
    return bool(view.shape == swapped_sizes(tensor.shape))
