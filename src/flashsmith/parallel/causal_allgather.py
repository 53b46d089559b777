"""The schedule 'allgather' for a plain causal mask, where a chunk of queries sees all keys up to
its own.

For each of its two chunks of queries, a rank calls attention() once with all keys that the chunk
sees, so that no parts have to be merged. The order of the keys does not matter, as long as the keys
of the chunk itself are the last. K and V are gathered in this order:

    later chunks by rank | earlier chunks by rank | this rank's own later chunk

Rank r's earlier chunk is chunk r, and its later chunk is chunk 2P - 1 - r. In this order, the later
chunk sees all keys from the later chunk of rank r + 1 on. The earlier chunk sees the earlier chunks
of the ranks 0 to r. While the earlier chunk is computed, the later chunks arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashsmith.integrations import traceable
from flashsmith.parallel.group import Group
from flashsmith.parallel.layout import CAUSAL
from flashsmith.parallel.rank_memory import Place, RankMemory, RowShape
from flashsmith.parallel.schedules import (
    GroupCall,
    GroupGradients,
    GroupResults,
    GroupSchedule,
    Needs,
    as_needed,
)
from flashsmith.semantics.sizes import FREE


def serves(call: GroupCall) -> bool:
    """Whether this schedule serves the call: all chunks have the same length, and each sees all
    keys up to its own."""
    (length, *more) = call.q_layout.lengths or (0,)
    return (
        call.limits == CAUSAL
        and not call.bits
        and call.q_layout == call.k_layout
        and not (call.packed or more)
        and length > 0
        and length % (2 * call.group.size) == 0
    )


# dk and dv of a chunk, in fp32.
_Pair = Sequence[Any]


class _Keys(NamedTuple):
    """The K and V that this rank's chunks see, with functions that wait until they have arrived."""

    earlier: Sequence[Any]
    later: Sequence[Any]
    wait_for_earlier: Callable[[], None]
    wait_for_later: Callable[[], None]
    # Copies of this rank's own K and V: their memory must not be used again before the last wait.
    sent: tuple[Any, ...] = ()


def _gather(call: GroupCall, peers: RankMemory | None, k: Any, v: Any) -> _Keys:
    """Starts to gather K and V."""
    ranks, rank = call.group.size, call.group.rank
    if peers is not None:
        return _copy_keys(peers, k, v)
    batch, rows = k.shape[:2]
    chunk = rows // 2
    places = ranks * chunk, ranks * chunk, chunk
    whole = [it.new_empty((batch, sum(places), *it.shape[2:])) for it in (k, v)]
    if batch == 1:
        # The rows of each rank are contiguous in the gathered tensor, so they arrive where they
        # belong.
        k_halves, v_halves = (it[0].contiguous().chunk(2) for it in (k, v))
        k_places, v_places = (it[0].split_with_sizes(places) for it in whole)
        gather = call.group.all_gather_into
    else:
        k_halves, v_halves = (it.chunk(2, 1) for it in (k, v))
        k_places, v_places = (it.split_with_sizes(places, 1) for it in whole)
        gather = functools.partial(_gather_batch, call.group)
    earlier, later = _prefixes(whole, ranks, rank, chunk)
    wait_for_earlier = gather((k_places[1], v_places[1]), (k_halves[0], v_halves[0]))
    wait_for_later = gather((k_places[0], v_places[0]), (k_halves[1], v_halves[1]))

    def wait_and_copy() -> None:
        wait_for_earlier()
        # This is copied only now, so that the second message is enqueued before a kernel occupies
        # the GPU.
        torch._foreach_copy_([k_places[2], v_places[2]], [k_halves[1], v_halves[1]])

    return _Keys(earlier, later, wait_and_copy, wait_for_later)


def _peers(call: GroupCall, k: Any, v: Any) -> RankMemory | None:
    """Slots for K and V and for their gradients; None if ranks cannot write to each other's
    memory."""
    ranks, chunk_bytes = call.group.size, (k.nbytes + v.nbytes) // 2
    # K and V take 2P + 1 chunks. Gradients take two pairs from each other rank, in fp32.
    nbytes = chunk_bytes * max(2 * ranks + 1, 4 * (ranks - 1))
    return call.group.peers(call.devices, k.device, nbytes)


