"""Fixtures of the sweep's tests: its fakes by name, here and in the worker processes."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
# The benchmark's stand-ins for a GPU serve here too.
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmark")]
