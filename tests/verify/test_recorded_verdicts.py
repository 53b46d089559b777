"""Proofs and benchmarks judge hundreds of outputs as they did when that was recorded."""

from __future__ import annotations

import json
import re

import pytest
from recorded_verdicts import FILE, PROBLEMS, verdicts

RECORDED = json.loads(FILE.read_text())
_NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?:e[-+]?\d+)?")


def test_enough_is_recorded() -> None:
    said = [text for found in RECORDED.values() for text in found.values()]
    assert len(said) > 700
    assert 150 < sum(text.startswith("right;") for text in said) < 400


@pytest.mark.parametrize("problem", PROBLEMS)
def test_verdicts_are_as_recorded(problem: str) -> None:
    found, recorded = verdicts(problem), RECORDED[problem]
    assert found.keys() == recorded.keys()
    for what, said in found.items():
        assert _NUMBER.sub("#", said) == _NUMBER.sub("#", recorded[what]), what
        # Another processor's products may round a few outputs to the next number.
        numbers, expected = (
            [float(it) for it in _NUMBER.findall(text)] for text in (said, recorded[what])
        )
        assert numbers == pytest.approx(expected, rel=0.05), what
