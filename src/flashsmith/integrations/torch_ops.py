"""attention() and its gradients for PyTorch: custom ops, opaque to its tracers, with fake kernels
for their shapes; and the autograd functions around them.

``flashsmith::attention`` returns the output; ``flashsmith::attention_with_statistics`` also the
log-sum-exp and the row maximum, and ``flashsmith::attention_backward`` the gradients of q, k, v and
sinks. An op always returns as many tensors: those that were not asked for are empty.

Where nothing looks at the ops (no dispatch mode, no tensor class of one's own) the autograd
functions call the kernels directly: an op takes the host some microseconds more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd import forward_ad

from flashsmith.chooser.attention import check_attention_config
from flashsmith.chooser.backward import (
    CHOOSERS,
    backward_ahead,
    check_backward_config,
    resolve_deterministic,
)
from flashsmith.chooser.choice import choose_config
from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, family_named, parse_kernel_name_into_config
from flashsmith.runtime import run_backward, run_call
from flashsmith.runtime.forward_options import NO_WINDOW, check_pair

# attention()'s own arguments, where a schema can hold them: a pair becomes two, a config its text.
# PyTorch's autograd takes no tensors by name, so they come first.
_SHARED = (
    "bool causal=False, SymInt? window_left=None, SymInt? window_right=None, "
    "float softcap=0.0, float? scale=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, str? config=None, bool emulate=False"
)
_PACKING = "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, {_PACKING}, *, {_SHARED}"
# What the backward pass that follows is to be; its kernel is found or built with the forward's.
_FOLLOWING = "bool with_backward=False, str? backward_config=None, bool deterministic=False"
_SCHEMAS = {
    "attention": f"({_ARGUMENTS}) -> Tensor",
    "attention_with_statistics": (
        f"({_ARGUMENTS}, bool return_lse=False, bool return_row_max=False, {_FOLLOWING}) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "attention_backward": (
        f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse=None, "
        f"{_PACKING}, *, {_SHARED}, bool deterministic=False, bool[4] needs) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
}
# The kernels use the tensors' strides, so a compiler must not change them.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class Asked(NamedTuple):
    """What attention() is asked for beside tensors, in both directions."""

    causal: Any = False
    window: Any = NO_WINDOW
    softcap: Any = 0.0
    scale: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    return_row_max: Any = False
    config: KernelConfig | None = None
    backward_config: KernelConfig | None = None
    deterministic: bool = False
    emulate: Any = False

    def of_op(self, config: KernelConfig | None) -> dict[str, Any]:
        """The arguments that the ops of both directions have, with one's config."""
        left, right = check_pair(self.window)
        return {
            "causal": self.causal,
            "window_left": left,
            "window_right": right,
            "softcap": self.softcap,
            "scale": self.scale,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
            "config": None if config is None else _text(config),
            "emulate": self.emulate,
        }


def _asked(
    window_left: Any = None,
    window_right: Any = None,
    config: str | None = None,
    backward_config: str | None = None,
    **options: Any,
) -> Asked:
    """The same from an op's arguments."""
    return Asked(
        window=(window_left, window_right),
        config=None if config is None else parse_kernel_name_into_config(config),
        backward_config=(
            None if backward_config is None else parse_kernel_name_into_config(backward_config)
        ),
        **options,
    )


# --- the kernels, called directly ----------------------------------------------------------------


def _forward_directly(
    q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_k: Any, asked: Asked
) -> tuple[Any, Any, Any]:
    """The output, its log-sum-exp, and the row maximum or None; the backward pass is prepared."""
    causal, window, softcap, scale, max_q, max_k, row_max, config, after, repeatable, emulate = (
        asked
    )
    options = (causal, window, softcap, scale, sinks, cu_q, cu_k, max_q, max_k, True, row_max)
    ahead = backward_ahead(after, repeatable)
    results = run_call(config or choose_config, (q, k, v, None), options, emulate, "out", ahead)
    return results if row_max else (*results, None)


def _backward_directly(
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
    asked: Asked,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Any, Any, Any, Any]:
    causal, window, softcap, scale, max_q, max_k, _, _, config, repeatable, emulate = asked
    options = (
        causal, window, softcap, scale, sinks, cu_q, cu_k, max_q, max_k, dlse, repeatable, needs,
        None,
    )  # fmt: skip
    # The forward pass was allowed to take as long as both do.
    on_host = emulate or q.device.type == "cpu"
    chosen = config or CHOOSERS[repeatable]
    return run_backward(chosen, (do, q, k, v, o, lse), options, on_host)


