"""tools/benchmark/decode_run_costs.py on the committed rows, and on times that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from flashsmith.families import Problem, device_spec
from flashsmith.families.mma_sync_decode.cost import RUN_COSTS, RunCosts

COSTS = RUN_COSTS["H200"]


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("benchmark/decode_run_costs.py")


@pytest.mark.parametrize(("gpu", "calls", "most"), [("H200", 84, 1.007), ("H100", 42, 1.0005)])
def test_the_costs_in_use_are_near_the_best_by_the_committed_rows(
    tool: ModuleType, gpu: str, calls: int, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an H100's rows the H200's costs lose nothing that a search would find."""
    every = tool.calls(tool.FILES[gpu], device_spec(gpu))
    assert len(every) == calls
    assert tool.mean_loss(every, COSTS) < most
    assert tool.main(["--gpu", gpu]) == 0
    said = capsys.readouterr().out
    assert f"{gpu}, current: 1.0" in said
    assert f"of {calls} calls" in said
    assert "turn_bytes=" in said


def rows(tool: ModuleType, costs: RunCosts, path: Path) -> Path:
    """Calls that take just what they cost."""
    device, lines = device_spec("H200"), []
    for batch in (3, 5, 8, 12, 20, 40, 64, 100):
        for keys in (1024, 4096, 8192):
            cell = f"b{batch} s1:{keys} h32:8 d128 bf16 decode"
            problem = Problem.parse(cell)
            config = tool.CHOOSERS["invariant"](problem, device)
            tiles = tool.EqualTiles.of(problem, config, device)
            for runs in (1, 2, 4, 8, 16):
                microseconds = tiles.cost(costs, runs, keys / config.B_c) / 4e6
                counted = "c" * (runs * tiles.tiles > tiles.slots)
                line = {"what": "time", "label": "explore", "cell": cell, "how": "flushed"}
                lines.append(
                    json.dumps(line | {"name": f"n{runs}{counted}", "median": microseconds})
                )
    path.write_text("\n".join(lines))
    return path


def test_planted_costs_are_found(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = replace(COSTS, turn_bytes=60e6, merge_bytes=1e6)
    file = rows(tool, planted, tmp_path / "rows.jsonl")
    every = tool.calls(file, device_spec("H200"))
    before = tool.mean_loss(every, COSTS)
    assert before > 1.02
    found = tool.fitted(every, COSTS)
    assert tool.mean_loss(every, found) < 1 + (before - 1) / 10
    assert tool.mean_loss(every, planted) == 1.0
    assert tool.main(["--rows", str(file)]) == 1
    assert ",  # now " in capsys.readouterr().out


def test_costs_that_are_right_stay(tool: ModuleType, tmp_path: Path) -> None:
    file = rows(tool, COSTS, tmp_path / "rows.jsonl")
    every = tool.calls(file, device_spec("H200"))
    assert tool.fitted(every, COSTS) == COSTS
    assert tool.main(["--rows", str(file)]) == 0


@pytest.mark.parametrize("arguments", [["--gpu", "A100"], ["--rows", "/nowhere/rows.jsonl"]])
def test_a_gpu_without_rows_is_said(
    tool: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tool.main(arguments)
    assert "give a file" in capsys.readouterr().err
