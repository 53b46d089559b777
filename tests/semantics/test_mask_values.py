"""A mask is a value: what rows and keys see of each other, its words, and a kind of one's own."""

from __future__ import annotations

import copy
import json
import pickle
from itertools import product

import numpy as np
import pytest

from flashsmith.errors import ArgumentError
from flashsmith.semantics import CAUSAL, MASKS, NONE, UNLIMITED, WINDOW, Mask, Semantics
from flashsmith.semantics import mask as masks
from flashsmith.semantics.mask import KEY, LEFT, POSITION, RIGHT
from flashsmith.semantics.typed import INT, apply, typed_symbol, where

# Every row sees the first RIGHT + 1 keys, and those up to its own.
PREFIX = Mask(
    "prefix",
    last=apply("maximum", POSITION, RIGHT),
    first_row=where(KEY <= RIGHT, -UNLIMITED, KEY),
)
LENGTHS = [(1, 1), (5, 5), (3, 9), (9, 3), (7, 1)]


def seen(mask: Mask, seq_q: int, seq_k: int, left: int, right: int) -> np.ndarray:
    """Which of the keys each row sees, (seq_q, seq_k), by the rows' intervals."""
    position = np.arange(seq_q) + seq_k - seq_q
    first, end = mask.keys(position, seq_k, left, right, np)
    key = np.arange(seq_k)
    return (key >= first[:, None]) & (key < end[:, None])


@pytest.mark.parametrize("mask", [*MASKS, PREFIX])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (1, 3), (UNLIMITED, 2)])
def test_rows_and_keys_say_the_same(mask: Mask, left: int, right: int) -> None:
    for seq_q, seq_k in LENGTHS:
        by_rows = seen(mask, seq_q, seq_k, left, right)
        for row, key in product(range(seq_q), range(seq_k)):
            values = {"key": key, "left": left, "right": right}
            position = row + seq_k - seq_q
            first, last = (
                end.evaluate(values) if end is not None else default
                for end, default in ((mask.first_row, -UNLIMITED), (mask.last_row, UNLIMITED))
            )
            assert by_rows[row, key] == (first <= position <= last), (row, key)
            number = mask.keys(position, seq_k, left, right)
            assert by_rows[row, key] == (number[0] <= key < number[1])


def test_what_the_known_masks_hide() -> None:
    assert seen(NONE, 3, 5, 0, 0).all()
    assert np.array_equal(seen(CAUSAL, 3, 5, 0, 0), np.tril(np.ones((3, 5), bool), 2))
    window = np.tril(np.ones((4, 4), bool), 1) & np.triu(np.ones((4, 4), bool), -2)
    assert np.array_equal(seen(WINDOW, 4, 4, 2, 1), window)
    facts = {it: (it.hides, it.hides_earlier, it.is_triangular, it.takes_limits) for it in MASKS}
    assert facts == {
        "none": (False, False, False, False),
        "causal": (True, False, True, False),
        "window": (True, True, False, True),
    }


def test_a_mask_is_its_name() -> None:
    assert list(MASKS) == ["none", "causal", "window"]
    assert json.dumps({"mask": CAUSAL}) == '{"mask": "causal"}'
    for mask in (*MASKS, PREFIX):
        for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
            assert (twin, twin.first, twin.last) == (mask, mask.first, mask.last)
    assert Semantics("causal") == Semantics(CAUSAL)
    assert Semantics("causal").key_mask is CAUSAL
    assert repr(Semantics("window")).startswith("Semantics(mask='window', softcap=False")


@pytest.fixture(autouse=True)
def _known_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that a test uses is registered for that test alone."""
    monkeypatch.setattr(masks, "_KNOWN", dict(masks._KNOWN))


def test_two_masks_of_one_name_are_not_taken_for_each_other() -> None:
    """They are equal, and so would be the names of their kernels."""
    other = Mask("causal", last=POSITION + 1, first_row=KEY - 1)
    with pytest.raises(ArgumentError, match="mask='causal': another mask has that name"):
        Semantics(other)
    Semantics(PREFIX)
    with pytest.raises(ArgumentError, match="mask='prefix': another mask has that name"):
        Semantics(Mask("prefix", last=POSITION, first_row=KEY))


def test_semantics_take_a_mask_of_ones_own() -> None:
    own = Semantics(PREFIX, packed=True, uneven=True)
    assert str(own) == "prefix+packed+uneven"
    assert own.key_mask.is_triangular
    assert pickle.loads(pickle.dumps(own)).key_mask.last == PREFIX.last
    assert own != Semantics("causal", packed=True, uneven=True)


def test_mistakes_are_named() -> None:
    with pytest.raises(ArgumentError, match="mask='prefix': allowed are none, causal, window"):
        Semantics("prefix")
    with pytest.raises(ArgumentError, match="give a mask a Python identifier as name"):
        Mask("of one's own")
    with pytest.raises(ArgumentError, match="mask early: give first with last_row"):
        Mask("early", first=POSITION)
    with pytest.raises(ArgumentError, match="mask odd: z is unknown here; use key, left, right"):
        Mask("odd", last=POSITION, first_row=KEY + typed_symbol("z", INT))
    with pytest.raises(ArgumentError, match="mask odd: key is unknown here"):
        Mask("odd", first=KEY - LEFT, last_row=KEY)
    with pytest.raises(ArgumentError, match=r"mask odd: 'float32\(key\) \* 0.5' is float32"):
        Mask("odd", last=POSITION, first_row=KEY * 0.5)
