"""The schedule 'allgather': every rank gathers the K and V of all ranks, one group of heads after
another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashsmith.parallel.group import Transfer
from flashsmith.parallel.group_call import GroupCall, GroupGradients, GroupResults, Needs, as_needed
from flashsmith.parallel.kernel_calls import (
    Differentiated,
    add_gradients,
    calls_for,
    empty_statistics,
    heads_per_group,
    run_forward,
    sink_gradients,
)
from flashsmith.parallel.layout import Span
from flashsmith.parallel.rank_rows import by_owner, in_order, padded, side_by_side

# K and V are gathered in groups of heads. While one group is computed, the next ones are gathered.
# A rank's message has at least this many bytes, because smaller messages do not reach the full
# bandwidth of a link.
SMALLEST_MESSAGE = 8 << 20


def head_parts(kv: Any) -> list[Span]:
    """The groups of KV heads that are gathered at once."""
    heads = int(kv.shape[-2])
    size = kv.numel() * kv.element_size()
    counts = [n for n in range(1, heads + 1) if heads % n == 0 and size // n >= SMALLEST_MESSAGE]
    step = heads // max(counts, default=1)
    return [(head, head + step) for head in range(0, heads, step)] if step else [(0, 0)]


def _gathered(call: GroupCall, k: Any, v: Any) -> Iterator[tuple[Span, Any]]:
    """Yields each group of heads with the K and V of all rows, which lie side by side in one
    tensor, in the order of the sequences.

    When a group is yielded, the transfers of later groups have already begun.
    """
    dim = call.dim
    kv = padded(side_by_side(k, v), dim, call.k_layout.most_rows)
    parts = head_parts(kv)
    transfers = [call.group.all_gather(kv[..., begin:end, :].contiguous()) for begin, end in parts]
    for heads in parts:
        yield heads, in_order(transfers.pop(0).wait(), call.k_layout, dim)


def forward(call: GroupCall, q: Any, k: Any, v: Any, sinks: Any) -> GroupResults:
    call.confirm()
    o, lse = call.zeros(q), empty_statistics(call, q)
    if sinks is not None:
        lse = torch.maximum(lse, sinks[:, None])  # For rows that see no key
    row_max = empty_statistics(call, q) if call.return_row_max else None
    group = heads_per_group(q, k)
    for heads, kv in _gathered(call, k, v):
        begin, end = (group * head for head in heads)
        for part in calls_for(call, q.device):
            found = run_forward(
                call,
                part,
                q[..., begin:end, :],
                *call.split(kv),
                sinks=None if sinks is None else sinks[begin:end],
            )
            part.q.put(o[..., begin:end, :], call.dim, found[0])
            for into, values in zip((lse, row_max), found[1:], strict=True):
                if values is not None:
                    part.q.put(into[..., begin:end, :], -1, values)
    return GroupResults(o, lse, row_max, (q, k, v, o, lse, sinks))


def backward(
    call: GroupCall, saved: tuple[Any, ...], do: Any, dlse: Any, needs: Needs
) -> GroupGradients:
    q, k, v, o, lse, sinks = saved
    of = Differentiated(do, q, o, lse, dlse)
    dim, group = call.dim, heads_per_group(q, k)
    dq = torch.zeros_like(q, dtype=torch.float32)
    sent: list[tuple[Span, Transfer]] = []
    for heads, kv in _gathered(call, k, v):
        dkv = torch.zeros_like(kv, dtype=torch.float32)
        some = of.heads(group, heads)
        begin, end = (group * head for head in heads)
        parts = calls_for(call, q.device)
        add_gradients(call, parts, some, kv, needs, dq[..., begin:end, :], dkv)
        if needs[1] or needs[2]:
            sent.append((heads, call.group.all_to_all(by_owner(dkv, call.k_layout, dim))))
    dsinks = sink_gradients(call, of, k, v, sinks) if needs[3] else None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for (begin, end), transfer in sent:
        found = transfer.wait()
        total = found[0]
        for rank in range(1, call.group.size):
            total = total + found[rank]
        total = total.narrow(dim, 0, k.shape[dim])
        for into, gradient in zip((dk, dv), call.split(total), strict=True):
            into[..., begin:end, :].copy_(gradient)
    return as_needed(needs, dq.to(q.dtype), dk, dv, dsinks)
