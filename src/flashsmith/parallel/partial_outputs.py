"""Computes partial outputs over different keys, and merges them."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch

from flashsmith.chooser.merge import merge_attention
from flashsmith.integrations import traceable
from flashsmith.parallel.group_call import GroupCall
from flashsmith.parallel.kernel_calls import KernelCall, empty_statistics
from flashsmith.parallel.layout import Span
from flashsmith.parallel.rank_rows import RankRows
from flashsmith.semantics.sizes import FREE

# When there are this many partial outputs, they are merged into one to limit memory. A partial
# output takes twice the memory of q.
MOST_PARTS = 4


class PartialOutput(NamedTuple):
    """A partial result: an fp32 output and log-sum-exp of some rows over some keys."""

    rows: RankRows
    o: Any
    lse: Any


class _Region(NamedTuple):
    """Rows that occur in the same partial outputs, and their positions in each of these outputs."""

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


class MergedOutputs:
    """Merges partial results over different keys, in the order in which they are added."""

    def __init__(self, call: GroupCall, q: Any) -> None:
        self._call, self._q = call, q
        self._parts: list[PartialOutput] = []

    def add(self, part: PartialOutput) -> None:
        self._parts.append(part)
        if len(self._parts) == MOST_PARTS:
            found = self._together(torch.float32, None)
            rows = RankRows([(0, self._q.shape[self._call.dim])], self._q.device)
            self._parts = [PartialOutput(rows, *found)]

    def results(self, sinks: Any) -> tuple[Any, Any]:
        """Returns o, which is rounded once, and lse. The sinks are added here."""
        return self._together(self._q.dtype, sinks)

    def _together(self, dtype: Any, sinks: Any) -> tuple[Any, Any]:
        call, q = self._call, self._q
        regions = _regions(tuple(part.rows.spans for part in self._parts), q.device)
        if len(regions) == 1 and regions[0].rows.count == q.shape[call.dim]:
            return self._merged(regions[0], dtype, sinks)
        o, lse = call.zeros(q, dtype), empty_statistics(call, q)
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


def partial_output(call: GroupCall, part: KernelCall, q: Any, k: Any, v: Any) -> PartialOutput:
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
    return PartialOutput(part.q, o, lse)
