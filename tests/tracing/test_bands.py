"""Bands: masks that are provably causal or a window, against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashsmith import masks
from flashsmith.semantics.band import band_of
from flashsmith.semantics.program import K, Q, program_of
from flashsmith.semantics.typed import INT, Typed, apply, typed_symbol
from flashsmith.tracing import bind

LENGTHS = 13, 17
WIDTH = typed_symbol("number0", INT)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def test_causal_is_the_causal_mask() -> None:
    assert bind(None, (causal,), (64, 64)) == (None, None, 0)
    assert bind(None, (masks.causal(),), (64, 64)) == (None, None, 0)


def test_a_window_keeps_its_numbers() -> None:
    width = 5
    window = lambda b, h, q, k: (q - k < width) & (k <= q)  # noqa: E731
    assert bind(None, (window,), (64, 64)) == (None, 4, 0)
    width = 9
    assert bind(None, (window,), (64, 64)) == (None, 8, 0)
    assert bind(None, (masks.window(3, 7),), (64, 64)) == (None, 3, 7)
    assert bind(None, (lambda b, h, q, k: abs(q - k) <= width,), (64, 64)) == (None, 9, 9)


def test_masks_conjoin() -> None:
    assert bind(None, (causal, masks.window(8, 3)), (64, 64)) == (None, 8, 0)


def test_positions_are_aligned_to_the_bottom_right() -> None:
    # 10 queries and 14 keys: the first query stands at key 4.
    assert bind(None, (lambda b, h, q, k: k <= q + 6,), (10, 14)) == (None, None, 2)
    assert bind(None, (masks.causal(),), (10, 14), "end") == (None, None, 0)
    assert bind(None, (masks.causal(),), None, "end") == (None, None, 0)
    # Row 0 sees key 0 only, which no window of ours is.
    assert bind(None, (masks.causal(),), (10, 14)).program is not None
    assert bind(None, (masks.causal(),), None).program is not None


def test_the_score_keeps_its_program() -> None:
    table = torch.rand(4)
    found = bind(lambda s, b, h, q, k: s + table[h], (causal,), (64, 64))
    assert found.right == 0
    assert found.program is not None
    assert found.program.program.mask is None
    assert found.program.tensors[0] is table


@pytest.mark.parametrize(
    "mask",
    [
        masks.documents(torch.zeros(64, dtype=torch.int32)),
        lambda b, h, q, k: (k <= q) | (k < 3),
        lambda b, h, q, k: 2 * q >= k,
        lambda b, h, q, k: q + k <= 7,
        lambda b, h, q, k: q.float() >= k,
        lambda b, h, q, k: (k <= q) & (h > 0),
        lambda b, h, q, k: k <= q * 1 + (1 << 29),
    ],
)
def test_others_stay_programs(mask: Any) -> None:
    assert bind(None, (mask,), (64, 64)).program is not None


@st.composite
def sums(draw: st.DrawFn) -> Typed:
    """A sum of q, k, a number and constants."""
    found = draw(st.sampled_from([Q, K, WIDTH])) + draw(st.integers(-9, 9))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(st.sampled_from([Q, K, WIDTH, Q - K, K - Q]))
        found = found + other if draw(st.booleans()) else found - other
    return found


@st.composite
def conjunctions(draw: st.DrawFn) -> Typed:
    found = None
    for _ in range(draw(st.integers(1, 3))):
        low, high = draw(sums()), draw(st.one_of(sums(), st.integers(-9, 9)))
        if draw(st.booleans()):
            low = apply("abs", low)
        name = draw(st.sampled_from(["less", "less_equal"]))
        sides = (low, high) if draw(st.booleans()) else (high, low)
        it = apply(name, *sides)
        it = ~it if draw(st.booleans()) else it
        found = it if found is None else found & it
    assert found is not None
    return found


@given(conjunctions(), st.integers(-20, 20))
def test_a_known_band_has_the_masks_elements(mask: Typed, width: int) -> None:
    if mask.function == "constant":
        return
    band = band_of(mask)
    if band is None:
        return
    values = {"q": np.arange(LENGTHS[0])[:, None], "k": np.arange(LENGTHS[1]), "number0": width}
    expected = np.broadcast_to(mask.evaluate(values), LENGTHS)
    limits = band.limits({"number0": width})
    assert limits is not None
    left, right = limits
    distance = values["k"] - values["q"]
    found = np.ones(LENGTHS, bool)
    if left is not None:
        found &= distance >= -left
    if right is not None:
        found &= distance <= right
    np.testing.assert_array_equal(found, expected)


def test_some_random_masks_are_bands() -> None:
    """The property above is not empty."""
    assert band_of((K - Q - WIDTH <= 3) & (Q < K + 5)) is not None
    assert program_of(None, K <= Q).program.mask is not None
