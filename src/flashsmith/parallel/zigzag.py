"""The schedule 'zigzag': K and V pass from rank to rank in a ring; outputs are merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashsmith.parallel.group import Transfer, used_until_now
from flashsmith.parallel.group_call import GroupCall, GroupGradients, GroupResults, Needs, as_needed
from flashsmith.parallel.kernel_calls import (
    Differentiated,
    add_gradients,
    calls_for,
    heads_per_group,
    sink_gradients,
)
from flashsmith.parallel.layout import Span
from flashsmith.parallel.partial_outputs import MergedOutputs, partial_output
from flashsmith.parallel.rank_rows import side_by_side


class _Ring:
    """Iterates over the K and V of all ranks, beginning with this rank's.

    While the caller uses the K and V of one rank, the K and V of the next rank are transferred.

    ``confirm`` is called after the caller has enqueued the work on this rank's own K and V.
    """

    def __init__(self, call: GroupCall, kv: Any, confirm: Callable[[], None] | None = None) -> None:
        self._group, self._confirm = call.group, confirm
        self._blocks = [kv]
        # K and V arrive in one of these two buffers while the kernels read the other.
        self._spare = [torch.empty_like(kv) for _ in range(min(2, call.group.size - 1))]
        self._free = [used_until_now(kv)] * len(self._spare)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yields (rank, K and V of that rank)."""
        size, rank = self._group.size, self._group.rank
        block = self._blocks[0]
        for step in range(size):
            coming, place = None, step % 2
            if step == 0 and self._confirm is not None:
                yield rank, block
                self._confirm()
            if step < size - 1:
                coming = self._group.pass_on(block, self._spare[place], self._free[place])
            if step or self._confirm is None:
                yield (rank - step) % size, block
            if step:
                self._free[(step - 1) % 2] = used_until_now(block)
            if coming is not None:
                block = coming.wait()


def forward(call: GroupCall, q: Any, k: Any, v: Any, sinks: Any) -> GroupResults:
    merged = MergedOutputs(call, q)
    for owner, kv in _Ring(call, side_by_side(k, v), call.confirm):
        for part in calls_for(call, q.device, owner):
            merged.add(partial_output(call, part, q, *call.split(kv)))
    o, lse = merged.results(sinks)
    return GroupResults(o, lse, None, (q, k, v, o, lse, sinks))


def backward(
    call: GroupCall, saved: tuple[Any, ...], do: Any, dlse: Any, needs: Needs
) -> GroupGradients:
    q, k, v, o, lse, sinks = saved
    of = Differentiated(do, q, o, lse, dlse)
    own = side_by_side(k, v)
    dq = torch.zeros_like(q, dtype=torch.float32)
    # The gradients for this rank's own keys are computed in two halves of the heads: one half while
    # the first keys of another rank arrive, the other while the last gradients return to their
    # rank.
    early, late = halves(int(k.shape[-2]))
    own_dkv = torch.zeros_like(own, dtype=torch.float32)
    coming: Transfer | None = None
    for step, (owner, kv) in enumerate(_Ring(call, own)):
        if step == 0:
            _add_own(call, of, own, needs, dq, own_dkv, early)
            continue
        dkv = torch.zeros_like(own_dkv)
        add_gradients(call, calls_for(call, q.device, owner), of, kv, needs, dq, dkv)
        if needs[1] or needs[2]:
            # Adds this rank's gradients to the sum of the earlier ranks, and passes the sum on.
            if coming is not None:
                dkv = coming.wait().add_(dkv)
            coming = call.group.pass_on(dkv, torch.empty_like(dkv))
    _add_own(call, of, own, needs, dq, own_dkv, late)
    if coming is not None:
        own_dkv += coming.wait()
    dsinks = sink_gradients(call, of, k, v, sinks) if needs[3] else None
    dk, dv = (it.to(k.dtype) for it in call.split(own_dkv))
    return as_needed(needs, dq.to(q.dtype), dk, dv, dsinks)


def halves(heads: int) -> tuple[Span, Span]:
    return (0, (heads + 1) // 2), ((heads + 1) // 2, heads)


def _add_own(
    call: GroupCall, of: Differentiated, kv: Any, needs: Needs, dq: Any, dkv: Any, heads: Span
) -> None:
    """Adds the gradients for some heads of a rank's own keys."""
    begin, end = heads
    if begin == end:
        return
    group = heads_per_group(of.q, kv)
    add_gradients(
        call,
        calls_for(call, of.q.device, call.group.rank),
        of.heads(group, heads),
        kv[..., begin:end, :],
        needs,
        dq[..., group * begin : group * end, :],
        dkv[..., begin:end, :],
    )
