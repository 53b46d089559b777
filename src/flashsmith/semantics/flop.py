"""How many pairs of a query and a key a head computes: what FLOP are counted by."""

from __future__ import annotations

from flashsmith.semantics.sizes import Sizes


def twice_nominal_pairs(sizes: Sizes) -> int:
    """Twice the pairs of one head of one sequence, as publications count them: all seq_q * seq_k;
    half of these where a row sees all that earlier rows see, and more; those that are seen in a
    window."""
    if sizes.window is not None:
        return 2 * pairs_in_window(sizes.seq_q, sizes.seq_k, sizes.window[0])
    return sizes.seq_q * sizes.seq_k * (1 if sizes.semantics.key_mask.is_triangular else 2)


def visible_pairs(sizes: Sizes) -> int:
    """The pairs of one head of one sequence that the mask lets see each other."""
    if not sizes.semantics.key_mask.hides:
        return sizes.seq_q * sizes.seq_k
    left = sizes.seq_k if sizes.window is None else sizes.window[0]
    return pairs_in_window(sizes.seq_q, sizes.seq_k, left)


def pairs_in_window(seq_q: int, seq_k: int, left: int) -> int:
    """Keys that all queries of a head see together, each its own and ``left`` before it."""
    first = max(0, seq_k - seq_q)  # the first query's own key, or that of the first with one
    queries = seq_k - first
    short = max(0, min(left, seq_k) - first)  # queries with fewer keys before them
    return short * (2 * first + short + 1) // 2 + (queries - short) * (left + 1)
