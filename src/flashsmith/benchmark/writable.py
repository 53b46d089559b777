"""Whether a file can be written, asked before the work whose result it is to hold."""

from __future__ import annotations

import os
from pathlib import Path

from flashsmith.errors import ArgumentError


def require_writable(option: str, path: str | Path) -> None:
    """Makes the folder of `path`, and raises ArgumentError naming `option` unless a file can be
    written there."""
    path = Path(path)
    reason = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = str(error)
    if not reason and path.is_dir():
        reason = "it is a folder"
    elif not reason and not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    if reason:
        raise ArgumentError(
            f"{option}={str(path)!r}: cannot be written: {reason}; give a file in a folder of yours"
        )
