"""Sweeps on several GPUs: local processes, and a cluster without processes whose GPUs go away."""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sweep_fakes as fakes
from sweep_fakes import NAMES, Kernel, World, but, times
from worker_targets import Target

from flashsmith.benchmark.measurement_files import read_rows
from flashsmith.chooser.winners import WinnersTable
from flashsmith.errors import CompileError, LaunchError
from flashsmith.families import DeviceSpec, Problem, device_spec
from flashsmith.tuning.executor import LocalExecutor, WorkerCall, WorkerGpu
from flashsmith.tuning.race import Halving, Rung
from flashsmith.tuning.sweep import Settings
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.tune import GpuPool, SweepResult, make_race, tune, tune_fleets
from flashsmith.tuning.worker import Failure, WorkerResult

HALVING = Halving((Rung(3, 0.0, 0.10), Rung(10, 0.0, 0.04)), finalists=3, final_least=15)
SETTINGS = Settings(HALVING, jobs=2)
PROBLEMS = [Problem.parse(f"b2 s{s} h4 d128 fp16") for s in (256, 512, 1024, 1536, 2048)]
KERNELS = but(
    times(best=4, count=9, step=0.03),
    {1: {"fails": "prove", "how": "lie"}, 3: {"spill_bytes": 999},
     5: {"fails": "compile", "how": "refuse"}},
)  # fmt: skip
WORLD = World(KERNELS, noise=0.01)
OTHER = device_spec("GH200")
LOST = WorkerResult(failure=Failure("lost", "its machine is gone"))


class CallCluster:
    """An executor without processes: a call is carried out when its result is asked for, the GPUs
    in turns. GPU `name` is lost for good after `lives[name]` calls; compilations with the numbers
    in `lost_builds` are, too; `interrupted` counts calls down to Ctrl-C."""

    def __init__(
        self,
        benches: dict[str, fakes.FakeBench],
        lives: dict[str, int] | None = None,
        lost_builds: Iterable[int] = (),
        interrupted: int = -1,
    ) -> None:
        self.benches, self.lives = benches, dict(lives or {})
        self.lost_builds, self.interrupted = set(lost_builds), interrupted
        self.waiting: deque[WorkerCall] = deque()
        self.done: list[tuple[str, WorkerCall]] = []
        self.builds = 0
        self.closed = False

    def submit(self, call: WorkerCall) -> None:
        assert not self.closed
        assert not call.gpu or call.gpu not in {one.gpu for one in self.waiting}
        self.waiting.append(call)

    def next_result(self, seconds: float) -> tuple[WorkerCall, WorkerResult] | None:
        if not self.waiting:
            return None
        if self.interrupted == 0:
            raise KeyboardInterrupt
        self.interrupted -= 1
        call = self.waiting.popleft()
        return call, self._outcome(call)

    def _outcome(self, call: WorkerCall) -> WorkerResult:
        if call.compiler is not None:
            self.builds += 1
            if self.builds in self.lost_builds:
                return LOST
            return WorkerResult(call.compiler.compile(*call.arguments))
        if self.lives.get(call.gpu, 1) == 0:
            return LOST
        if call.gpu in self.lives:
            self.lives[call.gpu] -= 1
        self.done.append((call.gpu, call))
        return WorkerResult(getattr(self.benches[call.gpu], call.method)(*call.arguments))

    def close(self, calls: Iterable[WorkerCall] | None = None) -> None:
        dropped = set(self.waiting if calls is None else calls)
        self.waiting = deque(call for call in self.waiting if call not in dropped)
        self.closed = self.closed or calls is None


def cluster(names: Sequence[str] = ("a", "b"), world: World = WORLD, **how: object) -> CallCluster:
    return CallCluster({name: fakes.FakeBench(world) for name in names}, **how)  # type: ignore[arg-type]


def fleet(names: Sequence[str], device: DeviceSpec = fakes.DEVICE, world: World = WORLD) -> GpuPool:
    runner = fakes.fake_runner(world, device)
    key = "; ".join(world.kernels)
    races = [make_race(problem, device, key, HALVING) for problem in PROBLEMS]
    return GpuPool(runner, tuple(WorkerGpu(name, runner.origin) for name in names), races)


def run(
    executor: CallCluster, folder: Path, fleets: Sequence[GpuPool] | None = None,
    settings: Settings = SETTINGS,
) -> SweepResult:  # fmt: skip
    fleets = [fleet(list(executor.benches))] if fleets is None else fleets
    return tune_fleets(fleets, executor, settings, folder, SweepProgress(quiet=True),
                       table=folder / "mine.json")  # fmt: skip


