"""Rows have the same bits whichever way they are computed.

One program stands for all ways, the specification's (oracle.py): ways that equal it are equal to
each other. The plain run takes a case of the cover, and one whose v has another width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import shared_kernels
from bit_inputs import KINDS
from bit_kernels import Kernels
from cases import VALUES, Case, cover
from oracle import CHUNK
from plain_run import full_after
from rounding import unrounded_of
from sequence import Sequence, differing

from flashsmith.families import DType
from flashsmith.runtime import kernel_choice

CHUNKS = (1, 2, 7, 64, 300)
PAGES = (0, 16, 48)  # 0: dense
KEYS = CHUNK + 76

#: (kernel, arch), d, mask, group, dtype, softcap, sinks, packed
PLAIN = (
    Case((("mma_sync_of_groups", 90), 64, "window", 2, DType.FP16, 3.0, (), True), 2),
    Case((("wgmma", 90), 64, "causal", 4, DType.FP16, 0.0, (0.5, -1.0, 2.0, 0.0), False), 1),
)
TWO_WIDTHS = (
    Case((("wgmma", 90), (40, 120), "causal", 4, DType.FP16, 0.0, (0.5, 2.0), False), 3),
    Case((("mma_sync", 90), (120, 56), "causal", 1, DType.FP16, 0.0, (), False), 4),
)

#: Kernels whose O two warpgroups halve; d 320 is compiled as 512.
WIDE = (
    Case((("wgmma", 90), 512, "window", 4, DType.BF16, 0.0, (0.5, 2.0), False), 5),
    Case((("wgmma", 90), 320, "causal", 1, DType.FP16, 3.0, (), True), 6),
)

for _case in PLAIN[:1]:
    _sequence = _case.sequence(1, 1)
    shared_kernels.want([_case.forward], _sequence.semantics, 90)
    shared_kernels.want([_case.decode], _sequence.semantics_of_cache(_case.decode), 90)


def main_sequence(case: Case) -> Sequence:
    """Its last queries, as many as the emulator computes in seconds."""
    few = case.of("group") * max(case.widths) <= 256
    return case.sequence(300 if few else 70, KEYS)


def rows_of(sequence: Sequence, first: int, end: int) -> Sequence:
    """With these queries alone, over all keys that are not behind the last."""
    q, k, v = sequence.tensors
    keys = sequence.keys - sequence.queries + end
    part = replace(sequence, queries=end - first, keys=keys)
    part.__dict__["tensors"] = q[:, first:end], k[:, :keys], v[:, :keys]
    return part


# --- the ways --------------------------------------------------------------------------------


def check_forward(case: Case, sequence: Sequence) -> None:
    """With and without other outputs, whole and row by row."""
    cfg = case.forward
    assert sequence.differing(sequence.forward(cfg)) == 0
    alone, nothing = sequence.forward(cfg, return_lse=False)
    assert nothing is None
    assert differing(alone, sequence.expected[0]) == 0
    assert sequence.differing(sequence.forward(cfg, return_row_max=True)) == 0
    for count in (1, 2, 33):
        rows = slice(sequence.queries - count, sequence.queries)
        part = rows_of(sequence, rows.start, rows.stop)
        assert sequence.differing(part.forward(cfg), rows) == 0, count


def check_neighbours(case: Case, sequence: Sequence) -> None:
    """Other rows' queries, and what is at keys that a row does not see."""
    q, k, v = sequence.tensors
    rng = np.random.default_rng(1)
    rows = slice(sequence.queries // 3, sequence.queries // 3 + 9)
    others = np.full(sequence.queries, True)
    others[rows] = False
    q, k, v = q.copy(), k.copy(), v.copy()
    q[:, others] = 5 * rng.standard_normal(q[:, others].shape)
    if sequence.causal:
        first = sequence.keys - sequence.queries
        hidden = np.arange(sequence.keys) >= first + rows.stop
        left = sequence.window[0]
        if left is not None:
            hidden |= np.arange(sequence.keys) < first + rows.start - left
        assert hidden.any()
        k[:, hidden] = np.where(rng.random(k[:, hidden].shape) < 0.5, np.nan, np.inf)
        v[:, hidden] = 300 * rng.standard_normal(v[:, hidden].shape)
    o, lse = sequence.forward(case.forward, q, k, v)
    assert sequence.differing((o[:, rows], lse[:, :, rows]), rows) == 0


def check_batch(case: Case, sequence: Sequence) -> None:
    """In a batch behind another sequence, with the heads in another order."""
    rng = np.random.default_rng(2)
    heads_k, group = sequence.heads_k, sequence.group
    order_k = rng.permutation(heads_k)
    order = np.concatenate([head * group + rng.permutation(group) for head in order_k])
    orders = (order, order_k, order_k)
    tensors = [x[:, :, by] for x, by in zip(sequence.tensors, orders, strict=True)]
    sinks = sequence.keywords["sinks"]
    keywords: dict[str, Any] = {} if sinks is None else {"sinks": sinks[order]}
    if not sequence.packed:
        others = [rng.standard_normal(x.shape).astype(x.dtype) for x in tensors]
        tensors = [np.concatenate(both) for both in zip(others, tensors, strict=True)]
    o, lse = sequence.forward(case.forward, *tensors, **keywords)
    back = np.argsort(order)
    assert sequence.differing((o[-1:, :, back], lse[-1:, back])) == 0


def check_chunks(case: Case, sequence: Sequence, ways: list[tuple[int, int]]) -> None:
    """By attention_with_cache(): chunks of so many queries, in pages of so many keys, before and
    behind a chunk's end."""
    before = sequence.keys - sequence.queries
    for count, page in ways:
        # Without a mask a row sees all keys, so that no cache ends before the last one.
        shorter = {CHUNK, CHUNK + 1} if count < 64 and sequence.causal else set()
        for keys in shorter | {sequence.keys}:
            rows = slice(keys - before - count, keys - before)
            if rows.start >= 0:
                found = sequence.cached(case.decode, rows, page, beside=40 + 13 * count)
                assert sequence.differing(found, rows) == 0, (count, page, keys)


def check_lengths(case: Case, kinds: Iterator[str]) -> None:
    """Around tiles' and chunks' ends, with numbers at which orders show."""
    for (queries, keys), kind in zip(case.lengths, kinds, strict=False):
        sequence = case.sequence(queries, keys, kind)
        assert sequence.differing(sequence.forward(case.forward)) == 0, sequence
        rows = slice(max(0, queries - keys), queries)
        if rows.start < rows.stop:
            assert sequence.differing(sequence.cached(case.decode, rows), rows) == 0, sequence


def kinds_from(number: int) -> Iterator[str]:
    kinds = [kind for kind in KINDS if kind != "random"]
    yield from (kinds[(number + i) % len(kinds)] for i in range(len(kinds)))


# --- tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", full_after(1, PLAIN), ids=str)
def test_rows_have_the_same_bits(case: Case) -> None:
    sequence = case.sequence(40, KEYS)
    check_forward(case, sequence)
    check_neighbours(case, sequence)
    check_batch(case, sequence)
    check_chunks(case, sequence, [(7, 0), (33, 48)])
    check_lengths(case, kinds_from(case.number))


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "queries", "ways"),
    [*((case, 40, [(2, 16)]) for case in PLAIN), *((case, 9, [(1, 0)]) for case in WIDE)],
    ids=str,
)
def test_chunks_have_the_same_bits(case: Case, queries: int, ways: list[tuple[int, int]]) -> None:
    """More chunks of the cases above and below."""
    check_chunks(case, case.sequence(queries, KEYS), ways)


