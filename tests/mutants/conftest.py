"""Makes this folder's helper modules, and those of the tests of ptxlab and of bits, importable by
its tests."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(_TESTS / "ptxlab"), str(_TESTS / "bits")]
