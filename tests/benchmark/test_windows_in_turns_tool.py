"""tools/gpu/windows_in_turns.py on made-up times: its kernels, its rows, and that it can fail."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashsmith.benchmark.environment import Environment
from flashsmith.chooser.winners.table import WinnersTable
from flashsmith.families import device_spec

PROBLEM = "b4 s8192 h16 d64 bf16"


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool on an H200 that is not there: of each window the first kernel takes a millisecond,
    each other one a tenth longer than the one before."""
    module = load_tool("gpu/windows_in_turns.py")
    environment = Environment.collect(None)
    monkeypatch.setattr(module, "query_gpu", lambda ordinal: device_spec("H200"))
    monkeypatch.setattr(module.Environment, "collect", lambda ordinal: environment)

    def rounds_of(problem: Any, kernels: Any, rounds: int) -> Iterator[dict[str, float]]:
        for _ in range(rounds):
            yield {str(kernel): 1.0 + number / 10 for number, kernel in enumerate(kernels)}

    monkeypatch.setattr(module, "rounds_of", rounds_of)
    return module


def test_each_kernel_is_timed_on_every_window(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.csv"
    assert tool.main([str(out), PROBLEM, "--rounds", "2"]) == 0
    rows = list(csv.DictReader(out.open()))
    chosen = tool.choices(PROBLEM, tool.WINDOWS, device_spec("H200"))
    kernels = set(map(str, chosen.values()))
    assert len(kernels) > 1, "windows of 64 and of 8,192 keys have other kernels"
    assert len(rows) == len(tool.WINDOWS) * len(kernels) * 2
    for problem, config in chosen.items():
        of_one = [row for row in rows if row["problem"] == str(problem)]
        assert {row["config"] for row in of_one} == kernels
        assert {row["config"] for row in of_one if row["chosen"] == "True"} == {str(config)}
    assert "  1.1000: " in capsys.readouterr().out


def test_listed_kernels_are_timed_next_to_the_chosen_one(tool: ModuleType, tmp_path: Path) -> None:
    forms, out = tmp_path / "forms.txt", tmp_path / "rows.csv"
    other = (
        "(BF16, 64, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+overlap+pingpong_gemm"
        "+dynamic+canonical_1"
    )
    forms.write_text(f"{other}\n{other.replace('BF16', 'FP16')}\n")
    problem = f"{PROBLEM} canonical"
    assert tool.main([str(out), problem, "--kernels", str(forms), "--rounds", "2"]) == 0
    rows = list(csv.DictReader(out.open()))
    assert {row["problem"] for row in rows} == {problem}
    (chosen,) = {row["config"] for row in rows if row["chosen"] == "True"}
    assert {row["config"] for row in rows} == {chosen, other}
    assert "canonical_1" in chosen


def test_kernels_of_a_larger_d_head_are_timed_if_wanted(tool: ModuleType, tmp_path: Path) -> None:
    forms, table = tmp_path / "forms.txt", tmp_path / "table.json"
    wide = "(BF16, 96, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
    forms.write_text(f"{wide}\n{wide.replace('96', '64')}\n")
    for wider, timed in (((), set()), (("--wider",), {wide})):
        out = tmp_path / "rows.csv"
        ask = [str(out), "b4 s1024 h16 d72 bf16", "--kernels", str(forms), "--rounds", "2", *wider]
        assert tool.main(ask) == 0
        rows = list(csv.DictReader(out.open()))
        assert {row["config"] for row in rows if row["chosen"] == "False"} == timed
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "gpu", "arch"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, "gpu": "H200", "arch": "90"} for row in rows)
    assert tool.main([str(out), "--table", str(table)]) == 0
    (entry,) = WinnersTable.load(table)
    assert len(entry.ranked) == 1
    assert entry.best.config.startswith("(BF16, 72,")


def test_it_fails_where_an_output_is_wrong(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds_of(problem: Any, kernels: Any, rounds: int) -> Iterator[dict[str, float]]:
        if "window_64" in str(problem):
            raise ValueError(f"{problem}: {kernels[0]}: 3 outputs are NaN")
        yield {str(kernel): 1.0 for kernel in kernels}

    monkeypatch.setattr(tool, "rounds_of", rounds_of)
    out = tmp_path / "rows.csv"
    assert tool.main([str(out), PROBLEM, "--windows", "64", "8192"]) == 1
    assert {row["problem"] for row in csv.DictReader(out.open())} == {f"{PROBLEM} window_8192"}


def test_rows_become_entries_of_a_table(tool: ModuleType, tmp_path: Path) -> None:
    """Those that are committed: with windows of 512 keys a kernel wins that was not chosen."""
    rows = Path(__file__).parents[2] / "benchmarks" / "h200" / "window-classes.csv"
    table = tmp_path / "table.json"
    assert tool.main([str(rows), "--table", str(table)]) == 0
    entries = {str(entry.problem): entry for entry in WinnersTable.load(table)}
    assert len(entries) == 8
    entry = entries[f"{PROBLEM} window_512"]
    assert entry.best.config.startswith("(BF16, 64, 192, 128, 3wg)")
    assert [one.ms for one in entry.ranked] == sorted(one.ms for one in entry.ranked)
    assert entry.key.gpu == "H200"
    with pytest.raises(SystemExit):
        tool.main([str(rows)])
