"""RowFiles: where a benchmark's rows go while it runs, and when it ends, however it ends."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from flashsmith.benchmark.rows import (
    BenchRow,
    RowWriter,
    require_parquet,
    rows_as_csv,
    rows_as_json,
    write_rows,
)
from flashsmith.benchmark.writable import require_writable
from flashsmith.errors import ArgumentError

STDOUT = "-"


class RowFiles:
    """A CSV file that grows row by row, and JSON and Parquet files written at the end.

    '-' as CSV or JSON is standard output, at the end. A run that breaks off leaves the rows it has.

    Raises ArgumentError for a wrong ending, a file that cannot be written or two things for
    standard output, DependencyError for Parquet without pyarrow.
    """

    def __init__(
        self, csv: str | None = None, json: str | None = None, parquet: str | None = None
    ) -> None:
        if csv == json == STDOUT:
            raise ArgumentError("csv='-': json='-' as well; standard output takes one of them")
        for name, path in (("csv", csv), ("json", json), ("parquet", parquet)):
            to_stdout = path == STDOUT and name != "parquet"
            if path is not None and not to_stdout and Path(path).suffix != f".{name}":
                raise ArgumentError(f"{name}={path!r}: give a file that ends in .{name}")
            if path is not None and not to_stdout:
                require_writable(name, path)
        if parquet is not None:
            require_parquet()
        self._csv, self._json, self._parquet = csv, json, parquet
        self._rows: list[BenchRow] = []
        self._writer: RowWriter | None = None
        self._stack = ExitStack()

    @property
    def takes_stdout(self) -> bool:
        """Whether the rows take a table's place."""
        return STDOUT in (self._csv, self._json)

    def __enter__(self) -> RowFiles:
        if self._csv not in (None, STDOUT):
            self._writer = self._stack.enter_context(RowWriter(str(self._csv)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        if self._csv == STDOUT:
            rows_as_csv(self._rows, sys.stdout)
        if self._json == STDOUT:
            print(json.dumps(rows_as_json(self._rows), indent=2))
        elif self._json is not None:
            write_rows(self._json, self._rows)
        if self._parquet is not None:
            write_rows(self._parquet, self._rows)

    def write(self, row: BenchRow) -> None:
        """Takes a row as soon as it is made."""
        self._rows.append(row)
        if self._writer is not None:
            self._writer.write(row)
