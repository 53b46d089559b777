"""A CSV file that grows a row at a time, each on the disk before the next is measured."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from flashsmith.benchmark.csv_read import read_csv
from flashsmith.benchmark.writable import require_writable
from flashsmith.errors import ArgumentError

_Self = TypeVar("_Self", bound="CsvAppender")


class CsvAppender:
    """Appends records of `columns` to `path`; a file that is there is continued.

    A last line that was cut off, by a crash or a full disk, is taken away first. Use as a context
    manager.

    Raises ArgumentError when the file has other columns or cannot be written.
    """

    def __init__(self, path: str | Path, columns: tuple[str, ...]) -> None:
        self.path = Path(path)
        require_writable("csv", self.path)
        if self.path.exists() and not self.path.is_file():
            raise ArgumentError(f"csv: {self.path} is no regular file; give another file")
        _drop_unfinished_line(self.path)
        begun = self.path.exists() and self.path.stat().st_size > 0
        if begun and _header(self.path) != columns:
            raise ArgumentError(
                f"csv: {self.path} has other columns than this version writes; give another file"
            )
        self._file = self.path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")
        if not begun:
            self._writer.writeheader()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """One more line, on the disk when the call returns; texts of several lines become one."""
        self._writer.writerow({name: _one_line(value) for name, value in record.items()})
        self._file.flush()
        os.fsync(self._file.fileno())


def _one_line(value: Any) -> Any:
    if not isinstance(value, str) or "\n" not in value:
        return value
    return "; ".join(filter(None, (line.strip() for line in value.split("\n"))))


def _header(path: Path) -> tuple[str, ...]:
    try:
        return read_csv(path)[0]
    except ArgumentError as error:
        raise ArgumentError(f"csv: {error}; give another file") from error


def _drop_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    # An odd number of quotes: the line goes on, within one.
    while content.count(b'"', 0, complete) % 2:
        complete = content.rfind(b"\n", 0, complete - 1) + 1
    if complete < len(content):
        os.truncate(path, complete)