def _prefixes(
    whole: Sequence[Any], ranks: int, rank: int, chunk: int
) -> tuple[list[Any], list[Any]]:
    """The K and V that the earlier and the later chunk of a rank see: (batch, places, heads, d)."""
    earlier, later = (
        [it.narrow(1, first * chunk, count * chunk) for it in whole]
        for first, count in ((ranks, rank + 1), (rank + 1, 2 * ranks - rank))
    )
    return earlier, later


class _Places(NamedTuple):
    """Views of a slot with K and V, and what is copied.

    earlier, later: the K and V that the two chunks of this rank see. own: what this rank copies to
    its own slot. sent: what it sends to others for their earlier chunk, and then for their later
    chunk. come: from which ranks these come. A place is given with its tensor (0 for K, 1 for V),
    and has the offset in it in place of an address.
    """

    earlier: list[Any]
    later: list[Any]
    own: list[tuple[int, Place]]
    sent: list[list[tuple[int, list[tuple[int, Place]]]]]
    come: list[list[int]]


def _copy_keys(peers: RankMemory, k: Any, v: Any) -> _Keys:
    k, v = k.contiguous(), v.contiguous()
    slot = peers.begin()
    shapes = k.shape, v.shape
    make = functools.partial(_places_of_keys, peers.size, peers.rank, shapes, k.dtype)
    it = peers.view(slot, ("keys", *shapes, k.dtype), make)
    addresses = k.data_ptr(), v.data_ptr()

    def at(places: list[tuple[int, Place]]) -> list[Place]:
        return [Place(addresses[side] + first, to, rows) for side, (first, to, rows) in places]

    wait_for_earlier, wait_for_later = peers.send(
        slot, [[(rank, at(its)) for rank, its in group] for group in it.sent], it.come
    )
    peers.put(slot, at(it.own))
    return _Keys(it.earlier, it.later, wait_for_earlier, wait_for_later, (k, v))


def _places_of_keys(
    ranks: int,
    rank: int,
    shapes: Sequence[Sequence[int]],
    dtype: Any,
    tensor: Callable[..., Any],
) -> _Places:
    batch, rows = shapes[0][:2]
    chunk, places = rows // 2, 2 * ranks + 1
    # The bytes of a chunk of K and of V, and where the two begin.
    sizes = [chunk * heads * d * dtype.itemsize for _, _, heads, d in shapes]
    firsts = 0, batch * places * sizes[0]
    both = [
        tensor(first, (batch, places * chunk, *shape[2:]), dtype)
        for first, shape in zip(firsts, shapes, strict=True)
    ]

    def copies(half: int, place: int) -> list[tuple[int, Place]]:
        """Of a chunk, to a place; K and V."""
        return [
            (
                side,
                Place(
                    half * size,
                    firsts[side] + place * size,
                    RowShape(size, batch, 2 * size, places * size),
                ),
            )
            for side, size in enumerate(sizes)
        ]

    # Each rank begins with the next rank, so that all links are used.
    others = [(rank + step) % ranks for step in range(1, ranks)]
    own_earlier, own_later = copies(0, ranks + rank), copies(1, rank)
    return _Places(
        *_prefixes(both, ranks, rank, chunk),
        own_earlier + copies(1, 2 * ranks),
        [
            [(it, own_earlier) for it in others if it > rank],
            [(it, own_later + own_earlier) for it in others if it < rank],
        ],
        [[it for it in others if it < rank], [it for it in others if it > rank]],
    )


def _gather_batch(group: Group, into: Sequence[Any], mine: Sequence[Any]) -> Callable[[], None]:
    """Starts to gather one chunk from each rank to the tensors ``into``, whose rows are in the
    order of ranks."""
    mine = [it.contiguous() for it in mine]
    found = [it.new_empty((group.size * it.shape[0], *it.shape[1:])) for it in mine]
    wait = group.all_gather_into(found, mine)

    def wait_and_place() -> None:
        wait()
        for whole, of_ranks in zip(into, found, strict=True):
            rows = of_ranks.unflatten(0, (group.size, -1)).transpose(0, 1)
            whole.unflatten(1, (group.size, -1)).copy_(rows)

    return wait_and_place


