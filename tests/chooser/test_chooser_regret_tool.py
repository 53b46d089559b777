"""tools/benchmark/chooser_regret.py: what it writes and says. No GPU: the timer is a stand-in."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashsmith.families import (
    KernelConfig,
    Problem,
    device_spec,
    parse_kernel_name_into_config,
)

PROBLEMS = ("b1 s64 h1 d128 fp16", "b16 s3000 h16 d64 bf16 causal")


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("benchmark/chooser_regret.py")


def by_rows(problem: Problem, configs: Sequence[Any]) -> list[float | None]:
    """Kernels with small tiles are the faster ones here."""
    return [2.0 if config.B_r == 128 else 1.5 for config in configs]


def test_the_choice_stands_first_beside_what_was_turned_down(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "regret.csv"
    assert tool.main([str(out), *PROBLEMS, "--without-table"], timer=by_rows) == 0
    rows = list(csv.DictReader(out.open()))
    for text in PROBLEMS:
        of_problem = [row for row in rows if row["problem"] == text]
        assert [row["chosen"] for row in of_problem] == ["True"] + ["False"] * (len(of_problem) - 1)
        for row in of_problem:
            large = parse_kernel_name_into_config(row["config"]).B_r == 128
            assert float(row["regret"]) == pytest.approx(1 / 3 if large else 0)
    # Which of them is chosen depends on the GPU that is there.
    chosen = [parse_kernel_name_into_config(r["config"]) for r in rows if r["chosen"] == "True"]
    took = ["took 2 ms, 33.3%" if config.B_r == 128 else "took 1.5 ms, 0.0%" for config in chosen]
    said = capsys.readouterr().out.splitlines()[: len(PROBLEMS)]
    for line, expected in zip(said, took, strict=True):
        assert f"{expected} over the fastest of" in line


def test_a_wrong_kernel_is_told_and_fails(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "regret.csv"

    def first_is_wrong(problem: Problem, configs: Sequence[Any]) -> list[float | None]:
        return [None, *(1.0 for _ in configs[1:])]

    assert tool.main([str(out), PROBLEMS[0]], timer=first_is_wrong) == 1
    assert "WRONG" in capsys.readouterr().out
    assert next(csv.DictReader(out.open()))["right"] == "False"


def test_each_library_is_of_one_family(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On sm_90 the candidates are of both, and the builder makes a library of one."""
    built: list[list[KernelConfig]] = []
    monkeypatch.setattr(tool, "build", lambda configs, **_: built.append(list(configs)))
    tool.build_ahead([Problem.parse("b16 s3000 h16 d128 fp16")], device_spec("H200"), None)
    assert {cfg.FAMILY for configs in built for cfg in configs} == {"mma_sync", "wgmma"}
    assert all(len({cfg.FAMILY for cfg in configs}) == 1 for configs in built)


def test_its_own_problems_are_problems(tool: ModuleType) -> None:
    assert len({str(Problem.parse(text)) for text in tool.PROBLEMS}) == len(tool.PROBLEMS)
