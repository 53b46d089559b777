"""attention() and its gradients as PyTorch custom ops, with autograd functions around them.

The ops are opaque to PyTorch's tracers; fake kernels compute their output shapes.
``flashsmith::attention`` returns the output. ``flashsmith::attention_with_statistics`` also returns
the log-sum-exp and the row maximum. ``flashsmith::attention_backward`` returns the gradients of q,
k, v and sinks. Each op has a fixed number of outputs; those not requested are empty.

If nothing intercepts ops (no dispatch mode, no tensor subclass that dispatches), the autograd
functions call the kernels directly, because an op costs some microseconds of host time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

from flashsmith.bundle import OPERATORS
from flashsmith.chooser.attention import check_attention_config
from flashsmith.chooser.backward import (
    CHOOSERS,
    backward_ahead,
    check_backward_config,
    resolve_deterministic,
)
from flashsmith.chooser.choice import choose_config
from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, parse_kernel_name_into_config
from flashsmith.integrations.pytorch_state import check_for_an_op
from flashsmith.integrations.repeated_ops import Asked, repeated_op
from flashsmith.operations.backward import gradients_word, n_columns
from flashsmith.runtime import cached_calls, run_backward, run_call
from flashsmith.runtime.backward_pass import backward_call
from flashsmith.runtime.bits import resolve_bits
from flashsmith.runtime.cached_calls import CachedCall, run_repeated
from flashsmith.runtime.forward_pass import attention_call, waits_for
from flashsmith.runtime.frameworks import framework_of
from flashsmith.semantics.signature import (
    ATTENTION,
    TENSORS,
    BackwardOptions,
    ForwardOptions,
    check_flag,
    check_pair,
    tensors_of,
)

OPS = getattr(torch.ops, OPERATORS)
# The arguments of attention() as an op's schema declares them: a pair becomes two arguments, and a
# config becomes a string. Tensors come first, because PyTorch's autograd does not take tensors as
# keywords.
SHARED = ATTENTION.in_schema("causal window softcap scale max_seqlen_q max_seqlen_k config emulate")
_PACKING = ATTENTION.in_schema("sinks cu_seqlens_q cu_seqlens_k")
_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, {_PACKING}, *, {SHARED}, {ATTENTION.in_schema('bits')}"
# Options of the backward pass that follows. The kernel of the backward pass is found or built
# together with that of the forward pass.
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
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
_prefers_repeatable = torch.are_deterministic_algorithms_enabled


class OpOptions(NamedTuple):
    """The arguments of attention() that both passes need, except the tensors.

    ``options`` requests the log-sum-exp if a backward pass may need it.
    """

    options: ForwardOptions
    config: KernelConfig | None = None
    backward_config: KernelConfig | None = None
    deterministic: bool = False
    emulate: Any = False

    def of_op(self, config: KernelConfig | None) -> dict[str, Any]:
        """The arguments that the forward and backward ops share, with the given config."""
        options = {name: getattr(self.options, name) for name in _OF_OPS}
        left, right = check_pair(self.options.window)
        return options | {
            "window_left": left,
            "window_right": right,
            "config": None if config is None else str(config),
            "emulate": self.emulate,
        }


_OF_OPS = ("causal", "softcap", "scale", "max_seqlen_q", "max_seqlen_k")


def call_options(
    window_left: Any = None,
    window_right: Any = None,
    config: str | None = None,
    backward_config: str | None = None,
    deterministic: bool = False,
    emulate: bool = False,
    **options: Any,
) -> OpOptions:
    """The OpOptions of a forward op's arguments."""
    forward, backward = (
        None if it is None else parse_kernel_name_into_config(it)
        for it in (config, backward_config)
    )
    check_attention_config(forward)
    check_backward_config("backward_config", backward)
    opts = ForwardOptions(window=(window_left, window_right), **options)
    return OpOptions(opts, forward, backward, deterministic, emulate)


def call_options_backward(config: str | None = None, **options: Any) -> OpOptions:
    """The OpOptions of a backward op's arguments; ``config`` is for the backward pass."""
    backward = None if config is None else parse_kernel_name_into_config(config)
    check_backward_config("config", backward)
    return call_options(**options)._replace(backward_config=backward)


