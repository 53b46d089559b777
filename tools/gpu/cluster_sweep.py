#!/usr/bin/env python3
"""Times the same sweep on one GPU and on two GPUs of a Ray cluster, and prints the ratio.

    python tools/gpu/cluster_sweep.py OUT              # two GPUs of this machine, some 10 minutes
    python tools/gpu/cluster_sweep.py OUT --gpus 1     # or in two shorter calls:
    python tools/gpu/cluster_sweep.py OUT --gpus 2     # OUT keeps the seconds of the first call

The sweep has 48 problems with about equal work, and the set `tune` of both forward families. The
libraries are built first. The time includes starting the processes that measure, but not starting
Ray. The run also checks that each problem has a winner and was timed on one GPU, and that no
measurement occurs twice.

The exit status is 0 if one GPU needs at least 200 s and two GPUs are at least 1.8 times as fast.
OUT/summary.json has the figures; OUT/one and OUT/two have the sweeps' journals and rankings.
"""

from __future__ import annotations

import argparse
import json
import sys
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
LEAST_RATIO = 1.8
NAMES = {1: "one", 2: "two"}


def problems() -> list[Problem]:
    """Independent problems: none is the reference of another."""
    return [
        Problem.parse(f"b{16384 // s} s{s} h{heads} d{d} {dtype}{mask}")
        for heads in ("16", "32", "32:8")
        for s in (4096, 2048)
        for d in (128, 64)
        for dtype in ("fp16", "bf16")
        for mask in ("", " causal")
    ]


def races(device: DeviceSpec) -> list[Race]:
    return [make_race(one, device, "tune", DEFAULT_HALVING) for one in problems()]


def check(folder: Path) -> dict[str, int]:
    """How many problems each GPU had.

    Raises ValueError if a measurement occurs twice, or if a problem was timed on two GPUs.
    """
    records = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    seen = Counter(
        json.dumps([one["stage"], one["problem"], one["kernels"]])
        for one in records
        if one["stage"] != "compile"
    )
    gpus: dict[str, str] = {}
    for one in records:
        if one["samples"]:
            gpu = one["origin"].get("worker", "")
            if gpus.setdefault(one["problem"], gpu) != gpu:
                raise ValueError(f"{folder}: {one['problem']} was timed on two GPUs")
    if seen and max(seen.values()) > 1:
        raise ValueError(f"{folder}: measured twice: {max(seen, key=lambda key: seen[key])}")
    return dict(Counter(gpus.values()))


def sweep(cluster: Cluster, wanted: Sequence[Race], gpus: int, folder: Path) -> dict[str, Any]:
    """The seconds of a sweep on ``gpus`` GPUs of the cluster, and how many problems each GPU
    had."""
    found = cluster.gpus[:gpus]
    if len(found) < gpus:
        raise ValueError(f"gpus={gpus}: Ray has {len(found)} here")
    if (folder / "journal.jsonl").exists():
        raise ValueError(f"{folder} has a sweep that this run would resume; give another folder")
    fleet = GpuPool(found[0][1], tuple(gpu for gpu, _ in found), list(wanted))
    table = folder / "mine.json"
    with SweepProgress() as progress:
        began = time.monotonic()
        done = tune_fleets(
            [fleet], cluster.executor, Settings(jobs=cluster.jobs), folder, progress, table=table
        )
        seconds = time.monotonic() - began
    if not done.ok:
        raise ValueError(f"{folder}: not every problem has a winner")
    return {"seconds": seconds, "problems": check(folder)}


def verdict(summary: dict[str, Any]) -> tuple[str, bool]:
    one, two = (summary[name]["seconds"] for name in ("one", "two"))
    said = f"one GPU {one:.0f} s, two {two:.0f} s: {one / two:.2f} times as fast"
    return said, one >= LEAST_SECONDS and one / two >= LEAST_RATIO


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    for gpus in given.gpus:
        # Each sweep gets new actors.
        cluster = connect(ANY_CLUSTER, partial(first_gpu_runner, DEFAULT_HALVING))
        device = cluster.gpus[0][1].device
        with SweepProgress() as progress:
            settings = Settings(jobs=cluster.jobs)
            build_ahead(races(device), NvccCompiler(device), device, settings, progress)
        folder = given.out / NAMES[gpus]
        summary[NAMES[gpus]] = sweep(cluster, races(device), gpus, folder)
        path.write_text(json.dumps(summary, indent=1) + "\n")
    if not all(name in summary for name in NAMES.values()):
        return 0
    said, ok = verdict(summary)
    print(said)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
