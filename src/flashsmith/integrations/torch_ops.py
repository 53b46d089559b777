"""Defines PyTorch custom ops for attention() and its gradients.

The ops are opaque to PyTorch's tracers; fake kernels compute their output shapes.
``flashsmith::attention`` returns the output. ``flashsmith::attention_with_statistics`` also returns
the log-sum-exp and the row maximum. ``flashsmith::attention_backward`` returns the gradients of q,
k, v and sinks. Each op has a fixed number of outputs; those not requested are empty.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

from flashsmith.bundle import OPERATORS
from flashsmith.chooser.backward import backward_ahead
from flashsmith.chooser.choice import choose_config
from flashsmith.errors import ArgumentError
from flashsmith.integrations.autograd_functions import (
    FlashsmithAttention,
    FlashsmithGradients,
    refuse_vmap,
)
from flashsmith.integrations.op_flop import flop, flop_backward
from flashsmith.integrations.op_options import OPS as OPS  # others import it from here
from flashsmith.integrations.op_options import call_options, call_options_backward
from flashsmith.integrations.repeated_ops import Asked, repeated_op
from flashsmith.integrations.saved_call import SavedCall, backward_arguments
from flashsmith.runtime import run_backward, run_call
from flashsmith.runtime.backward_pass import backward_call
from flashsmith.runtime.forward_pass import attention_call
from flashsmith.semantics.signature import ATTENTION

# The arguments of attention() as an op's schema declares them: a pair becomes two arguments, and a
# config becomes a string. Tensors come first, because PyTorch's autograd does not take tensors as
# keywords.
SHARED = ATTENTION.in_schema("causal window softcap scale max_seqlen_q max_seqlen_k config emulate")
_PACKING = ATTENTION.in_schema("sinks cu_seqlens_q cu_seqlens_k")
_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, {_PACKING}, *, {SHARED}, {ATTENTION.in_schema('bits')}"
# Options of the backward pass that follows. The kernels of both passes are found or built together.
FOLLOWING = (
    "bool with_backward=False, str? backward_config=None, bool deterministic=False, bool[] needs=[]"
)
_SCHEMAS = {
    "attention": f"({_ARGUMENTS}) -> Tensor",
    "attention_with_statistics": (
        f"({_ARGUMENTS}, bool return_lse=False, bool return_row_max=False, {FOLLOWING}) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "attention_backward": (
        f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse=None, "
        f"{_PACKING}, *, {SHARED}, bool deterministic=False, bool[4] needs, "
        "bool fp32_gradients=False) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
}
# The kernels use the tensors' strides, so a compiler must not change them.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def nothing_like(like: Any, dtype: Any = torch.float32) -> Any:
    return like.new_empty((0,), dtype=dtype)


def _run(*tensors: Any, **keywords: Any) -> Any:
    chosen, given, options, emulate, _ = _asked_forward(*tensors, **keywords)
    return run_call(chosen, given, options, emulate, "out")


def _asked_forward(
    q: Any,
    k: Any,
    v: Any,
    sinks: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
    *,
    return_lse: bool = False,
    return_row_max: bool = False,
    with_backward: bool = False,
    needs: Any = (),
    **keywords: Any,
) -> tuple[Any, ...]:
    """Converts a forward op's arguments to the arguments of run_call and attention_call, in the
    order that forward_arguments() describes."""
    opts = call_options(return_lse=return_lse, return_row_max=return_row_max, **keywords)
    options = opts.options.with_tensors(sinks, cu_q, cu_k)
    ahead = None
    if with_backward:
        its_needs = needs or (True,) * 3
        ahead = backward_ahead(opts.backward_config, opts.deterministic, *its_needs)
    return opts.config or choose_config, (q, k, v, None), options, opts.emulate, ahead


def _run_with_statistics(*tensors: Any, **keywords: Any) -> Any:
    chosen, given, options, emulate, ahead = _asked_forward(*tensors, **keywords)
    results = run_call(chosen, given, options, emulate, "out", ahead)
    return _all_statistics(options.return_lse, options.return_row_max, results, given[0])


def _all_statistics(return_lse: bool, return_row_max: bool, results: Any, like: Any) -> Any:
    """Converts the results of run_call to the op's outputs. ``like`` is a tensor on the same
    device."""
    output, *statistics = results if return_lse or return_row_max else (results,)
    values: Iterator[Any] = iter(statistics)
    lse = next(values) if return_lse else nothing_like(like)
    return output, lse, next(values) if return_row_max else nothing_like(like)


def _run_backward(*tensors: Any, fp32_gradients: bool = False, **keywords: Any) -> Any:
    asked = _asked_backward(*tensors, fp32_gradients=fp32_gradients, **keywords)
    return _all_gradients(fp32_gradients, run_backward(*asked), tensors[1])


def _all_gradients(fp32_gradients: bool, found: Any, like: Any) -> Any:
    """Converts the results of run_backward to the op's outputs. ``like`` is a tensor on the same
    device with q's dtype."""
    *gradients, dsinks = found
    dtype = torch.float32 if fp32_gradients else like.dtype
    return (
        *(nothing_like(like, dtype) if it is None else it for it in gradients),
        nothing_like(like) if dsinks is None else dsinks,
    )


