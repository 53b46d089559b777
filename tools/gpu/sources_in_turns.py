#!/usr/bin/env python3
"""Launches kernels compiled from two versions of csrc alternately, to find out what a change of the
sources costs.

    python tools/gpu/sources_in_turns.py rows.csv --base OLD/csrc
    python tools/gpu/sources_in_turns.py rows.csv --base OLD/csrc --softcap     # the same, capped
    python tools/gpu/sources_in_turns.py rows.csv --base OLD/csrc --family mma_sync
    python tools/gpu/sources_in_turns.py rows.csv --base OLD/csrc --operations decode backward
    python tools/gpu/sources_in_turns.py rows.csv --base OLD/csrc --build-only  # needs no GPU

A pair is a kernel that ranks first in an entry of a shipped table, given by its config and
semantics, and the problem of the first such entry. Entries are those of the forward pass, unless
--operations gives other operations. Libraries are kept in the cache, and any library built from the
same sources is used. So one machine can build the libraries, and another can time them.
--changed-only leaves out pairs with equal machine code.

A round is an independent measurement: both kernels are launched alternately, and the L2 is flushed.
For a small KV cache, launches are in graphs that cycle through several caches, as in 'flashsmith
bench'. The outputs of both are checked in the same run. If one is wrong, the pair gets no times. If
the ratio of a pair is below --again, up to twenty more rounds are measured, and all rounds are
pooled.

There is a CSV row per round. The summary lists registers and spills that have changed, and the
ratio of each pair with its interval: the time of the base divided by the new time, so above 1 the
new kernel is faster. It also lists the pairs that are still below --again, and the geometric mean
of all ratios with its 95% interval, from the rounds that all pairs have. The exit status is 1 if an
output is wrong, or if the interval extends below --least.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from kernel_pairs import Pair, changed_pairs, changed_resources, first_ranked, libraries_of, loaded

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.implementations import KernelImplementation, captured
from flashsmith.benchmark.rounds import AlternatingRounds, Contender, PooledFigure
from flashsmith.benchmark.timing import CudaEvents, Protocol, num_sets
from flashsmith.benchmark.workload import AnyWorkload, workload_of
from flashsmith.builder.sources import package_sources, tree_hash
from flashsmith.families import FAMILIES, Problem
from flashsmith.operations import BACKWARD, DECODE, FORWARD
from flashsmith.runtime import query_gpu
from flashsmith.runtime.libraries import LoadedKernel
from flashsmith.runtime.prepared_call import prepare
from flashsmith.runtime.request import check_operation

BASE, NEW = "base", "new"
ROUND = Protocol(num_warmups=2, runs=12, warmup_ms=0.0, measure_ms=20.0)
MORE_ROUNDS = 20
# The time of a pair is estimated as the sum of these: its tensors and proofs, its rounds without
# launches, and its launches.
PAIR_SECONDS, ROUND_SECONDS, FLOP_PER_SECOND = 2.0, 0.1, 4e14


def implementation(name: str, kernel: LoadedKernel, workload: AnyWorkload) -> KernelImplementation:
    """A contender that calls this kernel."""
    request = check_operation(workload.problem, workload.tensors, options=workload.call_options)
    prepared = prepare(request, query_gpu(0), lambda: kernel)
    return KernelImplementation(name, kernel.config, workload, prepared.run)


def protocol_of(problem: Problem) -> Protocol:
    """The protocol of a round, which is that of 'flashsmith bench' for such a problem."""
    if problem.operation != DECODE.name:
        return ROUND
    return ROUND.over_cache(problem.computed.bytes(problem))


def contenders(pair: Pair, kernels: dict[str, LoadedKernel]) -> tuple[list[Contender], int]:
    """Both kernels with their proofs, and the number of calls in a launch."""
    workload = workload_of(pair.problem)
    if not protocol_of(pair.problem).in_graphs:
        alone = [implementation(name, kernel, workload) for name, kernel in kernels.items()]
        return list(map(Contender.of, alone)), 1
    sets, clock = num_sets(pair.problem.computed.bytes(pair.problem)), CudaEvents()
    workloads = [workload, *(workload_of(pair.problem, seed) for seed in range(1, sets))]
    made, calls = [], 1
    for name, kernel in kernels.items():
        each = [implementation(name, kernel, one) for one in workloads]
        replay, output = captured(name, each, clock, workload.memory)
        # Checked now, because the calls of the next contender write to the same tensors.
        why = "; ".join(workload.check(output).reasons)
        made.append(Contender(name, replay.launch, lambda why=why: why))
        calls = replay.calls
    return made, calls


def measured(pair: Pair, kernels: dict[str, LoadedKernel]) -> Callable[[], dict[str, Any]]:
    """A function that measures another round of a pair and returns its row."""
    both, calls = contenders(pair, kernels)
    turns = AlternatingRounds(both)

    def one_round() -> dict[str, Any]:
        times: dict[str, float] = {}
        if not turns.wrong:
            samples = turns.round(protocol_of(pair.problem))
            times = {name: it.median_ms / calls for name, it in samples.items()}
        return {
            "problem": str(pair.problem),
            "semantics": str(pair.semantics),
            "config": str(pair.config),
            "base_ms": f"{times[BASE]:.5f}" if times else "",
            "new_ms": f"{times[NEW]:.5f}" if times else "",
            "ratio": f"{times[BASE] / times[NEW]:.5f}" if times else "",
            "base_right": BASE not in turns.wrong,
            "new_right": NEW not in turns.wrong,
        }

    return one_round


def rounds_of(
    one_round: Callable[[], dict[str, Any]], rounds: int, again: float
) -> Iterable[dict[str, Any]]:
    """The rows of a pair. Rounds are added as long as the median ratio is below ``again``.

    If an output is wrong, there is only one row.
    """
    ratios: list[float] = []
    while len(ratios) < rounds or (
        statistics.median(ratios) < again and len(ratios) < rounds + MORE_ROUNDS
    ):
        row = one_round()
        yield row
        if not (row["base_right"] and row["new_right"]):
            return
        ratios.append(float(row["ratio"]))


def geometric_mean(ratios: Sequence[Sequence[float]]) -> PooledFigure:
    """The geometric mean over pairs; each pair counts with the median of its rounds.

    Its interval comes from the geometric means of those rounds that all pairs have.
    """
    mean = statistics.geometric_mean(map(statistics.median, ratios))
    rounds = PooledFigure.of(
        [statistics.geometric_mean(of_one) for of_one in zip(*ratios, strict=False)]
    )
    return PooledFigure(mean, rounds.low, rounds.high, rounds.certain)


def estimated_seconds(pairs: Sequence[Pair], rounds: int) -> float:
    """About how long the rounds take if no pair needs more."""
    launches = 2 * (ROUND.runs + ROUND.num_warmups + ROUND.num_estimates)
    work = sum(launches * pair.problem.attn_flop() / FLOP_PER_SECOND for pair in pairs)
    return len(pairs) * (PAIR_SECONDS + rounds * ROUND_SECONDS) + rounds * work


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", help="the CSV file to write; overwritten")
    parser.add_argument("--base", type=Path, required=True, help="the other folder csrc")
    parser.add_argument("--new", type=Path, default=package_sources(), help="default: this csrc")
    parser.add_argument("--only", default="", help="a regex for the texts of pairs")
    names = [FORWARD.name, DECODE.name, BACKWARD.name]
    parser.add_argument("--operations", nargs="+", choices=names, default=names[:1])
    parser.add_argument("--softcap", action="store_true", help="the same kernels, capped")
    forward = [name for name, one in FAMILIES.items() if one.operation == FORWARD.name]
    parser.add_argument("--family", choices=forward, help="kernels of this family only")
    parser.add_argument("--changed-only", action="store_true", help="skip pairs with equal code")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--again", type=float, default=0.98, help="twenty more rounds below this")
    parser.add_argument("--least", type=float, default=0.0, help="lower limit of the mean")
    parser.add_argument("--build-only", action="store_true")
    options = parser.parse_args()
    options.sources = {BASE: options.base.resolve(), NEW: options.new.resolve()}
    for name, csrc in options.sources.items():
        if not (csrc / "common" / "forward_args.cuh").is_file():
            parser.error(f"--{name} {csrc}: has no common/forward_args.cuh; give a folder csrc")
    if options.family and options.operations != names[:1]:
        parser.error(f"--family {options.family}: serves the forward pass; give no --operations")
    ranked = first_ranked(options.operations, options.softcap, options.family)
    options.pairs = [pair for pair in ranked if re.search(options.only, str(pair))]
    if not options.pairs:
        parser.error(f"--only {options.only!r}: no pair matches")
    return options


def main() -> int:
    options = parsed()
    pairs: list[Pair] = options.pairs
    libraries = {name: libraries_of(csrc, pairs) for name, csrc in options.sources.items()}
    for line in changed_resources(*libraries.values()):
        print(line, flush=True)
    if options.changed_only:
        pairs = changed_pairs(pairs, *libraries.values())
        print(f"{len(pairs)} of {len(options.pairs)} pairs differ in machine code", flush=True)
    if options.build_only or not pairs:
        return 0
    seconds = estimated_seconds(pairs, options.rounds)
    print(f"{len(pairs)} pairs, {options.rounds} rounds: about {seconds:.0f} s", flush=True)
    kernels = {name: loaded(one) for name, one in libraries.items()}
    hashes = {name: tree_hash(csrc)[:12] for name, csrc in options.sources.items()}
    print(f"{Environment.collect(0).gpu}: {hashes}", flush=True)
    figures: dict[Pair, list[float]] = {}
    with open(options.csv, "w", newline="") as file:
        writer = None
        for pair in pairs:
            rows = []
            one_round = measured(pair, {name: of[pair.kernel] for name, of in kernels.items()})
            for row in rounds_of(one_round, options.rounds, options.again):
                rows.append(row | {"base_csrc": hashes[BASE], "csrc": hashes[NEW]})
                writer = writer or csv.DictWriter(file, list(rows[0]))
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow(rows[-1])
            file.flush()
            if not (rows[-1]["base_right"] and rows[-1]["new_right"]):
                print("WRONG", pair, flush=True)
                continue
            figures[pair] = [float(row["ratio"]) for row in rows]
            print(f"{PooledFigure.of(figures[pair]):.4f}, {len(rows)} rounds: {pair}", flush=True)
    if not figures:
        return 1
    for pair, ratios in figures.items():
        if statistics.median(ratios) < options.again:
            print(f"below {options.again}: {statistics.median(ratios):.4f} {pair}")
    mean = geometric_mean(list(figures.values()))
    least = min(map(statistics.median, figures.values()))
    print(f"geometric mean {mean:.4f} over {len(figures)} pairs, least {least:.4f}")
    return 1 if len(figures) < len(pairs) or mean.low < options.least else 0


if __name__ == "__main__":
    sys.exit(main())
