"""Counts the query-key pairs that a head computes; the FLOP count is based on this number."""

from __future__ import annotations

from flashsmith.semantics.sizes import Sizes


def twice_nominal_pairs(sizes: Sizes) -> int:
    """Returns twice the number of query-key pairs of one head of one sequence, counted as in
    publications. These are all seq_q * seq_k pairs, or half of them under a triangular mask
    (Mask.is_triangular). With a window they are the visible pairs.
    """
    if sizes.window is not None:
        return 2 * pairs_in_window(sizes.seq_q, sizes.seq_k, sizes.window[0])
    return sizes.seq_q * sizes.seq_k * (1 if sizes.semantics.key_mask.is_triangular else 2)


def visible_pairs(sizes: Sizes) -> int:
    """Returns the number of query-key pairs of one head of one sequence that the mask does not
    hide."""
    if not sizes.semantics.key_mask.hides:
        return sizes.seq_q * sizes.seq_k
    left = sizes.seq_k if sizes.window is None else sizes.window[0]
    return pairs_in_window(sizes.seq_q, sizes.seq_k, left)


def pairs_in_window(seq_q: int, seq_k: int, left: int) -> int:
    """Returns the number of pairs of one head if every query sees its own key and the ``left`` keys
    before it."""
    first = max(0, seq_k - seq_q)  # own key of the first query that has one
    queries = seq_k - first
    short = max(0, min(left, seq_k) - first)  # queries with fewer than ``left`` keys before them
    return short * (2 * first + short + 1) // 2 + (queries - short) * (left + 1)
