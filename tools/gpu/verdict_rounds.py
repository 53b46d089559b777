#!/usr/bin/env python3
"""Measures rounds of the verdict in one process, so that most of the GPU's time is for launches.

    python tools/gpu/verdict_rounds.py OUT RUN --seconds 200 [--cells public] [--peers cudnn,...]

A round is the same as in tools/gpu/verdict.sh. Its file is OUT/verdict-SETS-RUN-ROUND.csv, and
tools/benchmark/verdict.py pools the files. The contenders of a cell are proven on the same random
tensors, and launched alternately; each round begins with another one. Starting the process,
compiling a peer, and making the tensors with their float64 references are done only once. A round
is also
shorter: it has a third of the launches, but at least eight per contender. Rounds are pooled by
their medians, so short rounds at different times are better than a few long ones.

The script ends after --rounds, or before --seconds if there may not be enough time for another
round. The exit status is 1 if one of our kernels is wrong or could not run, or if a peer is wrong.
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
from flashsmith.benchmark.rounds import rounds_within
from flashsmith.benchmark.timing import Clock, CudaEvents, Protocol
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
    """The rows of each round, when they are in its file.

    An interrupted round leaves its rows in a file named unfinished-... The tensors of a problem are
    made once.
    """
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
    parser.add_argument("--rounds", type=int, help="maximum number of rounds")
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
