#!/usr/bin/env python3
"""`flashsmith progression` as a script: each step's time and what it changes.

KERNELS=prog python tools/benchmark/progression.py --plot ladder.png
"""

from __future__ import annotations

import sys

from flashsmith.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["progression"]
    main()
