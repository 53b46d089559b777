#!/usr/bin/env python3
"""Proves every config of some sets on the GPU over several lengths; one CSV row each.

    python tools/gpu/prove_sets.py rows.csv --kernels tune cover --seqs 128 256

A wrong kernel, or one that does not come to its end, is a row like any other; the exit status says
whether there was one.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

from flashsmith.builder import library_for
from flashsmith.configs import FlashForwardKernelConfig, get_kernel_configs
from flashsmith.errors import LaunchError
from flashsmith.runtime import query_gpu
from flashsmith.verify import prove

COLUMNS = ("config", "batch", "heads", "seq", "ok", "max_error", "bound", "rel_l2", "lse_error")


def prove_row(
    config: FlashForwardKernelConfig, batch: int, heads: int, seq: int
) -> dict[str, object]:
    """One row; the figures are empty for a kernel that failed to run."""
    row: dict[str, object] = dict.fromkeys(COLUMNS, "")
    row |= {"config": str(config), "batch": batch, "heads": heads, "seq": seq}
    try:
        verdict = prove(config, seq=seq, batch=batch, heads=heads, backend="gpu")
    except LaunchError as error:
        print(f"{config} at {seq}: {error}", file=sys.stderr)
        return row | {"ok": False}
    if not verdict.ok:
        print(verdict, file=sys.stderr)
    return row | {name: getattr(verdict, name) for name in COLUMNS[4:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the CSV file to write")
    parser.add_argument("--kernels", nargs="+", default=["tune", "prog-all", "cover"], help="sets")
    parser.add_argument("--seqs", nargs="+", type=int, default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    options = parser.parse_args()

    arch = query_gpu(0).arch
    wrong = rows = 0
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for key in options.kernels:
            configs = get_kernel_configs(key)
            start = time.perf_counter()
            library_for(configs, arch=arch)
            print(f"{key}: built in {time.perf_counter() - start:.0f} s", flush=True)
            for seq in options.seqs:
                for config in configs:
                    row = prove_row(config, options.batch, options.heads, seq)
                    writer.writerow(row)
                    rows += 1
                    wrong += not row["ok"]
                print(f"{key} at {seq}: {rows} proven, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
