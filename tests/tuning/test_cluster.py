"""A sweep over a Ray cluster on this machine, whose GPUs are pretended and whose nodes get lost."""

from __future__ import annotations

import _thread
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sweep_fakes as fakes
from sweep_fakes import NAMES, World, but
from test_executor import (
    KERNELS,
    OTHER,
    PROBLEMS,
    SETTINGS,
    WORLD,
    figures,
    fleet,
    nothing_lost_or_doubled,
)
from test_executor import serial as serial
from typer.testing import CliRunner

from flashsmith.cli import app
from flashsmith.errors import ArgumentError, DependencyError, LaunchError
from flashsmith.tuning import cluster as cluster_module
from flashsmith.tuning.cluster import Cluster, connect
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.tune import SweepResult, fleets_of, tune, tune_fleets

full = pytest.mark.full
HERE = Path(__file__).parent


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DependencyError, match=r"needs Ray, not installed here; .*\[cluster\]"):
        connect("auto", partial(fakes.machine_runner, WORLD))


@pytest.mark.parametrize("option", [("--dry-run",), ("--build-only",), ("--device", "1")])
def test_a_cluster_is_for_sweeps_alone(option: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["tune", "--cluster", *option])
    assert isinstance(done.exception, ArgumentError)
    assert str(done.exception).startswith(f"cluster='auto': not with {option[0]}")


@pytest.mark.parametrize(
    ("machines", "cores_of_gpus", "all_cores"),
    [
        ([(8, 2)], [1, 1], 8),
        ([(2, 2)], [0, 0], 2),  # a core each would leave none to compile on
        ([(4, 0), (2, 1), (0, 1)], [1, 0], 6),
    ],
)
def test_gpus_leave_cores_to_compile_on(
    machines: list[tuple[int, int]], cores_of_gpus: list[int], all_cores: int
) -> None:
    nodes = [{"NodeID": "n", "Resources": {"CPU": float(c), "GPU": float(g)}} for c, g in machines]
    slots, cores = cluster_module._slots(nodes)
    assert ([slot.cores for slot in slots], cores) == (cores_of_gpus, all_cores)


