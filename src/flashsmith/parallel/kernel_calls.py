"""The calls to attention() and backward() from which the schedules are composed, each for some rows
of queries and some rows of keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flashsmith.families.canonical import CHUNK
from flashsmith.integrations import traceable
from flashsmith.parallel.group_call import GroupCall, Needs
from flashsmith.parallel.layout import (
    CAUSAL,
    Layout,
    Limits,
    ScoreBlock,
    Span,
    batches,
    pieces,
)
from flashsmith.parallel.rank_rows import RankRows
from flashsmith.semantics.sizes import FREE


class KernelCall(NamedTuple):
    """A call to attention() on some rows of queries and some rows of keys."""

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
    """The kernel calls for the queries of ``rank`` and the keys of ``owner``. If ``owner`` is None,
    they are for all keys.

    With canonical bits, masked keys are left out only in whole chunks, which are counted from the
    first key of the sequence.
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


def run_forward(call: GroupCall, part: KernelCall, q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    """Calls attention() for some rows. Returns o, lse, and row_max, which is None if it was not
    requested."""
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


class Differentiated(NamedTuple):
    """The tensors with one row per query that every kernel of a backward pass reads."""

    do: Any
    q: Any
    o: Any
    lse: Any
    dlse: Any

    def heads(self, group: int, heads: Span) -> Differentiated:
        """The tensors for the query heads that use the given KV heads."""
        begin, end = (group * head for head in heads)
        return Differentiated(*(None if it is None else it[..., begin:end, :] for it in self))


def _backward(
    call: GroupCall, part: KernelCall, of: Differentiated, k: Any, v: Any, needs: Needs
) -> Any:
    """Calls flashsmith.backward() for some rows. Returns dq, dk and dv in fp32."""
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


def add_gradients(
    call: GroupCall,
    parts: Sequence[KernelCall],
    of: Differentiated,
    kv: Any,
    needs: Needs,
    dq: Any,
    dkv: Any,
) -> None:
    """Computes the gradients for each part in fp32, and adds them to dq and dkv."""
    for part in parts:
        found = _backward(call, part, of, *call.split(kv), needs)
        sums, rows = (dq, *call.split(dkv)), (part.q, part.k, part.k)
        for total, its_rows, gradient in zip(sums, rows, found, strict=True):
            if gradient is not None:
                its_rows.add(total, call.dim, gradient)


def sink_gradients(call: GroupCall, of: Differentiated, k: Any, v: Any, sinks: Any) -> Any:
    """The part of the gradient of the sinks that comes from this rank's queries; no keys are needed
    for it."""
    # These are copies, because kernels might refuse the strides of views.
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


def heads_per_group(q: Any, k: Any) -> int:
    """How many query heads share one KV head."""
    heads = k.shape[-2]
    return int(q.shape[-2]) // int(heads) if heads else 1


def empty_statistics(call: GroupCall, q: Any) -> Any:
    """The lse or row_max for rows that see no keys."""
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return q.new_full(shape, -torch.inf, dtype=torch.float32)


def calls_for(call: GroupCall, device: Any, owner: int | None = None) -> tuple[KernelCall, ...]:
    return kernel_calls(
        *(call.q_layout, call.k_layout, call.group.rank, owner, call.packed, call.limits, device),
        call.bits,
    )
