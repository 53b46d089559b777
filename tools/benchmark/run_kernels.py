#!/usr/bin/env python3
"""Launches named kernels N times: what a profiler is pointed at.

    KERNELS=prog python tools/benchmark/run_kernels.py --seq_lens 4096 --runs 3
    python tools/benchmark/run_kernels.py --kernels ours --ref fa2 --causal --time

`--ref` launches peers the same way; `--time` proves and measures instead, and prints a table.
"""

from __future__ import annotations

import sys

from flashsmith.benchmark.kernel_launches import main
from flashsmith.errors import FlashsmithError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except FlashsmithError as error:
        print(f"run_kernels.py: {error}", file=sys.stderr)
        sys.exit(2)
