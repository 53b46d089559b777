"""Puts the pretended GPU and the invalid calls where this folder's tests find them."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path += [str(_ROOT / "tools" / "gpu"), str(_ROOT / "tests" / "semantics")]
