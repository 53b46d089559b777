"""tools/gpu/parallel_bench.py over two processes of gloo, in the emulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.full]

TOOL = Path(__file__).parents[2] / "tools" / "gpu" / "parallel_bench.py"


def test_it_proves_times_and_loses_ranks(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = {
        "--device": "cpu", "--heads": "4:2", "--d": "64", "--proof-seq": "40", "--seqs": "32",
        "--masks": "causal,packed", "--rounds": "1", "--measure-ms": "1", "--lost-seq": "32",
    }  # fmt: skip
    done = subprocess.run(
        [
            sys.executable,
            str(TOOL),
            str(rows),
            *[part for pair in options.items() for part in pair],
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    proofs = [row for row in found if row["what"] == "correct"]
    assert {(row["case"], row["schedule"]) for row in proofs} == {
        (case, schedule)
        for case in ("causal", "packed")
        for schedule in ("zigzag", "allgather", "ulysses")
    }
    assert all(row["ok"] and row["repeatable"] and row["worst"] <= 1.1 for row in proofs)
    # Beside float64, which 16 bits do not reach.
    assert all(1e-4 < error < 0.1 for row in proofs for error in row["errors"])
    for direction in ("forward", "both"):
        (alone,) = (
            it["ms"] for it in found if (it["what"], it.get("direction")) == ("alone", direction)
        )
        calls = [it for it in found if (it["what"], it.get("direction")) == ("call", direction)]
        assert len(calls) == 3
        assert all(it["efficiency"] == pytest.approx(alone / 2 / it["ms"]) for it in calls)
    lost = [row for row in found if row["what"] == "lost"]
    assert [row["of"] for row in lost] == ["ended between calls", "killed at work"]
    for row in lost:
        assert row["said"].startswith("GroupError: group: rank 0 of 2 lost the others")
        assert row["seconds"] < row["timeout"] + 10
