#!/usr/bin/env python3
"""Times attention() on pairs of problems that should be about equally fast; a CSV row per pair.

    python tools/gpu/pair_shares.py rows.csv
    python tools/gpu/pair_shares.py rows.csv --kinds odd --seqs 1024 --dims 64

- causal: with a causal mask and without a mask, from 4096 keys on. The causal call may take 0.56 of
  the time without a mask: half of the FLOP, and some overhead.
- odd: length n - 1 and length n, from 1024 on. With length n - 1, there must be at least 0.95 of
  the TFLOP/s of n.

The launches of a pair alternate, so that both run at the same clock and temperature. One after the
other, the power limit of the GPU would change their ratio by several percent. Outputs are checked
against float64 in the same run. If one is wrong, the pair gets no times. The exit status is 1 if an
output is wrong or a problem is too slow.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.implementations import KernelImplementation, attention_implementation
from flashsmith.benchmark.problems import default_problem
from flashsmith.benchmark.rounds import AlternatingRounds, Contender
from flashsmith.benchmark.timing import INTERLEAVED
from flashsmith.benchmark.workload import Workload
from flashsmith.chooser.choice import choose_config
from flashsmith.families import DType, Problem
from flashsmith.runtime import query_gpu

# The smallest ratios of TFLOP/s that are allowed.
LEAST_SHARES = {"causal": 0.5 / 0.56, "odd": 0.95}
LENGTHS = {"causal": (4096, 8192, 16384), "odd": (1024, 4096)}
HEAD_DIMS = {"causal": (64, 96, 128, 256), "odd": (64, 128)}


@dataclass(frozen=True)
class Pair:
    """A ``problem``, and the ``other`` problem with which it is compared."""

    kind: str
    problem: Problem
    other: Problem


def pairs(kinds: Iterable[str], seqs: list[int] | None, dims: list[int] | None) -> Iterator[Pair]:
    for kind in kinds:
        sizes = product(seqs or LENGTHS[kind], dims or HEAD_DIMS[kind], DType)
        for seq, d, dtype in sizes:
            problem = default_problem(d, seq, dtype)
            if kind == "causal":
                yield Pair(kind, problem, default_problem(d, seq, dtype, causal=True))
            else:
                for whole in (problem, default_problem(d, seq, dtype, causal=True)):
                    yield Pair(kind, whole, replace(whole, seq_q=seq - 1, seq_k=seq - 1))


def implementation(name: str, of: Problem) -> KernelImplementation:
    config = choose_config(of, query_gpu(0))
    return replace(attention_implementation(config, Workload(of)), name=name)


def measured(pair: Pair) -> dict[str, Any]:
    problem, other = implementation("problem", pair.problem), implementation("other", pair.other)
    turns = AlternatingRounds([Contender.of(one) for one in (problem, other)])
    times = dict.fromkeys(("ms", "other_ms", "time_share", "speed_share"), "")
    if not turns.wrong:
        samples = turns.round(INTERLEAVED)
        ms, other_ms = samples["problem"].median_ms, samples["other"].median_ms
        work = pair.other.attn_flop() / pair.problem.attn_flop()
        figures = ms, other_ms, other_ms / ms, work * ms / other_ms
        times = {name: f"{it:.4f}" for name, it in zip(times, figures, strict=True)}
    return {
        "kind": pair.kind,
        "problem": str(pair.problem),
        "other": str(pair.other),
        **times,
        "right": not turns.wrong,
        "config": str(problem.config),
        "other_config": str(other.config),
        "revision": Environment.collect(0).revision,
    }


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", help="the CSV file to write; overwritten")
    parser.add_argument("--kinds", default="causal,odd", help="kinds: causal, odd or both")
    parser.add_argument("--seqs", type=numbers, help="lengths, instead of each kind's own")
    parser.add_argument("--dims", type=numbers, help="head dimensions, instead of each kind's own")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if not set(kinds) <= set(LEAST_SHARES):
        parser.error(f"--kinds: {options.kinds}; give some of {','.join(LEAST_SHARES)}")
    bad = 0
    with open(options.csv, "w", newline="") as file:
        writer = None
        for pair in pairs(kinds, options.seqs, options.dims):
            row = measured(pair)
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            slow = row["right"] and float(row["speed_share"]) < LEAST_SHARES[pair.kind]
            said = "WRONG" if not row["right"] else "SLOW" if slow else ""
            print(row["other"], row["time_share"], row["speed_share"], said, flush=True)
            bad += slow or not row["right"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
