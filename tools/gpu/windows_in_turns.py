#!/usr/bin/env python3
"""Times the kernels chosen for windows of several sizes on all of these windows.

This shows whether another window size needs another kernel.

    python tools/gpu/windows_in_turns.py rows.csv 'b4 s8192 h16 d64 bf16' 'b1 s8192 h16 d128 bf16'
    python tools/gpu/windows_in_turns.py rows.csv 'b4 s8192 h16 d64 bf16' --windows 64 8192

The problems are given without a mask. The choices for all windows are proven on each window and
launched alternately, with the L2 flushed, in independent rounds. There is a row for each window,
kernel and round. The summary lists each kernel's time over the chosen one's (above 1, the choice is
better): the median of the rounds, and the interval that contains the true median with at least 95%.
The exit status is 1 if an output is wrong; it has no times then.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.implementations import kernel_implementation
from flashsmith.benchmark.timing import Protocol
from flashsmith.benchmark.turns import Contender, Pooled, Turns
from flashsmith.benchmark.workload import workload_of
from flashsmith.chooser import choose
from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.runtime import query_gpu

WINDOWS = 64, 512, 1024, 8192
ROUND = Protocol(num_warmups=2, runs=10, warmup_ms=0.0, measure_ms=20.0, num_estimates=1)


def choices(
    problem: str, windows: Sequence[int], device: DeviceSpec
) -> dict[Problem, KernelConfig]:
    """The problem with each window, and the kernel chosen for it."""
    with_windows = [Problem.parse(f"{problem} window_{keys}") for keys in windows]
    return {one: choose(one, device).config for one in with_windows}


def rounds_of(
    problem: Problem, kernels: Sequence[KernelConfig], rounds: int
) -> Iterator[dict[str, float]]:
    """Milliseconds by config, round by round. Raises ValueError if an output is wrong."""
    workload = workload_of(problem)
    turns = Turns([Contender.of(kernel_implementation(one, workload)) for one in kernels])
    for config, why in turns.wrong.items():
        raise ValueError(f"{problem}: {config}: {why}")
    for _ in range(rounds):
        yield {config: samples.median_ms for config, samples in turns.round(ROUND).items()}


def ratios(rounds: Sequence[dict[str, float]], chosen: str) -> dict[str, Pooled]:
    """The time of each other kernel over that of the chosen one."""
    others = [config for config in rounds[0] if config != chosen]
    return {one: Pooled.of([of[one] / of[chosen] for of in rounds]) for one in others}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path, help="the CSV file to write; overwritten")
    parser.add_argument("problems", nargs="+", help="problems without a mask")
    parser.add_argument("--windows", nargs="+", type=int, default=WINDOWS, help="powers of two")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    environment, wrong = asdict(Environment.collect(0)), 0
    with options.csv.open("w", newline="") as file:
        writer = None
        for text in options.problems:
            chosen = choices(text, options.windows, query_gpu(0))
            kernels = list(dict.fromkeys(chosen.values()))
            for problem, config in chosen.items():
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
                for kernel, ratio in ratios(found, str(config)).items():
                    print(f"  {ratio:.4f}: {kernel}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
