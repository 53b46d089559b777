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
from dataclasses import replace
from typing import Any

import flashsmith
from flashsmith.benchmark.contenders import KernelContender, attention_contender
from flashsmith.benchmark.timing import Environment, measure
from flashsmith.benchmark.workload import Workload
from flashsmith.configs import DType, Problem, Semantics
from flashsmith.runtime import query_gpu
from flashsmith.tuning.choice import choose_config

HEADS = {64: 32, 96: 16, 128: 16, 256: 8}
TOKENS = 65536  # of a batch, which is 16 at most


def problem(seq: int, d: int, dtype: DType, mask: str) -> Problem:
    batch = min(16, TOKENS // seq)
    heads = HEADS[d]
    return Problem(batch, seq, seq, heads, heads, d, dtype, Semantics(mask=mask))


def contender(name: str, of: Problem) -> KernelContender:
    config = choose_config(of, query_gpu(0))
    return replace(attention_contender(flashsmith.attention, config, Workload(of)), name=name)


def shares(seqs: list[int]) -> Any:
    revision = Environment.collect(0).revision
    for seq in seqs:
        for d in HEADS:
            for dtype in (DType.FP16, DType.BF16):
                both = [
                    contender(name, problem(seq, d, dtype, mask))
                    for name, mask in (("full", "none"), ("causal", "causal"))
                ]
                right = all(one.workload.judge(one.output()).ok for one in both)
                full, causal = (samples.median_ms for samples in measure(both).values())
                yield {
                    "problem": str(both[0].workload.problem),
                    "full_ms": f"{full:.4f}",
                    "causal_ms": f"{causal:.4f}",
                    "share": f"{causal / full:.4f}",
                    "right": right,
                    "full_config": str(both[0].config),
                    "causal_config": str(both[1].config),
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
