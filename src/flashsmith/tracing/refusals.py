"""Errors of tracing: what a function does that cannot be traced, and where."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import NoReturn

from flashsmith.errors import TraceError

_PACKAGE = str(Path(__file__).parent.parent)


class NeedsValue(BaseException):
    """A function needs the value of captured numbers, for example to choose a branch.

    It is not an Exception, so that the function does not handle it.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self.names = names


def source_line() -> str:
    """Where the traced function is: file, line number and text of the line."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and "/torch/" not in name and "/numpy/" not in name:
            line = linecache.getline(name, frame.f_lineno).strip()
            where = f"{Path(name).name}:{frame.f_lineno}"
            return f"{where}: {line}" if line else where
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def refuse(operation: str, instead: str) -> NoReturn:
    """Raises TraceError for an operation of the traced function."""
    raise TraceError(f"{operation} cannot be traced ({source_line()}); {instead}")
