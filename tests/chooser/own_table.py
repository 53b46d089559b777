"""A fixture that keeps tests from the user's own table of winners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashsmith.chooser import forget_choices


@pytest.fixture(autouse=True)
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user's table would be; there is none yet."""
    path = tmp_path / "own" / "winners.json"
    monkeypatch.setenv("FLASHSMITH_TABLE", str(path))
    forget_choices()
    yield path
    forget_choices()
