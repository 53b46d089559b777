"""Exchanges gradients of chunks of keys between ranks: by messages, or by copies to memory that the
ranks can address."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashsmith.parallel.group import Group
from flashsmith.parallel.group_call import GroupCall
from flashsmith.parallel.rank_memory import Place, RankMemory, RowShape

# dk and dv of a chunk, in fp32.
_Pair = Sequence[Any]


class Chunks(NamedTuple):
    """Dense dk and dv, (batch, chunks * rows, heads, d). The d of dk and the d of dv may differ."""

    both: list[Any]
    rows: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of dk and dv of a chunk."""
        return [(it.shape[0], self.rows, *it.shape[2:]) for it in self.both]

    def at(self, chunk: int, count: int = 1) -> list[Any]:
        """dk and dv of some chunks."""
        return [it.narrow(1, chunk * self.rows, count * self.rows) for it in self.both]


def exchange(
    call: GroupCall,
    peers: RankMemory | None,
    gradients: Chunks,
    sent: dict[int, list[int]],
    owners: Sequence[int],
    count: int,
) -> Callable[[], dict[int, list[_Pair]]]:
    """Starts to send ``count`` chunks of the gradients to each rank in ``sent``, and to receive
    ``count`` chunks from each of the ranks ``owners``.

    The chunks that are sent must not be overwritten. The returned function waits for the received
    pairs of dk and dv, and returns them by owner. All ranks must call this, even those that send
    nothing.
    """
    if peers is None:
        return _exchange_by_message(call.group, gradients, sent, owners, count)
    return _exchange_by_copy(peers, gradients, sent, owners, count)


def _pairs(flat: Any, shapes: Sequence[Sequence[int]]) -> list[_Pair]:
    """The pairs of dk and dv in a tensor (pairs, elements), in which dk's elements precede dv's
    elements."""
    parts = flat.split([math.prod(it) for it in shapes], 1)
    both = (part.unflatten(1, it).unbind() for part, it in zip(parts, shapes, strict=True))
    return list(zip(*both, strict=True))


def _exchange_by_message(
    group: Group,
    gradients: Chunks,
    sent: dict[int, list[int]],
    owners: Sequence[int],
    count: int,
) -> Callable[[], dict[int, list[_Pair]]]:
    shapes = gradients.shapes
    parts = [it for its in sent.values() for at in its for it in gradients.at(at)]
    elements = sum(math.prod(it) for it in shapes)
    mine = gradients.both[0].new_empty((len(parts) // 2, elements))
    if parts:
        torch._foreach_copy_([it for pair in _pairs(mine, shapes) for it in pair], parts)
    arrived = group.exchange_parts(
        mine,
        sent=[count * (it in sent) for it in range(group.size)],
        come=[count * (it in owners) for it in range(group.size)],
    )

    def wait() -> dict[int, list[_Pair]]:
        found = _pairs(arrived(), shapes)
        return {owner: found[n * count : (n + 1) * count] for n, owner in enumerate(owners)}

    return wait


def _exchange_by_copy(
    peers: RankMemory,
    gradients: Chunks,
    sent: dict[int, list[int]],
    owners: Sequence[int],
    count: int,
) -> Callable[[], dict[int, list[_Pair]]]:
    ranks, rank, shapes = peers.size, peers.rank, gradients.shapes
    dtype = gradients.both[0].dtype

    def make(tensor: Callable[..., Any]) -> list[list[_Pair]]:
        whole = tensor(0, (ranks - 1, count, sum(math.prod(it) for it in shapes)), dtype)
        return [_pairs(it, shapes) for it in whole.unbind()]

    def index(rank: int, of: int) -> int:
        """The index of the rank ``of`` among all ranks except ``rank``."""
        return of - (of > rank)

    slot = peers.begin()
    pairs = peers.view(slot, ("gradients", *shapes, count), make)
    # For dk and for dv, the bytes of one chunk of one sequence.
    sizes = [math.prod(shape[1:]) * dtype.itemsize for shape in shapes]
    batch, pair_bytes = shapes[0][0], shapes[0][0] * sum(sizes)
    of_both = [
        (it.data_ptr(), size, first, RowShape(size, batch, it.stride(0) * dtype.itemsize, size))
        for it, size, first in zip(gradients.both, sizes, (0, batch * sizes[0]), strict=True)
    ]
    # Each rank sends to the next rank first, so that all links are busy.
    mine = []
    for to in sorted(sent, key=lambda it: (it - rank) % ranks):
        first, chunks = count * index(to, rank), sent[to]
        if batch == 1 and len(chunks) == 2:
            # One copy moves both chunks of a tensor.
            apart = chunks[1] - chunks[0]
            places = [
                Place(
                    address + chunks[0] * size,
                    first * pair_bytes + offset,
                    RowShape(size, 2, apart * size, pair_bytes),
                )
                for address, size, offset, _ in of_both
            ]
        else:
            places = [
                Place(address + at * size, (first + n) * pair_bytes + offset, rows)
                for n, at in enumerate(chunks)
                for address, size, offset, rows in of_both
            ]
        mine.append((to, places))
    kept = gradients.both if mine else ()
    arrived, _ = peers.send(slot, [mine], [owners], kept=kept)

    def wait() -> dict[int, list[_Pair]]:
        arrived()
        return {owner: pairs[index(rank, owner)] for owner in owners}

    return wait


def add_into(into: _Pair, pairs: Sequence[_Pair]) -> None:
    """Writes the sum of the pairs to ``into``. They are added in their order, and the sum is
    rounded once. The first pair is overwritten."""
    total, *others = pairs
    for pair in others[:-1]:
        torch._foreach_add_(total, pair)
    if not others:
        torch._foreach_copy_(into, total)
    for out, one, other in zip(into, total, others[-1] if others else (), strict=False):
        torch.add(one, other, out=out)
