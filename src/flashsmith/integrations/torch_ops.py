"""attention() as custom ops: opaque to PyTorch's tracers, with fake kernels for their shapes.

``flashsmith::attention`` returns the output; ``flashsmith::attention_with_statistics`` also the
log-sum-exp and the row maximum, empty where they were not asked for, because an op always returns
as many tensors. Forward only: going backward through one is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from flashsmith import chooser
from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, family_named, parse_kernel_name_into_config
from flashsmith.runtime.forward_options import check_pair

# attention()'s own arguments, where a schema can hold them: a pair becomes two, a config its text.
# PyTorch's autograd takes no tensors by name, so they come first.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, "
    "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, *, "
    "bool causal=False, SymInt? window_left=None, SymInt? window_right=None, "
    "float softcap=0.0, float? scale=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, str? config=None, bool emulate=False"
)
_STATISTICS = "bool return_lse=False, bool return_row_max=False"
# The kernels use the tensors' strides, so a compiler must not change them.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def _run(
    q: Any,
    k: Any,
    v: Any,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    **keywords: Any,
) -> Any:
    left, right = keywords.pop("window_left", None), keywords.pop("window_right", None)
    config = keywords.pop("config", None)
    return chooser.attention(
        q,
        k,
        v,
        window=(left, right),
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        config=None if config is None else parse_kernel_name_into_config(config),
        **keywords,
    )


def _fake(q: Any, *_: Any, **__: Any) -> Any:
    return q.new_empty(q.shape)


def _run_with_statistics(q: Any, *tensors: Any, **keywords: Any) -> Any:
    lse, row_max = _asked_for(keywords)
    results = _run(q, *tensors, **keywords)
    output, *statistics = results if lse or row_max else (results,)
    values: Iterator[Any] = iter(statistics)
    return output, next(values) if lse else _nothing(q), next(values) if row_max else _nothing(q)


def _fake_with_statistics(q: Any, *_: Any, **keywords: Any) -> Any:
    *leading, length, heads, _d = q.shape
    shapes = [(*leading, heads, length) if asked else (0,) for asked in _asked_for(keywords)]
    return q.new_empty(q.shape), *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _asked_for(keywords: dict[str, Any]) -> tuple[bool, bool]:
    return keywords.get("return_lse", False), keywords.get("return_row_max", False)


def _nothing(q: Any) -> Any:
    return q.new_empty((0,), dtype=torch.float32)


def _no_gradient(*_: Any) -> NoReturn:
    raise ArgumentError(
        "q, k, v: flashsmith's ops are forward only; flashsmith.sdpa() leaves calls that need "
        "gradients to PyTorch"
    )


for _name, _results, _kernel, _fake_kernel in (
    (f"attention({_ARGUMENTS})", "Tensor", _run, _fake),
    (
        f"attention_with_statistics({_ARGUMENTS}, {_STATISTICS})",
        "(Tensor, Tensor, Tensor)",
        _run_with_statistics,
        _fake_with_statistics,
    ),
):
    _op, _, _schema = f"flashsmith::{_name}".partition("(")
    torch.library.define(_op, f"({_schema} -> {_results}", tags=_TAGS)
    torch.library.impl(_op, "default", _kernel)
    torch.library.register_fake(_op, _fake_kernel)
    torch.library.register_autograd(_op, _no_gradient)


def _text(config: KernelConfig) -> str:
    """The short form. Field by field, since PyTorch 2.11 makes a constant of no dataclass."""
    family = config.FAMILY
    return _short_form(family, *[getattr(config, name) for name in config.KNOBS])


@torch.compiler.assume_constant_result
def _short_form(family: str, *values: Any) -> str:
    """Worked out by Python itself, not traced."""
    return str(family_named(family).config_class(*values))


def traced_attention(
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
    **keywords: Any,
) -> Any:
    """attention() in terms of the ops; takes and returns what it does.

    Raises ArgumentError while tracing when an input requires grad in grad mode, or for a window
    that is no pair; other arguments are judged when the op runs.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"{name}: requires grad, and attention() is forward only; call it under "
                "torch.no_grad(), or flashsmith.sdpa(), which leaves such calls to PyTorch"
            )
    tensors = q, k, v, sinks, cu_seqlens_q, cu_seqlens_k
    keywords["window_left"], keywords["window_right"] = check_pair(window)
    keywords["config"] = None if config is None else _text(config)
    if not (return_lse or return_row_max):
        output = torch.ops.flashsmith.attention(*tensors, **keywords)
        return output if out is None else out.copy_(output)
    output, lse, row_max = torch.ops.flashsmith.attention_with_statistics(
        *tensors, return_lse=return_lse, return_row_max=return_row_max, **keywords
    )
    if out is not None:
        output = out.copy_(output)
    return (output, *((lse,) if return_lse else ()), *((row_max,) if return_row_max else ()))