def _is_plain(*tensors: Any) -> bool:
    """Whether nothing but autograd looks at operations on the tensors."""
    return not torch._C._len_torch_dispatch_stack() and all(
        type(tensor).__torch_dispatch__ is _NO_DISPATCH for tensor in tensors
    )


# --- autograd ------------------------------------------------------------------------------------


def _no_jvp(*_: Any) -> NoReturn:
    raise ArgumentError(
        "q, k, v: forward-mode differentiation (jvp, jacfwd); flashsmith's kernels compute "
        "gradients by reverse mode only: use grad or vjp"
    )


def _no_vmap(*_: Any) -> NoReturn:
    raise ArgumentError(
        "q, k, v: inside torch.vmap (or jacrev, per-sample gradients); flashsmith's kernels take "
        "plain tensors: put the mapped dimension into the batch"
    )


def _no_second(*_: Any) -> NoReturn:
    raise ArgumentError(
        "q, k, v: a second derivative (double backward, hessian); flashsmith's kernels compute "
        "first ones only: use PyTorch's attention there"
    )


class FlashsmithAttention(torch.autograd.Function):
    """q, k, v, sinks, the offsets of packed sequences and an Asked to the output, its log-sum-exp
    and the row maximum, which is not differentiable; None if it was not asked for."""

    jvp, vmap = staticmethod(_no_jvp), staticmethod(_no_vmap)

    @staticmethod
    def forward(
        q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_k: Any, asked: Asked
    ) -> tuple[Any, Any, Any]:
        if _is_plain(q, k, v):
            return _forward_directly(q, k, v, sinks, cu_q, cu_k, asked)
        with torch._C._AutoDispatchBelowAutograd():
            results = torch.ops.flashsmith.attention_with_statistics.default(
                *(q, k, v, sinks, cu_q, cu_k),
                **asked.of_op(asked.config),
                return_lse=True,
                return_row_max=asked.return_row_max,
                with_backward=True,
                backward_config=_text_or_none(asked.backward_config),
                deterministic=asked.deterministic,
            )
        return results if asked.return_row_max else (*results[:2], None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, sinks, cu_q, cu_k, ctx.asked = inputs
        o, lse, row_max = output
        ctx.set_materialize_grads(False)
        if row_max is not None:
            ctx.mark_non_differentiable(row_max)
        ctx.save_for_backward(q, k, v, o, lse, sinks, cu_q, cu_k)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:
        if do is None and dlse is None:
            return (None,) * 7
        q, k, v, o, lse, sinks, cu_q, cu_k = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(o)
        arguments = (
            *(do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k, ctx.asked),
            ctx.needs_input_grad[:4],
        )
        # Their own derivative must be an error, and not 0.
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            gradients = FlashsmithGradients.apply(*arguments)
        else:
            gradients = _gradients(*arguments)
        return (*gradients, None, None, None)


class FlashsmithGradients(torch.autograd.Function):
    """The backward pass, which has no derivative."""

    jvp, vmap = staticmethod(_no_jvp), staticmethod(_no_vmap)
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
        asked: Asked,
        needs: tuple[bool, bool, bool, bool],
    ) -> tuple[Any, Any, Any, Any]:
        return _gradients(do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k, asked, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def _gradients(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, sinks: Any, *rest: Any
) -> tuple[Any, Any, Any, Any]:
    """dq, dk, dv and dsinks, None where not needed."""
    if _is_plain(do, q, k, v):
        return _backward_directly(do, q, k, v, o, lse, dlse, sinks, *rest)
    cu_q, cu_k, asked, needs = rest
    with torch._C._AutoDispatchBelowAutograd():
        found = torch.ops.flashsmith.attention_backward.default(
            *(do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k),
            **asked.of_op(asked.backward_config),
            deterministic=asked.deterministic,
            needs=needs,
        )
    dq, dk, dv, dsinks = (it if need else None for it, need in zip(found, needs, strict=True))
    return dq, dk, dv, dsinks


# --- the ops -------------------------------------------------------------------------------------


def _nothing(like: Any, dtype: Any = torch.float32) -> Any:
    return like.new_empty((0,), dtype=dtype)


def _run(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_q: Any = None, cu_k: Any = None, **keywords: Any
) -> Any:
    asked = _asked(**keywords)
    options = (
        *(asked.causal, asked.window, asked.softcap, asked.scale, sinks, cu_q, cu_k),
        *(asked.max_seqlen_q, asked.max_seqlen_k, False, False),
    )
    chosen = asked.config or choose_config
    return run_call(chosen, (q, k, v, None), options, asked.emulate, "out")


def _run_with_statistics(
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
    **keywords: Any,
) -> Any:
    asked = _asked(return_row_max=return_row_max, **keywords)
    options = (
        *(asked.causal, asked.window, asked.softcap, asked.scale, sinks, cu_q, cu_k),
        *(asked.max_seqlen_q, asked.max_seqlen_k, return_lse, return_row_max),
    )
    ahead = backward_ahead(asked.backward_config, asked.deterministic) if with_backward else None
    chosen = asked.config or choose_config
    results = run_call(chosen, (q, k, v, None), options, asked.emulate, "out", ahead)
    output, *statistics = results if return_lse or return_row_max else (results,)
    values: Iterator[Any] = iter(statistics)
    lse = next(values) if return_lse else _nothing(q)
    return output, lse, next(values) if return_row_max else _nothing(q)


def _run_backward(
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
    config: str | None = None,
    **keywords: Any,
) -> Any:
    asked = _asked(backward_config=config, **keywords)
    needed = tuple(needs)
    arguments = do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k, asked, needed
    dq, dk, dv, dsinks = _backward_directly(*arguments)
    return (
        *(_nothing(q, q.dtype) if it is None else it for it in (dq, dk, dv)),
        _nothing(q) if dsinks is None else dsinks,
    )


def _fake(q: Any, *_: Any, **__: Any) -> Any:
    return q.new_empty(q.shape)


def _fake_with_statistics(
    q: Any, *_: Any, return_lse: bool = False, return_row_max: bool = False, **__: Any
) -> Any:
    *leading, length, heads, _d = q.shape
    shapes = [
        (*leading, heads, length) if asked else (0,) for asked in (return_lse, return_row_max)
    ]
    return q.new_empty(q.shape), *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _fake_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, sinks: Any = None,
    *_: Any, needs: Any, **__: Any,
) -> Any:  # fmt: skip
    made = [
        tensor.new_empty(tensor.shape if need else (0,))
        for tensor, need in zip((q, k, v), needs, strict=False)
    ]
    has_sinks = needs[3] and sinks is not None
    return *made, q.new_empty(sinks.shape if has_sinks else (0,), dtype=torch.float32)