def _attend(call: GroupCall, q: Any, kv: Sequence[Any], out: Any, sinks: Any) -> tuple[Any, Any]:
    """Computes one chunk and writes it to ``out``.

    Returns its lse and row maximum; None if not requested.
    """
    keeps_lse = call.return_lse or call.has_gradients
    found = traceable.attention(
        q,
        *kv,
        causal=True,
        sinks=sinks,
        out=out,
        return_lse=keeps_lse,
        return_row_max=call.return_row_max,
        bits=FREE,
        config=call.config,
        **call.options,
    )
    if not (keeps_lse or call.return_row_max):
        return None, None
    _, *statistics = found
    row_max = statistics.pop() if call.return_row_max else None
    return statistics[0] if statistics else None, row_max


def forward(call: GroupCall, q: Any, k: Any, v: Any, sinks: Any) -> GroupResults:
    o = q.new_empty((*q.shape[:-1], call.d_v))
    (q_earlier, q_later), (o_earlier, o_later) = q.chunk(2, 1), o.chunk(2, 1)
    call.confirm()
    keys = _gather(call, _peers(call, k, v), k, v)
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
    return GroupResults(o, lse, row_max, (q, k, v, o, sinks, earlier[0], later[0]))


def backward(
    call: GroupCall, saved: tuple[Any, ...], do: Any, dlse: Any, needs: Needs
) -> GroupGradients:
    q, k, v, o, sinks, *lses = saved
    ranks, rank = call.group.size, call.group.rank
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

    def by_chunk(gradients: Any) -> list[_Pair]:
        """For each chunk, dk and dv: (batch, rows, heads, d)."""
        return list(zip(*(it.split(chunk, 1) for it in gradients), strict=True))

    peers = _peers(call, k, v)
    keys = _gather(call, peers, k, v)
    keys.wait_for_earlier()
    keys.wait_for_later()
    later = differentiate(1, keys.later)
    if needs_kv:
        of_keys = [it.contiguous() for it in later[1:3]]
        of_later = by_chunk(of_keys)
        of_earlier, own = of_later[ranks - 1 - rank : -1], of_later[-1]
        # The earlier chunk sees no keys of the ranks after this one, so their gradients are
        # complete. They are sent while it is computed.
        sent = {it: [of_later[it - rank - 1], of_earlier[it]] for it in range(rank + 1, ranks)}
        come_from_before = _exchange(call, peers, of_keys, sent, range(rank), 2)
    earlier = differentiate(0, keys.earlier)
    del keys
    dq = dk = dv = None
    if needs_kv:
        torch._foreach_add_(
            [it for both in of_earlier[: rank + 1] for it in both],
            [it for both in by_chunk(earlier[1:3]) for it in both],
        )
        sent = {it: [of_earlier[it]] for it in range(rank)}
        come_from_after = _exchange(call, peers, of_keys, sent, range(rank + 1, ranks), 1)
    if needs[0]:
        dq = torch.empty_like(q)
        torch._foreach_copy_(dq.chunk(2, 1), [earlier.dq, later.dq])
    if needs_kv:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dkv_earlier, dkv_later = zip(dk.chunk(2, 1), dv.chunk(2, 1), strict=True)
        # Added in the order of ranks. The owner of a later chunk is the last rank that sees it.
        before = come_from_before()
        _add_into(dkv_later, [*(its[0] for its in before.values()), own])
        of_ranks = [its[1] for its in before.values()] + [of_earlier[rank]]
        of_ranks += [its[0] for its in come_from_after().values()]
        _add_into(dkv_earlier, of_ranks)
    dsinks = earlier.dsinks + later.dsinks if needs[3] else None
    return as_needed(needs, dq, dk, dv, dsinks)


