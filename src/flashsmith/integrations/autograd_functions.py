"""The autograd functions of attention() and its gradients.

If nothing intercepts ops (no dispatch mode, no tensor subclass that dispatches), these functions
call the kernels directly, because an op costs some microseconds of host time.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch._C._functorch import is_legacy_batchedtensor

from flashsmith.errors import ArgumentError
from flashsmith.integrations.op_options import OPS, OpOptions
from flashsmith.integrations.pytorch_state import check_for_an_op
from flashsmith.integrations.saved_call import (
    SavedCall,
    backward_directly,
    forward_directly,
    is_plain,
    remember_gradients,
    required,
)
from flashsmith.runtime.cached_calls import run_repeated

_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled


def no_jvp(*_: Any) -> NoReturn:
    raise ArgumentError(
        "q, k, v: forward-mode differentiation (jvp, jacfwd); flashsmith's kernels compute "
        "gradients by reverse mode only: use grad or vjp"
    )


def refuse_vmap(*_: Any, **__: Any) -> NoReturn:
    raise ArgumentError(
        "q, k, v: inside torch.vmap (or jacrev, per-sample gradients); flashsmith's kernels take "
        "plain tensors: put the mapped dimension into the batch"
    )


def _no_second(*_: Any) -> NoReturn:
    raise ArgumentError(
        "q, k, v: a second derivative (double backward, hessian); flashsmith's kernels compute "
        "first derivatives only: use PyTorch's attention there"
    )


class FlashsmithAttention(torch.autograd.Function):
    """The forward and backward pass as an autograd function.

    It maps q, k, v, sinks, the two cu_seqlens and a SavedCall to the output, its log-sum-exp and
    the row maximum. The row maximum is not differentiable, and None if it was not requested.
    """

    jvp, vmap = staticmethod(no_jvp), staticmethod(refuse_vmap)

    @staticmethod
    def forward(
        q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_k: Any, this: SavedCall
    ) -> tuple[Any, Any, Any]:
        if is_plain(q, k, v):
            return forward_directly(q, k, v, sinks, cu_q, cu_k, this)
        check_for_an_op(q=q, k=k, v=v)
        opts = this.opts
        backward = opts.backward_config
        with torch._C._AutoDispatchBelowAutograd():
            results = OPS.attention_with_statistics.default(
                *(q, k, v, sinks, cu_q, cu_k),
                **opts.of_op(opts.config),
                bits=opts.options.bits,
                return_lse=True,
                return_row_max=opts.options.return_row_max,
                with_backward=True,
                backward_config=None if backward is None else str(backward),
                deterministic=opts.deterministic,
                needs=required(q, k, v),
            )
        return results if opts.options.return_row_max else (*results[:2], None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, sinks, cu_q, cu_k, ctx.this = inputs
        o, lse, row_max = output
        ctx.set_materialize_grads(False)
        if row_max is not None:
            ctx.mark_non_differentiable(row_max)
        if sinks is None and cu_q is None:
            ctx.save_for_backward(q, k, v, o, lse)
        else:
            ctx.save_for_backward(q, k, v, o, lse, sinks, cu_q, cu_k)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:
        needs = ctx.needs_input_grad[:4]
        return (*_gradients_after(ctx.saved_tensors, ctx.this, do, dlse, needs), None, None, None)


class RepeatedAttention(torch.autograd.Function):
    """FlashsmithAttention for a SavedCall that has a cached call, if nothing but autograd
    intercepts operations.

    It maps q, k, v and the SavedCall to what attention() or sdpa() returns. This saves host time:
    PyTorch calls one Python function instead of two. PyTorch usually also tracks one output instead
    of three, and four gradients instead of seven.
    """

    jvp, vmap = staticmethod(no_jvp), staticmethod(refuse_vmap)

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, this: SavedCall) -> Any:
        call = this.call
        assert call is not None
        results = call.run((q, k, v))
        if results is None:
            if this.swapped:
                raise UnusableAddress
            results = forward_directly(q, k, v, None, None, None, this)
        ctx.set_materialize_grads(False)
        ctx.this, (o, lse) = this, results[:2]
        # A returned lse requires grad. It is saved detached, so that it has the same layout in
        # every backward().
        ctx.save_for_backward(q, k, v, o, lse.detach() if this.return_lse else lse)
        if this.opts.options.return_row_max:
            ctx.mark_non_differentiable(results[2])
        return this.returned(*results)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None, *_: Any) -> Any:
        saved, this = ctx.saved_tensors, ctx.this
        # The fourth entry stands for the SavedCall, so it is False. Elsewhere the fourth entry
        # stands for the sinks, which are None here.
        needs = ctx.needs_input_grad
        if (
            dlse is None
            and do is not None
            and not (_grad_enabled() or _transforms() or _dispatch_modes())
        ):
            gradients = run_repeated((do, *saved), (this, needs))
            if gradients is not None:
                return gradients
        if this.swapped and do is not None:
            tensors = _swapped(do, *saved)
            found = _gradients_after(tensors[1:], this, tensors[0], dlse, needs)
            remember_gradients(this, needs, tensors, (do, *saved))
            return _swapped(*found)
        return _gradients_after(saved, this, do, dlse, needs)


class UnusableAddress(Exception):
    """Raised for a swapped call whose addresses need the full checks of sdpa()."""


def _swapped(*tensors: Any) -> tuple[Any, ...]:
    """Returns the arguments, with dimensions 1 and 2 of every 4-D tensor swapped. None stays
    None."""
    return tuple(it.transpose(1, 2) if it is not None and it.dim() == 4 else it for it in tensors)


def _gradients_after(
    saved: tuple[Any, ...],
    this: SavedCall,
    do: Any,
    dlse: Any,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Any, Any, Any, Any]:
    """Computes dq, dk, dv and dsinks from the tensors that a forward pass saved; a gradient that is
    not needed is None."""
    if do is None and dlse is None:
        return None, None, None, None
    q, k, v, o, lse = saved[:5]
    sinks, cu_q, cu_k = saved[5:] or (None,) * 3
    if do is None:
        do = torch.zeros_like(o)
    tensors = do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k
    # Differentiating the gradients must raise an error, not give 0.
    if torch.is_grad_enabled() or _transforms():
        found: tuple[Any, Any, Any, Any] = FlashsmithGradients.apply(*tensors, this.opts, needs)
        return found
    return _gradients(tensors, this.opts, needs, False, this)


class FlashsmithGradients(torch.autograd.Function):
    """The backward pass; differentiating it raises ArgumentError."""

    jvp, vmap = staticmethod(no_jvp), staticmethod(refuse_vmap)
    backward = staticmethod(_no_second)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Any, Any, Any, Any]:
        """Takes the ten tensors of _gradients(), followed by its other arguments."""
        return _gradients(arguments[:10], *arguments[10:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def _gradients(
    tensors: tuple[Any, ...],
    opts: OpOptions,
    needs: tuple[bool, bool, bool, bool],
    fp32_gradients: bool = False,
    this: SavedCall | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Computes dq, dk, dv and dsinks, each None if not needed, from the ``tensors`` that
    backward_directly() takes; ``this`` is the forward pass."""
    if is_plain(*tensors[:4]):
        try:
            return backward_directly(tensors, opts, needs, fp32_gradients, this)
        except RuntimeError:
            # torch.autograd.grad(is_grads_batched=True) uses a different, older vmap.
            if is_legacy_batchedtensor(tensors[0]):
                refuse_vmap()
            raise
    with torch._C._AutoDispatchBelowAutograd():
        found = OPS.attention_backward.default(
            *tensors,
            **opts.of_op(opts.backward_config),
            deterministic=opts.deterministic,
            needs=needs,
            fp32_gradients=fp32_gradients,
        )
    dq, dk, dv, dsinks = (it if need else None for it, need in zip(found, needs, strict=True))
    return dq, dk, dv, dsinks


# The autograd engine calls this. PyTorch's own apply() looks up backward() in every call, which
# takes a microsecond.
RepeatedAttention._backward_cls.apply = RepeatedAttention.backward
