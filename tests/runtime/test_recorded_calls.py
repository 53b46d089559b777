"""Thousands of calls are refused, or launched, just as they were when that was recorded."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from recorded_calls import PLANS, REFUSALS, compact, launched_calls, refusals, schemas

pytestmark = pytest.mark.torch


def test_refused_calls_are_refused_as_recorded() -> None:
    recorded, found = json.loads(REFUSALS.read_text()), compact(refusals())
    assert sum(len(said) for said in recorded.values()) > 2000
    for call in {**recorded, **found}:
        assert found.get(call) == recorded.get(call), call


def test_launched_calls_are_launched_as_recorded() -> None:
    recorded, found = json.loads(PLANS.read_text())["launched"], launched_calls()
    assert len(recorded) > 300
    for call in {**recorded, **found}:
        assert found.get(call) == recorded.get(call), call


@pytest.mark.parametrize("name", json.loads(PLANS.read_text())["schemas"])
def test_a_schema_is_as_recorded(name: str) -> None:
    assert schemas()[name] == json.loads(PLANS.read_text())["schemas"][name]
