"""Which cases a plain run takes: those that a test names, or the first ones."""

from __future__ import annotations

from typing import Any

import pytest
from plain_run import full_after, full_except


def is_full(case: Any) -> bool:
    return [mark.name for mark in getattr(case, "marks", ())] == ["full"]


def test_named_cases_stay_and_the_others_are_marked() -> None:
    cases = full_except({"a": 1, "b": 2, "c": 3}, "b")
    assert [is_full(case) for case in cases] == [True, False, True]
    assert [cases[0].values, cases[1], cases[2].values] == [("a",), "b", ("c",)]


@pytest.mark.parametrize("plain", [(), ("d",), ("a", "d")])
def test_a_plain_run_never_loses_all_cases_unnoticed(plain: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        full_except(["a", "b"], *plain)


def test_the_first_cases_stay() -> None:
    cases = full_after(1, [("a", 1), ("b", 2)])
    assert [is_full(case) for case in cases] == [False, True]
    assert [cases[0], cases[1].values] == [("a", 1), ("b", 2)]
