"""Schedules: how the ranks of a group share a call of attention.

They are 'zigzag', 'allgather' and 'ulysses'.

A schedule is two functions, forward and backward. Tensors are the shards of one rank, (batch, rows,
heads, d) or packed (rows, heads, d). All ranks send and receive the same amounts in the same order,
even if they have nothing to compute.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flashsmith.chooser.merge import merge_attention
from flashsmith.families.canonical import CHUNK
from flashsmith.integrations import traceable
from flashsmith.parallel.group import Group, Transfer, used_until_now
from flashsmith.parallel.layout import (
    CAUSAL,
    Layout,
    Limits,
    ScoreBlock,
    Span,
    batches,
    joined,
    pieces,
)
from flashsmith.semantics.sizes import FREE

# K and V are gathered in groups of heads. While one group is computed, the next ones are gathered.
# The message of a rank has at least this many bytes, because smaller ones do not use the full speed
# of a link.
SMALLEST_MESSAGE = 8 << 20


class GroupCall(NamedTuple):
    """One call of attention() over a group.

    Its fields differ between ranks only in the rank and the rows.
    """

    group: Group
    q_layout: Layout
    k_layout: Layout
    packed: bool
    limits: Limits
    # softcap, scale and emulate, which both passes need.
    options: dict[str, Any]
    config: Any
    backward_config: Any
    deterministic: bool
    # Whether q, k, v or sinks require gradients; the same on every rank.
    has_gradients: bool
    return_lse: bool
    return_row_max: bool
    shape: tuple[int, ...]  # The shape of this rank's q
    d_v: int  # The head dimension of v and o
    # Returns when all ranks have agreed on the call. Before that, the forward pass sends nothing.
    confirm: Callable[[], None]
    devices: tuple[str, ...] = ()  # The devices of all ranks
    bits: str = ""  # 'canonical', or '' for free bits
    # Launches of earlier calls like this one, by what they are for; None for a call that is not
    # remembered.
    launches: dict[Any, Any] | None = None

    @property
    def dim(self) -> int:
        """The dimension of rows."""
        return 0 if self.packed else 1

    def zeros(self, like: Any, dtype: Any = None) -> Any:
        """Zeros in the shape of this rank's o."""
        return like.new_zeros((*self.shape[:-1], self.d_v), dtype=dtype)

    def split(self, kv: Any) -> tuple[Any, Any]:
        """The reverse of side_by_side(): views of K and V, or of their gradients."""
        k, v = kv.split((self.shape[-1], self.d_v), -1)
        return k, v


class GroupResults(NamedTuple):
    """This rank's shards of the results, and ``saved``, which are tensors for the backward pass.

    lse and row_max may be None if they were not requested. No later call uses the memory of these
    tensors again.
    """

    o: Any
    lse: Any
    row_max: Any
    saved: tuple[Any, ...]


Needs = tuple[bool, bool, bool, bool]
GroupGradients = tuple[Any, Any, Any, Any]


class GroupSchedule(NamedTuple):
    forward: Callable[[GroupCall, Any, Any, Any, Any], GroupResults]
    # call, saved, do, dlse (may be None), needs -> dq, dk, dv, this rank's part of dsinks
    backward: Callable[[GroupCall, tuple[Any, ...], Any, Any, Needs], GroupGradients]


# --- rows ----------------------------------------------------------------------------------------


class RankRows:
    """Some rows of a tensor, in order. Contiguous rows are taken as a view, others as a copy."""

    def __init__(self, spans: Iterable[Span], device: Any) -> None:
        self.spans = tuple(joined(spans))
        self.span = self.spans[0] if len(self.spans) == 1 else None
        self.count = sum(end - begin for begin, end in self.spans)
        self._index = None
        if self.span is None:
            parts = [torch.arange(begin, end) for begin, end in self.spans]
            self._index = torch.cat([*parts, torch.empty(0, dtype=torch.long)]).to(device)

    def take(self, tensor: Any, dim: int) -> Any:
        if self.span is not None:
            return tensor.narrow(dim, self.span[0], self.count)
        return tensor.index_select(dim, self._index)

    def put(self, tensor: Any, dim: int, part: Any) -> None:
        if self.span is not None:
            self.take(tensor, dim).copy_(part)
        else:
            tensor.index_copy_(dim, self._index, part)

    def add(self, tensor: Any, dim: int, part: Any) -> None:
        if self.span is not None:
            self.take(tensor, dim).add_(part)
        else:
            # Each row occurs once, so the order of additions does not matter.
            self.put(tensor, dim, self.take(tensor, dim) + part)


