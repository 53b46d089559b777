"""Fixtures of the tuner's tests: its fakes by name, here and in the worker processes."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
# The benchmark's stand-ins for a GPU serve here too, and so does the chooser's fixture.
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmark"), str(HERE.parent / "chooser")]

from own_table import own_table  # noqa: E402, F401