def _asked_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dlse: Any = None,
    sinks: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
    *,
    needs: Any,
    fp32_gradients: bool = False,
    config: str | None = None,
    **keywords: Any,
) -> Any:
    """Converts a backward op's arguments to the result of backward_arguments()."""
    opts = call_options_backward(config, **keywords)
    tensors = do, q, k, v, o, lse
    return backward_arguments(tensors, dlse, sinks, cu_q, cu_k, opts, tuple(needs), fp32_gradients)


def _attention_asked(*tensors: Any, **keywords: Any) -> Asked:
    return attention_call(*_asked_forward(*tensors, **keywords)), None


def _statistics_asked(*tensors: Any, **keywords: Any) -> Asked:
    asked = _asked_forward(*tensors, **keywords)
    wanted = asked[2].return_lse, asked[2].return_row_max
    return attention_call(*asked), partial(_all_statistics, *wanted)


def _backward_asked(*tensors: Any, fp32_gradients: bool = False, **keywords: Any) -> Asked:
    asked = _asked_backward(*tensors, fp32_gradients=fp32_gradients, **keywords)
    return backward_call(*asked), partial(_all_gradients, fp32_gradients)


def _fake(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _fake_with_statistics(
    q: Any, k: Any, v: Any, *_: Any, return_lse: bool = False, return_row_max: bool = False,
    **__: Any,
) -> Any:  # fmt: skip
    *leading, length, heads, _d = q.shape
    shapes = [
        (*leading, heads, length) if asked else (0,) for asked in (return_lse, return_row_max)
    ]
    statistics = (q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), *statistics


def _fake_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, sinks: Any = None,
    *_: Any, needs: Any, fp32_gradients: bool = False, **__: Any,
) -> Any:  # fmt: skip
    dtype = torch.float32 if fp32_gradients else q.dtype
    made = [
        tensor.new_empty(tensor.shape if need else (0,), dtype=dtype)
        for tensor, need in zip((q, k, v), needs, strict=False)
    ]
    has_sinks = needs[3] and sinks is not None
    return *made, q.new_empty(sinks.shape if has_sinks else (0,), dtype=torch.float32)


