"""Measures the regret of the chooser: how much slower the chosen kernel is than the best of those
that were rejected.

    python tools/benchmark/chooser_regret.py OUT.csv [--without-table] [PROBLEM ...]

Needs an NVIDIA GPU with PyTorch. For each problem, the chosen kernel, its runners-up and the
candidates of the cost model are proven and timed alternately. Each of them gets a row with its
expected and its measured time, which is written when the problem is done. The default problems have
lengths that were not tuned, or few CTAs, so that expected times depend on the cost model. The exit
status is 1 if a kernel is wrong.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashsmith.benchmark.implementations import kernel_implementation
from flashsmith.benchmark.timing import measure
from flashsmith.benchmark.workload import Workload
from flashsmith.builder import build
from flashsmith.chooser import choose
from flashsmith.chooser.candidates import candidates
from flashsmith.chooser.cost_model import estimate
from flashsmith.chooser.winners import WinnersTable
from flashsmith.families import DeviceSpec, Problem, by_family
from flashsmith.pluralize import pluralize
from flashsmith.runtime.target import choose_target

PROBLEMS = tuple(
    f"{sizes} d{d} {dtype}{mask}"
    for d, dtype in ((128, "fp16"), (128, "bf16"), (64, "fp16"))
    for mask in ("", " causal")
    for sizes in (
        *("b16 s1536 h16", "b16 s3000 h16", "b4 s10000 h16"),
        *("b1 s512 h16", "b2 s512 h16", "b1 s1024 h16", "b2 s1536 h16"),
        *("b1 s2048 h32:8", "b2 s3000 h32:8", "b1 s10000 h32:8", "b1 s1:16384 h32:8"),
    )
)
COLUMNS = ("problem", "config", "evidence", "chosen", "right", "expected_ms", "ms", "regret")

# Takes a problem and configs. Returns the milliseconds of each config, or None if its kernel is
# wrong.
Timer = Callable[[Problem, Sequence[Any]], "list[float | None]"]


def timed_on_gpu(problem: Problem, configs: Sequence[Any]) -> list[float | None]:
    workload = Workload(problem)
    implementations = [kernel_implementation(config, workload) for config in configs]
    right = [c for c in implementations if workload.check(c.output()).ok]
    samples = measure(right)
    return [samples[c.name].median_ms if c.name in samples else None for c in implementations]


def expected_times(
    problem: Problem, device: DeviceSpec, table: WinnersTable | None
) -> tuple[str, dict[Any, float]]:
    """The evidence for the choice; and the configs to time with their expected times, the chosen
    one first."""
    answer = choose(problem, device, table=table)
    expected = {answer.config: answer.ms} | {one.config: one.ms for one in answer.runners_up}
    masked = problem.semantics.mask != "none"
    for config in candidates(problem.dtype, answer.config.d_head, device, masked):
        expected.setdefault(config, estimate(config, problem, device).ms)
    return answer.evidence, expected


def build_ahead(
    problems: Sequence[Problem], device: DeviceSpec, table: WinnersTable | None
) -> None:
    """Builds all kernels in parallel; otherwise each would be built at its first launch."""
    wanted: dict[Any, dict[Any, None]] = defaultdict(dict)
    for problem in problems:
        for config in expected_times(problem, device, table)[1]:
            wanted[problem.required_semantics(config)][config] = None
    for semantics, configs in wanted.items():
        print(f"building {pluralize(len(configs), 'kernel')}, {semantics}", flush=True)
        for group in by_family(configs):
            build(group, arch=device.arch, semantics=semantics)


def reviewed(
    problem: Problem, device: DeviceSpec, table: WinnersTable | None, timer: Timer
) -> list[dict[str, Any]]:
    """One row per config, the chosen one first.

    Its regret is its time divided by the fastest time, minus 1.
    """
    evidence, expected = expected_times(problem, device, table)
    times = timer(problem, list(expected))
    fastest = min((ms for ms in times if ms is not None), default=float("nan"))
    return [
        {
            "problem": str(problem),
            "config": str(config),
            "evidence": evidence,
            "chosen": number == 0,
            "right": ms is not None,
            "expected_ms": wanted,
            "ms": ms,
            "regret": None if ms is None else ms / fastest - 1,
        }
        for number, ((config, wanted), ms) in enumerate(zip(expected.items(), times, strict=True))
    ]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]
    if first["ms"] is None:
        return f"{first['problem']}: WRONG {first['config']}"
    return (
        f"{first['problem']}: {first['evidence']}, expected {first['expected_ms']:.4g} ms, took "
        f"{first['ms']:.4g} ms, {first['regret']:.1%} over the fastest of {len(rows)}"
    )


def main(arguments: Sequence[str], timer: Timer = timed_on_gpu) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.csv")
    parser.add_argument("problems", nargs="*", metavar="PROBLEM")
    parser.add_argument("--without-table", action="store_true", help="judge the cost model alone")
    given = parser.parse_args(arguments)
    table = WinnersTable() if given.without_table else None
    device = choose_target().device
    problems = [Problem.parse(text) for text in given.problems or PROBLEMS]
    if timer is timed_on_gpu:
        build_ahead(problems, device, table)
    wrong = False
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for problem in problems:
            rows = reviewed(problem, device, table, timer)
            writer.writerows(rows)
            file.flush()
            print(summary(rows), flush=True)
            wrong |= not all(row["right"] for row in rows)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
