"""The samples of this folder's tests lie one up, beside those of the other family."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
