#!/usr/bin/env python3
"""Times the kernels that are chosen for windows of several sizes, each on all of these windows.

This shows whether another window size needs another kernel.

    python tools/gpu/windows_in_turns.py rows.csv 'b4 s8192 h16 d64 bf16' 'b1 s8192 h16 d128 bf16'
    python tools/gpu/windows_in_turns.py rows.csv 'b4 s8192 h16 d64 bf16' --windows 64 8192

The problems are given without a mask. The kernels chosen for all windows are proven on each window,
and launched alternately in independent rounds with the L2 flushed. There is a row for each window,
kernel and round. The summary has the time of each kernel divided by that of the chosen kernel;
above 1, the choice is right. It is given as the median over the rounds, with the interval that
contains the true median with a confidence of at least 95%. If an output is wrong, the window gets
no times, and the exit status is 1.

    python tools/gpu/windows_in_turns.py rows.csv --table src/flashsmith/chooser/tables/h200.json

enters the rankings, by the median of the rounds, in an autotune table. Without problems, it reads
the rows that are in the file.

    python tools/gpu/windows_in_turns.py rows.csv 'b4 s8192 h32 d64 bf16 causal' --kernels list.txt

times the listed short forms instead, one per line, on complete problems. For a problem, these are
the short forms with its dtype and d, and the kernel that is chosen for it. With --wider they are
also those of a larger d_head: the kernels that a problem of d 72 had before there were any of this
width. With --build-only H200 the kernels for this GPU are built, and nothing is timed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.implementations import kernel_implementation
from flashsmith.benchmark.rounds import AlternatingRounds, Contender, ratios_to
from flashsmith.benchmark.timing import Protocol
from flashsmith.benchmark.workload import workload_of
from flashsmith.builder import library_for
from flashsmith.chooser import choose
from flashsmith.chooser.winners.entry import RankedConfig
from flashsmith.chooser.winners.table import record_winners
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    d_head_for,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.runtime import query_gpu

WINDOWS = 64, 512, 1024, 8192
# The columns of a row besides its environment.
OF_A_ROUND = "problem", "round", "config", "chosen", "ms"
ROUND = Protocol(num_warmups=2, runs=10, warmup_ms=0.0, measure_ms=20.0, num_estimates=1)


def choices(
    problem: str, windows: Sequence[int], device: DeviceSpec
) -> dict[Problem, KernelConfig]:
    """The problem with each window, and the kernel that is chosen for it."""
    with_windows = [Problem.parse(f"{problem} window_{keys}") for keys in windows]
    return {one: choose(one, device).config for one in with_windows}


def listed(
    problem: str, forms: Path, device: DeviceSpec, wider: bool = False
) -> dict[Problem, list[KernelConfig]]:
    """The problem, with the kernel that is chosen for it and those in the list; with ``wider`` also
    those of a larger d_head."""
    one = Problem.parse(problem)
    chosen = choose(one, device).config
    others = map(parse_kernel_name_into_config, forms.read_text().split("\n")[:-1])
    same_type = (it for it in others if it.dtype == chosen.dtype)
    fitting = (
        it for it in same_type if it.d_head == chosen.d_head or (wider and it.d_head > one.d)
    )
    return {one: list(dict.fromkeys([chosen, *fitting]))}


def rounds_of(
    problem: Problem, kernels: Sequence[KernelConfig], rounds: int
) -> Iterator[dict[str, float]]:
    """The milliseconds of each config, round by round. Raises ValueError if an output is wrong."""
    workload = workload_of(problem)
    turns = AlternatingRounds(
        [Contender.of(kernel_implementation(one, workload)) for one in kernels]
    )
    for config, why in turns.wrong.items():
        raise ValueError(f"{problem}: {config}: {why}")
    yield from turns.times_ms(ROUND, rounds)


def enter(rows: Path, table: Path) -> None:
    """Enters the kernels for each problem, fastest first, in an autotune table."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    environments: dict[str, dict[str, str]] = {}
    with rows.open(newline="") as file:
        for row in csv.DictReader(file):
            times[row["problem"]][row["config"]].append(float(row["ms"]))
            environments[row["problem"]] = {
                name: value for name, value in row.items() if name not in OF_A_ROUND and value
            }
    for text, by_config in times.items():
        problem, environment = Problem.parse(text), environments[text]
        ranked = []
        for config, of_rounds in by_config.items():
            kernel, ms = parse_kernel_name_into_config(config), statistics.median(of_rounds)
            if kernel.head_dims != d_head_for(problem):  # of --wider
                continue
            family = kernel.family.name
            tflops = round(problem.attn_flop() / ms / 1e9, 3)
            of_gpu = {"time": now} | environment | {"arch": int(environment["arch"])}
            ranked.append(RankedConfig(family, config, ms, tflops, of_gpu))
        entry = record_winners(problem, device_spec(environment["gpu"]), ranked, table)
        print(f"{problem}: {entry.best.config}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "csv", type=Path, help="the CSV file of the rows; overwritten if problems are given"
    )
    parser.add_argument(
        "problems", nargs="*", help="problems without a mask; with --kernels, complete problems"
    )
    parser.add_argument("--windows", nargs="+", type=int, default=WINDOWS, help="powers of two")
    parser.add_argument("--kernels", type=Path, help="a file of short forms to time instead")
    parser.add_argument("--wider", action="store_true", help="also --kernels of a larger d_head")
    parser.add_argument("--build-only", metavar="GPU", help="build the kernels for this GPU only")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--table", type=Path, help="the autotune table that gets the rankings")
    options = parser.parse_args(arguments)
    if options.build_only:
        return build(options)
    wrong = measure(options) if options.problems else 0
    if options.table is not None:
        enter(options.csv, options.table)
    elif not options.problems:
        parser.error("problems: none given; only --table needs none")
    return 1 if wrong else 0


