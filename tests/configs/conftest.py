"""Lets this folder's tests share config_samples.py: pytest adds no test folder to the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
