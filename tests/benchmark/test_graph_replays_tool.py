"""tools/gpu/graph_replays.py on made-up times: what it prints, and that it can fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool: replays take module.delay us more than launches, outputs are module.replayed, and
    those in module.wrong are wrong."""
    module = load_tool("gpu/graph_replays.py")
    module.delay, module.replayed, module.wrong = 0.5, None, ()
    cuda = SimpleNamespace(is_available=lambda: True)
    torch = SimpleNamespace(cuda=cuda, equal=lambda a, b: a == b)
    monkeypatch.setitem(sys.modules, "torch", torch)

    def launches(shape: Any) -> Any:
        found = {name: lambda name=name: name for name in (module.OURS, "cudnn")}
        return found, lambda output: "largest error 2" if output in module.wrong else ""

    def times_us(turns: Any, rounds: int) -> dict[str, float]:
        timed = [one.name for one in turns.right]
        return {name: 10.0 + module.delay * name.endswith("replay") for name in timed}

    monkeypatch.setattr(module, "launches", launches)
    monkeypatch.setattr(module, "captured", lambda launch: (launch, module.replayed or launch()))
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


@pytest.mark.parametrize(("name", "value"), [("delay", 1.3), ("replayed", "another")])
def test_it_fails_for_slow_and_for_wrong_replays(tool: ModuleType, name: str, value: Any) -> None:
    setattr(tool, name, value)
    assert tool.main() == 1


@pytest.mark.parametrize("name", ["attention()", "cudnn"])
def test_what_is_wrong_has_no_time(
    tool: ModuleType, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.wrong = (name,)
    assert tool.main() == 1
    (line, *_) = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert line == f"  {name:16} WRONG: largest error 2"


def test_without_a_gpu_it_says_so(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["torch"].cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tool.main()
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
