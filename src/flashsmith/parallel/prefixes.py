"""The schedule 'allgather' under a plain causal mask: a chunk of queries sees a prefix of the keys.

Each of a rank's two chunks is one call of attention() on all keys that it sees, so that there are
no parts to merge. Keys need no order but that the chunk's own are the last. So they are gathered
into

    later chunks by rank | earlier chunks by rank | this rank's own later chunk

where rank r's chunks are r, the earlier, and 2P - 1 - r, the later: what its later chunk sees is
everything from the later chunk of rank r + 1 on, and what its earlier chunk sees is the earlier
chunks up to its own. The later chunks come while the earlier is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashsmith.integrations import traceable
from flashsmith.parallel.group import Group
from flashsmith.parallel.layout import CAUSAL
from flashsmith.parallel.schedules import Call, Gradients, Needs, Results, Schedule, as_needed


def serves(call: Call) -> bool:
    """Whether all chunks of this call are as long, and see nothing but a prefix."""
    (length, *more) = call.q_layout.lengths or (0,)
    return (
        call.mask == CAUSAL
        and call.q_layout == call.k_layout
        and not (call.packed or more)
        and length > 0
        and length % (2 * call.group.size) == 0
    )


class _Keys(NamedTuple):
    """What this rank's chunks see of K and of V, and how to wait until it has come."""

    earlier: Sequence[Any]
    later: Sequence[Any]
    wait_for_earlier: Callable[[], None]
    wait_for_later: Callable[[], None]


def _gather(call: Call, k: Any, v: Any, confirm: Callable[[], None] | None = None) -> _Keys:
    """Begins to gather K and V; ``confirm`` is called when all else is done, before that."""
    ranks, rank = call.group.size, call.group.rank
    batch, rows, heads, d = k.shape
    chunk = rows // 2
    places = ranks * chunk, ranks * chunk, chunk
    whole = k.new_empty((2, batch, sum(places), heads, d)).unbind()
    if batch == 1:
        # Rows of ranks are neighbours already.
        k_halves, v_halves = (it[0].contiguous().chunk(2) for it in (k, v))
        k_places, v_places = (it[0].split_with_sizes(places) for it in whole)
        gather = call.group.all_gather_into
    else:
        k_halves, v_halves = (it.chunk(2, 1) for it in (k, v))
        k_places, v_places = (it.split_with_sizes(places, 1) for it in whole)
        gather = functools.partial(_gather_batch, call.group)
    earlier, later = (
        [it.narrow(1, first * chunk, count * chunk) for it in whole]
        for first, count in ((ranks, rank + 1), (rank + 1, 2 * ranks - rank))
    )
    if confirm is not None:
        confirm()
    wait_for_earlier = gather((k_places[1], v_places[1]), (k_halves[0], v_halves[0]))
    wait_for_later = gather((k_places[0], v_places[0]), (k_halves[1], v_halves[1]))

    def wait_and_copy() -> None:
        wait_for_earlier()
        # Now, so that the second message has a place on the GPU before a kernel fills it.
        torch._foreach_copy_([k_places[2], v_places[2]], [k_halves[1], v_halves[1]])

    return _Keys(earlier, later, wait_and_copy, wait_for_later)


def _gather_batch(group: Group, into: Sequence[Any], mine: Sequence[Any]) -> Callable[[], None]:
    """Begins to gather one chunk of each rank ``into`` tensors whose rows are by rank."""
    mine = [it.contiguous() for it in mine]
    found = [it.new_empty((group.size * it.shape[0], *it.shape[1:])) for it in mine]
    wait = group.all_gather_into(found, mine)

    def wait_and_place() -> None:
        wait()
        for whole, of_ranks in zip(into, found, strict=True):
            rows = of_ranks.unflatten(0, (group.size, -1)).transpose(0, 1)
            whole.unflatten(1, (group.size, -1)).copy_(rows)

    return wait_and_place


