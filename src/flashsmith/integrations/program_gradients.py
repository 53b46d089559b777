"""Computes attention() with score and mask functions under autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flashsmith import chooser
from flashsmith.chooser.functions import CallFunctions, bound_functions, sizes_of
from flashsmith.integrations.autograd_functions import no_jvp, refuse_vmap
from flashsmith.integrations.captured_gradients import Saved, captured_gradients
from flashsmith.integrations.differentiable_calls import saved_call
from flashsmith.integrations.saved_call import SavedCall, backward_directly, forward_directly


def attention_with_functions(
    q: Any,
    k: Any,
    v: Any,
    functions: Mapping[str, Any],
    keywords: Mapping[str, Any],
    attention: Callable[..., Any],
) -> Any:
    """Computes attention() while autograd is enabled. ``functions`` are the keywords of attention()
    that define a program. If the functions only express a causal mask or a window, ``attention``
    computes the call."""
    program, causal, window = bound_functions(
        CallFunctions(**functions),
        (keywords.get("causal", False), keywords.get("window", (None, None))),
        sizes_of(q, k, keywords.get("cu_seqlens_q")),
    )
    keywords = {**keywords, "causal": causal, "window": window}
    if program is None:
        return attention(q, k, v, **keywords)
    inputs = q, k, v, keywords.get("sinks"), *program.tensors
    if not any(getattr(it, "requires_grad", False) for it in inputs):
        return chooser.attention(q, k, v, **{**keywords, **functions})
    this, tensors, _ = saved_call(q, k, v, keywords, program)
    return this.returned(*AttentionOfProgram.apply(this, *tensors, *program.tensors))


def tensors_with_gradients(q: Any, k: Any, keywords: Mapping[str, Any]) -> list[Any]:
    """Returns the tensors that require grad, among those that a call's functions read. ``keywords``
    are the keywords of attention()."""
    functions = {it: keywords[it] for it in CallFunctions._fields if keywords.get(it) is not None}
    sizes = sizes_of(q, k, keywords.get("cu_seqlens_q"))
    program, _, _ = bound_functions(CallFunctions(**functions), (False, (None, None)), sizes)
    tensors = () if program is None else program.tensors
    return [it for it in tensors if getattr(it, "requires_grad", False)]


class AttentionOfProgram(torch.autograd.Function):
    """The autograd function of a call with a program.

    It maps a SavedCall, q, k, v, sinks, the two cu_seqlens and the tensors that the program reads
    to the output, its log-sum-exp, and the row maximum or None.
    """

    jvp, vmap = staticmethod(no_jvp), staticmethod(refuse_vmap)

    @staticmethod
    def forward(ctx: Any, this: SavedCall, *tensors: Any) -> tuple[Any, Any, Any]:
        q, k, v, sinks, cu_q, cu_k, *_ = tensors
        o, lse, row_max = forward_directly(q, k, v, sinks, cu_q, cu_k, this)
        ctx.set_materialize_grads(False)
        if row_max is not None:
            ctx.mark_non_differentiable(row_max)
        ctx.this = this
        ctx.save_for_backward(o, lse, *tensors)
        return o, lse, row_max

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:
        o, lse, q, k, v, sinks, cu_q, cu_k, *reads = ctx.saved_tensors
        nothing = (None,) * len(reads)
        if do is None and dlse is None:
            return (None,) * 7 + nothing
        opts = ctx.this.opts
        program = opts.options.program._replace(tensors=tuple(reads))
        opts = opts._replace(options=opts.options._replace(program=program))
        do = torch.zeros_like(o) if do is None else do
        needs = ctx.needs_input_grad
        found: Any = (None,) * 4
        if any(needs[1:5]):
            tensors = do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k
            found = backward_directly(tensors, opts, needs[1:5])
        captured: Any = nothing
        if any(needs[7:]):
            saved = Saved(do, q, k, v, o, lse, dlse, cu_q, cu_k)
            captured = captured_gradients(saved, opts.options, program, needs[7:])
        return (None, *found, None, None, *captured)
