"""Reads and writes measurement files.

JSON Lines and CSV files grow by one row at a time: each row is on disk before the next is measured.
JSON and Parquet files (extra 'parquet') are written as a whole. All have the fields of Measurement
as columns. Files of older versions can be read although columns have been added and removed.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, TextIO, TypeVar, Union, get_args, get_origin

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.records import for_json, hints_of, read_record, required_of
from flashsmith.builder.safe_files import written_beside
from flashsmith.errors import ArgumentError, DependencyError, install_extra
from flashsmith.printable import quoted
from flashsmith.safe_json import UnusableTextError, parse_json, read_json, read_text

# The maximum size of a measurement file that is read; files with ten million rows are smaller.
MOST_BYTES = 1 << 30
STDOUT = "-"
# Fields that have another name in files: field -> column.
_COLUMN_OF = {"implementation": "contender"}
_FIELD_OF = {column: field for field, column in _COLUMN_OF.items()}
# Nested fields, which only JSON files contain.
_PARTED = ("instructions", "conflicts")
COLUMNS = tuple(
    _COLUMN_OF.get(field.name, field.name)
    for field in fields(Measurement)
    if field.name not in _PARTED
)
_Row = TypeVar("_Row", bound=Measurement)
_Self = TypeVar("_Self", bound="GrowingFile")


def require_writable(option: str, path: str | Path) -> None:
    """Raises ArgumentError, which names `option`, if no file can be written at `path`.

    This is called before the work whose result will be written to the file. A missing folder is not
    created, because its name may be mistyped.
    """
    path = Path(path)
    folder = path.parent
    try:
        found = folder.exists()
    except OSError as error:
        raise ArgumentError(f"{option}={str(path)!r}: cannot be written: {error}") from error
    if not found:
        raise ArgumentError(
            f"{option}={str(path)!r}: there is no folder {str(folder)!r}; make it first, or give a "
            "file in another"
        )
    reason = ""
    if not folder.is_dir():
        reason = f"{str(folder)!r} is not a folder"
    elif path.is_dir():
        reason = "it is a folder"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "permission denied"
    if reason:
        raise ArgumentError(
            f"{option}={str(path)!r}: cannot be written: {reason}; give a file in a writable folder"
        )


# Columns that files of earlier versions lack; in rows that are read from such files, they are None.
_LATER_COLUMNS = {"d_v"}

# --- files that grow ------------------------------------------------------------------------------


class GrowingFile:
    """A file to which records with these `columns` are appended: JSON Lines if its name ends in
    .jsonl, otherwise CSV. An existing file is continued.

    A last line that was cut off by a crash or a full disk is removed first. It is used as a context
    manager.

    Raises ArgumentError if the file cannot be written or has other columns.
    """

    def __init__(self, path: str | Path, columns: tuple[str, ...] = COLUMNS) -> None:
        self.path = Path(path)
        self._lines = self.path.suffix == ".jsonl"
        option = "jsonl" if self._lines else "csv"
        require_writable(option, self.path)
        if self.path.exists() and not self.path.is_file():
            raise ArgumentError(f"{option}: {self.path} is not a regular file; give another file")
        if self._lines:
            self._check_lines()
        _drop_unfinished_line(self.path, quotes=not self._lines)
        begun = self.path.exists() and self.path.stat().st_size > 0
        if begun and not self._lines:
            columns = self._own_columns(columns)
        self._file = self.path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")
        if not begun and not self._lines:
            self._writer.writeheader()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends one line, which is on disk when the call returns.

        In CSV, a string of several lines is written on one line.
        """
        if self._lines:
            self._file.write(json.dumps(for_json(record)) + "\n")
        else:
            self._writer.writerow({name: _one_line(value) for name, value in record.items()})
        self._file.flush()
        os.fsync(self._file.fileno())

    def write(self, row: Measurement) -> None:
        """Appends a measurement."""
        if self._lines:
            self.append(_without_defaults(row))
        else:
            for name in _LATER_COLUMNS - {*self._writer.fieldnames}:
                if getattr(row, name) is not None:
                    raise ArgumentError(
                        f"csv: {self.path} was begun without the column {name}; give another file"
                    )
            self.append(_cells(row, self._writer.fieldnames))

    def _own_columns(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """The columns of an existing file; a file that an earlier version wrote lacks the columns
        that were added later."""
        try:
            known = read_csv(self.path)[0]
        except ArgumentError as error:
            raise ArgumentError(f"csv: {error}; give another file") from error
        if known not in (columns, tuple(it for it in columns if it not in _LATER_COLUMNS)):
            raise ArgumentError(
                f"csv: {self.path} has other columns than this version writes; give another file"
            )
        return known

    def _check_lines(self) -> None:
        """Checks that an existing file contains records of this kind, so that no other kind of file
        is changed."""
        try:
            for number, record in enumerate(read_lines(self.path) if self.path.exists() else (), 1):
                row_of(record, f"{self.path}, row {number}")
        except ArgumentError as error:
            raise ArgumentError(f"jsonl: {error}; give another file") from error


def _column(field: str) -> str:
    return _COLUMN_OF.get(field, field)


def _cells(row: Measurement, columns: Iterable[str]) -> dict[str, Any]:
    return {column: getattr(row, _FIELD_OF.get(column, column)) for column in columns}


def _one_line(value: Any) -> Any:
    if not isinstance(value, str) or "\n" not in value:
        return value
    return "; ".join(filter(None, (line.strip() for line in value.split("\n"))))


def _without_defaults(row: Measurement) -> dict[str, Any]:
    named = required_of(Measurement)
    return {
        _column(field.name): value
        for field in fields(row)
        if (value := getattr(row, field.name)) != field.default or field.name in named
    }


def _drop_unfinished_line(path: Path, *, quotes: bool) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    # If the number of quotes is odd, the record continues in the next line, within a quoted text.
    while quotes and content.count(b'"', 0, complete) % 2:
        complete = content.rfind(b"\n", 0, complete - 1) + 1
    if complete < len(content):
        os.truncate(path, complete)


class MeasurementFiles:
    """The files to which a run writes: JSON Lines and CSV files grow with each measurement; JSON
    and Parquet files are written at the end. An interrupted run keeps the measurements made so far.

    '-' for CSV or JSON means standard output, which is written at the end.

    Raises ArgumentError if a name ends in the wrong suffix, a file cannot be written, or two
    outputs go to standard output. Raises DependencyError for Parquet without pyarrow.
    """

    def __init__(
        self,
        csv: str | None = None,
        json: str | None = None,
        parquet: str | None = None,
        jsonl: str | None = None,
    ) -> None:
        if csv == json == STDOUT:
            raise ArgumentError("csv='-': json='-' as well; standard output takes one of them")
        given = {"csv": csv, "json": json, "parquet": parquet, "jsonl": jsonl}
        for name, path in given.items():
            if path is None or (path == STDOUT and name in ("csv", "json")):
                continue
            if Path(path).suffix != f".{name}":
                raise ArgumentError(f"{name}={path!r}: give a file that ends in .{name}")
            require_writable(name, path)
        if parquet is not None:
            require_parquet()
        self._csv, self._json, self._parquet, self._jsonl = csv, json, parquet, jsonl
        self._rows: list[Measurement] = []
        self._growing: list[GrowingFile] = []
        self._stack = ExitStack()

    @property
    def takes_stdout(self) -> bool:
        """Whether measurements go to standard output, in place of the table."""
        return STDOUT in (self._csv, self._json)

    def __enter__(self) -> MeasurementFiles:
        for path in (self._csv, self._jsonl):
            if path not in (None, STDOUT):
                self._growing.append(self._stack.enter_context(GrowingFile(str(path))))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        if self._csv == STDOUT:
            rows_as_csv(self._rows, sys.stdout)
        if self._json == STDOUT:
            print(json.dumps(rows_as_json(self._rows), indent=2))
        elif self._json is not None:
            write_rows(self._json, self._rows)
        if self._parquet is not None:
            write_rows(self._parquet, self._rows)

    def write(self, row: Measurement) -> None:
        """Records a measurement as soon as it is made."""
        self._rows.append(row)
        for file in self._growing:
            file.write(row)


# --- writing whole files --------------------------------------------------------------------------


def write_rows(path: str | Path, rows: Sequence[Measurement]) -> None:
    """Writes all measurements to a new file.

    Its suffix selects the format: .csv, .jsonl, .json or .parquet.

    Raises ArgumentError for another suffix, DependencyError for Parquet without pyarrow.
    """
    path = Path(path)
    writer = _by_ending(path, _WRITERS)
    with written_beside(path) as unfinished:
        writer(unfinished, rows)


def rows_as_csv(
    rows: Iterable[Measurement], file: TextIO, columns: tuple[str, ...] = COLUMNS
) -> None:
    """Writes a header and the rows to an open CSV file."""
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_cells(row, columns) for row in rows)


