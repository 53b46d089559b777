"""Lets this folder's tests share padded_attention.py, and get every fallback's warning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashsmith.integrations.fallbacks import forget_warnings

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _every_fallback_warns_anew() -> None:
    forget_warnings()
