"""tools/gpu/cluster_sweep.py without Ray and GPUs: what it counts, and that it can fail."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_cluster import SLOW, join
from test_cluster import nodes as nodes
from test_executor import CallCluster, fleet
from test_executor import cluster as calls
from test_executor import serial as serial

from flashsmith.families import device_spec
from flashsmith.tuning.cluster import Cluster


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("gpu/cluster_sweep.py")


def joined(executor: CallCluster) -> Cluster:
    sweep = fleet(list(executor.benches))
    return Cluster(executor, tuple((gpu, sweep.runner) for gpu in sweep.gpus), jobs=2)  # type: ignore[arg-type]


def test_problems_are_of_about_equal_work(tool: ModuleType) -> None:
    found = tool.problems()
    assert len(set(found)) == len(found) == 48
    assert len({one.batch * one.seq_q for one in found}) == 1
    assert len(tool.races(device_spec("H200"))) == 48
    some = tool.problems(["d128", "bf16"])
    assert len(some) == 12
    assert all("d128" in str(one) and "bf16" in str(one) for one in some)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_sweep_has_each_problem_on_one_gpu(tool: ModuleType, tmp_path: Path, gpus: int) -> None:
    done = tool.sweep(joined(calls()), fleet(("a",)).races, gpus, tmp_path)
    assert done["seconds"] > 0
    assert sum(done["problems"].values()) == len(fleet(("a",)).races)
    with pytest.raises(ValueError, match="would resume"):
        tool.sweep(joined(calls()), fleet(("a",)).races, gpus, tmp_path)


def test_only_a_cluster_of_its_own_is_harmed(tool: ModuleType) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert tool.is_ours(child.pid)
        assert not tool.is_ours(os.getppid())
        child.kill()


def test_a_sweep_in_which_nothing_was_killed_is_an_error(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no process of a GPU was killed"):
        tool.sweep(joined(calls()), fleet(("a",)).races, 2, tmp_path, kill=True)


def test_fewer_gpus_than_asked_for_are_an_error(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gpus=2: Ray has 1"):
        tool.sweep(joined(calls("a")), fleet(("a",)).races, 2, tmp_path)


def test_a_measurement_twice_or_on_another_gpu_is_found(
    tool: ModuleType, tmp_path: Path, serial: Path
) -> None:
    lines = (serial / "journal.jsonl").read_text().splitlines()
    journal = tmp_path / "journal.jsonl"
    journal.write_text("\n".join(lines))
    assert sum(tool.check(tmp_path).values()) > 0
    timed = next(one for one in lines if json.loads(one)["samples"])
    journal.write_text("\n".join([*lines, timed]))
    with pytest.raises(ValueError, match="measured twice"):
        tool.check(tmp_path)
    moved = json.loads(timed)
    moved["origin"]["worker"] = "elsewhere"
    journal.write_text("\n".join([*lines, json.dumps(moved)]))
    with pytest.raises(ValueError, match="on two GPUs"):
        tool.check(tmp_path)


@pytest.mark.parametrize(
    ("one", "two", "ok"), [(329.5, 170.2, True), (329.5, 190.0, False), (150.0, 70.0, False)]
)
def test_the_verdict(tool: ModuleType, one: float, two: float, ok: bool) -> None:
    said = tool.verdict({"one": {"seconds": one}, "two": {"seconds": two}})
    assert said[1] is ok
    assert f"{one / two:.2f} times" in said[0]


def test_no_ratio_before_both_are_measured(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "connect", lambda address, runner: joined(calls()))
    monkeypatch.setattr(tool, "build_ahead", lambda *given: None)
    monkeypatch.setattr(tool, "races", lambda device, only: fleet(("a",)).races)
    assert tool.main([str(tmp_path), "--gpus", "1"]) == 0
    assert tool.main([str(tmp_path), "--gpus", "2"]) == 1  # a moment is no 200 seconds
    assert set(json.loads((tmp_path / "summary.json").read_text())) == {"one", "two"}


def test_sweeps_that_measured_different_kernels_are_told(
    tool: ModuleType, tmp_path: Path, serial: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (serial / "journal.jsonl").read_text().splitlines()
    missing = next(
        one
        for one in lines
        if json.loads(one)["samples"] and json.loads(one)["stage"] == tool.FIRST_RUNG
    )
    for name, kept in (
        ("one", lines),
        ("two", lines[::-1]),
        ("killed", [one for one in lines if one != missing]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").write_text("\n".join(kept))
    assert tool.measured(tmp_path / "one")
    assert tool.same_measurements(tmp_path, ["one", "two"])
    assert not tool.same_measurements(tmp_path, ["one", "two", "killed"])
    assert json.loads(missing)["problem"] in capsys.readouterr().out
    assert not tool.same_measurements(tmp_path, ["none"])


@pytest.mark.full
def test_a_process_of_a_gpu_is_found_in_a_cluster_of_ray_and_its_end_costs_nothing(
    tool: ModuleType, nodes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("two", "killed"):
        (tmp_path / name).mkdir()
        kill = name == "killed"
        races = fleet("", world=SLOW).races
        done = tool.sweep(join(nodes, SLOW), races, 2, tmp_path / name, kill=kill)
        assert sum(done["problems"].values()) == len(races)
        assert ("killed " in capsys.readouterr().out) == kill
    assert tool.same_measurements(tmp_path, ["two", "killed"])