def rows_as_json(
    rows: Iterable[Measurement], columns: tuple[str, ...] = COLUMNS
) -> list[dict[str, Any]]:
    """The rows as JSON. Infinities and NaN, which JSON cannot represent, become strings."""
    return [
        for_json(_cells(row, [*columns, *(name for name in _PARTED if getattr(row, name))]))
        for row in rows
    ]


def require_parquet() -> None:
    """Raises DependencyError, which names the extra, if pyarrow is missing."""
    _pyarrow()


def _by_ending(path: Path, choices: dict[str, Any]) -> Any:
    if path.suffix not in choices:
        raise ArgumentError(f"{path}: the ending must be {' or '.join(choices)}")
    return choices[path.suffix]


def _write_csv(path: Path, rows: Iterable[Measurement]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows_as_csv(rows, file)


def _write_json(path: Path, rows: Iterable[Measurement]) -> None:
    path.write_text(json.dumps(rows_as_json(rows), indent=1) + "\n", encoding="utf-8")


def _write_lines(path: Path, rows: Iterable[Measurement]) -> None:
    lines = (json.dumps(for_json(_without_defaults(row))) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def _write_parquet(path: Path, rows: Iterable[Measurement]) -> None:
    pyarrow, parquet = _pyarrow()
    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema([(name, kinds[_stored_as(name)]) for name in COLUMNS])
    table = pyarrow.Table.from_pylist([_cells(row, COLUMNS) for row in rows], schema=schema)
    parquet.write_table(table, path)


def _stored_as(column: str) -> type:
    """The type of a column in files: int, float or str. Fields that allow only certain
    words are stored as str."""
    hint = hints_of(Measurement)[_FIELD_OF.get(column, column)]
    if get_origin(hint) in (Union, UnionType):
        hint = get_args(hint)[0]
    return hint if hint in (int, float) else str


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DependencyError(
            f"Parquet files need pyarrow: {install_extra('parquet')}, or write .csv or .json"
        ) from None
    return pyarrow, parquet


# --- reading --------------------------------------------------------------------------------------


def read_rows(path: str | Path) -> list[Measurement]:
    """Reads the measurements in a file; unknown columns are ignored.

    Raises ArgumentError if the suffix is unknown, the file is unreadable, a required column is
    missing, or a value does not fit its column.
    """
    path = Path(path)
    records = _by_ending(path, _READERS)(path)
    return [row_of(record, f"{path}, row {number}") for number, record in enumerate(records, 1)]


def row_of(record: Mapping[str, Any], where: str) -> Measurement:
    """Makes a measurement from a record, whose values may be strings.

    Messages of errors begin with ``where``.

    Raises ArgumentError if a required column is missing or a value does not fit its column.
    """
    return checked_row(Measurement, record, where, required_of(Measurement))


def checked_row(
    cls: type[_Row], record: Mapping[str, Any], where: str, required: Sequence[str]
) -> _Row:
    """Does the same as row_of() for any class of measurement; ``required`` are the required columns
    of that class."""
    missing = [
        _column(name)
        for name in required
        if record.get(name) is None and record.get(_column(name)) is None
    ]
    if missing:
        raise ArgumentError(
            f"{where}: lacks {', '.join(missing)}; these are not rows of a benchmark"
        )
    try:
        return read_record(cls, record, _COLUMN_OF)
    except ValueError as error:
        raise ArgumentError(f"{where}: {error}") from error


def read_csv(path: str | Path) -> tuple[tuple[str, ...], list[tuple[int, dict[str, str]]]]:
    """Reads the columns and rows of a CSV file.

    Each row is a list of strings, together with the number of its last line.

    Blank lines are ignored. A byte order mark and all kinds of line ends are accepted.

    Raises ArgumentError, which names the file and line, if the file is not UTF-8 or not CSV, if a
    column occurs twice, or if a row does not have one value for each column.
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
        raise ArgumentError(f"{where}: the column {quoted(twice, 80)} occurs twice")


def _read_csv(path: Path) -> list[dict[str, Any]]:
    return [dict(record) for _, record in read_csv(path)[1]]


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        records = read_json(path, MOST_BYTES)
    except UnusableTextError as error:
        raise ArgumentError(f"{path}{error.place}: cannot be read as json: {error}") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ArgumentError(f"{path}: must hold a list of objects, one per row")
    return records


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads one object per line. If the last line was cut off, it is left out."""
    try:
        text = read_text(path, MOST_BYTES)
    except UnusableTextError as error:
        raise ArgumentError(f"{path}{error.place}: cannot be read: {error}") from error
    records = []
    *lines, unfinished = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line) if line.strip() else None
        except UnusableTextError as error:
            raise ArgumentError(f"{path}, line {number}: cannot be read: {error}") from error
        if record is not None and not isinstance(record, dict):
            raise ArgumentError(f"{path}, line {number}: must hold an object, which is a row")
        if record is not None:
            records.append(record)
    with contextlib.suppress(UnusableTextError):
        if isinstance(last := parse_json(unfinished), dict):
            records.append(last)
    return records


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    pyarrow, parquet = _pyarrow()
    if not os.path.isfile(path):
        raise ArgumentError(f"{path}: cannot be read as parquet: it is not a file")
    try:
        records: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        # These messages may have many lines.
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"{path}: cannot be read as parquet: {reason}") from error
    return records


_WRITERS = {
    ".csv": _write_csv,
    ".jsonl": _write_lines,
    ".json": _write_json,
    ".parquet": _write_parquet,
}
_READERS = {
    ".csv": _read_csv,
    ".jsonl": read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
