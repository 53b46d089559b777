#!/usr/bin/env python3
"""What share of the full time attention() takes under a causal mask; a CSV row each problem.

    python tools/gpu/mask_share.py rows.csv [--seqs 4096,8192,16384] [--most 0.56]

Both take turns, so that they share one clock and one temperature: one after the other, the GPU's
power limit moves their ratio by several percent. Outputs are checked against float64 in the same
run. The exit status is 1 if one is wrong, or a share is above --most.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import flashsmith
from flashsmith.benchmark.bench.problems import default_problem
from flashsmith.benchmark.contenders import KernelContender, attention_contender
from flashsmith.benchmark.timing import Environment, measure
from flashsmith.benchmark.workload import Workload
from flashsmith.configs import DType, Problem
from flashsmith.runtime import query_gpu
from flashsmith.tuning.choice import choose_config

HEAD_DIMS = (64, 96, 128, 256)


def contender(name: str, of: Problem) -> KernelContender:
    config = choose_config(of, query_gpu(0))
    return replace(attention_contender(flashsmith.attention, config, Workload(of)), name=name)


def shares(seqs: list[int]) -> Iterator[dict[str, Any]]:
    revision = Environment.collect(0).revision
    for seq, d, dtype in product(seqs, HEAD_DIMS, DType):
        full, causal = (
            contender(name, default_problem(d, seq, dtype, causal=name == "causal"))
            for name in ("full", "causal")
        )
        right = all(one.workload.judge(one.output()).ok for one in (full, causal))
        samples = measure((full, causal))
        full_ms, causal_ms = samples["full"].median_ms, samples["causal"].median_ms
        yield {
            "problem": str(full.workload.problem),
            "full_ms": f"{full_ms:.4f}",
            "causal_ms": f"{causal_ms:.4f}",
            "share": f"{causal_ms / full_ms:.4f}",
            "right": right,
            "full_config": str(full.config),
            "causal_config": str(causal.config),
            "revision": revision,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", help="where the rows go; written anew")
    parser.add_argument("--seqs", default="4096,8192,16384")
    parser.add_argument("--most", type=float, default=0.56)
    options = parser.parse_args()
    bad = 0
    with open(options.csv, "w", newline="") as file:
        writer = None
        for row in shares([int(seq) for seq in options.seqs.split(",")]):
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            print(row["problem"], row["share"], "" if row["right"] else "WRONG", flush=True)
            bad += not row["right"] or float(row["share"]) > options.most
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
