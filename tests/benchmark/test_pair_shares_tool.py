"""tools/gpu/pair_shares.py on made-up times: its pairs, its rows, and that it can fail."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashsmith.families import Problem


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, with kernels that need as many ms as a problem has TFLOP, and are right."""
    module = load_tool("gpu/pair_shares.py")
    module.slowdown, module.right = 1.0, True

    def implementation(name: str, of: Problem) -> SimpleNamespace:
        reasons = () if module.right else ("largest error 2",)
        return SimpleNamespace(
            name=name,
            workload=SimpleNamespace(check=lambda output: SimpleNamespace(reasons=reasons)),
            output=lambda: None,
            launch=of.attn_flop,
            config=f"config of {of}",
        )

    def measure(pair: Any, *protocol: Any, **options: Any) -> dict[str, SimpleNamespace]:
        times = {one.name: one.launch() / 1e9 for one in pair}
        times["other"] *= module.slowdown
        return {name: SimpleNamespace(median_ms=ms) for name, ms in times.items()}

    monkeypatch.setattr(module, "implementation", implementation)
    monkeypatch.setattr("flashsmith.benchmark.rounds.measure", measure)
    environment = SimpleNamespace(collect=lambda index: SimpleNamespace(revision="none"))
    monkeypatch.setattr(module, "Environment", environment)
    return module


def run(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["pair_shares.py", *map(str, arguments)])
    return int(tool.main())


def test_a_row_for_every_pair(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "rows.csv"
    assert run(tool, monkeypatch, out) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24 + 16
    assert len({row["other"] for row in rows}) == len(rows)
    causal = next(row for row in rows if row["other"] == "b16 s4096 h16 d128 bf16 causal")
    assert causal["problem"] == "b16 s4096 h16 d128 bf16"
    assert float(causal["time_share"]) == 0.5
    odd = next(row for row in rows if row["other"] == "b16 s1023 h32 d64 fp16 causal")
    assert odd["problem"] == "b16 s1024 h32 d64 fp16 causal"
    assert {float(row["speed_share"]) for row in rows} == {1.0}


@pytest.mark.parametrize(
    ("kind", "slowdown", "status"),
    [("causal", 1.11, 0), ("causal", 1.13, 1), ("odd", 1.04, 0), ("odd", 1.06, 1)],
)
def test_what_is_too_slow(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    slowdown: float,
    status: int,
) -> None:
    tool.slowdown = slowdown
    asked = (tmp_path / "rows.csv", "--kinds", kind, "--seqs", 1024, "--dims", 64)
    assert run(tool, monkeypatch, *asked) == status
    assert ("SLOW" in capsys.readouterr().out) == bool(status)


def test_what_is_wrong(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool.right = False
    assert run(tool, monkeypatch, tmp_path / "rows.csv", "--seqs", 4096, "--dims", 64) == 1
    assert "WRONG" in capsys.readouterr().out
    with (tmp_path / "rows.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert (row["right"], row["ms"], row["other_ms"], row["time_share"]) == (
                "False",
                "",
                "",
                "",
            )


def test_an_unknown_kind(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tool, monkeypatch, tmp_path / "rows.csv", "--kinds", "even")
    assert not (tmp_path / "rows.csv").exists()
