#!/usr/bin/env python3
"""Times the same sweep on one GPU and on two GPUs of a Ray cluster, and prints the ratio.

    python tools/gpu/cluster_sweep.py OUT              # two GPUs of this machine, some 10 minutes
    python tools/gpu/cluster_sweep.py OUT --gpus 1     # or in two shorter calls:
    python tools/gpu/cluster_sweep.py OUT --gpus 2     # OUT keeps the seconds of the first call
    python tools/gpu/cluster_sweep.py OUT --only d128,bf16 --least 60 --kill    # a shorter one

The sweep has 48 problems of about equal work, with the set `tune` of both forward families; --only
takes those whose text has all these words.
Libraries are built before. The time includes the start of the measuring processes, but not Ray's
start. The run also checks that every problem has a winner, that no measurement is listed twice, and
that each problem was timed on one GPU.

With --kill, there is one more sweep by two GPUs, in which a GPU's process is killed once half of
the problems have been measured. It must make the same measurements as the sweep by two GPUs before.

The exit status is 0 if one GPU needs at least --least seconds (200), two GPUs are at least 1.8
times as fast, and both have measured the same kernels of the same problems. OUT/summary.json has
the figures; OUT/one, OUT/two and OUT/killed have the sweeps' journals and rankings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flashsmith.families import DeviceSpec, Problem
from flashsmith.tuning.cluster import ANY_CLUSTER, Cluster, connect
from flashsmith.tuning.gpu_runner import NvccCompiler, first_gpu_runner
from flashsmith.tuning.race import DEFAULT_HALVING, Race
from flashsmith.tuning.sweep import Settings
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.tune import GpuPool, build_ahead, make_race, tune_fleets

LEAST_SECONDS = 200.0
FIRST_RUNG = "rung 1"
# The process of a GPU, as Ray names it.
GPU_PROCESS = b"ray::_GpuActor"
LEAST_RATIO = 1.8
NAMES = {1: "one", 2: "two"}


def problems(only: Sequence[str] = ()) -> list[Problem]:
    """Independent problems: none is the reference of another."""
    texts = [
        f"b{16384 // s} s{s} h{heads} d{d} {dtype}{mask}"
        for heads in ("16", "32", "32:8")
        for s in (4096, 2048)
        for d in (128, 64)
        for dtype in ("fp16", "bf16")
        for mask in ("", " causal")
    ]
    return [Problem.parse(text) for text in texts if set(only) <= set(text.split())]


def races(device: DeviceSpec, only: Sequence[str] = ()) -> list[Race]:
    return [make_race(one, device, "tune", DEFAULT_HALVING) for one in problems(only)]


def records_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measured(folder: Path) -> set[tuple[str, str]]:
    """The problem and kernels of each measurement of a sweep's first rung, in which every kernel is
    measured. The kernels of later rungs depend on the times."""
    return {
        (one["problem"], json.dumps(one["kernels"]))
        for one in records_of(folder)
        if one["samples"] and one["stage"] == FIRST_RUNG
    }


def is_ours(process: int) -> bool:
    """Whether this process started another one, or one that started it. Other clusters may run on
    this machine."""
    while process not in (0, os.getpid()):
        # The name of the process, which comes first, may contain spaces and parentheses.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        process = int(fields[1])
    return process != 0


def kill_one_gpu(folder: Path, wanted: int, killed: list[int]) -> None:
    """Kills the process of a GPU once ``wanted`` problems have been measured, and appends its id to
    ``killed``."""
    found: set[str] = set()
    while len(found) < wanted:
        time.sleep(0.5)
        with contextlib.suppress(ValueError):  # a line that is being written
            found = {one["problem"] for one in records_of(folder) if one["samples"]}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(GPU_PROCESS) and is_ours(int(path.parent.name)):
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed.append(int(path.parent.name))
                print(f"killed {killed[0]}", flush=True)
                return


def check(folder: Path, *, moved: bool = False) -> dict[str, int]:
    """The number of problems per GPU; ``moved`` allows that a problem was timed on two GPUs.

    Raises ValueError if a measurement occurs twice, or if a problem was timed on two GPUs.
    """
    records = records_of(folder)
    seen = Counter(
        json.dumps([one["stage"], one["problem"], one["kernels"]])
        for one in records
        if one["stage"] != "compile"
    )
    gpus: dict[str, str] = {}
    for one in records:
        if one["samples"]:
            gpu = one["origin"].get("worker", "")
            if gpus.setdefault(one["problem"], gpu) != gpu and not moved:
                raise ValueError(f"{folder}: {one['problem']} was timed on two GPUs")
    if seen and max(seen.values()) > 1:
        raise ValueError(f"{folder}: measured twice: {max(seen, key=lambda key: seen[key])}")
    return dict(Counter(gpus.values()))


def sweep(
    cluster: Cluster, wanted: Sequence[Race], gpus: int, folder: Path, *, kill: bool = False
) -> dict[str, Any]:
    """The seconds of a sweep by ``gpus`` of the cluster's GPUs, and the problems of each GPU.

    Raises ValueError if a measurement is lost or doubled, or if ``kill`` found nothing to kill.
    """
    found = cluster.gpus[:gpus]
    if len(found) < gpus:
        raise ValueError(f"gpus={gpus}: Ray has {len(found)} here")
    if (folder / "journal.jsonl").exists():
        raise ValueError(f"{folder} has a sweep that this run would resume; give another folder")
    fleet = GpuPool(found[0][1], tuple(gpu for gpu, _ in found), list(wanted))
    table = folder / "mine.json"
    killed = list[int]()
    if kill:
        given = folder, len(wanted) // 2, killed
        threading.Thread(target=kill_one_gpu, args=given, daemon=True).start()
    with SweepProgress() as progress:
        began = time.monotonic()
        done = tune_fleets(
            [fleet], cluster.executor, Settings(jobs=cluster.jobs), folder, progress, table=table
        )
        seconds = time.monotonic() - began
    if not done.ok:
        raise ValueError(f"{folder}: not every problem has a winner")
    if kill and not killed:
        raise ValueError(f"{folder}: no process of a GPU was killed, so this sweep proves nothing")
    return {"seconds": seconds, "problems": check(folder, moved=kill)}


def verdict(summary: dict[str, Any], least: float = LEAST_SECONDS) -> tuple[str, bool]:
    one, two = (summary[name]["seconds"] for name in ("one", "two"))
    said = f"one GPU {one:.0f} s, two {two:.0f} s: {one / two:.2f} times as fast"
    return said, one >= least and one / two >= LEAST_RATIO


def same_measurements(out: Path, names: Sequence[str]) -> bool:
    """Whether the sweeps have measured the same kernels; prints what differs."""
    first, *others = ((name, measured(out / name)) for name in names)
    for name, found in others:
        if found != first[1]:
            print(f"{first[0]} and {name} differ in {sorted(found ^ first[1])[:5]}")
    print(f"{len(first[1])} measurements in {first[0]}", flush=True)
    return bool(first[1]) and all(found == first[1] for _, found in others)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--only", default="", help="words of the problems, such as d128,bf16")
    parser.add_argument("--least", type=float, default=LEAST_SECONDS)
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args(arguments)
    only = [word for word in given.only.split(",") if word]
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    for name, gpus in [(NAMES[it], it) for it in given.gpus] + [("killed", 2)] * given.kill:
        # Each sweep gets new actors.
        cluster = connect(ANY_CLUSTER, partial(first_gpu_runner, DEFAULT_HALVING))
        device = cluster.gpus[0][1].device
        with SweepProgress() as progress:
            settings = Settings(jobs=cluster.jobs)
            build_ahead(races(device, only), NvccCompiler(device), device, settings, progress)
        summary[name] = sweep(
            cluster, races(device, only), gpus, given.out / name, kill=name == "killed"
        )
        print(name, summary[name], flush=True)
        path.write_text(json.dumps(summary, indent=1) + "\n")
    if not all(name in summary for name in NAMES.values()):
        return 0
    said, ok = verdict(summary, given.least)
    print(said)
    same = same_measurements(given.out, list(summary))
    return 0 if ok and same else 1


if __name__ == "__main__":
    sys.exit(main())
