#!/usr/bin/env python3
"""Rounds of the verdict in one process: what a GPU's minutes are spent on is launches.

    python tools/gpu/verdict_rounds.py OUT RUN --seconds 200 [--cells public] [--peers cudnn,...]

A round is that of tools/gpu/verdict.sh, OUT/verdict-SETS-RUN-ROUND.csv, which
tools/benchmark/verdict.py pools: every cell's contenders are proven on the same random tensors and
take turns, another one first in each round. What a process of its own costs again, the start, a
peer's compilation, the tensors and their references in float64, is there once. A round is shorter,
too (a third of the launches, and at least eight of each contender): the rounds are pooled by their
medians, and many short ones at different times say more than few long ones.

It ends before --seconds are over, when the time left may be too short for another round, or after
--rounds of them. Exit status 1 when a kernel of ours is wrong or could not run, or a peer is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from flashsmith.benchmark.bench import BenchPlan, MakeWorkload, run_bench
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.measurement_files import MeasurementFiles
from flashsmith.benchmark.peers import get_peers
from flashsmith.benchmark.problems import named_problems
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.timing import Clock, CudaEvents, Protocol
from flashsmith.benchmark.turns import rounds_within
from flashsmith.benchmark.workload import workload_of
from flashsmith.errors import FlashsmithError
from flashsmith.families import DeviceSpec
from flashsmith.runtime import query_gpu

SHORT = Protocol(num_warmups=2, runs=8, warmup_ms=15.0, measure_ms=35.0, num_estimates=2)

PlanOfRound = Callable[[int], BenchPlan]


def rounds(
    plan_of: PlanOfRound,
    path_of: Callable[[int], Path],
    device: DeviceSpec,
    *,
    seconds: float,
    most: int | None = None,
    clock: Clock,
    reporter: ProgressReporter,
    environment: Environment | None = None,
    make_workload: MakeWorkload = workload_of,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[list[Measurement]]:
    """The rows of each round, which are in its file by then; one that breaks off leaves its rows in
    a file whose name begins with unfinished-. A problem's tensors are made once."""
    kept = cache(make_workload)
    for number in rounds_within(seconds, most, now):
        path = path_of(number)
        unfinished = path.with_name(f"unfinished-{path.name}")
        unfinished.unlink(missing_ok=True)
        with MeasurementFiles(str(unfinished)) as files:
            rows = run_bench(
                plan_of(number),
                device,
                clock=clock,
                reporter=reporter,
                environment=environment,
                write=files.write,
                make_workload=kept,
            )
        unfinished.replace(path)
        yield rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("verdict_rounds.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path)
    parser.add_argument("run", type=int, help="a number")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rounds", type=int, help="at most so many")
    parser.add_argument("--cells", default="public", help="sets of problems; default: public")
    parser.add_argument("--peers", default="cudnn,flash_attn_4")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    sets = options.cells.replace(",", "-")
    wrong = 0
    try:
        problems, peers = named_problems(options.cells), get_peers(options.peers)

        def plan_of(number: int) -> BenchPlan:
            rotation = options.run + number
            return BenchPlan(problems, ours=True, peers=peers, protocol=SHORT, rotation=rotation)

        def path_of(number: int) -> Path:
            name = f"verdict-{sets}-{options.run}-{number}.csv"
            return Path(options.out) / name

        started = time.monotonic()
        with ProgressReporter(quiet=True) as reporter:
            for number, rows in enumerate(
                rounds(
                    plan_of,
                    path_of,
                    query_gpu(0),
                    seconds=options.seconds,
                    most=options.rounds,
                    clock=CudaEvents(),
                    reporter=reporter,
                )
            ):
                bad = [row for row in rows if row.is_failure]
                wrong += len(bad)
                took = time.monotonic() - started
                print(f"round {number}: {len(rows)} rows, {took:.0f} s so far", flush=True)
                for row in bad:
                    said = f"{row.implementation} on '{row.problem}': {row.verdict} {row.note}"
                    print(said, file=sys.stderr)
    except FlashsmithError as error:
        print(f"verdict_rounds.py: {error}", file=sys.stderr)
        return 2
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
