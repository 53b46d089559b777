"""Lets this folder's tests, and the processes that they start, share ranks.py, and the reference of
the integrations' tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integrations")]