# --- the kernels, called directly ----------------------------------------------------------------


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
        """The results, in the form in which attention() returns them."""
        if self.return_lse:
            return (o, lse) if row_max is None else (o, lse, row_max)
        return o if row_max is None else (o, row_max)


def _required(*tensors: Any) -> tuple[bool, ...]:
    """For each argument, whether it is a tensor that requires a gradient.

    The result is False for other objects, which the checks refuse later.
    """
    return tuple(getattr(it, "requires_grad", False) for it in tensors)


def _forward_arguments(
    q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_k: Any, opts: OpOptions
) -> Any:
    """The arguments of run_call and attention_call: a config or its chooser, the tensors, the
    options, emulate, and the backward pass that follows."""
    _, config, after, repeatable, emulate = opts
    options = opts.options.with_tensors(sinks, cu_q, cu_k)
    ahead = backward_ahead(after, repeatable, *_required(q, k, v))
    return config or choose_config, (q, k, v, None), options, emulate, ahead


def forward_directly(
    q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_k: Any, this: SavedCall
) -> tuple[Any, Any, Any]:
    """Runs the kernel: the output, its log-sum-exp, and the row maximum or None.

    The kernel of the backward pass is prepared, too.
    """
    chosen, tensors, options, emulate, ahead = _forward_arguments(
        q, k, v, sinks, cu_q, cu_k, this.opts
    )
    results = run_call(chosen, tensors, options, emulate, "out", ahead)
    return results if this.opts.options.return_row_max else (*results, None)


def _backward_arguments(
    tensors: tuple[Any, ...], dlse: Any, sinks: Any, cu_q: Any, cu_k: Any, opts: OpOptions,
    needs: tuple[bool, bool, bool, bool], fp32_gradients: bool,
) -> Any:  # fmt: skip
    """The arguments of run_backward and backward_call; ``tensors`` are do, q, k, v, o and lse."""
    _, _, config, repeatable, emulate = opts
    dtype = "float32" if fp32_gradients else None
    options = BackwardOptions(
        opts.options.with_tensors(sinks, cu_q, cu_k), dlse, repeatable, needs, dtype
    )
    return config or CHOOSERS[repeatable], tensors, options, emulate


def backward_directly(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dlse: Any,
    sinks: Any,
    cu_q: Any,
    cu_k: Any,
    opts: OpOptions,
    needs: tuple[bool, bool, bool, bool],
    fp32_gradients: bool = False,
    this: SavedCall | None = None,
) -> tuple[Any, Any, Any, Any]:
    """dq, dk, dv and dsinks, None where not needed; ``this`` is the forward pass."""
    tensors = do, q, k, v, o, lse
    call = _backward_arguments(tensors, dlse, sinks, cu_q, cu_k, opts, needs, fp32_gradients)
    found = run_backward(*call)
    if this is not None and not this.swapped and dlse is None and sinks is None:
        # RepeatedAttention will make the next lookup, and it saves a detached lse.
        _remember_gradients(this, needs, tensors, (*tensors[:5], lse.detach()))
    return found


def _remember_gradients(
    this: SavedCall, needs: Any, tensors: tuple[Any, ...], like: tuple[Any, ...]
) -> None:
    """Records the backward call that has just computed gradients from do, q, k, v, o and lse, so
    that RepeatedAttention finds it. ``like`` are these tensors as RepeatedAttention gets them: with
    dimensions 1 and 2 swapped if the call is ``swapped``."""
    if this.call is None:
        return
    groups = cached_calls.repeated
    call = _backward_arguments(tensors, None, None, None, None, this.opts, needs, False)
    _, repeated = cached_calls.find(backward_call(*call))
    if repeated is not None:
        if this.swapped:
            repeated = repeated.swapped(like[0])
        cached_calls.remember_repeated(groups, like, (this, needs), like, repeated.run)