def _exchange(
    call: GroupCall,
    peers: RankMemory | None,
    gradients: Sequence[Any],
    sent: dict[int, list[_Pair]],
    owners: Sequence[int],
    count: int,
) -> Callable[[], dict[int, list[_Pair]]]:
    """Starts to send ``count`` pairs of chunks to some ranks, and to receive as many from each of
    the ranks ``owners``.

    They are parts of the dense tensors ``gradients``, dk and dv, and must not be overwritten. The
    returned function waits for the received pairs, by owner. All ranks must call this, even those
    that send nothing.
    """
    like = [it.narrow(1, 0, call.shape[1] // 2) for it in gradients]
    if peers is None:
        return _exchange_by_message(call.group, like, sent, owners, count)
    arrived, received = _copy_gradients(peers, like, sent, owners, count, gradients)

    def wait() -> dict[int, list[_Pair]]:
        arrived()
        return received

    return wait


def _pairs(flat: Any, like: Sequence[Any]) -> list[_Pair]:
    """The pairs in a tensor (pairs, elements), in which dv follows dk."""
    parts = flat.split([it.numel() for it in like], 1)
    both = (part.unflatten(1, it.shape).unbind() for part, it in zip(parts, like, strict=True))
    return list(zip(*both, strict=True))


def _exchange_by_message(
    group: Group,
    like: Sequence[Any],
    sent: dict[int, list[_Pair]],
    owners: Sequence[int],
    count: int,
) -> Callable[[], dict[int, list[_Pair]]]:
    parts = [it for pairs in sent.values() for pair in pairs for it in pair]
    mine = like[0].new_empty((len(parts) // 2, sum(it.numel() for it in like)))
    if parts:
        torch._foreach_copy_([it for pair in _pairs(mine, like) for it in pair], parts)
    arrived = group.exchange_parts(
        mine,
        sent=[count * (it in sent) for it in range(group.size)],
        come=[count * (it in owners) for it in range(group.size)],
    )

    def wait() -> dict[int, list[_Pair]]:
        found = _pairs(arrived(), like)
        return {owner: found[n * count : (n + 1) * count] for n, owner in enumerate(owners)}

    return wait


def _copy_gradients(
    peers: RankMemory,
    like: Sequence[Any],
    sent: dict[int, list[_Pair]],
    owners: Sequence[int],
    count: int,
    kept: Sequence[Any],
) -> tuple[Callable[[], None], dict[int, list[_Pair]]]:
    """Starts to copy pairs to the memory of other ranks.

    Returns a function that waits for those from other ranks, and where these arrive.
    """
    ranks, rank = peers.size, peers.rank
    shape = (ranks - 1, count, sum(it.numel() for it in like))

    def make(tensor: Callable[..., Any]) -> list[list[_Pair]]:
        return [_pairs(it, like) for it in tensor(0, shape, like[0].dtype).unbind()]

    def index(rank: int, of: int) -> int:
        """The index of the rank ``of`` among all ranks except ``rank``."""
        return of - (of > rank)

    slot = peers.begin()
    pairs = peers.view(slot, ("gradients", *(it.shape for it in like), count), make)
    sizes = [it.numel() * it.element_size() for it in like]
    rows = []
    for it, size in zip(like, sizes, strict=True):
        batch = it.shape[0]
        row = size // max(batch, 1)
        rows.append(RowShape(row, batch, it.stride(0) * it.element_size(), row))
    # Each rank begins with the next rank, so that all links are used.
    mine = []
    for to in sorted(sent, key=lambda it: (it - rank) % ranks):
        places, offset = [], count * index(to, rank) * sum(sizes)
        for pair in sent[to]:
            for it, size, shape_of_rows in zip(pair, sizes, rows, strict=True):
                places.append(Place(it.data_ptr(), offset, shape_of_rows))
                offset += size
        mine.append((to, places))
    (arrived,) = peers.send(slot, [mine], [owners], kept=kept if mine else ())
    return arrived, {owner: pairs[index(rank, owner)] for owner in owners}


def _add_into(into: _Pair, pairs: Sequence[_Pair]) -> None:
    """Writes the sum of pairs, in their order and rounded once; overwrites the first pair."""
    total, *others = pairs
    for pair in others[:-1]:
        torch._foreach_add_(total, pair)
    if not others:
        torch._foreach_copy_(into, total)
    for out, one, other in zip(into, total, others[-1] if others else (), strict=False):
        torch.add(one, other, out=out)


PREFIXES = GroupSchedule(forward, backward)
