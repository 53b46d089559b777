"""Runs of several parts have the bits of parts in runs of their own."""

from __future__ import annotations

import numpy as np
from test_decode import assert_same, attend, dense, draw


def test_parts_end_where_they_do_in_runs_of_their_own() -> None:
    """A step late, say: the numbers are right, and bits alone show it."""
    (one,) = draw((700,), (1,))
    alone_o, alone_lse = attend([one], dense([one], 700), packed=False)
    many = 24
    o, lse = attend([one] * many, dense([one] * many, 700), packed=False)
    assert_same((o, lse), (np.tile(alone_o, (many, 1, 1)), np.tile(alone_lse, (1, many))))
