"""Makes this folder's helper modules importable, and keeps the tests from the user's own table."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from own_table import own_table  # noqa: F401
