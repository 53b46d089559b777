"""tools/gpu/graph_replays.py on made-up times: what it prints, and that it can fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool: replays take module.delay us more than launches, outputs are module.replayed."""
    module = load_tool("gpu/graph_replays.py")
    module.delay, module.replayed, module.right = 0.5, 1, True
    cuda = SimpleNamespace(is_available=lambda: True)
    torch = SimpleNamespace(cuda=cuda, equal=lambda a, b: a == b)
    monkeypatch.setitem(sys.modules, "torch", torch)

    def launches(shape: Any) -> Any:
        return {name: lambda: 1 for name in (module.OURS, "cudnn")}, lambda: module.right

    def times_us(both: dict[tuple[str, str], Any], rounds: int) -> dict[Any, float]:
        return {name: 10.0 + module.delay * (name[1] == "replay") for name in both}

    monkeypatch.setattr(module, "launches", launches)
    monkeypatch.setattr(module, "captured", lambda launch: (launch, module.replayed))
    monkeypatch.setattr(module, "times_us", times_us)
    monkeypatch.setattr(sys, "argv", ["graph_replays.py"])
    return module


def test_it_prints_both_and_their_difference(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("attention()") == shown.count("cudnn") == len(tool.SHAPES)
    assert "eager  10.00  replay  10.50  +0.50" in shown


@pytest.mark.parametrize(("name", "value"), [("delay", 1.3), ("replayed", 2), ("right", False)])
def test_it_fails_for_slow_and_for_wrong_replays(tool: ModuleType, name: str, value: Any) -> None:
    setattr(tool, name, value)
    assert tool.main() == 1


def test_without_a_gpu_it_says_so(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["torch"].cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tool.main()
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