def figures(folder: Path) -> list[object]:
    """The table that a sweep made, without the times of day."""
    return [
        (str(entry.key), [(one.config, one.ms, one.family) for one in entry.ranked])
        for entry in sorted(WinnersTable.load(folder / "mine.json"), key=lambda e: str(e.key))
    ]


def records(folder: Path) -> list[str]:
    """What was found, one text a record, without the times of day and the GPUs' names."""
    found = []
    for line in (folder / "journal.jsonl").read_text().splitlines():
        record = json.loads(line)
        origin = record["origin"]
        record["origin"] = {k: v for k, v in origin.items() if k not in ("time", "worker")}
        found.append(json.dumps(record, sort_keys=True))
    return found


def nothing_lost_or_doubled(folder: Path, serial: Path) -> bool:
    """Whether a journal has each measurement of a serial sweep once. On which problems the kernel
    that is wrong was found to be so depends on who was first. (Every run has the compiler, or the
    cache behind it, answer for all kernels.)"""

    def found(folder: Path) -> tuple[Counter[str], Counter[str]]:
        lines = [one for one in records(folder) if '"stage": "compile"' not in one]
        wrong = [one for one in lines if '"verdict": "fail"' in one]
        return Counter(lines) - Counter(wrong), Counter(wrong)

    (right, wrong), (expected, _) = found(folder), found(serial)
    about = {json.loads(one)["kernels"][0][0] for one in wrong}
    return right == expected and about == {NAMES[1]} and max(wrong.values()) == 1


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one GPU makes of it, alone: the folder."""
    folder = tmp_path_factory.mktemp("serial")
    assert run(cluster(["a"]), folder).ok
    return folder


def test_local_processes_make_the_same_of_it(tmp_path: Path, serial: Path) -> None:
    alone = fleet(["a"])
    done = tune(alone.races[:2], alone.runner, SETTINGS, tmp_path, SweepProgress(quiet=True),
                table=tmp_path / "mine.json")  # fmt: skip
    assert done.ok
    assert figures(tmp_path) == [one for one in figures(serial) if one in figures(tmp_path)]
    assert len(figures(tmp_path)) == 2


def test_two_gpus_share_the_problems_and_each_stays_on_one(tmp_path: Path, serial: Path) -> None:
    executor = cluster()
    assert run(executor, tmp_path).ok
    assert figures(tmp_path) == figures(serial)
    assert nothing_lost_or_doubled(tmp_path, serial)
    where = defaultdict(set)
    for gpu, call in executor.done:
        where[call.arguments[0]].add(gpu)
    assert all(len(gpus) == 1 for gpus in where.values())
    count = Counter(gpu for gpus in where.values() for gpu in gpus)
    assert sorted(count.values()) == [2, 3]
    assert executor.closed
    # The last problem begins when two are over: so all GPUs end together.
    calls = [call for _, call in executor.done]
    begun = {call.arguments[0]: n for n, call in reversed([*enumerate(calls)])}
    ends = [n for n, one in enumerate(calls) if one.method == "time" and len(one.arguments[1]) > 1]
    assert sum(end < max(begun.values()) for end in ends) >= 2


@pytest.mark.parametrize("life", [0, 7, 35])
def test_a_lost_gpu_loses_and_doubles_nothing(tmp_path: Path, serial: Path, life: int) -> None:
    executor = cluster(lives={"b": life})
    assert run(executor, tmp_path).ok
    assert figures(tmp_path) == figures(serial)
    assert nothing_lost_or_doubled(tmp_path, serial)
    assert sum(gpu == "b" for gpu, _ in executor.done) == life


def test_without_a_gpu_left_the_sweep_ends_and_another_goes_on(
    tmp_path: Path, serial: Path
) -> None:
    with pytest.raises(LaunchError, match=r"3 times in a row; the last time: its machine is gone"):
        run(cluster(lives={"a": 9, "b": 30}), tmp_path)
    found = records(tmp_path)
    assert 0 < len(found) < len(records(serial))
    assert run(cluster(["c"]), tmp_path).ok
    assert figures(tmp_path) == figures(serial)
    assert nothing_lost_or_doubled(tmp_path, serial)


def test_ctrl_c_on_a_cluster_and_the_rest_on_one_gpu(tmp_path: Path, serial: Path) -> None:
    done = run(cluster(interrupted=40), tmp_path)
    assert done.interrupted
    assert not done.ok
    assert len(read_rows(tmp_path / "ranking.csv")) == len(PROBLEMS) * len(KERNELS)
    assert run(cluster(["a"]), tmp_path).ok
    assert figures(tmp_path) == figures(serial)


def test_lost_compilations_are_made_elsewhere_until_there_is_nowhere(
    tmp_path: Path, serial: Path
) -> None:
    assert run(cluster(lost_builds=(1, 2)), tmp_path / "some").ok
    assert figures(tmp_path / "some") == figures(serial)
    with pytest.raises(CompileError, match="a compile process failed: its machine is gone"):
        run(cluster(lost_builds=range(1000)), tmp_path / "all")


def test_gpus_of_two_kinds_fill_two_tables(tmp_path: Path, serial: Path) -> None:
    slower = {name: replace(kernel, ms=3 - kernel.ms) for name, kernel in KERNELS.items()}
    other = World({**slower, NAMES[8]: Kernel(ms=0.5)}, noise=0.01)
    benches = {name: fakes.FakeBench(WORLD) for name in "ab"}
    executor = CallCluster({**benches, "x": fakes.FakeBench(other)})
    fleets = [fleet("ab"), fleet("x", OTHER, other)]
    done = run(executor, tmp_path, fleets)
    assert done.ok
    assert len(done.races) == 2 * len(PROBLEMS)
    found = figures(tmp_path)
    assert [one for one in found if str(one).startswith("('H200")] == figures(serial)
    winners = {e.key.gpu: e.best.config for e in WinnersTable.load(tmp_path / "mine.json")}
    assert winners == {"H200": NAMES[4], "GH200": NAMES[8]}
    rows = read_rows(tmp_path / "ranking.csv")
    assert Counter(row.gpu for row in rows) == dict.fromkeys(("fake", "GH200"), len(rows) // 2)

    # One kind alone goes on from the journal of both, and measures nothing again.
    again = cluster(["c"])
    run(again, tmp_path, [fleet(["c"])])
    assert again.done == []


def test_a_kind_without_a_gpu_left_does_not_end_the_other(tmp_path: Path, serial: Path) -> None:
    benches = {name: fakes.FakeBench(WORLD) for name in "ax"}
    executor = CallCluster(benches, lives={"x": 12})
    with pytest.raises(LaunchError, match="did not start 3 times"):
        run(executor, tmp_path, [fleet("a"), fleet("x", OTHER)])
    found = figures(tmp_path)
    assert [one for one in found if str(one).startswith("('H200")] == figures(serial)


def test_a_budget_is_for_all_gpus_together(tmp_path: Path) -> None:
    """Twice as many GPUs have twice the time for each problem, and every final is held."""
    done = run(cluster(), tmp_path, settings=replace(SETTINGS, budget=20.0))
    assert [race.ranked[0].stage for race in done.races] == ["final"] * len(PROBLEMS)


def test_events_say_what_becomes_of_every_problem(tmp_path: Path) -> None:
    events: list[dict[str, object]] = []
    executor = cluster()
    progress = SweepProgress(quiet=True, events=events.append)
    tune_fleets([fleet("ab")], executor, SETTINGS, tmp_path, progress,
                table=tmp_path / "mine.json")  # fmt: skip
    done = [one for one in events if one["event"] == "done"]
    assert sorted(str(one["problem"]) for one in done) == sorted(map(str, PROBLEMS))
    assert {one["gpu"] for one in done} == {"H200"}
    assert events[-1]["event"] == "end"
    assert (events[-1]["problems"], events[-1]["winners"]) == (5, 5)
    json.dumps(events)


# ---- processes of this machine ----


def test_local_calls_have_one_result_each_and_dropped_ones_none() -> None:
    executor = LocalExecutor(Target())
    sums = [WorkerCall("add", (1, n), 30.0, compiler=Target()) for n in range(3)]  # type: ignore[arg-type]
    slow = WorkerCall("sleep", (60.0,), 90.0, compiler=Target())  # type: ignore[arg-type]
    measured = WorkerCall("add", (2, 2), 30.0, gpu="GPU")
    for call in (*sums, slow, measured):
        executor.submit(call)
    executor.close([slow])
    found = {}
    while len(found) < 4:
        over = executor.next_result(30.0)
        assert over is not None
        assert over[0] not in found
        found[over[0]] = over[1].value
    assert found == {**{call: 1 + n for n, call in enumerate(sums)}, measured: 4}
    assert executor.next_result(0.0) is None
    executor.close()


def test_a_fresh_local_call_has_a_new_process() -> None:
    executor = LocalExecutor(Target())

    def pid(fresh: bool) -> int:
        executor.submit(WorkerCall("pid", (), 30.0, gpu="GPU", fresh=fresh))
        over = executor.next_result(30.0)
        while over is None:
            over = executor.next_result(30.0)
        return int(over[1].value)

    first = pid(fresh=False)
    assert pid(fresh=False) == first
    assert pid(fresh=True) != first
    executor.close()
