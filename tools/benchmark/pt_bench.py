#!/usr/bin/env python3
"""`flashsmith bench` as a script: compares kernels with PyTorch's and other libraries' attention.

KERNELS=prog python tools/benchmark/pt_bench.py --seq_lens 1024,4096 --csv prog.csv
"""

from __future__ import annotations

import sys

from flashsmith.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench"]
    main()
