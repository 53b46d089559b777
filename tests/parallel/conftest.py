"""Lets this folder's tests, and the processes that they start, share ranks.py, the reference of the
integrations' tests, and the pretended GPU."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integrations")]
# Last: a tool there may have the name of a module of tests.
sys.path.append(str(HERE.parents[1] / "tools" / "gpu"))
