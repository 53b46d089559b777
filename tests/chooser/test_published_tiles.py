"""The cost model against what FlashAttention 2's sources say of tiles on GPUs without a table."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("benchmark/published_tiles.py")


def test_tiles_are_ranked_as_published(tool: ModuleType) -> None:
    """All but one pair: on an A10 the model expects 64 x 64 at d 96 with a causal mask to be 7%
    slower than 128 x 64."""
    found = {pair: pair.estimated() for pair in tool.pairs()}
    others = [pair for pair, ratio in found.items() if ratio <= 1]
    assert [(it.gpu, it.d_head, it.causal) for it in others] == [("A10", 96, True)]
    assert len(found) == 20
    assert tool.correlation(list(found.values())) == pytest.approx(0.9)


def test_the_correlation_of_a_model_that_is_wrong(tool: ModuleType) -> None:
    assert tool.correlation([0.9, 0.8]) == -1
    assert tool.correlation([1.1, 0.8]) == 0


def test_the_command(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 21
    assert printed[-1] == "19 of 20 pairs as published, tau 0.90"
