"""Which cases of a test a plain run takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def full_except(cases: Iterable[Any], *plain: Any) -> list[Any]:
    """All cases of one parameter; those that are not among ``plain`` are marked full.

    Each of ``plain`` must be a case, so that a renamed case cannot leave a plain run unnoticed.
    """
    cases = list(cases)
    missing = [case for case in plain if case not in cases]
    assert plain
    assert not missing, f"{missing}: no such cases"
    return [it if it in plain else pytest.param(it, marks=pytest.mark.full) for it in cases]


def full_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """All cases; those after the first ``count`` are marked full. A case is one value, or a tuple
    of the values of several parameters."""
    return [
        it if number < count else pytest.param(*_values(it), marks=pytest.mark.full)
        for number, it in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)
