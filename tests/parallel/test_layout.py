"""Who holds what, and the rectangles of scores that a rank computes: against the mask itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from flashsmith.parallel.layout import (
    CAUSAL,
    FULL,
    Layout,
    Limits,
    RowRun,
    ScoreBlock,
    batches,
    joined,
    pieces,
)

limit = st.none() | st.integers(0, 12)


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(1, 5))
def test_every_row_has_one_rank(lengths: list[int], ranks: int) -> None:
    layout = Layout(tuple(lengths), ranks)
    rows = [row for rank in range(ranks) for span in layout.spans(rank) for row in range(*span)]
    assert sorted(rows) == list(range(sum(lengths)))
    for rank in range(ranks):
        assert layout.rows(rank) == sum(end - begin for begin, end in layout.spans(rank))
    assert layout.most_rows == max(layout.rows(rank) for rank in range(ranks))
    assert sum(end - begin for _, (begin, end) in layout.places()) == sum(lengths)


def test_ranks_hold_an_early_chunk_and_a_late_one() -> None:
    layout = Layout((8, 12), 2)
    assert layout.spans(0) == [(0, 2), (6, 8), (8, 11), (17, 20)]
    assert layout.spans(1) == [(2, 6), (11, 17)]
    assert layout.runs(1) == ((RowRun(2, 0, 4),), (RowRun(3, 4, 6),))
    assert layout.places() == [
        (0, (0, 2)), (1, (0, 4)), (0, (2, 4)), (0, (4, 7)), (1, (4, 10)), (0, (7, 10))
    ]  # fmt: skip


def seen_by(piece: ScoreBlock) -> set[tuple[int, int]]:
    """Rows and keys that meet in a call of attention(), whose masks end in the bottom right."""
    (q, q_end), (k, k_end) = piece.q, piece.k
    before = {
        (i, j): (i - q + (k_end - k) - (q_end - q)) - (j - k)
        for i in range(q, q_end)
        for j in range(k, k_end)
    }
    left, right = piece.limits
    return {
        pair
        for pair, distance in before.items()
        if (left is None or distance <= left) and (right is None or -distance <= right)
    }


@given(st.integers(0, 24), st.integers(0, 24), st.integers(1, 3), st.data(), limit, limit)
def test_pieces_are_the_mask(
    rows: int, keys: int, ranks: int, data: st.DataObject, left: int | None, right: int | None
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    owner = data.draw(st.none() | st.integers(0, ranks - 1))
    of_q, of_k = Layout((rows,), ranks), Layout((keys,), ranks)
    (q_runs,) = of_q.runs(rank)
    (k_runs,) = of_k.whole() if owner is None else of_k.runs(owner)
    found = pieces(q_runs, k_runs, keys - rows, Limits(left, right))
    for piece in found:
        assert piece.limits.left is None or piece.limits.left >= 0
        assert piece.limits.right is None or piece.limits.right >= 0
    pairs = [pair for piece in found for pair in seen_by(piece)]
    expected = {
        (q.row + i, k.row + j)
        for q in q_runs
        for k in k_runs
        for i in range(q.length)
        for j in range(k.length)
        if left is None or q.position + i + keys - rows - (k.position + j) <= left
        if right is None or k.position + j - (q.position + i + keys - rows) <= right
    }
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_a_step_of_the_ring_is_one_call(ranks: int, mask: Limits) -> None:
    layout = Layout((32 * ranks,), ranks)
    work = set()
    for rank in range(ranks):
        for owner in range(ranks):
            (piece,) = pieces(layout.runs(rank)[0], layout.runs(owner)[0], 0, mask)
            work.add((rank == owner, len(seen_by(piece))))
    # Its own keys a little more than others', all ranks the same.
    assert len(work) == 2


def test_calls_of_packed_sequences_have_one_piece_of_each() -> None:
    one, two = ScoreBlock((0, 1), (0, 1), FULL), ScoreBlock((1, 2), (1, 2), FULL)
    causal = ScoreBlock((2, 3), (2, 3), CAUSAL)
    found = batches([[one, two], [causal], [], [two]])
    assert found == [[one, two], [two], [causal]]


def test_spans_that_touch_are_one() -> None:
    assert joined([(0, 0), (1, 2), (2, 2), (2, 5), (6, 7)]) == [(1, 5), (6, 7)]
