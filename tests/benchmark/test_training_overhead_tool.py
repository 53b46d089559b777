"""tools/gpu/training_overhead.py: who is wrong beside float64 is named, and gets no time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

GPU_TOOLS = Path(__file__).parents[2] / "tools" / "gpu"
Runs = dict[str, Callable[[], Any]]


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With contenders that are right, but for those in module.spoilt, whose outputs are halved."""
    monkeypatch.syspath_prepend(str(GPU_TOOLS))
    module = load_tool("gpu/training_overhead.py")
    module.spoilt = ()

    def contenders(tensors: Any) -> Runs:
        def of(name: str, found: Any) -> Callable[[], Any]:
            factor = 0.5 if name in module.spoilt else 1.0
            parts = [(factor * it).bfloat16() for it in found]
            if name.startswith("cuDNN"):
                parts = [it.transpose(1, 2) for it in parts]
            return lambda: parts[0] if len(parts) == 1 else tuple(parts)

        o, *gradients = module.exactly(tensors)
        names = ("forward", "both", "both, repeatable", "cuDNN forward", "cuDNN both")
        runs = {name: of(name, [o] if "forward" in name else gradients) for name in names}
        return {**runs, "bare both": lambda: torch.zeros(1)}

    monkeypatch.setattr(module, "contenders", contenders)
    draw = module.drawn
    monkeypatch.setattr(module, "drawn", lambda device: draw("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretended")
    return module


def measured(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Any]:
    out = tmp_path / "times.json"
    monkeypatch.setattr(sys, "argv", ["training_overhead.py", str(out), "--turns", "2"])
    return tool.main(), json.loads(out.read_text())


def test_who_is_right_has_a_time(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = measured(tool, tmp_path, monkeypatch)
    assert status == 0
    assert {"forward", "both", "cuDNN forward", "cuDNN both", "bare both", "ratio"} <= set(found)
    assert "wrong" not in found


@pytest.mark.parametrize("name", ["cuDNN forward", "cuDNN both", "both, repeatable"])
def test_who_is_wrong_has_none(
    tool: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool.spoilt = (name,)
    status, found = measured(tool, tmp_path, monkeypatch)
    assert status == 1
    assert name not in found
    assert "3 times ours" in found["wrong"].pop(name)
    assert found["wrong"] == {}
    assert ("ratio" in found) == (name != "cuDNN both")


def test_ours_is_compared_with_more_than_itself(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool.spoilt = ("forward", "both", "cuDNN forward", "cuDNN both", "both, repeatable")
    status, found = measured(tool, tmp_path, monkeypatch)
    assert status == 1
    assert {"forward", "both"} <= set(found["wrong"])