def _needs_autograd(*tensors: Any) -> bool:
    """Whether autograd must see an operation on these tensors, or None, even if only to refuse
    it."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and any(it is not None and it.requires_grad for it in tensors))
    )


def _autograd(*tensors: Any, **keywords: Any) -> Any:
    if not _needs_autograd(*tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flashsmith.attention.default(*tensors, **keywords)
    padded = (*tensors, *[None] * (6 - len(tensors)))
    o, _, _ = FlashsmithAttention.apply(*padded, _asked(**keywords))
    return o


def _autograd_with_statistics(*tensors: Any, **keywords: Any) -> Any:
    if not _needs_autograd(*tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flashsmith.attention_with_statistics.default(*tensors, **keywords)
    padded = (*tensors, *[None] * (6 - len(tensors)))
    return_lse = keywords.pop("return_lse", False)
    keywords.pop("with_backward", None)
    o, lse, row_max = FlashsmithAttention.apply(*padded, _asked(**keywords))
    nothing = _nothing(tensors[0])
    return o, lse if return_lse else nothing, nothing if row_max is None else row_max


def _autograd_backward(*tensors: Any, needs: Any, config: Any = None, **keywords: Any) -> Any:
    if not _needs_autograd(*tensors):
        if config is not None:
            keywords["config"] = config
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flashsmith.attention_backward.default(
                *tensors, needs=needs, **keywords
            )
    padded = (*tensors, *[None] * (10 - len(tensors)))
    asked = _asked(backward_config=config, **keywords)
    *found, dsinks = FlashsmithGradients.apply(*padded, asked, tuple(needs))
    q = tensors[1]
    return (
        *(_nothing(q, q.dtype) if it is None else it for it in found),
        _nothing(q) if dsinks is None else dsinks,
    )


_library = torch.library.Library("flashsmith", "DEF")
for _name, _kernel, _fake_kernel, _autograd_kernel in (
    ("attention", _run, _fake, _autograd),
    (
        "attention_with_statistics",
        _run_with_statistics,
        _fake_with_statistics,
        _autograd_with_statistics,
    ),
    ("attention_backward", _run_backward, _fake_backward, _autograd_backward),
):
    _library.define(_name + _SCHEMAS[_name], tags=_TAGS)
    _op = f"flashsmith::{_name}"
    torch.library.impl(_op, "default", _kernel, lib=_library)
    torch.library.register_fake(_op, _fake_kernel, lib=_library)
    torch.library.register_vmap(_op, _no_vmap, lib=_library)
    _library.impl(_name, _autograd_kernel, "Autograd")


def _text(config: KernelConfig) -> str:
    """The short form. Field by field, since PyTorch 2.11 makes a constant of no dataclass."""
    family = config.FAMILY
    return _short_form(family, *[getattr(config, name) for name in config.KNOBS])


def _text_or_none(config: KernelConfig | None) -> str | None:
    return None if config is None else _text(config)


@torch.compiler.assume_constant_result
def _short_form(family: str, *values: Any) -> str:
    """Worked out by Python itself, not traced."""
    return str(family_named(family).config_class(*values))


def differentiable_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    out: Any = None,
    return_lse: bool = False,
    return_row_max: bool = False,
    config: KernelConfig | None = None,
    backward_config: KernelConfig | None = None,
    deterministic: bool | None = None,
    **options: Any,
) -> Any:
    """attention() with gradients, or to refuse what has none; takes and returns what it does."""
    if out is not None:
        raise _no_out(q=q, k=k, v=v, sinks=sinks)
    check_attention_config(config)
    check_backward_config("backward_config", backward_config)
    asked = Asked(
        return_row_max=return_row_max,
        config=config,
        backward_config=backward_config,
        deterministic=resolve_deterministic(deterministic, q),
        **options,
    )
    tensors = q, k, v, sinks, cu_seqlens_q, cu_seqlens_k
    if torch._C._are_functorch_transforms_active():
        o, lse, row_max = FlashsmithAttention.apply(*tensors, asked)
    else:
        # Function.apply itself spends more on binding arguments than a launch takes.
        o, lse, row_max = _apply(*tensors, asked)
    if return_lse:
        return (o, lse, row_max) if return_row_max else (o, lse)
    return (o, row_max) if return_row_max else o


_apply = super(torch.autograd.Function, FlashsmithAttention).apply


def _no_out(**tensors: Any) -> ArgumentError:
    growing = (name for name, it in tensors.items() if it is not None and it.requires_grad)
    return ArgumentError(
        f"out: given, and {next(growing, 'q')} requires grad: autograd makes its own outputs; "
        "leave it out, or call under torch.no_grad()"
    )


def attention_by_op(
    q: Any,
    k: Any,
    v: Any,
    *,
    window: tuple[int | None, int | None] = (None, None),
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    out: Any = None,
    return_lse: bool = False,
    return_row_max: bool = False,
    config: KernelConfig | None = None,
    backward_config: KernelConfig | None = None,
    deterministic: bool | None = None,
    **keywords: Any,
) -> Any:
    """attention() in terms of the ops, for tracers and dispatch modes; takes and returns what it
    does.

    Raises ArgumentError while tracing for a window that is no pair, and for an out with gradients;
    other arguments are judged when the op runs.
    """
    tensors = q, k, v, sinks, cu_seqlens_q, cu_seqlens_k
    keywords["window_left"], keywords["window_right"] = check_pair(window)
    keywords["config"] = None if config is None else _text(config)
    differentiable = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    )
    if differentiable:
        if out is not None:
            raise _no_out(q=q, k=k, v=v, sinks=sinks)
        keywords["with_backward"] = True
        keywords["backward_config"] = None if backward_config is None else _text(backward_config)
        keywords["deterministic"] = (
            torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        )
    if not (return_lse or return_row_max or differentiable):
        output = torch.ops.flashsmith.attention(*tensors, **keywords)
        return output if out is None else out.copy_(output)
    output, lse, row_max = torch.ops.flashsmith.attention_with_statistics(
        *tensors, return_lse=return_lse, return_row_max=return_row_max, **keywords
    )
    if out is not None:
        output = out.copy_(output)
    if return_lse:
        return (output, lse, row_max) if return_row_max else (output, lse)
    return (output, row_max) if return_row_max else output
