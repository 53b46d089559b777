"""Files are found unwritable before any work is done for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashsmith.benchmark.measurement_files import require_writable
from flashsmith.errors import ArgumentError


def test_nothing_is_made_and_nothing_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"csv='.*': there is no folder '.*/a/b'; make it"):
        require_writable("csv", tmp_path / "a" / "b" / "rows.csv")
    assert not (tmp_path / "a").exists()
    path = tmp_path / "rows.csv"
    require_writable("csv", path)
    assert not path.exists()
    path.write_text("kept")
    require_writable("csv", path)
    assert path.read_text() == "kept"


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"json='.*file/rows\.json': cannot be written: "):
        require_writable("json", tmp_path / "file" / "rows.json")
    with pytest.raises(ArgumentError, match="it is a folder"):
        require_writable("json", tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ArgumentError, match="permission denied"):
        require_writable("json", tmp_path / "rows.json")
