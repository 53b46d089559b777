"""Turns calls to attention() and backward() into calls to their custom ops, for tracers and
dispatch modes.

Only calls under a tracer or a dispatch mode import this module.
"""

from __future__ import annotations

from typing import Any

import torch

from flashsmith.families import KernelConfig, family_named
from flashsmith.integrations.pytorch_state import (
    as_limit,
    assume_constant_result,
    check_for_an_op,
    under_autocast,
)
from flashsmith.integrations.torch_ops import no_out
from flashsmith.operations.backward import check_grad_dtype
from flashsmith.runtime import Gradients
from flashsmith.runtime.backward_pass import check_needs
from flashsmith.runtime.bits import resolve_bits
from flashsmith.semantics.signature import ATTENTION, BACKWARD, check_pair


def short_form(config: KernelConfig | None) -> str | None:
    """Returns the short form of a config; None for None.

    The fields are passed to _written() one by one, since PyTorch 2.11 cannot make a dataclass a
    constant.
    """
    if config is None:
        return None
    return _written(config.FAMILY, *[getattr(config, name) for name in config.KNOBS])


@assume_constant_result
def _written(family: str, *values: Any) -> str:
    """Returns the short form of a config; tracers let Python run this function and do not trace
    it."""
    return str(family_named(family).config_class(*values))


def attention_by_op(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    """Computes attention() by a call to an op, with the same arguments and results.

    While tracing, raises ArgumentError for a window that is not a pair, and for ``out`` with
    gradients. Other arguments are checked when the op runs.
    """
    asked = ATTENTION.bind(keywords)
    check_for_an_op(q=q, k=k, v=v)
    q, k, v = under_autocast(q, k, v)
    sinks, out = asked["sinks"], asked["out"]
    return_lse, return_row_max = asked["return_lse"], asked["return_row_max"]
    tensors = q, k, v, sinks, asked["cu_seqlens_q"], asked["cu_seqlens_k"]
    options = of_op(asked, "causal softcap scale bits emulate")
    differentiable = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    )
    if differentiable:
        if out is not None:
            raise no_out(q=q, k=k, v=v, sinks=sinks)
        options["with_backward"] = True
        options["backward_config"] = short_form(asked["backward_config"])
        options["deterministic"] = is_deterministic(asked["deterministic"], asked["bits"])
    if not (return_lse or return_row_max or differentiable):
        output = torch.ops.flashsmith.attention(*tensors, **options)
        return output if out is None else out.copy_(output)
    output, lse, row_max = torch.ops.flashsmith.attention_with_statistics(
        *tensors, return_lse=return_lse, return_row_max=return_row_max, **options
    )
    if out is not None:
        output = out.copy_(output)
    if return_lse:
        return (output, lse, row_max) if return_row_max else (output, lse)
    return (output, row_max) if return_row_max else output


def of_op(asked: dict[str, Any], names: str) -> dict[str, Any]:
    """Returns the arguments of an op's schema for the options in ``names`` and for the options that
    all ops have."""
    left, right = check_pair(asked["window"])
    limits = [name for name in ("max_seqlen_q", "max_seqlen_k") if name in asked]
    return {
        **{name: asked[name] for name in names.split()},
        **{name: as_limit(asked[name]) for name in limits},
        "window_left": left,
        "window_right": right,
        "config": short_form(asked["config"]),
    }


def is_deterministic(asked: bool | None, bits: str | None = None) -> bool:
    if asked is not None:
        return asked
    return torch.are_deterministic_algorithms_enabled() or _resolved_bits(bits) != ""


# Tracers record the result as a constant, because they cannot trace a read of the environment.
_resolved_bits = assume_constant_result(resolve_bits)


def backward_by_op(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, **keywords: Any) -> Gradients:
    """Computes backward() by a call to its op, with the same arguments and results.

    While tracing, raises ArgumentError for values that a schema cannot hold: a window that is not a
    pair, ``needs`` without four entries, or another grad_dtype. Other arguments are checked when
    the op runs.
    """
    asked = BACKWARD.bind(keywords)
    check_for_an_op(do=do, q=q, k=k, v=v, o=o)
    options = of_op(asked, "causal softcap scale emulate")
    sinks, needed = asked["sinks"], check_needs(asked["needs"])
    found = torch.ops.flashsmith.attention_backward(
        *(do, q, k, v, o, lse, asked["dlse"], sinks, asked["cu_seqlens_q"], asked["cu_seqlens_k"]),
        deterministic=is_deterministic(asked["deterministic"]),
        needs=needed,
        fp32_gradients=check_grad_dtype(asked["grad_dtype"]) is not None,
        **options,
    )
    wanted = (*needed[:3], needed[3] and sinks is not None)
    return Gradients(*(it if want else None for it, want in zip(found, wanted, strict=True)))
