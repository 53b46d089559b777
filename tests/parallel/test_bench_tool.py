"""tools/gpu/parallel_bench.py over two processes of gloo, in the emulator."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

TOOL = Path(__file__).parents[2] / "tools" / "gpu" / "parallel_bench.py"


def run(command: list[str], *more: Path) -> subprocess.CompletedProcess[str]:
    folders = [*map(str, more), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_it_proves_and_times(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = {
        "--device": "cpu", "--heads": "4:2", "--d": "64", "--proof-seq": "40", "--seqs": "32",
        "--masks": "causal,packed", "--rounds": "1", "--measure-ms": "1",
    }  # fmt: skip
    done = run([str(TOOL), str(rows), *[part for pair in options.items() for part in pair]])
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows_of(rows)
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


@pytest.mark.full
def test_a_peer_is_called_where_pytorch_has_replaced_its_function_and_a_wrong_one_has_no_time(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"
    done = run([str(Path(__file__).parent / "planted_peers.py"), str(rows)], TOOL.parent)
    assert done.returncode == 1, done.stdout + done.stderr
    found = rows_of(rows)
    for direction in ("forward", "both"):
        of = {
            row["name"].removeprefix("context_parallel cudnn "): row
            for row in found
            if "name" in row and row["direction"] == direction
        }
        for name in ("allgather gqa", "allgather repeated"):
            assert of[name]["what"] == "peer"
            assert len(of[name]["rounds"]) == 2
        for name in ("alltoall repeated", "nan repeated"):
            assert of[name]["what"] == "wrong"
            assert "ms" not in of[name]
            assert "3 times ours" in of[name]["why"]
        assert of["alltoall repeated"]["errors"]["o"] > 0.1
        assert of["refusing repeated"]["why"] == "not on this device"
    assert len([row for row in found if row["what"] == "call"]) == 6


class Planted:
    """An implementation whose outputs are so far off, and that takes no time."""

    name, error = "alone", 0.01

    def prepared(self, bench: Any, whole: Any, direction: str) -> Planted:
        tool = sys.modules["parallel_bench"]
        right = tool.exactly(tool.last_group(whole), True, None, None)
        self.found = [it + self.error for it in right[: 1 if direction == "forward" else 4]]
        return self

    def output(self) -> list[Any]:
        return self.found

    @contextlib.contextmanager
    def entered(self) -> Iterator[Callable[[], None]]:
        yield lambda: None


def planted(name: str, error: float = 0.01) -> Planted:
    found = Planted()
    found.name, found.error = name, error
    return found


class Refusing(Planted):
    name = "refusing"

    def output(self) -> list[Any]:
        raise NotImplementedError("not here")


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone_in_a_group")
def test_what_is_wrong_has_a_row_that_says_so_and_no_time(
    load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = load_tool("gpu/parallel_bench.py")
    monkeypatch.setattr(tool, "Alone", Planted)
    errors = {"zigzag": 0.0109, "allgather": 0.0111, "ulysses": 0.01}
    monkeypatch.setattr(tool, "Sharded", lambda name, module: planted(name, errors[name]))
    peers = (planted("near", 0.0299), planted("off", 0.0301), planted("nan", math.nan), Refusing())
    options = argparse.Namespace(
        device="cpu", heads=(4, 2), d=8, sizes=[(1, 16)], rounds=2, measure_ms=1e-3, peers=peers,
        schedules=tool.SCHEDULES, directions=["forward", "both"], beside="",
    )  # fmt: skip
    path = tmp_path / "rows.jsonl"
    tool.Bench(0, 1, path, options).time()
    found = rows_of(path)
    for direction in ("forward", "both"):
        rows = [row for row in found if row["direction"] == direction]
        words = {row.get("name", row.get("schedule", "alone")): row["what"] for row in rows}
        assert words == {
            "alone": "alone", "zigzag": "call", "allgather": "wrong", "ulysses": "call",
            "near": "peer", "off": "wrong", "nan": "wrong", "refusing": "absent",
        }  # fmt: skip
        for row in rows:
            assert ("ms" in row) == (row["what"] in ("alone", "call", "peer"))
            assert row.get("host_us", -1) > 0 or "ms" not in row
            assert row.get("ok", True) == (row["what"] != "wrong")
    assert tool.status_of(path, 0) == 1
    assert tool.status_of(path, len(found)) == 0


def test_what_is_built_ahead_is_what_one_gpu_and_all_ranks_compute(
    load_tool: Callable[[str], ModuleType],
) -> None:
    tool = load_tool("gpu/parallel_bench.py")
    options = argparse.Namespace(
        heads=(4, 2), d=64, gpus=2, steps=["speed", "bits"], sizes=[(2, 64)], schedules=["auto"],
        directions=["forward"], proof_seq=32, masks=list(tool.MASKS),
    )  # fmt: skip
    found = {(str(one), deterministic) for one, deterministic in tool.planned(options)}
    shape = "h4:2 d64 bf16 causal"
    assert {(f"b2 {it} {shape}", False) for it in ("s64", "s16", "s16:64", "s16:32")} < found
    assert (f"b1 s32 {shape} canonical", False) in found
    assert not any("backward" in text for text, _ in found)
    options.steps = ["proof"]
    proofs = tool.planned(options)
    assert all(deterministic for _, deterministic in proofs)
    masks = {str(one.semantics.mask) for one, _ in proofs}
    assert {"causal", "none", "window"} <= masks
    assert any(one.semantics.packed for one, _ in proofs)
