"""tools/gpu/host_overhead.py on a GPU that is not there: its rows, and that it can fail."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "gpu" / "host_overhead.py"

pytestmark = pytest.mark.torch


HOPPER = (
    "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
    "+rescale_8"
)


@pytest.mark.parametrize(
    ("limit", "status", "more"),
    [("1e9", 0, ("--config", HOPPER)), ("1e-9", 1, ()), ("1e9", 0, ("--over-a-cache",))],
)
def test_a_row_for_every_kind_of_call(
    tmp_path: Path, limit: str, status: int, more: tuple[str, ...]
) -> None:
    out = tmp_path / "rows.csv"
    run = subprocess.run(
        [
            *(sys.executable, str(TOOL), str(out), "--pretend", "--calls", "40"),
            *("--limit-us", limit, *more),
        ],
        capture_output=True,
        text=True,
    )
    assert run.returncode == status, run.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [row["call"] for row in rows]
    assert len(set(names)) == len(names) == len(run.stdout.splitlines()) >= 8
    assert any("packed" in name for name in names)
    for row in rows:
        assert row["gpu"] == "pretended"
        assert float(row["overhead"]) == pytest.approx(
            float(row["median"]) - float(row["bare"]), abs=0.02
        )
        assert 0 < float(row["bare"]) < float(row["median"]) < float(row["first"])
    assert all(name in run.stderr for name in names) == (status == 1)


@pytest.mark.full
def test_pairs_of_entry_points(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    run = subprocess.run(
        [
            sys.executable,
            str(TOOL.with_name("entry_points.py")),
            str(out),
            "--pretend",
            "--calls=40",
        ],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    with out.open(newline="") as file:
        rows = {row["call"]: row for row in csv.DictReader(file)}
    assert len(run.stdout.splitlines()) == len(rows) + 1  # torch.compile is beside two others
    assert {"sdpa", "flash_attn_func", "op", "sdpa, gradients"} < {*rows}
    for row in rows.values():
        assert float(row["ratio"]) == pytest.approx(
            float(row["p10"]) / float(row["its p10"]), rel=0.01
        )
        assert 0 < int(row["functions"]) < 100


@pytest.mark.full
def test_training_beside_pytorch(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    run = subprocess.run(
        [
            *(sys.executable, str(TOOL.with_name("training_overhead.py")), str(out), "--pretend"),
            *("--turns", "1", "--limit-ratio", "1e-9"),
        ],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stderr
    found = json.loads(out.read_text())
    assert json.loads(run.stdout) == found
    assert found["ratio"] == pytest.approx(found["both"] / found["cuDNN both"], abs=0.001)
    assert 0 < found["forward, no gradients"] < found["both"]
