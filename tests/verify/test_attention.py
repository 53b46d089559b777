"""Attention's own account of a call: which kernel it wants, what is in sight, how it reads."""

from __future__ import annotations

import numpy as np
import pytest
from plain_attention import sees

from flashsmith.verify.attention_semantics import Attention, offsets, row_slices

WINDOWS = [(None, None), (3, None), (None, 2), (2, 1), (0, 0), (50, 50)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(6, 9), (9, 6), (5, 5), (1, 4), (4, 1), (3, 0)])
def test_visible_keys_are_one_run(seq_q: int, seq_k: int, causal: bool, window: tuple) -> None:
    first, end = Attention(1.0, causal, window).visible_keys(np.arange(seq_q), seq_q, seq_k)
    for i in range(seq_q):
        seen = [j for j in range(seq_k) if sees(i, j, seq_q, seq_k, causal, window)]
        assert list(range(first[i], end[i])) == seen


def test_packed_rows() -> None:
    assert offsets((3, 0, 4)).tolist() == [0, 3, 3, 7]
    assert offsets((3, 0, 4)).dtype == np.int32
    assert row_slices((3, 0, 4)) == [slice(0, 3), slice(3, 3), slice(3, 7)]


def test_its_text_has_the_differences_from_plain() -> None:
    assert str(Attention(1.0)) == "plain"
    busy = Attention(1.0, True, (5, None), 30.0, (3, 0), (5, 7))
    assert str(busy) == "causal, window (5, None), softcap 30, lens 3+0:5+7"
