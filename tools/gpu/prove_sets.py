#!/usr/bin/env python3
"""Proves every config of some sets for several lengths, on a GPU; a CSV row per proof.

    python tools/gpu/prove_sets.py rows.csv --kernels tune cover --seqs 128 256
    timeout 300 python tools/gpu/prove_sets.py rows.csv --kernels hopper --masks none causal --lazy

A kernel that is wrong or fails gets a row too; the exit status is then 1. A kernel that hangs has
no row; it is named in the last line on stderr.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from flashsmith.builder import library_for
from flashsmith.errors import LaunchError
from flashsmith.families import KernelConfig, Problem, Semantics, get_kernel_configs
from flashsmith.runtime import query_gpu
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.verify import prove

PROBLEM = ("config", "batch", "heads", "seq", "causal", "row_max")
COLUMNS = (*PROBLEM, "ok", "max_error", "bound", "rel_l2", "lse_error")


def build(configs: Iterable[KernelConfig], seqs: Iterable[int], masks: Iterable[str]) -> None:
    """Builds and loads the kernels for these lengths and masks."""
    wanted: dict[Semantics, set[KernelConfig]] = {}
    for config, seq, mask in product(configs, seqs, masks):
        problem = Problem(1, seq, seq, 1, 1, config.d_head, config.dtype, Semantics(mask))
        wanted.setdefault(problem.required_semantics(config), set()).add(config)
    arch = query_gpu(0).arch
    for semantics, some in wanted.items():
        loaded_kernels.add(library_for(sorted(some), arch=arch, semantics=semantics))


def prove_row(
    config: KernelConfig, batch: int, heads: int, seq: int, causal: bool, row_max: bool
) -> dict[str, object]:
    """Proves a config and returns its row. If the kernel could not run, the row has no figures."""
    row: dict[str, object] = dict.fromkeys(COLUMNS, "")
    row |= zip(PROBLEM, (str(config), batch, heads, seq, causal, row_max), strict=True)
    print(f"{config} at {seq}{', causal' * causal}", file=sys.stderr, flush=True)
    try:
        verdict = prove(
            config, seq=seq, batch=batch, heads=heads, causal=causal, row_max=row_max, backend="gpu"
        )
    except LaunchError as error:
        print(f"{config} at {seq}: {error}", file=sys.stderr)
        return row | {"ok": False}
    if not verdict.ok:
        print(verdict, file=sys.stderr)
    return row | {name: getattr(verdict, name) for name in COLUMNS[len(PROBLEM) :]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the CSV file to write")
    parser.add_argument("--kernels", nargs="+", default=["tune", "prog-all", "cover"], help="sets")
    parser.add_argument("--seqs", nargs="+", type=int, default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--masks", nargs="+", choices=("none", "causal"), default=["none"])
    parser.add_argument(
        "--lazy",
        action="store_true",
        help="also prove lazily rescaling kernels, which are used without row maxima",
    )
    options = parser.parse_args()

    wrong = rows = 0
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for key in options.kernels:
            configs = get_kernel_configs(key)
            start = time.perf_counter()
            build(configs, options.seqs, options.masks)
            print(f"{key}: built in {time.perf_counter() - start:.0f} s", flush=True)
            for seq in options.seqs:
                asked = product(configs, options.masks, (True, False)[: 1 + options.lazy])
                for config, mask, row_max in asked:
                    row = prove_row(
                        config, options.batch, options.heads, seq, mask == "causal", row_max
                    )
                    writer.writerow(row)
                    file.flush()
                    rows += 1
                    wrong += not row["ok"]
                print(f"{key} at {seq}: {rows} proven, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