def _is_plain(*tensors: Any) -> bool:
    """Whether nothing but autograd intercepts operations on the tensors."""
    if _dispatch_modes() or _transforms():
        return False
    for tensor in tensors:  # a loop takes half the time of all()
        if getattr(type(tensor), "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH:
            return False
    return True


# --- autograd ------------------------------------------------------------------------------------


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
        if _is_plain(q, k, v):
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
                needs=_required(q, k, v),
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
                raise _UnusableAddress
            results = forward_directly(q, k, v, None, None, None, this)
        ctx.set_materialize_grads(False)
        ctx.this, (o, lse) = this, results[:2]
        # A returned lse requires grad. Saved detached, it has the same layout in every backward().
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
            _remember_gradients(this, needs, tensors, (do, *saved))
            return _swapped(*found)
        return _gradients_after(saved, this, do, dlse, needs)


class _UnusableAddress(Exception):
    """Raised for a swapped call whose addresses need the full checks of sdpa()."""


def _swapped(*tensors: Any) -> tuple[Any, ...]:
    """The arguments, with dimensions 1 and 2 of every 4-D tensor swapped. None stays None."""
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
    return _gradients(*tensors, this.opts, needs, False, this)


class FlashsmithGradients(torch.autograd.Function):
    """The backward pass; differentiating it raises ArgumentError."""

    jvp, vmap = staticmethod(no_jvp), staticmethod(refuse_vmap)
    backward = staticmethod(_no_second)

    @staticmethod
    def forward(
        do: Any,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        dlse: Any,
        sinks: Any,
        cu_q: Any,
        cu_k: Any,
        opts: OpOptions,
        needs: tuple[bool, bool, bool, bool],
        fp32_gradients: bool = False,
    ) -> tuple[Any, Any, Any, Any]:
        return _gradients(do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k, opts, needs, fp32_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def _gradients(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, sinks: Any, cu_q: Any, cu_k: Any,
    opts: OpOptions, needs: tuple[bool, bool, bool, bool], fp32_gradients: bool = False,
    this: SavedCall | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """dq, dk, dv and dsinks, None where not needed; ``this`` is the forward pass."""
    if _is_plain(do, q, k, v):
        try:
            return backward_directly(
                do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k, opts, needs, fp32_gradients, this
            )
        except RuntimeError:
            # torch.autograd.grad(is_grads_batched=True) uses a different, older vmap.
            if is_legacy_batchedtensor(do):
                refuse_vmap()
            raise
    with torch._C._AutoDispatchBelowAutograd():
        found = OPS.attention_backward.default(
            *(do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k),
            **opts.of_op(opts.backward_config),
            deterministic=opts.deterministic,
            needs=needs,
            fp32_gradients=fp32_gradients,
        )
    dq, dk, dv, dsinks = (it if need else None for it, need in zip(found, needs, strict=True))
    return dq, dk, dv, dsinks


# --- the ops -------------------------------------------------------------------------------------


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
    """The arguments of run_call and attention_call for a forward op's arguments: as
    _forward_arguments."""
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
    """_backward_arguments() for a backward op's arguments."""
    opts = call_options_backward(config, **keywords)
    tensors = do, q, k, v, o, lse
    return _backward_arguments(tensors, dlse, sinks, cu_q, cu_k, opts, tuple(needs), fp32_gradients)


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
    needs its own autograd function.
    """
    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(*arguments)


@functools.cache
def _of_one_level(function: Any) -> Any:
    """A copy of an autograd function whose apply() does not start at the outermost transform.

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


def _scores(
    q: Any, k: Any, cu_q: Any, cu_k: Any, causal: bool, left: int | None, right: int | None
) -> float:
    """The number of scores of one head that are not masked, summed over sequences.

    Causal attention without a window counts half of all scores. Offsets without values (fake and
    meta tensors) count as one sequence.
    """
    batch, lengths = 1, [(q.shape[0], k.shape[0])]
    if cu_q is None:
        batch, lengths = q.shape[0], [(q.shape[1], k.shape[1])]
    elif not isinstance(cu_q, FakeTensor) and cu_q.device.type != "meta":
        lengths = list(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True))
    total = 0.0
    for rows, keys in lengths:
        if left is None and right is None:
            total += rows * keys / (2 if causal else 1)
            continue
        places = torch.arange(rows) + keys - rows
        last = places + (0 if causal else keys if right is None else right)
        first = places - (rows + keys if left is None else left)
        total += (last.clamp(max=keys - 1) - first.clamp(min=0) + 1).clamp(min=0).sum().item()
    return batch * total


def flop(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_q: Any = None, cu_k: Any = None, *_: Any,
    causal: bool = False, window_left: int | None = None, window_right: int | None = None,
    **__: Any,
) -> int:  # fmt: skip
    """FLOP of the two GEMMs: 2 * heads * (d + d_v) per score of a head."""
    scores = _scores(q, k, cu_q, cu_k, causal, window_left, window_right)
    return int(2 * q.shape[-2] * (q.shape[-1] + v.shape[-1]) * scores)


def flop_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, *packing: Any,
    **options: Any,
) -> int:  # fmt: skip
    """FLOP of the backward pass: of all five GEMMs, or only of those that the requested gradients
    need."""
    needed = gradients_word(*options["needs"][:3])
    columns = n_columns(needed, q.shape[-1], v.shape[-1])
    both = q.shape[-1] + v.shape[-1]
    return flop(q, k, v, *packing, **options) * columns // both


register_flop_formula([OPS.attention, OPS.attention_with_statistics], get_raw=True)(flop)
register_flop_formula(OPS.attention_backward, get_raw=True)(flop_backward)


def differentiable_attention(
    q: Any, k: Any, v: Any, **keywords: Any
) -> tuple[Any, Callable[..., None]]:
    """attention() under autograd; refuses calls that cannot have gradients.

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
    """The cached call of the forward pass that has just run on q, k and v."""
    q, k, v = tensors
    with torch.no_grad():  # the mode within an autograd function
        signature = attention_call(*_forward_arguments(q, k, v, None, None, None, this.opts))
        return cached_calls.find(signature)[1]


def _run_of(this: SavedCall, follows_pytorch: bool) -> Callable[[tuple[Any, ...]], Any]:
    """The function that run_repeated calls for a pass with gradients."""

    def run(given: tuple[Any, ...]) -> Any:
        if not _grad_enabled() or (
            follows_pytorch and _prefers_repeatable() is not this.opts.deterministic
        ):
            return None
        try:
            return _apply_repeated(*given, this)
        except _UnusableAddress:
            return None

    return run


def _longest(offsets: tuple[Any, Any], limits: tuple[Any, Any]) -> Any:
    """Upper bounds on the lengths (``limits``). Those that the caller did not give are the greatest
    lengths, read from the GPU.

    Reading limits synchronizes with the GPU, so it is done once for both passes. The limits are
    returned unchanged if the offsets are on the host or unusable (the checks report that later), or
    if a CUDA graph is being captured.
    """
    framework = framework_of(torch.Tensor)
    assert framework is not None
    for offset in offsets:
        is_vector = type(offset) is torch.Tensor and offset.dtype is torch.int32
        if not is_vector or offset.dim() != 1 or not _is_plain(offset):
            return limits
    device = framework.view("cu_seqlens_q", offsets[0]).device
    if device.kind == "cpu" or framework.is_capturing(device.ordinal):
        return limits
    missing = [it for it, limit in zip(offsets, limits, strict=True) if limit is None]
    found = iter(framework.longest_steps(missing))
    return tuple(next(found) if limit is None else limit for limit in limits)


_apply = super(torch.autograd.Function, FlashsmithAttention).apply
_apply_repeated = super(torch.autograd.Function, RepeatedAttention).apply
# The autograd engine calls this. PyTorch's own apply() looks up backward() in every call, which
# takes a microsecond.
RepeatedAttention._backward_cls.apply = RepeatedAttention.backward


def no_out(**tensors: Any) -> ArgumentError:
    growing = (name for name, it in tensors.items() if it is not None and it.requires_grad)
    return ArgumentError(
        f"out: given, and {next(growing, 'q')} requires grad: autograd makes its own outputs; "
        "leave it out, or call under torch.no_grad()"
    )
