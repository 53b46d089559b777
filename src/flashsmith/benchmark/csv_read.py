"""CSV files that others wrote, as records of text: every row has a value for every column."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.untrusted import UnusableTextError, read_text

# Of a file of results; ten million rows are below it.
MOST_BYTES = 1 << 30


def read_csv(path: str | Path) -> tuple[tuple[str, ...], list[tuple[int, dict[str, str]]]]:
    """The columns of a CSV file, and its rows, each with the number of its last line.

    Blank lines do not count; a byte order mark and any line ends are accepted.

    Raises ArgumentError, naming file and line, when it is no UTF-8 text or no CSV, a column stands
    there twice, or a row has more or fewer values than there are columns.
    """
    try:
        text = read_text(path, MOST_BYTES)
    except UnusableTextError as error:
        raise ArgumentError(f"{path}{error.place}: cannot be read: {error}") from error
    reader = csv.reader(io.StringIO(text, newline=""))
    columns: tuple[str, ...] = ()
    records: list[tuple[int, dict[str, str]]] = []
    try:
        for values in reader:
            if not columns:
                columns = tuple(values)
                _check_columns(columns, f"{path}, line {reader.line_num}")
            elif values:
                if len(values) != len(columns):
                    raise ArgumentError(
                        f"{path}, line {reader.line_num}: has {len(values)} values for "
                        f"{len(columns)} columns"
                    )
                records.append((reader.line_num, dict(zip(columns, values, strict=True))))
    except csv.Error as error:
        raise ArgumentError(
            f"{path}, line {reader.line_num}: cannot be read as CSV: {error}"
        ) from error
    return columns, records


def _check_columns(columns: tuple[str, ...], where: str) -> None:
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError(f"{where}: the column {quoted(twice, 80)} stands there twice")