@pytest.mark.parametrize("case", full_after(1, TWO_WIDTHS), ids=str)
def test_rows_of_two_widths_have_the_same_bits(case: Case) -> None:
    sequence = case.sequence(9, KEYS)
    assert sequence.differing(sequence.forward(case.forward)) == 0
    check_chunks(case, sequence, [(1, 0), (7, 48)])


@pytest.mark.parametrize("case", [WIDE[0], pytest.param(WIDE[1], marks=pytest.mark.full)], ids=str)
def test_rows_above_d_256_have_the_same_bits(case: Case) -> None:
    sequence = case.sequence(9, KEYS)
    assert sequence.differing(sequence.forward(case.forward)) == 0
    check_chunks(case, sequence, [(7, 48)])
    for cfg, semantics in (
        (case.forward, sequence.semantics),
        (case.decode, sequence.semantics_of_cache(case.decode)),
    ):
        assert unrounded_of(cfg, sequence.arch, semantics) == []


@pytest.mark.full
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_more_rows_above_d_256(case: Case) -> None:
    sequence = case.sequence(70, 2 * CHUNK + 9)
    check_forward(case, sequence)
    check_neighbours(case, sequence)
    check_batch(case, sequence)
    check_lengths(case, kinds_from(case.number))
    check_chunks(case, sequence, [(2, 16), (64, 0)])


@pytest.mark.full
def test_decode_above_d_256_before_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no forward kernel: against the specification."""
    monkeypatch.setattr(kernel_choice, "emulated_arch", lambda cfg: 80)
    kernels = Kernels(DType.FP16, 512, 80)
    sequence = Sequence(5, KEYS, DType.FP16, 512, 1, 8, arch=80, seed=7)
    for rows, page in ((slice(4, 5), 0), (slice(0, 5), 16)):
        assert sequence.differing(sequence.cached(kernels.decode, rows, page), rows) == 0


@pytest.mark.full
@pytest.mark.parametrize("case", cover(), ids=str)
def test_forward_of_the_cover(case: Case) -> None:
    sequence = main_sequence(case)
    check_forward(case, sequence)
    check_neighbours(case, sequence)
    check_batch(case, sequence)
    check_lengths(case, kinds_from(case.number))
    assert unrounded_of(case.forward, sequence.arch, sequence.semantics) == []


@pytest.mark.full
@pytest.mark.parametrize("case", cover(), ids=str)
def test_chunks_of_the_cover(case: Case) -> None:
    sequence = main_sequence(case)
    ways = [
        (count, page)
        for i, (count, page) in enumerate(product(CHUNKS, PAGES))
        if count <= sequence.queries and (count < 64 or i % 3 == case.number % 3)
    ]
    check_chunks(case, sequence, ways)
    semantics = sequence.semantics_of_cache(case.decode)
    assert unrounded_of(case.decode, sequence.arch, semantics) == []


def test_the_cover_has_every_pair() -> None:
    names = list(VALUES)
    found = {
        (a, case.of(a), b, case.of(b)) for case in cover() for a in names for b in names if a < b
    }
    wanted = {
        (a, x, b, y) for a in names for b in names if a < b for x in VALUES[a] for y in VALUES[b]
    }
    assert found == wanted
    assert len(cover()) < 60
