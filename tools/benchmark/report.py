#!/usr/bin/env python3
"""`flashsmith report` as a script: writes an HTML page of result files, and its charts next to it.

python tools/benchmark/report.py *.csv ladder.json -o report.html
"""

from __future__ import annotations

import sys

from flashsmith.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["report"]
    main()
