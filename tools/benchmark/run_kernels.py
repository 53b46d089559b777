#!/usr/bin/env python3
"""Launches named kernels N times, for use under a profiler.

    KERNELS=prog python tools/benchmark/run_kernels.py --seq_lens 4096 --runs 3
    python tools/benchmark/run_kernels.py --kernels ours --ref fa2 --causal --time

`--ref` also launches peers. `--time` proves and measures the kernels and prints a table instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from flashsmith.benchmark.bench import BenchPlan, run_bench, select_implementations
from flashsmith.benchmark.bench_table import print_rows
from flashsmith.benchmark.kernel_facts import BuiltKernels
from flashsmith.benchmark.peers import get_peers
from flashsmith.benchmark.problems import make_shapes, parse_problems
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.benchmark.timing import Clock, CudaEvents, Implementation, Protocol
from flashsmith.benchmark.workload import workload_of
from flashsmith.env import KERNELS
from flashsmith.errors import ArgumentError, FlashsmithError
from flashsmith.families import DeviceSpec, get_kernel_configs
from flashsmith.runtime import query_gpu

_DESCRIPTION = """Launches named kernels N times on random tensors, for use under a profiler. With
--time it proves and times them and prints a table instead."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the options; exits with argparse's message if they are wrong."""
    parser = argparse.ArgumentParser("run_kernels.py", description=_DESCRIPTION)
    parser.add_argument(
        "--kernels", "-k", help="a key, short forms, or ours; default: the variable KERNELS"
    )
    parser.add_argument("--ref", metavar="PEER", help="peers to launch too, such as fa2,cudnn")
    parser.add_argument(
        "--runs", type=int, help="launches of each (default: 1; with --time, the protocol's)"
    )
    parser.add_argument(
        "--num_warmups",
        "--num-warmups",
        type=int,
        help="warm-up launches (default: 0; with --time, the protocol's)",
    )
    parser.add_argument("--d_heads", "--d-heads")
    parser.add_argument("--seq_lens", "--seq-lens", help="default: 4096", default="4096")
    parser.add_argument("--dtypes")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--gqa", metavar="HEADS")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--problems", metavar="PROBLEM", action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time", action="store_true", help="prove, measure and print a table")
    return parser.parse_args(arguments)


def make_plan(options: argparse.Namespace) -> BenchPlan:
    """What to launch.

    If neither --kernels nor KERNELS is given, only the peers in --ref are launched.

    Without --time, kernels are launched once unless --runs or --num_warmups is given.

    Raises ArgumentError or SelectionError if something cannot be launched, or if nothing is named.
    """
    named = options.kernels is not None or KERNELS.raw() is not None
    if not named and options.ref is None:
        get_kernel_configs(None)  # This raises the error that lists the keys
    configs, with_ours = select_implementations(options.kernels) if named else ((), False)
    shapes = make_shapes(
        configs,
        d_heads=options.d_heads,
        seq_lens=options.seq_lens,
        dtypes=options.dtypes,
        causal=options.causal,
        gqa=options.gqa,
        packed=options.packed,
    )
    runs, num_warmups = options.runs, options.num_warmups
    if not options.time:
        runs, num_warmups = 1 if runs is None else runs, num_warmups or 0
    plan = BenchPlan(
        problems=parse_problems(options.problems) if options.problems else shapes.problems(),
        configs=configs,
        ours=with_ours,
        peers=get_peers(options.ref) if options.ref else (),
        protocol=Protocol.named("interleaved", num_warmups, runs),
        seed=options.seed,
    )
    plan.check()
    return plan


def launch_named(
    plan: BenchPlan, device: DeviceSpec, clock: Clock, reporter: ProgressReporter
) -> Iterator[str]:
    """Launches every implementation on every problem, and yields a line after each.

    Raises ArgumentError for an absent peer or an illegal config, because all kernels must run under
    a profiler. Errors of building and launching are passed on.
    """
    kernels = BuiltKernels(device)
    entries = {problem: list(plan.entries(problem, device)) for problem in plan.problems}
    for problem in plan.problems:
        for entry in entries[problem]:
            config = entry.config
            reason = entry.note if config is None else kernels.illegality(config)
            if reason:
                raise ArgumentError(f"kernels: {entry.name} on '{problem}': {reason}")
        for peer in plan.peers_of(problem):
            if absence := peer.absence(problem):
                raise ArgumentError(f"ref={peer.name!r} on '{problem}': {absence}")
    uses = [(e.config, p) for p, found in entries.items() for e in found if e.config is not None]
    kernels.build(uses, reporter.build)
    total = plan.protocol.num_warmups + plan.protocol.runs
    for problem in plan.problems:
        workload = workload_of(problem, plan.seed)
        implementations: list[Implementation] = [
            entry.implementation(workload) for entry in entries[problem]
        ]
        implementations += [peer.prepare(workload) for peer in plan.peers_of(problem)]
        for implementation in implementations:
            with clock.running():
                for _ in range(total):
                    implementation.launch()
                clock.synchronize()
            yield f"{problem}: {implementation.name}: {total} launches"


def main(arguments: Sequence[str]) -> int:
    """Runs the script. The exit status is 1 if a timed kernel is wrong.

    Raises the errors of ``make_plan``, ``launch_named`` and ``run_bench``.
    """
    options = parse_arguments(arguments)
    plan = make_plan(options)
    clock = CudaEvents()
    with ProgressReporter() as reporter:
        if not options.time:
            for line in launch_named(plan, query_gpu(0), clock, reporter):
                print(line, flush=True)
            return 0
        rows = run_bench(plan, query_gpu(0), clock=clock, reporter=reporter)
    print_rows(make_console(), rows)
    return int(any(row.is_failure for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except FlashsmithError as error:
        print(f"run_kernels.py: {error}", file=sys.stderr)
        sys.exit(2)
