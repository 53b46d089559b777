"""bind() keeps results of calls with the same functions, and never a stale one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashsmith.errors import ArgumentError
from flashsmith.tracing import bind, binding
from flashsmith.tracing.binding import BoundFunctions

SHIFT = 3
TABLE = torch.rand(8)


def shifted(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k <= SHIFT


def left(mask: Callable[..., Any]) -> int | None:
    return bind(None, (mask,), (8, 8)).left


def test_a_repeated_call_traces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    score = lambda s, b, h, q, k: s + TABLE[h]  # noqa: E731
    first = bind(score, (shifted,), (8, 8))
    monkeypatch.setattr(binding, "watched_trace", None)
    assert bind(score, (shifted,), (8, 8)) is first


def test_a_changed_global_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(shifted) == 3
    monkeypatch.setitem(shifted.__globals__, "SHIFT", 5)
    assert left(shifted) == 5


def test_a_changed_cell_is_seen() -> None:
    width = 2
    mask = lambda b, h, q, k: q - k <= width  # noqa: E731
    assert left(mask) == 2
    width = 4
    assert left(mask) == 4


def test_a_changed_list_is_seen() -> None:
    widths = [2, 9]
    mask = lambda b, h, q, k: q - k <= widths[0]  # noqa: E731
    assert left(mask) == 2
    widths[0] = 6
    assert left(mask) == 6
    widths.append(1)
    assert left(mask) == 6


def test_a_changed_attribute_is_seen() -> None:
    class Window:
        width = 2

        def __init__(self) -> None:
            self.extra = 0

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return q - k <= self.width + self.extra

    mask = Window()
    assert left(mask) == 2
    mask.extra = 3
    assert left(mask) == 5
    mask.width = 4  # now an attribute of the object
    assert left(mask) == 7


def test_a_number_in_a_tensor_is_read_in_every_call() -> None:
    cap = torch.tensor(2.0)
    score = lambda s, b, h, q, k: s * cap  # noqa: E731

    def numbers() -> tuple[float, ...]:
        found = bind(score, (), (8, 8)).program
        assert found is not None
        return found.numbers

    assert numbers() == (2.0,)
    cap.fill_(3.0)
    assert numbers() == (3.0,)


def test_a_new_function_at_an_old_address_is_another() -> None:
    def made(width: int) -> Callable[..., Any]:
        return lambda b, h, q, k: q - k <= width

    # Each is where the one before was. A collection of all that earlier tests have left would take
    # seconds.
    gc.freeze()
    try:
        for width in range(4):
            assert left(made(width)) == width
            gc.collect()
    finally:
        gc.unfreeze()


def test_results_live_as_long_as_their_functions() -> None:
    table = torch.rand(8)
    score = lambda s, b, h, q, k: s + table[h]  # noqa: E731
    before = len(binding._RECENT)
    bind(score, (), (8, 8))
    assert len(binding._RECENT) == before + 1
    del score
    gc.collect()
    assert len(binding._RECENT) == before


def test_no_function_is_no_program() -> None:
    assert bind(None, (None, None)) == BoundFunctions(None)
    with pytest.raises(ArgumentError, match="mask=3"):
        bind(None, (3,))
