"""Defines PyTorch custom ops for attention_with_cache() and write_slots().

The ops are opaque to PyTorch's tracers; fake kernels compute their output shapes.
``flashsmith::attention_with_cache`` only reads the caches.
``flashsmith::attention_with_cache_appended`` appends to them. This op's schema declares the write,
so that a compiler neither copies nor reorders the caches. Both ops return the output and the
log-sum-exp, which is empty if it was not requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from flashsmith.bundle import OPERATORS
from flashsmith.chooser.decode import attention_with_cache
from flashsmith.chooser.write_slots import write_slots
from flashsmith.errors import ArgumentError
from flashsmith.families import parse_kernel_name_into_config
from flashsmith.integrations.autograd_functions import refuse_vmap
from flashsmith.integrations.op_options import OPS
from flashsmith.integrations.pytorch_state import (
    check_for_an_op,
    under_autocast_over,
)
from flashsmith.integrations.traced_attention import of_op
from flashsmith.runtime.cache_scales import Scales
from flashsmith.semantics.signature import CACHE, WRITE_SLOTS

_LENGTHS, _NEW = CACHE.in_schema("cache_lens page_table"), CACHE.in_schema("k v cos sin")
_OPTIONS = "max_seqlen_q causal window softcap scale rotary_interleaved split bits"
_REST = ", *, ".join(
    map(
        CACHE.in_schema,
        ("sinks cu_seqlens_q kv_offset k_scale v_scale", f"{_OPTIONS} return_lse config emulate"),
    )
)
SCHEMAS = {
    "attention_with_cache": (
        f"(Tensor q, Tensor k_cache, Tensor v_cache, {_LENGTHS}, {_REST}) -> (Tensor, Tensor)"
    ),
    "attention_with_cache_appended": (
        f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_LENGTHS}, {_NEW}, "
        f"{_REST}) -> (Tensor, Tensor)"
    ),
}
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def decode_by_op(q: Any, k_cache: Any, v_cache: Any, **keywords: Any) -> Any:
    """Computes attention_with_cache() by a call to one of its ops, with the same arguments and
    results.

    While tracing, raises ArgumentError for a window that is not a pair. Other arguments are checked
    when the op runs.
    """
    asked = CACHE.bind(keywords)
    both = OPS.attention_with_cache, OPS.attention_with_cache_appended
    return called_by_op(both, asked, (q, k_cache, v_cache), {})


def called_by_op(
    ops: tuple[Any, Any], asked: dict[str, Any], first: tuple[Any, ...], program: dict[str, Any]
) -> Any:
    """Calls the first op, or the second if keys are appended to the caches.

    ``first`` has the arguments that precede cache_lens: q, the caches, and the tensors that a
    program reads. ``program`` are further keywords for the op.
    """
    q, k_cache, v_cache, *reads = first
    check_for_an_op(q=q, k_cache=k_cache, v_cache=v_cache)
    q, k, v = under_autocast_over(k_cache, q, asked["k"], asked["v"])
    options = of_op(asked, "causal softcap scale rotary_interleaved split bits return_lse emulate")
    new: tuple[Any, ...] = k, v, asked["cos"], asked["sin"]
    if all(it is None for it in new):
        new = ()
    op = ops[1] if new else ops[0]
    lengths, packing = (asked["cache_lens"], asked["page_table"]), asked["cu_seqlens_q"]
    scales = scale_tensors(asked["k_scale"], asked["v_scale"], k_cache)
    others = asked["sinks"], packing, asked["kv_offset"], *scales
    tensors = q, k_cache, v_cache, *reads, *lengths, *new, *others
    o, lse = op(*tensors, **program, **options)
    if asked["out"] is not None:
        o = asked["out"].copy_(o)
    return (o, lse) if asked["return_lse"] else o


def scale_tensors(k_scale: Any, v_scale: Any, cache: Any) -> list[Any]:
    """Converts the scales of a cache to the tensors that ops require. A scale gives the same bits
    as a number and as a tensor.

    Raises ArgumentError unless both are tensors, numbers or None.
    """
    scales = Scales.of(k_scale, v_scale)
    return [
        tensor if value is None else torch.full((), value, dtype=torch.float32, device=cache.device)
        for tensor, value in zip(*scales, strict=True)
    ]


def write_slots_by_op(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    config: Any = None,
    emulate: bool = False,
) -> None:
    """Computes write_slots() by a call to its op, whose schema declares the writes."""
    named = None if config is None else str(config)
    scales = scale_tensors(k_scale, v_scale, k_cache)
    OPS.write_slots(k, v, k_cache, v_cache, slot_mapping, *scales, config=named, emulate=emulate)


def _run_write_slots(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    config: str | None = None,
    emulate: bool = False,
) -> None:
    named = None if config is None else parse_kernel_name_into_config(config)
    how = {"k_scale": k_scale, "v_scale": v_scale, "config": named, "emulate": emulate}
    write_slots(k, v, k_cache, v_cache, slot_mapping, **how)


def _run(*tensors: Any, **keywords: Any) -> Any:
    return call_by_name("attention_with_cache", tensors, **keywords)


def _run_appending(*tensors: Any, **keywords: Any) -> Any:
    return call_by_name("attention_with_cache_appended", tensors, **keywords)


def call_by_name(
    op: str,
    tensors: tuple[Any, ...],
    *,
    window_left: int | None = None,
    window_right: int | None = None,
    config: str | None = None,
    **keywords: Any,
) -> Any:
    """Computes the outputs of ``op`` with attention_with_cache(). ``tensors`` has the op's tensors
    in the order of its schema. The log-sum-exp is empty if it was not requested."""
    named = dict(zip(names_of(op), tensors, strict=False))
    q, k_cache, v_cache = (named.pop(it, None) for it in ("q", "k_cache", "v_cache"))
    keywords |= named
    keywords["window"] = window_left, window_right
    keywords["config"] = None if config is None else parse_kernel_name_into_config(config)
    found = attention_with_cache(q, k_cache, v_cache, **keywords)
    if keywords.get("return_lse", False):
        return found
    return found, q.new_empty((0,), dtype=torch.float32)


def _fake(q: Any, _k: Any, v_cache: Any, *_: Any, return_lse: bool = False, **__: Any) -> Any:
    *leading, length, heads, _d = q.shape
    shape = (*leading, heads, length) if return_lse else (0,)
    o = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    return o, q.new_empty(shape, dtype=torch.float32)


def _autograd(name: str) -> Any:
    """Returns the op's autograd kernel, which raises an error if a tensor requires grad, because
    the op has no gradients."""

    def called(*tensors: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            for which, tensor in _named(name, tensors):
                if tensor.requires_grad:
                    raise ArgumentError(
                        f"{which}: requires grad, and attention over a cache has no gradients; "
                        "call under torch.no_grad(), or detach it; flashsmith.attention() has them"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(OPS, name).default(*tensors, **keywords)

    return called


def _named(op: str, tensors: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each tensor argument of an op, including the tensors in
    lists."""
    for name, given in zip(names_of(op), tensors, strict=False):
        for tensor in given if isinstance(given, list | tuple) else (given,):
            if tensor is not None:
                yield name, tensor


@cache
def names_of(name: str) -> list[str]:
    schema = getattr(OPS, name).default._schema
    return [argument.name for argument in schema.arguments]


_library = torch.library.Library(OPERATORS, "FRAGMENT")


def define_op(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] = _fake
) -> None:
    """Defines an op over a cache, without gradients. ``schema`` is the part of the op's schema
    after the name."""
    _library.define(name + schema, tags=_TAGS)
    op = f"{OPERATORS}::{name}"
    torch.library.impl(op, "default", kernel, lib=_library)
    torch.library.register_fake(op, fake, lib=_library)
    torch.library.register_vmap(op, refuse_vmap, lib=_library)
    _library.impl(name, _autograd(name), "Autograd")


define_op("attention_with_cache", SCHEMAS["attention_with_cache"], _run)
define_op("attention_with_cache_appended", SCHEMAS["attention_with_cache_appended"], _run_appending)
define_op(
    "write_slots",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    f"{', *, '.join(map(WRITE_SLOTS.in_schema, ('k_scale v_scale', 'config emulate')))}) -> ()",
    _run_write_slots,
    lambda *_, **__: None,
)