def _attend(call: Call, q: Any, kv: Sequence[Any], out: Any, sinks: Any) -> tuple[Any, Any]:
    """One chunk's lse and row maximum, None where nobody asked; its output is written."""
    keeps_lse = call.return_lse or call.has_gradients
    found = traceable.attention(
        q,
        *kv,
        causal=True,
        sinks=sinks,
        out=out,
        return_lse=keeps_lse,
        return_row_max=call.return_row_max,
        config=call.config,
        **call.options,
    )
    if not (keeps_lse or call.return_row_max):
        return None, None
    _, *statistics = found
    row_max = statistics.pop() if call.return_row_max else None
    return statistics[0] if statistics else None, row_max


def forward(call: Call, q: Any, k: Any, v: Any, sinks: Any) -> Results:
    o = torch.empty_like(q)
    (q_earlier, q_later), (o_earlier, o_later) = q.chunk(2, 1), o.chunk(2, 1)
    keys = _gather(call, k, v, call.confirm)
    keys.wait_for_earlier()
    earlier = _attend(call, q_earlier, keys.earlier, o_earlier, sinks)
    keys.wait_for_later()
    later = _attend(call, q_later, keys.later, o_later, sinks)
    lse, row_max = (
        torch.cat(both, -1) if wish else None
        for wish, both in zip(
            (call.return_lse, call.return_row_max), zip(earlier, later, strict=True), strict=True
        )
    )
    return Results(o, lse, row_max, (q, k, v, o, sinks, earlier[0], later[0]))


def backward(call: Call, saved: tuple[Any, ...], do: Any, dlse: Any, needs: Needs) -> Gradients:
    q, k, v, o, sinks, *lses = saved
    group, ranks, rank = call.group, call.group.size, call.group.rank
    chunk = q.shape[1] // 2
    of_chunks = [it.chunk(2, 1) for it in (do, q, o)]
    dlses = (None, None) if dlse is None else [it.contiguous() for it in dlse.chunk(2, -1)]
    needs_kv = needs[1] or needs[2]

    def differentiate(half: int, kv: Sequence[Any]) -> Any:
        do, q, o = (both[half] for both in of_chunks)
        return traceable.backward(
            do,
            q,
            kv[0],
            kv[1],
            o,
            lses[half],
            dlse=dlses[half],
            causal=True,
            sinks=sinks,
            deterministic=call.deterministic,
            needs=(needs[0], needs_kv, needs_kv, needs[3]),
            grad_dtype="float32",
            config=call.backward_config,
            **call.options,
        )

    def by_chunk(gradients: Any) -> list[Any]:
        """dk and dv, (chunks, batch, rows, heads, d)."""
        batch, _, *rest = k.shape
        return [it.view(batch, -1, chunk, *rest).transpose(0, 1) for it in gradients[1:3]]

    keys = _gather(call, k, v)
    keys.wait_for_earlier()
    keys.wait_for_later()
    later = differentiate(1, keys.later)
    if needs_kv:
        # What it gives to later chunks of others travels while the earlier chunk is computed.
        of_later = by_chunk(later)
        others = ranks - 1 - rank
        to_later = group.exchange_parts(
            torch.stack([it[:others] for it in of_later], 1),
            sent=[int(it > rank) for it in range(ranks)],
            come=[int(it < rank) for it in range(ranks)],
        )
    earlier = differentiate(0, keys.earlier)
    del keys
    dq = dk = dv = None
    if needs_kv:
        of_earlier = torch.stack([it[others:-1] for it in of_later], 1)
        for place, it in enumerate(by_chunk(earlier)):
            of_earlier[: rank + 1, place] += it
        to_earlier = group.exchange_parts(of_earlier)
    if needs[0]:
        dq = torch.empty_like(q)
        torch._foreach_copy_(dq.chunk(2, 1), [earlier.dq, later.dq])
    if needs_kv:
        # In the order of ranks, of which the last that sees a later chunk is its own.
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        pairs = [*map(list, to_later()), [it[-1] for it in of_later]]
        total = pairs[0]
        for pair in pairs[1:]:
            torch._foreach_add_(total, pair)
        parts = to_earlier()
        first = parts[0]
        for part in parts[1:]:
            first.add_(part)
        halves = [*dk.chunk(2, 1), *dv.chunk(2, 1)]
        torch._foreach_copy_(halves, [first[0], total[0], first[1], total[1]])
    dsinks = earlier.dsinks + later.dsinks if needs[3] else None
    return as_needed(needs, dq, dk, dv, dsinks)


PREFIXES = Schedule(forward, backward)