class KernelCall(NamedTuple):
    """A call of attention() on some rows of queries and some rows of keys."""

    q: RankRows
    k: RankRows
    keywords: dict[str, Any]  # The mask, and the offsets of packed sequences


@functools.lru_cache(maxsize=256)
def kernel_calls(
    q_layout: Layout,
    k_layout: Layout,
    rank: int,
    owner: int | None,
    packed: bool,
    mask: Limits,
    device: Any,
    bits: str = "",
) -> tuple[KernelCall, ...]:
    """The kernel calls for the queries of ``rank`` and the keys of ``owner``; None stands for all
    keys.

    With canonical bits, masked keys are left out only in whole chunks, counted over all keys.
    """
    chunk = CHUNK if bits else 1
    k_runs = k_layout.whole() if owner is None else k_layout.runs(owner)
    found = [
        pieces(q, k, k_length - q_length, mask, chunk)
        for q, k, q_length, k_length in zip(
            q_layout.runs(rank), k_runs, q_layout.lengths, k_layout.lengths, strict=True
        )
    ]
    together = batches(found) if packed else [[piece] for of_one in found for piece in of_one]
    return tuple(_kernel_call(part, packed, device) for part in together)


def _kernel_call(part: Sequence[ScoreBlock], packed: bool, device: Any) -> KernelCall:
    limits = part[0].limits
    keywords: dict[str, Any] = {"causal": True} if limits == CAUSAL else {"window": tuple(limits)}
    sides = [[piece.q for piece in part], [piece.k for piece in part]]
    if packed:
        for side, spans in zip("qk", sides, strict=True):
            lengths = torch.tensor([0, *(end - begin for begin, end in spans)], dtype=torch.int32)
            keywords[f"cu_seqlens_{side}"] = lengths.cumsum(0, dtype=torch.int32).to(device)
            keywords[f"max_seqlen_{side}"] = int(lengths.max())
    q, k = (RankRows(spans, device) for spans in sides)
    return KernelCall(q, k, keywords)


@functools.lru_cache(maxsize=64)
def _order(layout: Layout, device: Any) -> Any:
    """The indices that put the rows of gathered shards, each padded to the longest, in order."""
    most = layout.most_rows
    parts = [
        torch.arange(rank * most + begin, rank * most + end)
        for rank, (begin, end) in layout.places()
    ]
    return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.long, device=device)


def padded(tensor: Any, dim: int, rows: int) -> Any:
    """A dense copy of a tensor, padded with zeros to this number of rows.

    Shards that are sent together must be equally long.
    """
    missing = rows - tensor.shape[dim]
    if missing:
        shape = list(tensor.shape)
        shape[dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return tensor.contiguous()


def in_order(gathered: Any, layout: Layout, dim: int) -> Any:
    """Joins (ranks, ...) shards, padded to the longest, to a tensor with all rows in order.

    ``dim`` is the dimension of rows, not counting the dimension of ranks.
    """
    if len(layout.lengths) == 1:
        places = layout.places()
        if not places:
            return gathered[0].narrow(dim, 0, 0)
        return torch.cat(
            [gathered[rank].narrow(dim, begin, end - begin) for rank, (begin, end) in places], dim
        )
    flat = gathered.movedim(0, dim).flatten(dim, dim + 1)
    return flat.index_select(dim, _order(layout, gathered.device))


def by_owner(whole: Any, layout: Layout, dim: int) -> Any:
    """The reverse of in_order(): the rows of each rank, (ranks, ...), padded with zeros."""
    shards = [
        padded(shard_of(whole, layout, rank, dim), dim, layout.most_rows)
        for rank in range(layout.ranks)
    ]
    return torch.stack(shards)


def shard_of(whole: Any, layout: Layout, rank: int, dim: int) -> Any:
    """The rows of a rank, from a tensor that has all rows."""
    parts = [whole.narrow(dim, begin, end - begin) for begin, end in layout.spans(rank)]
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)


