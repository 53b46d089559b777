"""The schedule 'ulysses': ranks exchange rows for heads, so that each rank computes some heads over
all rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from flashsmith.integrations import traceable
from flashsmith.parallel.group_call import GroupCall, GroupGradients, GroupResults, Needs
from flashsmith.parallel.layout import Layout
from flashsmith.parallel.rank_rows import by_owner, in_order, padded
from flashsmith.semantics.sizes import FREE


def _to_heads(call: GroupCall, layout: Layout, *tensors: Any) -> list[Any]:
    """Exchanges rows for heads: sends this rank's rows of all heads, and receives all rows, in
    order, of this rank's heads."""
    ranks, dim = call.group.size, call.dim
    parts = [it.unflatten(-2, (ranks, -1)) for it in tensors]
    shapes = [part.shape[-2:] for part in parts]
    sent = _joined_heads(parts).movedim(-2, 0)
    sent = padded(sent, dim + 1, layout.most_rows)
    whole = in_order(call.group.all_to_all(sent).wait(), layout, dim)
    return _split_heads(whole, shapes)


def _to_rows(call: GroupCall, layout: Layout, *tensors: Any) -> list[Any]:
    """The reverse of _to_heads(): receives this rank's rows of all heads."""
    dim, shapes = call.dim, [it.shape[-2:] for it in tensors]
    sent = by_owner(_joined_heads(tensors), layout, dim)
    rows = layout.rows(call.group.rank)
    found = call.group.all_to_all(sent).wait().narrow(dim + 1, 0, rows)
    return [part.movedim(0, -3).flatten(-3, -2) for part in _split_heads(found, shapes)]


def _joined_heads(tensors: Sequence[Any]) -> Any:
    """Joins tensors (..., heads, d), whose heads and d may differ, to one tensor whose last
    dimension has all elements of a row."""
    return torch.cat([it.flatten(-2) for it in tensors], -1)


def _split_heads(joined: Any, shapes: Sequence[Sequence[int]]) -> list[Any]:
    """The inverse of _joined_heads(): splits the last dimension into tensors with these (heads,
    d)."""
    parts = joined.split([heads * d for heads, d in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _as_tensor(statistics: Any) -> Any:
    """Arranges lse or row_max like a tensor with d = 1."""
    return statistics.transpose(-1, -2).unsqueeze(-1)


def _as_statistics(tensor: Any) -> Any:
    return tensor.squeeze(-1).transpose(-1, -2).contiguous()


def _keywords(call: GroupCall, device: Any) -> dict[str, Any]:
    keywords: dict[str, Any] = {"window": tuple(call.limits)}
    if call.packed:
        for side, layout in (("q", call.q_layout), ("k", call.k_layout)):
            keywords[f"cu_seqlens_{side}"] = _offsets(layout, device)
            keywords[f"max_seqlen_{side}"] = max(layout.lengths, default=0)
    return {**keywords, **call.options}


@functools.lru_cache(maxsize=64)
def _offsets(layout: Layout, device: Any) -> Any:
    return torch.tensor(layout.starts, dtype=torch.int32, device=device)


def _own_heads(call: GroupCall, sinks: Any) -> Any:
    return None if sinks is None else sinks.chunk(call.group.size)[call.group.rank]


def forward(call: GroupCall, q: Any, k: Any, v: Any, sinks: Any) -> GroupResults:
    call.confirm()
    if call.q_layout == call.k_layout:
        q, k, v = _to_heads(call, call.q_layout, q, k, v)
    else:
        (q,) = _to_heads(call, call.q_layout, q)
        k, v = _to_heads(call, call.k_layout, k, v)
    o, lse, *row_max = traceable.attention(
        q,
        k,
        v,
        sinks=_own_heads(call, sinks),
        return_lse=True,
        return_row_max=call.return_row_max,
        bits=call.bits or FREE,
        config=call.config,
        **_keywords(call, q.device),
    )
    (o_rows,) = _to_rows(call, call.q_layout, o)
    statistics = _to_rows(call, call.q_layout, *(_as_tensor(it) for it in (lse, *row_max)))
    lse_rows, *row_max = (_as_statistics(it) for it in statistics)
    return GroupResults(o_rows, lse_rows, row_max[0] if row_max else None, (q, k, v, o, lse, sinks))


def backward(
    call: GroupCall, saved: tuple[Any, ...], do: Any, dlse: Any, needs: Needs
) -> GroupGradients:
    q, k, v, o, lse, sinks = saved
    (do,) = _to_heads(call, call.q_layout, do)
    if dlse is not None:
        dlse = _as_statistics(_to_heads(call, call.q_layout, _as_tensor(dlse))[0])
    own = _own_heads(call, sinks)
    dq, dk, dv, dsinks = traceable.backward(
        do,
        q,
        k,
        v,
        o,
        lse,
        dlse=dlse,
        sinks=own,
        deterministic=call.deterministic,
        needs=needs,
        config=call.backward_config,
        **_keywords(call, q.device),
    )
    if needs[0]:
        (dq,) = _to_rows(call, call.q_layout, dq)
    if needs[1] or needs[2]:
        some = [it for it in (dk, dv) if it is not None]
        moved = iter(_to_rows(call, call.k_layout, *some))
        dk, dv = (next(moved) if need else None for need in needs[1:3])
    if needs[3]:
        part, dsinks = dsinks, torch.zeros_like(sinks)
        _own_heads(call, dsinks).copy_(part)
    return dq, dk, dv, dsinks
