"""tools/benchmark/verdict.py on made-up rows of runs, and the sets of cells they are of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from flashsmith.benchmark.bench import CELL_SETS, cell_problems
from flashsmith.benchmark.rows import BenchRow, problem_columns, write_rows
from flashsmith.configs import Problem
from flashsmith.errors import ArgumentError

KNOWN = "b16 s1024 h16 d128 fp16"  # best / cuDNN 1.05
UNKNOWN = "b1 s4096 h32:8 d128 bf16 causal"


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("benchmark/verdict.py")


def rows(problem: str, **tflops: float | None) -> list[BenchRow]:
    """A cell's rows: contenders with their TFLOP/s, None for one that was wrong."""
    return [
        BenchRow(
            contender=name,
            kind="ours" if name == "ours" else "peer",
            family="wgmma" if name == "ours" else "",
            config="(a config)" if name == "ours" else "",
            **problem_columns(Problem.parse(problem)),
            verdict="fail" if rate is None else "pass",
            tflops=rate,
            protocol="one_by_one",
            gpu="NVIDIA H200",
        )
        for name, rate in tflops.items()
    ]


def written(folder: Path, *runs: list[BenchRow]) -> list[str]:
    paths = [folder / f"run-{number}.csv" for number in range(len(runs))]
    for path, run in zip(paths, runs, strict=True):
        write_rows(path, run)
    return list(map(str, paths))


def test_the_run_in_the_middle_counts(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours over cuDNN is 1.1, 1.3 and 1.2; the clock was another in each run."""
    runs = [
        rows(KNOWN, ours=550, cudnn=500, fa2=320) + rows(UNKNOWN, ours=500, cudnn=490, fa2=270),
        rows(KNOWN, ours=780, cudnn=600, fa2=330) + rows(UNKNOWN, ours=510, cudnn=500, fa2=280),
        rows(KNOWN, ours=660, cudnn=550, fa2=325) + rows(UNKNOWN, ours=520, cudnn=530, fa2=290),
    ]
    assert tool.main(written(tmp_path, *runs)) == 0
    said = capsys.readouterr().out
    assert "| 660 | 550 | 325 | 1.200 | 1.050 | 1.143 | (a config) |" in said
    assert "| 510 | 500 | 280 | 1.020 | 1.821 | 1.020 | (a config) |" in said
    assert f"r: geometric mean 1.143 over 1 cells, worst 1.143 ({KNOWN}), 0 below 1" in said
    assert "Reached: aim" in said
    assert "ours / FA2: geometric mean 1.923 over 2 cells" in said
    assert "NVIDIA H200" in said
    assert "one_by_one, the median of 3 run(s)" in said


@pytest.mark.parametrize(
    ("ours", "grade"),
    [(580, "Reached: aim"), (555, "Reached: bar"), (530, "Reached: must"), (500, "Missed: must")],
)
def test_grades(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], ours: float, grade: str
) -> None:
    tool.main(written(tmp_path, rows(KNOWN, ours=ours, cudnn=500)))
    assert grade in capsys.readouterr().out


def test_what_is_wrong_or_missing_is_said(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        rows(KNOWN, ours=550, cudnn=500) + rows(UNKNOWN, ours=None, cudnn=490),
        rows(KNOWN, ours=560, cudnn=500),
    ]
    assert tool.main(written(tmp_path, *runs)) == 1
    out, err = capsys.readouterr()
    assert "| 550 |" in out  # of two the lower
    assert f"run-0.csv: ours on '{UNKNOWN}': fail" in err
    assert f"run-1.csv: ours on '{UNKNOWN}' was not measured" in err
    twice = rows(KNOWN, ours=550, cudnn=500) * 2
    assert tool.main(written(tmp_path, twice)) == 2
    assert "a file is one run" in capsys.readouterr().err


def test_a_cell_without_cudnn_goes_by_fa2(tool: ModuleType, tmp_path: Path) -> None:
    packed = "b16 s1024 h16 d128 fp16 causal packed"
    runs = [rows(packed, ours=ours, fa2=200) for ours in (300.0, 340.0, 320.0)]
    paths = map(Path, written(tmp_path, *runs))
    (cell,) = tool.make_cells([tool.read_run(path) for path in paths], {})
    assert cell.over("fa2") == pytest.approx(1.6)
    assert cell.r is None


def test_the_public_cells_are_those_whose_best_is_known(tool: ModuleType) -> None:
    assert set(tool.read_best(tool.BEST)) == set(cell_problems("public"))


def test_the_verdicts_cells() -> None:
    sizes = {name: len(cell_problems(name)) for name in CELL_SETS}
    assert sizes["verdict"] == 136
    assert sizes["public"] == 28
    assert set(cell_problems("public")) < set(cell_problems("verdict"))
    assert cell_problems("main,main") == cell_problems("main")
    with pytest.raises(ArgumentError, match=r"cells='nonsense': nonsense: allowed are main, heads"):
        cell_problems("nonsense")


def test_json_rows_serve_as_well(tool: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_rows(path, [replace(row, note="x") for row in rows(KNOWN, ours=550, cudnn=500)])
    assert json.loads(path.read_text())
    assert tool.main([str(path)]) == 0
