"""Makes this folder's helper modules importable, and keeps the tests from the user's own table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashsmith.tuning import forget_choices

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user's table would be; there is none yet."""
    path = tmp_path / "own" / "winners.json"
    monkeypatch.setenv("FLASHSMITH_TABLE", str(path))
    forget_choices()
    yield path
    forget_choices()
