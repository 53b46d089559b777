#!/usr/bin/env python3
"""Launches decode configs compiled from several versions of csrc alternately, and compares their
bits.

    python tools/gpu/configs_in_turns.py rows.csv --problem 'b1 s1:1024 h32:8 d128 bf16 decode' \\
        --csrc old=OLD/csrc --csrc new=src/flashsmith/csrc --config SHORT_FORM --config SHORT_FORM
    python tools/gpu/configs_in_turns.py ... --build-only     # needs no GPU

Contenders are all configs of all versions (those that cannot be built are reported), and
'invariant', which is the config that attention_with_cache() uses for split='invariant'. Calls are
in graphs that cycle through several caches, as in 'flashsmith bench'. The output of each contender
is checked in the same run. Outputs of canonical configs must have the same bits on all caches.

There is a CSV row per problem, contender and round. The summary has, for each contender, the median
time and the ratio: the time of the invariant config divided by its own in the same round, so above
1 it is faster. The exit status is 1 if an output is wrong or bits differ.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from kernel_pairs import Pair, library_of, loaded
from sources_in_turns import implementation, protocol_of

from flashsmith import parse_kernel_name_into_config
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.implementations import captured
from flashsmith.benchmark.rounds import AlternatingRounds, Contender
from flashsmith.benchmark.timing import CudaEvents, num_sets
from flashsmith.benchmark.workload import AnyWorkload, workload_of
from flashsmith.builder import KernelLibrary
from flashsmith.builder.sources import package_sources
from flashsmith.chooser.choice import choose_config
from flashsmith.errors import FlashsmithError
from flashsmith.families import Problem, device_spec
from flashsmith.semantics.sizes import CANONICAL

INVARIANT = "invariant"


@dataclass(frozen=True)
class Entrant:
    """A contender: its name, its kernel with the problem, and the library that contains it."""

    name: str
    pair: Pair
    library: KernelLibrary


def entrants(
    text: str, invariant: Path, sources: dict[str, Path], configs: list[str]
) -> Iterator[Entrant]:
    """The contenders for a problem."""
    free = Problem.parse(text)
    canonical = replace(free, bits=CANONICAL)
    found = choose_config(free, device_spec("H200"))
    pairs = [(INVARIANT, invariant, Pair(found, free))]
    pairs += [
        (f"{name} {config}", csrc, Pair(parse_kernel_name_into_config(config), canonical))
        for config in configs
        for name, csrc in sources.items()
    ]
    for name, csrc, pair in pairs:
        if pair.config.d_head < free.d:
            continue
        try:
            yield Entrant(name, pair, library_of(csrc, {pair.config}, pair.semantics))
        except FlashsmithError as error:
            print(f"left out: {name}: {error}", flush=True)


def bits_of(one: Entrant, kernel: Any, workloads: list[AnyWorkload]) -> list[Any]:
    """The outputs on all caches."""
    return [implementation(one.name, kernel, w).output().clone() for w in workloads]


def race(problem: str, racing: list[Entrant], rounds: int) -> Iterator[dict[str, Any]]:
    """The rows for a problem."""
    import torch

    kernels = {one.name: loaded({one.pair.kernel: one.library}) for one in racing}
    sets = num_sets(racing[0].pair.problem.computed.bytes(racing[0].pair.problem))
    of_problem: dict[Problem, list[AnyWorkload]] = {}
    contenders, clock, calls, first = [], CudaEvents(), {}, None
    for one in racing:
        at = one.pair.problem
        if at not in of_problem:
            of_problem[at] = [workload_of(at, seed) for seed in range(sets)]
        workloads = of_problem[at]
        kernel = kernels[one.name][one.pair.kernel]
        why = ""
        if one.name != INVARIANT:
            bits = bits_of(one, kernel, workloads)
            first = first or bits
            if not all(torch.equal(a, b) for a, b in zip(first, bits, strict=True)):
                why = "its bits differ from the first canonical contender's"
        each = [implementation(one.name, kernel, w) for w in workloads]
        replay, output = captured(one.name, each, clock, workloads[0].memory)
        # Checked now, because the calls of the next contender write to the same tensors.
        why = why or "; ".join(workloads[0].check(output).reasons)
        contenders.append(Contender(one.name, replay.launch, lambda why=why: why))
        calls[one.name] = replay.calls
    turns = AlternatingRounds(contenders)
    for name, why in turns.wrong.items():
        print(f"WRONG {problem} {name}: {why}", flush=True)
        yield {"problem": problem, "contender": name, "round": "", "us": "", "wrong": why}
    protocol = protocol_of(racing[0].pair.problem)
    for number in range(rounds):
        samples = turns.round(protocol)
        for name, its in samples.items():
            us = f"{1e3 * its.median_ms / calls[name]:.3f}"
            yield {"problem": problem, "contender": name, "round": number, "us": us, "wrong": ""}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line for each contender of each problem."""
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["us"]:
            times.setdefault(row["contender"], {})[row["round"]] = float(row["us"])
    free = times.get(INVARIANT, {})
    for name, its in times.items():
        ratio = ""
        if free:
            ratio = f"{statistics.median(free[i] / us for i, us in its.items()):.3f}"
        least, most = min(its.values()), max(its.values())
        median = statistics.median(its.values())
        yield f"{median:8.2f} us ({least:.2f} to {most:.2f})  {ratio:>6}  {name}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", help="the CSV file to write; overwritten")
    parser.add_argument("--problem", action="append", required=True, help="without 'canonical'")
    parser.add_argument("--config", action="append", required=True, help="a canonical config")
    parser.add_argument(
        "--csrc", action="append", default=[], help="NAME=FOLDER; default: the package's"
    )
    parser.add_argument(
        "--invariant",
        type=Path,
        default=package_sources(),
        help="folder csrc of the invariant config; default: the package's",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--build-only", action="store_true")
    options = parser.parse_args()
    given = (one.partition("=") for one in options.csrc)
    options.sources = {name: Path(folder).resolve() for name, _, folder in given}
    options.sources = options.sources or {"package": package_sources()}
    for name, csrc in options.sources.items():
        if not (csrc / "common" / "forward_args.cuh").is_file():
            parser.error(f"--csrc {name}={csrc}: has no common/forward_args.cuh; give a csrc")
    return options


def main() -> int:
    options = parsed()
    of_all = options.invariant.resolve(), options.sources, options.config
    races = {it: list(entrants(it, *of_all)) for it in options.problem}
    if options.build_only:
        return 0
    gpu, wrong = Environment.collect(0).gpu, 0
    with open(options.csv, "w", newline="") as file:
        names = ("gpu", "problem", "contender", "round", "us", "wrong")
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for problem, racing in races.items():
            rows = []
            for row in race(problem, racing, options.rounds):
                rows.append(row)
                writer.writerow({"gpu": gpu} | row)
                file.flush()
            wrong += sum(bool(row["wrong"]) for row in rows)
            print(problem, flush=True)
            for line in summary(rows):
                print(line, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