# ---- what follows needs Ray ----


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster whose head has no GPU, and a node with two."""
    pytest.importorskip("ray", reason="ray is not installed (the extra 'cluster')")
    with pytest.MonkeyPatch.context() as patch:
        # Nothing of this is to be in the user's home, or to leave the machine.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        from ray.cluster_utils import Cluster as Nodes

        folder = tmp_path_factory.mktemp("caches")
        head = {"num_cpus": 1, "env_vars": {"FAKE_CACHE": str(folder / "head")}}
        made = Nodes(initialize_head=True, head_node_args={**head, "include_dashboard": False})
        made.folder = folder
        add(made, "H200", gpus=2)
        yield made
        made.shutdown()


def add(nodes: Any, gpu: str, gpus: int) -> Any:
    """One more node, of which libraries are in a folder of its own."""
    folder = str(nodes.folder / str(len(nodes.worker_nodes)))
    env = {"FAKE_GPU": gpu, "FAKE_CACHE": folder}
    return nodes.add_node(num_cpus=gpus + 1, num_gpus=gpus, env_vars=env)


def join(nodes: Any, world: World = WORLD) -> Cluster:
    return connect(nodes.address, partial(fakes.machine_runner, world))


def run(
    nodes: Any, folder: Path, world: World = WORLD, progress: SweepProgress | None = None
) -> SweepResult:
    """A sweep on all GPUs that there are, of what test_executor has on one."""
    joined = join(nodes, world)
    fleets = fleets_of(joined.gpus, lambda spec: fleet("", spec, world).races)
    settings = replace(SETTINGS, jobs=2, patience=2.0)
    progress = progress or SweepProgress(quiet=True)
    return tune_fleets(fleets, joined.executor, settings, folder, progress,
                       table=folder / "mine.json")  # fmt: skip


def workers(folder: Path) -> dict[str, set[str]]:
    """The GPUs that a problem was timed on, by problem."""
    found = defaultdict(set)
    for line in (folder / "journal.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["samples"]:
            found[record["problem"]].add(record["origin"].get("worker"))
    return found


class After(threading.Thread):
    """Does something once the journal has so many records, unless the sweep is over by then."""

    def __init__(self, folder: Path, records: int, what: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.journal, self.records, self.what = folder / "journal.jsonl", records, what
        self.done = False
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.journal.exists() and self.journal.read_bytes().count(b"\n") >= self.records:
                self.what()
                self.done = True
                return
            time.sleep(0.01)


SLOW = replace(WORLD, seconds_per_request=0.03)


@full
def test_without_a_cluster_ray_runs_on_this_machine_for_the_time_of_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serial: Path
) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed (the extra 'cluster')")
    started, init = [], ray.init

    def with_gpus(*, address: str, **how: Any) -> Any:
        started.append(address)
        if address == "auto":
            # As Ray has it where nothing runs; that of another test is not to be found.
            raise ConnectionError("Could not find any running Ray instance.")
        return init(address=address, num_cpus=3, num_gpus=2, **how)

    monkeypatch.setattr(ray, "init", with_gpus)
    variables = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FAKE_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert run(SimpleNamespace(address="auto"), tmp_path).ok
    assert started == ["auto", "local"]
    assert figures(tmp_path) == figures(serial)
    assert len(set().union(*workers(tmp_path).values())) == 2
    assert not ray.is_initialized()


@full
def test_two_gpus_make_the_table_of_one_with_libraries_from_another_machine(
    nodes: Any, tmp_path: Path, serial: Path
) -> None:
    assert run(nodes, tmp_path, replace(WORLD, caches=True)).ok
    assert figures(tmp_path) == figures(serial)
    where = workers(tmp_path)
    assert all(len(gpus) == 1 for gpus in where.values())
    assert len(set().union(*where.values())) == 2
    assert "worker" not in (tmp_path / "mine.json").read_text()
    # The head compiled some of them, perhaps, and then their bytes have come here.
    assert len(list((nodes.folder / "0").iterdir())) == len(KERNELS) - 1


@full
def test_kernels_that_crash_and_hang_cost_themselves_alone(nodes: Any, tmp_path: Path) -> None:
    kernels = but(KERNELS, {0: {"fails": "prove", "how": "abort"},
                            2: {"fails": "time", "how": "hang"}})  # fmt: skip
    world = World(kernels, noise=0.01)
    done = run(nodes, tmp_path / "cluster", world)
    assert done.ok
    for race in done.races:
        found = {name: race.trials[name].status for name in NAMES[:4]}
        assert found == dict(zip(NAMES[:4], ("crash", "wrong", "hang", "culled"), strict=True))
    alone = fleet("", fakes.DEVICE, world)
    tune(alone.races, alone.runner, replace(SETTINGS, patience=2.0), tmp_path / "local",
         SweepProgress(quiet=True), table=tmp_path / "local" / "mine.json")  # fmt: skip
    assert figures(tmp_path / "cluster") == figures(tmp_path / "local")


@full
def test_an_actor_that_is_killed_costs_nothing(nodes: Any, tmp_path: Path, serial: Path) -> None:
    log = tmp_path / "log"

    def kill() -> None:
        actors = [line.split(" | ")[1] for line in log.read_text().splitlines() if "open" in line]
        os.kill(int(actors[0]), signal.SIGKILL)

    killing = After(tmp_path / "out", 30, kill)
    assert run(nodes, tmp_path / "out", replace(SLOW, log=log)).ok
    assert killing.done
    assert figures(tmp_path / "out") == figures(serial)
    assert nothing_lost_or_doubled(tmp_path / "out", serial)


@full
def test_a_lost_node_costs_nothing_and_a_second_kind_has_figures_of_its_own(
    nodes: Any, tmp_path: Path, serial: Path
) -> None:
    lost = add(nodes, "H200", gpus=1)
    other = add(nodes, OTHER.name, gpus=1)
    said: list[str] = []
    progress = SweepProgress(quiet=True)
    progress.say = said.append  # type: ignore[method-assign]
    losing = After(tmp_path, 40, lambda: nodes.remove_node(lost, allow_graceful=False))
    try:
        done = run(nodes, tmp_path, SLOW, progress)
    finally:
        nodes.remove_node(other)
    assert losing.done
    assert done.ok
    assert sorted(set(done.gpus)) == ["GH200", "H200"]
    found = figures(tmp_path)
    assert [one for one in found if str(one).startswith("('H200")] == figures(serial)
    assert len(found) == 2 * len(PROBLEMS)


@full
def test_ctrl_c_and_the_rest_on_this_machine(nodes: Any, tmp_path: Path, serial: Path) -> None:
    stopping = After(tmp_path, 30, _thread.interrupt_main)
    done = run(nodes, tmp_path, SLOW)
    assert stopping.done
    assert done.interrupted
    alone = fleet("")
    done = tune(alone.races, alone.runner, SETTINGS, tmp_path, SweepProgress(quiet=True),
                table=tmp_path / "mine.json")  # fmt: skip
    assert done.ok
    assert figures(tmp_path) == figures(serial)
    assert nothing_lost_or_doubled(tmp_path, serial)


@full
def test_the_command_writes_json_lines(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What ships is a candidate, too: slower than the fakes.
    world = replace(WORLD, default=fakes.Kernel(ms=2.0))
    monkeypatch.setattr(
        "flashsmith.tuning.gpu_runner.first_gpu_runner", partial(fakes.machine_runner, world)
    )
    options = {
        "--cluster": nodes.address, "--space": "; ".join(KERNELS), "--out": str(tmp_path),
        "--problems": "; ".join(map(str, PROBLEMS[:2])), "--table": str(tmp_path / "mine.json"),
    }  # fmt: skip
    done = CliRunner().invoke(
        app, ["tune", "--json", *[part for pair in options.items() for part in pair]]
    )
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events[:2]] == ["gpu", "gpu"]
    assert {event["gpu"] for event in events[:2]} == {"H200"}
    finished = [event for event in events if event["event"] == "done"]
    assert sorted(event["problem"] for event in finished) == sorted(map(str, PROBLEMS[:2]))
    assert all(event["best"][0]["config"] == NAMES[4] for event in finished)
    assert (events[-1]["event"], events[-1]["winners"]) == ("end", 2)


@full
def test_a_machine_that_has_just_left_is_listed_again(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    listed, gone = ray.nodes, "0" * 56
    times: list[int] = []

    def with_one_that_left(last: int) -> list[dict[str, Any]]:
        there = [node for node in listed() if node["Alive"]]
        times.append(len(there))
        return [*there, {**there[-1], "NodeID": gone}] if len(times) <= last else there

    monkeypatch.setattr(ray, "nodes", partial(with_one_that_left, 1))
    joined = join(nodes)
    joined.executor.close()
    assert len(times) == 2
    assert len(joined.gpus) == 2

    monkeypatch.setattr(cluster_module, "_NEWS_SECONDS", 0.0)
    monkeypatch.setattr(ray, "nodes", partial(with_one_that_left, 99))
    with pytest.raises(
        LaunchError, match=r"cluster: .* is listed, and Ray places nothing there; end Ray there"
    ):
        join(nodes)


@full
def test_what_is_wrong_with_a_cluster_is_said(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"cluster='nowhere': give host:port"):
        connect("nowhere", partial(fakes.machine_runner, WORLD))
    with pytest.raises(
        LaunchError, match=r"cluster='127.0.0.1:1': there is no Ray cluster .*refuse"
    ):
        connect("127.0.0.1:1", partial(fakes.machine_runner, WORLD))
    # No GPU is behind those that are pretended.
    with pytest.raises(LaunchError, match=r"none of its 2 GPUs can be measured on: left out: "):
        connect(nodes.address, partial(int, "no GPU"))
    with monkeypatch.context() as patch:
        patch.setattr(cluster_module, "version_here", lambda: "9.9")
        with pytest.raises(LaunchError, match=r"has flashsmith 0\.\S+ \(sources \w+\), and this "
                                              r"machine 9\.9; install the same"):  # fmt: skip
            join(nodes)
    import ray

    listed = ray.nodes

    def without_gpus() -> list[dict[str, Any]]:
        return [{**node, "Resources": {"CPU": 1.0}} for node in listed()]

    monkeypatch.setattr(ray, "nodes", without_gpus)
    with pytest.raises(LaunchError, match=r"none of its \d machines has a GPU that Ray knows of"):
        join(nodes)