def _needs_autograd(*tensors: Any) -> bool:
    """Whether autograd must handle an operation on the tensors, even if only to refuse it.

    Some of the tensors may be None.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and any(it is not None and it.requires_grad for it in tensors))
    )


def _apply_by_dispatcher(function: Any, *arguments: Any) -> Any:
    """Calls function.apply() within an op.

    Within an op, the dispatcher goes through torch.func's transforms one by one, and each transform
    needs a separate autograd function.
    """
    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(*arguments)


@functools.cache
def _of_one_level(function: Any) -> Any:
    """Returns a copy of an autograd function whose apply() does not start at the outermost
    transform.

    From PyTorch 2.14 on, the apply() of every torch.autograd.Function starts at the outermost
    transform.
    """
    steps = ("forward", "setup_context", "backward", "jvp")
    return type(
        function.__name__, (_SingleLevelFunction,), {step: vars(function)[step] for step in steps}
    )


def _autograd(*tensors: Any, **keywords: Any) -> Any:
    if not _needs_autograd(*tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return OPS.attention.default(*tensors, **keywords)
    padded = (*tensors, *[None] * (6 - len(tensors)))
    o, _, _ = _apply_by_dispatcher(
        FlashsmithAttention, *padded, SavedCall(call_options(return_lse=True, **keywords), True)
    )
    return o


def _autograd_with_statistics(*tensors: Any, **keywords: Any) -> Any:
    if not _needs_autograd(*tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return OPS.attention_with_statistics.default(*tensors, **keywords)
    padded = (*tensors, *[None] * (6 - len(tensors)))
    return_lse = keywords.pop("return_lse", False)
    keywords.pop("with_backward", None)
    keywords.pop("needs", None)
    o, lse, row_max = _apply_by_dispatcher(
        FlashsmithAttention, *padded, SavedCall(call_options(return_lse=True, **keywords), True)
    )
    nothing = nothing_like(tensors[0])
    return o, lse if return_lse else nothing, nothing if row_max is None else row_max


def _autograd_backward(*tensors: Any, **keywords: Any) -> Any:
    if not _needs_autograd(*tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return OPS.attention_backward.default(*tensors, **keywords)
    padded = (*tensors, *[None] * (10 - len(tensors)))
    needs, fp32_gradients = tuple(keywords.pop("needs")), keywords.pop("fp32_gradients", False)
    opts = call_options_backward(**keywords)
    *found, dsinks = _apply_by_dispatcher(FlashsmithGradients, *padded, opts, needs, fp32_gradients)
    q = tensors[1]
    dtype = torch.float32 if fp32_gradients else q.dtype
    return (
        *(nothing_like(q, dtype) if it is None else it for it in found),
        nothing_like(q) if dsinks is None else dsinks,
    )


_library = torch.library.Library(OPERATORS, "DEF")
for _name, _kernel, _fake_kernel, _autograd_kernel, _asked in (
    ("attention", _run, _fake, _autograd, _attention_asked),
    (
        "attention_with_statistics",
        _run_with_statistics,
        _fake_with_statistics,
        _autograd_with_statistics,
        _statistics_asked,
    ),
    ("attention_backward", _run_backward, _fake_backward, _autograd_backward, _backward_asked),
):
    _library.define(_name + _SCHEMAS[_name], tags=TAGS)
    _op = f"{OPERATORS}::{_name}"
    torch.library.impl(_op, "default", repeated_op(_name, _kernel, _asked), lib=_library)
    torch.library.register_fake(_op, _fake_kernel, lib=_library)
    torch.library.register_vmap(_op, refuse_vmap, lib=_library)
    # The library needs its own name, because tensors have other dispatch keys there.
    _autograd_kernel = repeated_op(f"{_name}, autograd", _autograd_kernel, _asked)
    _library.impl(_name, _autograd_kernel, "Autograd")

register_flop_formula([OPS.attention, OPS.attention_with_statistics], get_raw=True)(flop)
register_flop_formula(OPS.attention_backward, get_raw=True)(flop_backward)


def no_out(**tensors: Any) -> ArgumentError:
    growing = (name for name, it in tensors.items() if it is not None and it.requires_grad)
    return ArgumentError(
        f"out: given, and {next(growing, 'q')} requires grad: autograd makes its own outputs; "
        "leave it out, or call under torch.no_grad()"
    )
