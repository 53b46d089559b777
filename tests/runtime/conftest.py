"""Puts this folder's helpers, the pretended GPU and the invalid calls where its tests find them."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "semantics")]
# Last: a tool there has the name of a module of tests.
sys.path.append(str(_HERE.parents[1] / "tools" / "gpu"))
