"""Makes this folder's helper modules, and those of ptxlab's tests, importable by its tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ptxlab")]