def kernels_for(
    text: str, options: argparse.Namespace, device: DeviceSpec
) -> dict[Problem, list[KernelConfig]]:
    """Problems, and the kernels to time on each, the chosen one first."""
    if options.kernels is not None:
        return listed(text, options.kernels, device, options.wider)
    chosen = choices(text, options.windows, device)
    return {
        problem: list(dict.fromkeys([config, *chosen.values()]))
        for problem, config in chosen.items()
    }


def build(options: argparse.Namespace) -> int:
    """Builds all kernels, unless the cache has them."""
    device = device_spec(options.build_only)
    for text in options.problems:
        for problem, kernels in kernels_for(text, options, device).items():
            for config in kernels:
                semantics = problem.required_semantics(config)
                library = library_for([config], arch=device.arch, semantics=semantics)
                entry = library.entry(config)
                spilled = entry.spill_store_bytes + entry.spill_load_bytes
                print(f"{problem}: {config}, {entry.registers} registers, {spilled} spilled")
    return 0


def measure(options: argparse.Namespace) -> int:
    """Writes the rows of all problems. Returns how many outputs were wrong."""
    environment, wrong = asdict(Environment.collect(0)), 0
    with options.csv.open("w", newline="") as file:
        writer = None
        for text in options.problems:
            for problem, kernels in kernels_for(text, options, query_gpu(0)).items():
                config = kernels[0]
                found: list[dict[str, float]] = []
                try:
                    found.extend(rounds_of(problem, kernels, options.rounds))
                except ValueError as error:
                    wrong += 1
                    print(f"WRONG {error}", flush=True)
                    continue
                for number, times in enumerate(found):
                    for kernel, ms in times.items():
                        row: dict[str, Any] = {
                            "problem": str(problem),
                            "round": number,
                            "config": kernel,
                            "chosen": kernel == str(config),
                            "ms": f"{ms:.6f}",
                        }
                        if writer is None:
                            writer = csv.DictWriter(file, [*row, *environment])
                            writer.writeheader()
                        writer.writerow(row | environment)
                file.flush()
                print(f"{problem}: {config}", flush=True)
                for kernel, ratio in ratios_to(str(config), found).items():
                    print(f"  {ratio:.4f}: {kernel}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
