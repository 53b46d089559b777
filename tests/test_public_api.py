"""The public names, signatures, commands and variables are those of tools/ci/public_api.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import flashsmith


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("ci/public_api.py")


def test_the_code_is_what_was_recorded(tool: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert tool.main([]) == 0, capsys.readouterr().out


def test_every_public_name_is_recorded(tool: ModuleType) -> None:
    recorded = json.loads(tool.LIST.read_text())
    for name in set(flashsmith.__all__) - {"__version__"}:
        assert f"flashsmith.{name}" in recorded["python"]
    assert "causal: keyword: False" in recorded["python"]["flashsmith.attention"]
    assert "q: 0: required" in recorded["python"]["flashsmith.attention"]
    assert "--kernels" in recorded["commands"]["flashsmith run"]
    assert recorded["errors"]["ArgumentError"][0] == "FlashsmithError"


def change(path: list[str], value: object) -> Callable[[dict], None]:
    """Sets, or with None removes, what stands at the path."""

    def made(api: dict) -> None:
        *folders, last = path
        for folder in folders:
            api = api[folder]
        if value is None:
            del api[last]
        else:
            api[last] = value

    return made


ATTENTION = ["python", "flashsmith.attention"]


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (change(ATTENTION, None), "flashsmith.attention is gone"),
        (change(ATTENTION, ["q: 0: required"]), "'k: 1: required' is gone"),
        (change(["python", "ptxlab.Finding"], []), "ptxlab.Finding: "),
        (change(["errors", "ArgumentError"], ["FlashsmithError"]), "'ValueError' is gone"),
        (change(["commands", "flashsmith run"], []), "'--kernels' is gone"),
        (change(["variables", "KERNELS"], None), "KERNELS is gone"),
        (
            change([*ATTENTION[:1], "flashsmith.device_spec"], ["gpu: 0: required"]),
            "'gpu: 0: required' is new and has no default",
        ),
    ],
)
def test_what_breaks_callers_is_named_and_not_recorded(
    tool: ModuleType,
    mutate: Callable[[dict], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    now = tool.current()
    broken = copy.deepcopy(now)
    mutate(broken)
    monkeypatch.setattr(tool, "LIST", tmp_path / "list.json")
    tool.LIST.write_text(json.dumps(now))
    monkeypatch.setattr(tool, "current", lambda: broken)
    assert tool.main(["--record"]) == 1
    assert message in capsys.readouterr().out
    assert json.loads(tool.LIST.read_text()) == now
    assert tool.main(["--record", "--breaking"]) == 0
    assert json.loads(tool.LIST.read_text()) == broken


def test_an_argument_that_may_be_left_out_now_breaks_nobody(tool: ModuleType) -> None:
    before = {"python": {"f": ["q: 0: required", "k: 1: required"]}}
    assert tool.breaks(before, {"python": {"f": ["q: 0: required", "k: 1: None"]}}) == []
    moved = tool.breaks(before, {"python": {"f": ["q: 0: required", "k: keyword: None"]}})
    assert moved == ["f: 'k: 1: required' is gone"]


def test_what_is_new_is_recorded(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = tool.current()
    before = copy.deepcopy(now)
    del before["python"]["flashsmith.attention"]
    before["python"]["flashsmith.forward"].pop()
    monkeypatch.setattr(tool, "LIST", tmp_path / "list.json")
    tool.LIST.write_text(json.dumps(before))
    assert tool.main([]) == 1
    assert tool.main(["--record"]) == 0
    assert json.loads(tool.LIST.read_text()) == now
