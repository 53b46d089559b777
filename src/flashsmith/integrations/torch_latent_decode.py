"""Defines PyTorch custom ops for attention_with_cache() over a latent cache, similar to the ops of
torch_decode."""

from __future__ import annotations

from typing import Any

import torch

from flashsmith.chooser.latent_decode import check_keywords
from flashsmith.errors import ArgumentError
from flashsmith.integrations.op_options import OPS
from flashsmith.integrations.pytorch_state import (
    as_limit,
    check_for_an_op,
    under_autocast_over,
)
from flashsmith.integrations.torch_decode import call_by_name, define_op, scale_tensors
from flashsmith.integrations.traced_attention import of_op
from flashsmith.semantics.signature import CACHE

_READ, _APPENDED = "attention_with_latent_cache", "attention_with_latent_cache_appended"
_LENGTHS, _NEW = CACHE.in_schema("cache_lens page_table"), CACHE.in_schema("k")
_TENSORS = CACHE.in_schema("sinks cu_seqlens_q k_scale")
_OPTIONS = CACHE.in_schema(
    "v_width max_seqlen_q causal window scale split return_lse config emulate"
)
_REST = f"{_TENSORS}, *, {_OPTIONS}) -> (Tensor, Tensor)"
SCHEMAS = {
    _READ: f"(Tensor q, Tensor k_cache, {_LENGTHS}, {_REST}",
    _APPENDED: f"(Tensor q, Tensor(a!) k_cache, {_LENGTHS}, {_NEW}, {_REST}",
}


def latent_by_op(q: Any, k_cache: Any, v_cache: Any, **keywords: Any) -> Any:
    """Computes attention_with_cache() with ``v_width`` by a call to one of its ops.

    While tracing, raises ArgumentError for a window that is not a pair, and for an argument that
    attention over a latent cache does not have. Other arguments are checked when the op runs.
    """
    asked = CACHE.bind(keywords)
    check_keywords(v_cache, asked)
    return latent_called_by_op(
        (getattr(OPS, _READ), getattr(OPS, _APPENDED)), asked, (q, k_cache), {}
    )


def latent_called_by_op(
    ops: tuple[Any, Any], asked: dict[str, Any], first: tuple[Any, ...], program: dict[str, Any]
) -> Any:
    """Does the same as torch_decode.called_by_op() for a latent cache."""
    q, k_cache, *reads = first
    check_for_an_op(q=q, k_cache=k_cache)
    q, k, _ = under_autocast_over(k_cache, q, asked["k"], None)
    options = of_op(asked, "causal scale split return_lse emulate")
    options["v_width"] = as_limit(asked["v_width"])
    new = () if k is None else (k,)
    op = ops[1] if new else ops[0]
    scale, _ = scale_tensors(asked["k_scale"], None, k_cache)
    lengths = asked["cache_lens"], asked["page_table"]
    others = asked["sinks"], asked["cu_seqlens_q"], scale
    o, lse = op(q, k_cache, *reads, *lengths, *new, *others, **program, **options)
    if asked["out"] is not None:
        o = asked["out"].copy_(o)
    return (o, lse) if asked["return_lse"] else o


def _run(*tensors: Any, **keywords: Any) -> Any:
    return call_by_name(_READ, tensors, **keywords)


def _run_appending(*tensors: Any, **keywords: Any) -> Any:
    return call_by_name(_APPENDED, tensors, **keywords)


def fake_latent(q: Any, *_: Any, v_width: Any = None, return_lse: bool = False, **__: Any) -> Any:
    if v_width is None:
        raise ArgumentError("v_width: missing; give how many columns of the cache are values")
    *leading, length, heads, _d = q.shape
    shape = (*leading, heads, length) if return_lse else (0,)
    width = (*leading, length, heads, v_width)
    return q.new_empty(width), q.new_empty(shape, dtype=torch.float32)


define_op(_READ, SCHEMAS[_READ], _run, fake_latent)
define_op(_APPENDED, SCHEMAS[_APPENDED], _run_appending, fake_latent)