def side_by_side(k: Any, v: Any) -> Any:
    """K and V in one tensor for messages: the rows of each head one after the other, because they
    may have different d."""
    return torch.cat([k, v], -1)


# --- kernels -------------------------------------------------------------------------------------


def _forward(call: GroupCall, part: KernelCall, q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    """attention() for some rows. Returns o, lse, and row_max or None."""
    dim = call.dim
    found = traceable.attention(
        part.q.take(q, dim),
        part.k.take(k, dim),
        part.k.take(v, dim),
        return_lse=True,
        return_row_max=call.return_row_max,
        bits=call.bits or FREE,
        config=call.config,
        **part.keywords,
        **call.options,
        **keywords,
    )
    return found if call.return_row_max else (*found, None)


class _Differentiated(NamedTuple):
    """The tensors of the queries that every kernel of a backward pass reads."""

    do: Any
    q: Any
    o: Any
    lse: Any
    dlse: Any

    def heads(self, group: int, heads: Span) -> _Differentiated:
        """The tensors for the query heads that use the given KV heads."""
        begin, end = (group * head for head in heads)
        return _Differentiated(*(None if it is None else it[..., begin:end, :] for it in self))


def _backward(
    call: GroupCall, part: KernelCall, of: _Differentiated, k: Any, v: Any, needs: Needs
) -> Any:
    """flashsmith.backward() for some rows. Returns dq, dk and dv in fp32."""
    dim = call.dim
    do, q, o = (part.q.take(tensor, dim) for tensor in of[:3])
    lse = part.q.take(of.lse, -1).contiguous()
    dlse = None if of.dlse is None else part.q.take(of.dlse, -1).contiguous()
    return traceable.backward(
        do,
        q,
        part.k.take(k, dim),
        part.k.take(v, dim),
        o,
        lse,
        dlse=dlse,
        deterministic=call.deterministic,
        needs=(*needs[:3], False),
        grad_dtype="float32",
        config=call.backward_config,
        **part.keywords,
        **call.options,
    )[:3]


def _add_gradients(
    call: GroupCall,
    parts: Sequence[KernelCall],
    of: _Differentiated,
    kv: Any,
    needs: Needs,
    dq: Any,
    dkv: Any,
) -> None:
    """Adds the gradients for each part, in fp32, to dq and dkv."""
    for part in parts:
        found = _backward(call, part, of, *call.split(kv), needs)
        sums, rows = (dq, *call.split(dkv)), (part.q, part.k, part.k)
        for total, its_rows, gradient in zip(sums, rows, found, strict=True):
            if gradient is not None:
                its_rows.add(total, call.dim, gradient)


def _dsinks(call: GroupCall, of: _Differentiated, k: Any, v: Any, sinks: Any) -> Any:
    """The part of the gradient of the sinks that comes from this rank's queries; no keys are needed
    for it."""
    # Not views, whose strides kernels might refuse.
    nothing_k, nothing_v = (
        it.new_empty((*it.shape[: call.dim], 0, *it.shape[call.dim + 1 :])) for it in (k, v)
    )
    keywords: dict[str, Any] = {}
    if call.packed:
        rows = of.q.shape[0]
        for side, count in (("q", rows), ("k", 0)):
            keywords[f"cu_seqlens_{side}"] = torch.tensor(
                [0, count], dtype=torch.int32, device=sinks.device
            )
            keywords[f"max_seqlen_{side}"] = count
    found = traceable.backward(
        of.do,
        of.q,
        nothing_k,
        nothing_v,
        of.o,
        of.lse,
        dlse=of.dlse,
        sinks=sinks,
        deterministic=call.deterministic,
        needs=(False, False, False, True),
        config=call.backward_config,
        **keywords,
        **call.options,
    )
    return found.dsinks


def _group_of(q: Any, k: Any) -> int:
    """How many query heads share one KV head."""
    heads = k.shape[-2]
    return int(q.shape[-2]) // int(heads) if heads else 1


def _empty_statistics(call: GroupCall, q: Any) -> Any:
    """lse or row_max of rows that have no keys."""
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return q.new_full(shape, -torch.inf, dtype=torch.float32)


# --- allgather -----------------------------------------------------------------------------------


def head_parts(kv: Any) -> list[Span]:
    """The groups of KV heads that are gathered at once."""
    heads = int(kv.shape[-2])
    size = kv.numel() * kv.element_size()
    counts = [n for n in range(1, heads + 1) if heads % n == 0 and size // n >= SMALLEST_MESSAGE]
    step = heads // max(counts, default=1)
    return [(head, head + step) for head in range(0, heads, step)] if step else [(0, 0)]


def _gathered(call: GroupCall, k: Any, v: Any) -> Iterator[tuple[Span, Any]]:
    """Yields groups of heads with their K and V side by side, from all ranks and in order.

    The transfers of later groups have begun already.
    """
    dim = call.dim
    kv = padded(side_by_side(k, v), dim, call.k_layout.most_rows)
    parts = head_parts(kv)
    transfers = [call.group.all_gather(kv[..., begin:end, :].contiguous()) for begin, end in parts]
    for heads in parts:
        yield heads, in_order(transfers.pop(0).wait(), call.k_layout, dim)


def _calls(call: GroupCall, device: Any, owner: int | None = None) -> tuple[KernelCall, ...]:
    return kernel_calls(
        *(call.q_layout, call.k_layout, call.group.rank, owner, call.packed, call.limits, device),
        call.bits,
    )


def _allgather_forward(call: GroupCall, q: Any, k: Any, v: Any, sinks: Any) -> GroupResults:
    call.confirm()
    o, lse = call.zeros(q), _empty_statistics(call, q)
    if sinks is not None:
        lse = torch.maximum(lse, sinks[:, None])  # For rows that see no key
    row_max = _empty_statistics(call, q) if call.return_row_max else None
    group = _group_of(q, k)
    for heads, kv in _gathered(call, k, v):
        begin, end = (group * head for head in heads)
        for part in _calls(call, q.device):
            found = _forward(
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


def _allgather_backward(
    call: GroupCall, saved: tuple[Any, ...], do: Any, dlse: Any, needs: Needs
) -> GroupGradients:
    q, k, v, o, lse, sinks = saved
    of = _Differentiated(do, q, o, lse, dlse)
    dim, group = call.dim, _group_of(q, k)
    dq = torch.zeros_like(q, dtype=torch.float32)
    sent: list[tuple[Span, Transfer]] = []
    for heads, kv in _gathered(call, k, v):
        dkv = torch.zeros_like(kv, dtype=torch.float32)
        some = of.heads(group, heads)
        begin, end = (group * head for head in heads)
        parts = _calls(call, q.device)
        _add_gradients(call, parts, some, kv, needs, dq[..., begin:end, :], dkv)
        if needs[1] or needs[2]:
            sent.append((heads, call.group.all_to_all(by_owner(dkv, call.k_layout, dim))))
    dsinks = _dsinks(call, of, k, v, sinks) if needs[3] else None
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


def as_needed(needs: Needs, *gradients: Any) -> GroupGradients:
    dq, dk, dv, dsinks = (it if need else None for it, need in zip(gradients, needs, strict=True))
    return dq, dk, dv, dsinks


# --- ulysses -------------------------------------------------------------------------------------


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
    """Tensors (..., heads, d), whose heads and d may differ, in one with the elements of a row."""
    return torch.cat([it.flatten(-2) for it in tensors], -1)


def _split_heads(joined: Any, shapes: Sequence[Sequence[int]]) -> list[Any]:
    """The reverse of _joined_heads(), for tensors with these (heads, d)."""
    parts = joined.split([heads * d for heads, d in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _as_tensor(statistics: Any) -> Any:
    """lse or row_max in the layout of a tensor with d = 1."""
    return statistics.transpose(-1, -2).unsqueeze(-1)


def _as_statistics(tensor: Any) -> Any:
    return tensor.squeeze(-1).transpose(-1, -2).contiguous()


def _ulysses_keywords(call: GroupCall, device: Any) -> dict[str, Any]:
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


def _ulysses_forward(call: GroupCall, q: Any, k: Any, v: Any, sinks: Any) -> GroupResults:
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
        **_ulysses_keywords(call, q.device),
    )
    (o_rows,) = _to_rows(call, call.q_layout, o)
    statistics = _to_rows(call, call.q_layout, *(_as_tensor(it) for it in (lse, *row_max)))
    lse_rows, *row_max = (_as_statistics(it) for it in statistics)
    return GroupResults(o_rows, lse_rows, row_max[0] if row_max else None, (q, k, v, o, lse, sinks))


def _ulysses_backward(
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
        **_ulysses_keywords(call, q.device),
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


# --- zigzag --------------------------------------------------------------------------------------


class _Ring:
    """Iterates over the K and V of all ranks, beginning with this rank.

    Their use overlaps with the transfer of the next K and V.

    ``confirm`` is called when the GPU has work on this rank's own K and V.
    """

    def __init__(self, call: GroupCall, kv: Any, confirm: Callable[[], None] | None = None) -> None:
        self._group, self._confirm = call.group, confirm
        self._blocks = [kv]
        # K and V arrive in one of these two buffers while the other is used.
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


# This many partial outputs are merged into one, to limit memory. A partial output takes twice the
# memory of q.
MOST_PARTS = 4


class _Part(NamedTuple):
    """A partial result: an fp32 output and log-sum-exp of some rows over some keys."""

    rows: RankRows
    o: Any
    lse: Any


class _Region(NamedTuple):
    """Rows that are in the same partial results, and their position in each of them."""

    rows: RankRows
    of_parts: tuple[tuple[int, RankRows], ...]


@functools.lru_cache(maxsize=256)
def _regions(of_parts: tuple[tuple[Span, ...], ...], device: Any) -> tuple[_Region, ...]:
    edges = sorted({edge for spans in of_parts for span in spans for edge in span})
    found: dict[tuple[int, ...], list[Span]] = {}
    at: dict[tuple[int, int, int], int] = {}
    for begin, end in itertools.pairwise(edges):
        members = []
        for part, spans in enumerate(of_parts):
            row = 0
            for first, last in spans:
                if first <= begin < last:
                    members.append(part)
                    at[part, begin, end] = row + begin - first
                row += last - first
        if members:
            found.setdefault(tuple(members), []).append((begin, end))
    return tuple(
        _Region(
            RankRows(spans, device),
            tuple(
                (
                    part,
                    RankRows([(at[part, a, b], at[part, a, b] + b - a) for a, b in spans], device),
                )
                for part in members
            ),
        )
        for members, spans in found.items()
    )


class _Merged:
    """Merges partial results over different keys, in the order in which they are added."""

    def __init__(self, call: GroupCall, q: Any) -> None:
        self._call, self._q = call, q
        self._parts: list[_Part] = []

    def add(self, part: _Part) -> None:
        self._parts.append(part)
        if len(self._parts) == MOST_PARTS:
            found = self._together(torch.float32, None)
            rows = RankRows([(0, self._q.shape[self._call.dim])], self._q.device)
            self._parts = [_Part(rows, *found)]

    def results(self, sinks: Any) -> tuple[Any, Any]:
        """o, which is rounded once, and lse. The sinks are added here."""
        return self._together(self._q.dtype, sinks)

    def _together(self, dtype: Any, sinks: Any) -> tuple[Any, Any]:
        call, q = self._call, self._q
        regions = _regions(tuple(part.rows.spans for part in self._parts), q.device)
        if len(regions) == 1 and regions[0].rows.count == q.shape[call.dim]:
            return self._merged(regions[0], dtype, sinks)
        o, lse = call.zeros(q, dtype), _empty_statistics(call, q)
        if sinks is not None:
            lse = torch.maximum(lse, sinks[:, None])  # For rows that see no key
        for region in regions:
            found = self._merged(region, dtype, sinks)
            region.rows.put(o, call.dim, found[0])
            region.rows.put(lse, -1, found[1])
        return o, lse

    def _merged(self, region: _Region, dtype: Any, sinks: Any) -> tuple[Any, Any]:
        outs, lses = [], []
        for place, rows in region.of_parts:
            outs.append(rows.take(self._parts[place].o, self._call.dim))
            lses.append(rows.take(self._parts[place].lse, -1))
        if len(outs) == 1 and sinks is None:
            return outs[0].to(dtype), lses[0]
        name = str(dtype).removeprefix("torch.")
        return merge_attention(outs, lses, sinks, dtype=name, emulate=self._call.options["emulate"])


def _partial(call: GroupCall, part: KernelCall, q: Any, k: Any, v: Any) -> _Part:
    dim = call.dim
    o, lse = traceable.attention(
        part.q.take(q, dim),
        part.k.take(k, dim),
        part.k.take(v, dim),
        partial=True,
        bits=FREE,
        config=call.config,
        **part.keywords,
        **call.options,
    )
    return _Part(part.q, o, lse)


def _zigzag_forward(call: GroupCall, q: Any, k: Any, v: Any, sinks: Any) -> GroupResults:
    merged = _Merged(call, q)
    for owner, kv in _Ring(call, side_by_side(k, v), call.confirm):
        for part in _calls(call, q.device, owner):
            merged.add(_partial(call, part, q, *call.split(kv)))
    o, lse = merged.results(sinks)
    return GroupResults(o, lse, None, (q, k, v, o, lse, sinks))


def _zigzag_backward(
    call: GroupCall, saved: tuple[Any, ...], do: Any, dlse: Any, needs: Needs
) -> GroupGradients:
    q, k, v, o, lse, sinks = saved
    of = _Differentiated(do, q, o, lse, dlse)
    own = side_by_side(k, v)
    dq = torch.zeros_like(q, dtype=torch.float32)
    # This rank's own keys are computed in two halves of the heads: one while the first other keys
    # arrive, one while the last gradients return to their rank.
    early, late = halves(int(k.shape[-2]))
    own_dkv = torch.zeros_like(own, dtype=torch.float32)
    coming: Transfer | None = None
    for step, (owner, kv) in enumerate(_Ring(call, own)):
        if step == 0:
            _add_own(call, of, own, needs, dq, own_dkv, early)
            continue
        dkv = torch.zeros_like(own_dkv)
        _add_gradients(call, _calls(call, q.device, owner), of, kv, needs, dq, dkv)
        if needs[1] or needs[2]:
            # Adds this rank's gradients to the sum of the earlier ranks, and passes the sum on.
            if coming is not None:
                dkv = coming.wait().add_(dkv)
            coming = call.group.pass_on(dkv, torch.empty_like(dkv))
    _add_own(call, of, own, needs, dq, own_dkv, late)
    if coming is not None:
        own_dkv += coming.wait()
    dsinks = _dsinks(call, of, k, v, sinks) if needs[3] else None
    dk, dv = (it.to(k.dtype) for it in call.split(own_dkv))
    return as_needed(needs, dq.to(q.dtype), dk, dv, dsinks)


def halves(heads: int) -> tuple[Span, Span]:
    return (0, (heads + 1) // 2), ((heads + 1) // 2, heads)


def _add_own(
    call: GroupCall, of: _Differentiated, kv: Any, needs: Needs, dq: Any, dkv: Any, heads: Span
) -> None:
    """Adds the gradients for some heads of a rank's own keys."""
    begin, end = heads
    if begin == end:
        return
    group = _group_of(of.q, kv)
    _add_gradients(
        call,
        _calls(call, of.q.device, call.group.rank),
        of.heads(group, heads),
        kv[..., begin:end, :],
        needs,
        dq[..., group * begin : group * end, :],
        dkv[..., begin:end, :],
    )


SCHEDULES = {
    "zigzag": GroupSchedule(_zigzag_forward, _zigzag_backward),
    "allgather": GroupSchedule(_allgather_forward, _allgather_backward),
    "ulysses": GroupSchedule(_ulysses_forward, _ulysses_backward),
}
