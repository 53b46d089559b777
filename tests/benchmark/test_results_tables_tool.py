"""The tables of docs/results.md over KV caches, from rows that are made up here."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.measurement import Measurement, Proof, Times
from flashsmith.benchmark.measurement_files import write_rows
from flashsmith.benchmark.problems import named_problems
from flashsmith.benchmark.roofline.roofline import Ceiling, Roofline
from flashsmith.benchmark.timing import Samples
from flashsmith.families import Problem

HERE = Environment("NVIDIA H200", 90, "1.2", "13.0", "2.11", "0.1.0", "abc", "3.12")
US = {"ours": 80.0, "ours_free": 76.0, "cudnn": 100.0, "fa2": 120.0, "flashinfer": 90.0}


@pytest.fixture
def tool(
    load_tool: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    made = load_tool("docs/results_tables.py")
    rows = tmp_path / "h200"
    rows.mkdir()
    monkeypatch.setattr(made, "ROWS", rows)
    return made


def measured(problem: Problem, name: str, us: float | None, verdict: str = "pass") -> Measurement:
    kind = "ours" if name.startswith("ours") else "peer"
    times = None if us is None else Times.of(Samples((us / 1e3,)), problem)
    return Measurement.of(name, kind, problem, Proof(verdict), times, HERE)  # type: ignore[arg-type]


def write(folder: Path, name: str, rows: list[Measurement]) -> None:
    plain = folder / "rows.jsonl"
    write_rows(plain, rows)
    (folder / name).write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def rows_of(table: str) -> dict[str, list[str]]:
    lines = [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines[2:]}


def test_without_rows_no_figure_is_shown(tool: ModuleType) -> None:
    for name in ("", "-wide", "-on-h100", "-wide-on-h100", "-in-short-on-h100"):
        assert tool.TABLES[f"decode{name}"]() == "There are no rows of it yet."


def test_the_table_of_the_set_decode(tool: ModuleType) -> None:
    rows = []
    for problem in named_problems("decode"):
        longer = 1.25 if problem.page else 1.0
        for round_ in (0.9, 1.0, 5.0):  # the median of rounds is shown
            rows += [measured(problem, name, us * longer * round_) for name, us in US.items()]
        rows.append(measured(problem, "flash_attn_3", None, "absent"))
    write(tool.ROWS, tool.DECODE, rows)
    roof = Roofline("NVIDIA H200", 90, 132, "", {}, (Ceiling("dram_read", "TB/s", 4.5),))
    (tool.ROWS / tool.DECODE_ROOF).write_text(json.dumps(roof.to_json()))
    table = rows_of(tool.decode())
    assert len(table) == 11 + 1
    assert list(table)[:3] == ["1 x 1024", "1 x 4096", "1 x 8192"]
    cells = ["268", "80.0", "100.0", "flashinfer 90.0", "1.25", "1.12", "3.36", "75%"]
    assert table["8 x 8192"] == [*cells, "100.0", "0.800", "76.0", "0.950"]
    assert table["64 x 65536"][0] == "17180"
    short = rows_of(tool.decode_in_short())
    assert short["8 x 8192"] == ["80.0", "100.0", "1.25", "75%", "100.0", "76.0"]
    assert table["geometric mean"][-3:] == ["0.800", "", "0.950"]


def test_tables_of_another_gpu(tool: ModuleType) -> None:
    """They have its rows and its roof."""
    folder = tool.ROWS / tool.ON_H100
    folder.mkdir()
    problem = Problem.parse("b8 s1:8192 h32:8 d128 bf16 decode")
    write(folder, tool.DECODE, [measured(problem, "ours", 100.0)])
    write(folder, tool.DECODE_WIDE, [measured(problem, "ours", 200.0)])
    roof = Roofline("NVIDIA H100", 90, 132, "", {}, (Ceiling("dram_read", "TB/s", 3.0),))
    (folder / tool.DECODE_ROOF).write_text(json.dumps(roof.to_json()))
    assert rows_of(tool.TABLES["decode-on-h100"]())["8 x 8192"][5:8] == ["-", "2.68", "89%"]
    assert tool.TABLES["decode-wide-on-h100"]().endswith("| 1.34 | 45% |")
    short = rows_of(tool.TABLES["decode-in-short-on-h100"]())
    assert short["8 x 8192"] == ["100.0", "-", "-", "89%", "-", "-"]
    assert tool.TABLES["decode"]() == tool.NOT_MEASURED


def test_the_table_of_the_set_decode_wide(tool: ModuleType) -> None:
    rows = [
        measured(problem, name, us)
        for problem in named_problems("decode_wide")
        for name, us in US.items()
        if problem.seq_q == 1 or name != "cudnn"
    ]
    write(tool.ROWS, tool.DECODE_WIDE, rows)
    lines = tool.decode_wide().splitlines()[2:]
    assert len(lines) == 10
    assert lines[0].startswith("| heads 16:16, d 128 | 1 x 8192 | 67 | 80.0 | 100.0 |")
    assert lines[0].endswith("| 0.84 | - |")  # of no roof
    eight = (
        "| heads 32:8, d 128, 8 tokens | 1 x 8192 | 34 | 80.0 | - | flashinfer 90.0 | - | 1.12 |"
    )
    assert lines[-2].startswith(eight)


def test_of_a_wrong_kernel_there_is_no_table(tool: ModuleType) -> None:
    problem = Problem.parse("b1 s1:1024 h32:8 d128 bf16 decode")
    write(tool.ROWS, tool.DECODE, [measured(problem, "ours", None, "fail")])
    with pytest.raises(SystemExit, match=r"ours on .*: fail"):
        tool.decode()
