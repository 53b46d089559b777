"""The schedule 'allgather' for a plain causal mask, under which each chunk of queries sees the same
chunk of keys and all earlier chunks.

For each of its two chunks of queries, a rank calls attention() once with all keys that the chunk
sees, so that no partial outputs have to be merged. The order of the keys does not matter, except
that the chunk's own keys must be last. K and V are gathered in this order:

    later chunks by rank | earlier chunks by rank | this rank's own later chunk

Rank r's earlier chunk is chunk r, and its later chunk is chunk 2P - 1 - r. In this order, the later
chunk sees all keys from the later chunk of rank r + 1 on. The earlier chunk sees the earlier chunks
of the ranks 0 to r. While the earlier chunk is computed, the later chunks arrive.

The backward pass gathers K and V again, unless they are small: then the forward pass keeps them,
since the host would take longer to gather them than the GPU takes to copy them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from flashsmith.integrations import traceable
from flashsmith.parallel.gradient_exchange import Chunks, add_into, exchange
from flashsmith.parallel.group import Group
from flashsmith.parallel.group_call import (
    GroupCall,
    GroupGradients,
    GroupResults,
    GroupSchedule,
    Needs,
    as_needed,
)
from flashsmith.parallel.layout import CAUSAL
from flashsmith.parallel.rank_memory import Place, RankMemory, RowShape
from flashsmith.runtime import cached_calls
from flashsmith.runtime.backward_pass import Gradients
from flashsmith.runtime.cached_calls import CachedCall
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import RepeatableFramework
from flashsmith.semantics.sizes import FREE


def serves(call: GroupCall) -> bool:
    """Whether this schedule serves the call: dense sequences in which q and k have the same length
    and all chunks too, a plain causal mask, and no canonical bits."""
    (length, *more) = call.q_layout.lengths or (0,)
    return (
        call.limits == CAUSAL
        and not call.bits
        and call.q_layout == call.k_layout
        and not (call.packed or more)
        and length > 0
        and length % (2 * call.group.size) == 0
    )


# The most bytes of gathered K and V that are kept for the backward pass.
_MOST_KEPT = 64 << 20


def _nothing_to_wait_for() -> None: ...


class _Keys(NamedTuple):
    """The K and V that this rank's two chunks see, with functions that wait until these have
    arrived, and a function that waits until this rank's own K and V have been sent."""

    earlier: Sequence[Any]
    later: Sequence[Any]
    wait_for_earlier: Callable[[], None]
    wait_for_later: Callable[[], None]
    wait_until_sent: Callable[[], None] = _nothing_to_wait_for
    # Copies of this rank's own K and V: their memory must not be used again before the last wait.
    sent: tuple[Any, ...] = ()
    in_slot: bool = False  # A later transfer overwrites them


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
    """The slots for K and V and for their gradients; None if a rank cannot write to another rank's
    memory."""
    ranks, chunk_bytes = call.group.size, (k.nbytes + v.nbytes) // 2
    # K and V take 2P + 1 chunks. For the gradients, each other rank sends two pairs of dk and dv,
    # in fp32.
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
    """Views of a slot with K and V, and the copies to make.

    earlier, later: the K and V that this rank's earlier and later chunk see.
    own: the copies to this rank's own slot.
    sent: the copies to the other ranks, first for their earlier and then for their later chunks.
    come: the ranks that send data to this rank, for each of its two chunks.

    Each Place is paired with the tensor that it refers to (0 for K, 1 for V), and its ``address``
    is an offset in this tensor.
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

    sent = [[(rank, at(its)) for rank, its in group] for group in it.sent]
    if peers.rank == 0:
        # The earlier chunk needs no keys of other ranks, so it is computed while keys are copied.
        earlier, later, all_sent = peers.send(slot, sent, it.come, own=at(it.own))
        chunk = k.shape[1] // 2
        own = k.narrow(1, 0, chunk), v.narrow(1, 0, chunk)
        return _Keys(own, it.later, earlier, later, all_sent, (k, v), in_slot=True)
    # Each of the other ranks copies its own K and V while the other K and V are being transferred.
    earlier, later, all_sent = peers.send(slot, sent, it.come)
    peers.put(slot, at(it.own))
    return _Keys(it.earlier, it.later, earlier, later, all_sent, (k, v), in_slot=True)


def _places_of_keys(
    ranks: int,
    rank: int,
    shapes: Sequence[Sequence[int]],
    dtype: Any,
    tensor: Callable[..., Any],
) -> _Places:
    batch, rows = shapes[0][:2]
    chunk, places = rows // 2, 2 * ranks + 1
    # The bytes of one chunk of K and of V, and the offsets at which the two tensors begin in the
    # slot.
    sizes = [chunk * heads * d * dtype.itemsize for _, _, heads, d in shapes]
    firsts = 0, batch * places * sizes[0]
    both = [
        tensor(first, (batch, places * chunk, *shape[2:]), dtype)
        for first, shape in zip(firsts, shapes, strict=True)
    ]

    def copies(half: int, place: int) -> list[tuple[int, Place]]:
        """The copies that move K and V of one chunk to the given place."""
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

    # Each rank sends to the next rank first, so that all links are busy.
    others = [(rank + step) % ranks for step in range(1, ranks)]
    own_earlier, own_later = copies(0, ranks + rank), copies(1, rank)
    own = own_earlier + copies(1, 2 * ranks)
    if batch == 1:
        # One copy moves both chunks of a tensor.
        own = [
            (side, it._replace(rows=RowShape(size, 2, size, (ranks - rank) * size)))
            for (side, it), size in zip(own_earlier, sizes, strict=True)
        ]
    return _Places(
        *_prefixes(both, ranks, rank, chunk),
        own,
        [
            [(it, own_earlier) for it in others if it > rank],
            [(it, own_later + own_earlier) for it in others if it < rank],
        ],
        [[it for it in others if it < rank], [it for it in others if it > rank]],
    )


def _gather_batch(group: Group, into: Sequence[Any], mine: Sequence[Any]) -> Callable[[], None]:
    """Starts to gather one chunk from each rank into the tensors ``into``, in which the chunks are
    in the order of ranks. Returns a function that waits for them."""
    mine = [it.contiguous() for it in mine]
    found = [it.new_empty((group.size * it.shape[0], *it.shape[1:])) for it in mine]
    wait = group.all_gather_into(found, mine)

    def wait_and_place() -> None:
        wait()
        for whole, of_ranks in zip(into, found, strict=True):
            rows = of_ranks.unflatten(0, (group.size, -1)).transpose(0, 1)
            whole.unflatten(1, (group.size, -1)).copy_(rows)

    return wait_and_place


def _attend(
    call: GroupCall, half: int, q: Any, kv: Sequence[Any], o: Any, sinks: Any
) -> tuple[Any, Any]:
    """Computes one of a rank's two chunks and writes it to ``o``.

    Returns the chunk's lse and row maximum; None if not requested.
    """
    keeps_lse = call.return_lse or call.has_gradients
    halved, whole = (q, o), (*kv, sinks)
    found = _launched(call, half, half, halved, whole)
    if found is None:
        its_q, its_o = (it.chunk(2, 1)[half] for it in halved)
        keywords = {
            "causal": True,
            "sinks": sinks,
            "out": its_o,
            "return_lse": keeps_lse,
            "return_row_max": call.return_row_max,
            "bits": FREE,
            "config": call.config,
            **call.options,
        }
        found = traceable.attention(its_q, *kv, **keywords)
        if call.launches is not None:
            repeated = traceable.repeated_attention(its_q, *kv, **keywords)
            _remember(call, half, repeated, (its_q, its_o), halved, whole)
    if not (keeps_lse or call.return_row_max):
        return None, None
    _, *statistics = found
    row_max = statistics.pop() if call.return_row_max else None
    return statistics[0] if statistics else None, row_max


class _Launch(NamedTuple):
    """A kernel of an earlier call, which can be launched again with other addresses.

    groups: cached_calls.repeated at that time; another object there means that the choice of
        kernels may have changed.
    steps: for each tensor that has both chunks, the bytes from the first to the second.
    in_order: arranges addresses in the order that ``run`` takes.
    """

    groups: Any
    has_layout: Callable[..., bool]
    steps: list[int]
    in_order: Callable[[list[int]], tuple[int, ...]]
    run: Callable[[tuple[int, ...]], tuple[Any, ...] | None]


def _launched(
    call: GroupCall, key: Any, half: int, halved: Sequence[Any], whole: Sequence[Any]
) -> Any:
    """Launches the kernel of an earlier call on one chunk (``half``) of each of the tensors
    ``halved``, and on the tensors ``whole``.

    Returns the results, in which None stands for an output tensor that the caller passed. Returns
    None if there was no such call, or if this call has to be checked.
    """
    launch: _Launch | None = call.launches.get(key) if call.launches else None
    if (
        launch is None
        or launch.groups is not cached_calls.repeated
        or not traceable.may_repeat()
        or not launch.has_layout(*halved, *(it for it in whole if it is not None))
    ):
        return None
    at = [it.data_ptr() + half * step for it, step in zip(halved, launch.steps, strict=True)]
    at += [0 if it is None else it.data_ptr() for it in whole]
    return launch.run(launch.in_order(at))


def _remember(
    call: GroupCall,
    key: Any,
    repeated: traceable.Repeated | None,
    chunks: Sequence[Any],
    halved: Sequence[Any],
    whole: Sequence[Any],
) -> None:
    """Records the launch of ``repeated`` for _launched(). It ran on the tensors ``whole``, and on
    ``chunks``, which are one chunk of each of the tensors ``halved``."""
    framework = framework_of(torch.Tensor)
    if repeated is None or not isinstance(framework, RepeatableFramework):
        return
    run, tensors = repeated
    cached = getattr(run, "__self__", None)
    if isinstance(cached, CachedCall) and call.launches is not None:
        places = {id(it): at for at, it in enumerate((*chunks, *whole)) if it is not None}
        call.launches[key] = _Launch(
            cached_calls.repeated,
            framework.layout_check((*halved, *(it for it in whole if it is not None))),
            [it.shape[1] // 2 * it.stride(1) * it.element_size() for it in halved],
            itemgetter(*(places[id(it)] for it in tensors)),
            cached.run_from,
        )


def forward(call: GroupCall, q: Any, k: Any, v: Any, sinks: Any) -> GroupResults:
    o = q.new_empty((*q.shape[:-1], call.d_v))
    call.confirm()
    keys = _gather(call, _peers(call, k, v), k, v)
    keys.wait_for_earlier()
    earlier = _attend(call, 0, q, keys.earlier, o, sinks)
    keys.wait_for_later()
    later = _attend(call, 1, q, keys.later, o, sinks)
    keys.wait_until_sent()
    lse, row_max = (
        torch.cat(both, -1) if wish else None
        for wish, both in zip(
            (call.return_lse, call.return_row_max), zip(earlier, later, strict=True), strict=True
        )
    )
    saved = q, k, v, o, sinks, earlier[0], later[0], *_kept(call, keys)
    return GroupResults(o, lse, row_max, saved)


def _kept(call: GroupCall, keys: _Keys) -> Sequence[Any]:
    """The K and V that the later chunk sees, which the backward pass then need not gather; None
    twice if they are too large.

    All ranks decide alike: what counts is the size of whole sequences.
    """
    nbytes = sum(it.nbytes // it.shape[1] for it in keys.later) * call.q_layout.lengths[0]
    if not call.has_gradients or nbytes > _MOST_KEPT:
        return None, None
    return [it.clone() for it in keys.later] if keys.in_slot else keys.later


def _keys_again(call: GroupCall, peers: RankMemory | None, k: Any, v: Any, kept: Any) -> _Keys:
    """The keys of the forward pass: those that it has kept, or gathered again."""
    if kept[0] is None:
        return _gather(call, peers, k, v)
    rank, chunk = call.group.rank, k.shape[1] // 2
    # The later chunk sees the later chunks of the ranks after this one first.
    first = (call.group.size - 1 - rank) * chunk
    earlier = [it.narrow(1, first, (rank + 1) * chunk) for it in kept]
    return _Keys(earlier, kept, _nothing_to_wait_for, _nothing_to_wait_for)


def backward(
    call: GroupCall, saved: tuple[Any, ...], do: Any, dlse: Any, needs: Needs
) -> GroupGradients:
    q, k, v, o, sinks, *lses, kept_k, kept_v = saved
    ranks, rank = call.group.size, call.group.rank
    chunk = q.shape[1] // 2
    dlses = (None, None) if dlse is None else [it.contiguous() for it in dlse.chunk(2, -1)]
    needs_kv = needs[1] or needs[2]
    inputs = _Saved((do, q, o), lses, dlses, sinks, needs)
    differentiate = functools.partial(_differentiate, call, inputs)

    peers = _peers(call, k, v)
    keys = _keys_again(call, peers, k, v, (kept_k, kept_v))
    keys.wait_for_earlier()
    keys.wait_for_later()
    later = differentiate(1, keys.later)
    if needs_kv:
        # dk and dv for the keys that the later chunk sees, in this order: the later chunks of the
        # ranks after this one, the earlier chunks of all ranks, and the later chunk itself.
        gradients = Chunks([it.contiguous() for it in later[1:3]], chunk)
        first, own = ranks - 1 - rank, 2 * ranks - 1 - rank
        # The earlier chunk sees no keys of the ranks after this one, so their gradients are
        # complete. They are sent while it is computed.
        sent = {it: [it - rank - 1, first + it] for it in range(rank + 1, ranks)}
        come_from_before = exchange(call, peers, gradients, sent, range(rank), 2)
    earlier = differentiate(0, keys.earlier)
    keys.wait_until_sent()
    del keys
    dq = dk = dv = None
    if needs_kv:
        torch._foreach_add_(gradients.at(first, rank + 1), list(earlier[1:3]))
        sent = {it: [first + it] for it in range(rank)}
        come_from_after = exchange(call, peers, gradients, sent, range(rank + 1, ranks), 1)
    if needs[0]:
        dq = torch.empty_like(q)
        torch._foreach_copy_(dq.chunk(2, 1), [earlier.dq, later.dq])
    if needs_kv:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dkv_earlier, dkv_later = zip(dk.chunk(2, 1), dv.chunk(2, 1), strict=True)
        # Gradients are added in the order of ranks. Of the ranks that see a later chunk, the owner
        # is the last.
        before = come_from_before()
        add_into(dkv_later, [*(its[0] for its in before.values()), gradients.at(own)])
        of_ranks = [its[1] for its in before.values()] + [gradients.at(first + rank)]
        of_ranks += [its[0] for its in come_from_after().values()]
        add_into(dkv_earlier, of_ranks)
    dsinks = earlier.dsinks + later.dsinks if needs[3] else None
    return as_needed(needs, dq, dk, dv, dsinks)


class _Saved(NamedTuple):
    """The inputs from which the gradients of both chunks of this rank's rows are computed.

    ``halved`` are do, q and o, in which the earlier chunk's rows precede the later chunk's rows.
    """

    halved: tuple[Any, Any, Any]
    lses: Sequence[Any]
    dlses: Sequence[Any]
    sinks: Any
    needs: Needs


def _differentiate(call: GroupCall, of: _Saved, half: int, kv: Sequence[Any]) -> Gradients:
    """The gradients for one chunk of queries (``half`` 0 is the earlier one) and the keys and
    values that it sees."""
    lse, dlse, needs_kv = of.lses[half], of.dlses[half], of.needs[1] or of.needs[2]
    key, whole = (half, of.needs, dlse is None), (*kv, lse, dlse, of.sinks)
    found = _launched(call, key, half, of.halved, whole)
    if found is not None:
        return Gradients(*found)
    do, q, o = chunks = [it.chunk(2, 1)[half] for it in of.halved]
    tensors = do, q, *kv, o, lse
    keywords = {
        "dlse": dlse,
        "causal": True,
        "sinks": of.sinks,
        "deterministic": call.deterministic,
        "needs": (of.needs[0], needs_kv, needs_kv, of.needs[3]),
        "grad_dtype": "float32",
        "config": call.backward_config,
        **call.options,
    }
    gradients: Gradients = traceable.backward(*tensors, **keywords)
    if call.launches is not None:
        repeated = traceable.repeated_backward(*tensors, **keywords)
        _remember(call, key, repeated, chunks, of.halved, whole)
    return gradients


PREFIXES = GroupSchedule(forward, backward)
