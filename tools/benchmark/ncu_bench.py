#!/usr/bin/env python3
"""Profiles kernels with Nsight Compute: `flashsmith ncu` as a script.

    KERNELS=tune tools/benchmark/ncu_bench.py --seq_lens=1024,4096 --d_heads=128 --csv profile.csv
    KERNELS=tune tools/benchmark/ncu_bench.py --runs=1 --csv > profile.csv

A `--csv` without a file prints the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flashsmith.cli import main


def with_csv_value(arguments: Sequence[str]) -> list[str]:
    """Replaces a `--csv` without a value by `--csv=-`."""
    completed = list(arguments)
    for place, word in enumerate(arguments):
        following = arguments[place + 1 : place + 2]
        if word == "--csv" and (not following or following[0].startswith("--")):
            completed[place] = "--csv=-"
    return completed


if __name__ == "__main__":
    sys.argv = [sys.argv[0], "ncu", *with_csv_value(sys.argv[1:])]
    main()
