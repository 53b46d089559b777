"""tools/gpu/sources_in_turns.py on made-up times: its pairs, its rounds, and that it can fail."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashsmith.builder.sources import package_sources


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool: the new kernels take 1 / module.ratio of the old ones' time, and no compiler."""
    module = load_tool("gpu/sources_in_turns.py")
    module.ratio, module.right, module.registers = 1.0, True, 168

    def kernels_of(csrc: Path, pairs: Any, load: bool) -> dict[Any, Any]:
        new = csrc == package_sources()
        report = SimpleNamespace(
            registers=module.registers if new else 168,
            spill_store_bytes=0,
            spill_load_bytes=0,
            stack_bytes=0,
        )
        return {(pair.config, pair.semantics): report for pair in pairs}

    def measured(pair: Any, kernels: Any) -> Callable[[], dict[str, Any]]:
        row = {"problem": str(pair.problem), "ratio": str(module.ratio), "base_right": True}
        return lambda: row | {"new_right": module.right}

    monkeypatch.setattr(module, "kernels_of", kernels_of)
    monkeypatch.setattr(module, "measured", measured)
    environment = SimpleNamespace(collect=lambda index: SimpleNamespace(gpu="none"))
    monkeypatch.setattr(module, "Environment", environment)
    return module


@pytest.fixture
def run(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[dict[str, str]]]]:
    """Runs it beside a copy of csrc's first header; exit status and rows."""
    base = tmp_path / "csrc"
    (base / "common").mkdir(parents=True)
    (base / "common" / "forward_args.cuh").write_text("// older\n")

    def run(*options: str) -> tuple[int, list[dict[str, str]]]:
        out = tmp_path / "rows.csv"
        monkeypatch.setattr(sys, "argv", ["tool", str(out), "--base", str(base), *options])
        status = tool.main()
        return status, list(csv.DictReader(out.open())) if out.exists() else []

    return run


def test_every_pair_that_ranks_first_is_measured_in_rounds(tool: ModuleType, run: Any) -> None:
    status, rows = run("--rounds", "3")
    assert status == 0
    pairs = tool.first_ranked(False, None)
    assert len({(pair.config, pair.semantics) for pair in pairs}) == len(pairs) > 40
    assert {pair.problem.operation for pair in pairs} == {"forward"}, "what it can launch"
    assert [row["problem"] for row in rows] == [str(p.problem) for p in pairs for _ in range(3)]
    assert rows[0]["base_csrc"] != rows[0]["csrc"]


def test_softcapped_pairs_are_the_same_kernels(tool: ModuleType, run: Any) -> None:
    capped = tool.first_ranked(True, None)
    assert {pair.config for pair in capped} == {
        pair.config for pair in tool.first_ranked(False, None)
    }
    assert all(pair.semantics.softcap for pair in capped)
    _, rows = run("--softcap", "--only", "FP16", "--rounds", "1")
    assert rows
    assert all("softcap" in row["problem"] and "fp16" in row["problem"] for row in rows)


def test_of_a_family_it_measures_what_would_serve_alone(tool: ModuleType, run: Any) -> None:
    """Also where kernels of another family rank first, as wgmma's do throughout on an H200."""
    problems = {pair.problem for pair in tool.first_ranked(False, None)}
    pairs = tool.first_ranked(False, "mma_sync")
    assert {pair.config.FAMILY for pair in pairs} == {"mma_sync"}
    assert len({(pair.config, pair.semantics) for pair in pairs}) == len(pairs) > 20
    assert {pair.problem.d for pair in pairs} == {problem.d for problem in problems}
    _, rows = run("--family", "mma_sync", "--rounds", "1")
    assert [row["problem"] for row in rows] == [str(pair.problem) for pair in pairs]


def test_a_slow_pair_is_measured_longer(tool: ModuleType, run: Any) -> None:
    tool.ratio = 0.97
    _, rows = run("--rounds", "2", "--only", "d192.*causal")
    problems = {row["problem"] for row in rows}
    assert len(rows) == (2 + tool.MORE_ROUNDS) * len(problems) > 0


@pytest.mark.parametrize(("name", "value"), [("ratio", 0.9), ("right", False)])
def test_it_fails_for_slow_and_for_wrong_kernels(
    tool: ModuleType, run: Any, name: str, value: Any
) -> None:
    setattr(tool, name, value)
    assert run("--rounds", "1", "--least", "0.998")[0] == 1


def test_changed_registers_are_told(
    tool: ModuleType, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.registers = 200
    assert run("--build-only") == (0, [])
    assert "registers 168 -> 200" in capsys.readouterr().out


@pytest.mark.parametrize("options", [("--base", "/nowhere"), ("--only", "d640")])
def test_what_leaves_nothing_to_measure_is_said(run: Any, options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        run(*options)
