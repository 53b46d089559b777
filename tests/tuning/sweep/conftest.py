"""Fixtures of the sweep's tests: its fakes by name, here and in the worker processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
