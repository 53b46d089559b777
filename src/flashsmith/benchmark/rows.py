"""BenchRow: one contender on one problem, with everything the figure depends on; and its files.

CSV grows row by row; JSON and Parquet (extra 'parquet') are written whole. All three hold the same
columns, those of BenchRow, and read back as they were.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TextIO, get_args, get_type_hints

from flashsmith.benchmark.csv_append import CsvAppender
from flashsmith.benchmark.csv_read import MOST_BYTES, read_csv
from flashsmith.benchmark.json_numbers import for_json
from flashsmith.benchmark.typed_records import LARGEST, MOST_CHARACTERS
from flashsmith.builder.safe_files import written_beside
from flashsmith.errors import ArgumentError, DependencyError, install_extra
from flashsmith.families import Problem
from flashsmith.printable import quoted
from flashsmith.untrusted import UnusableTextError, read_json

Kind = Literal["ours", "peer"]
Verdict = Literal["pass", "fail", "absent", "error"]


@dataclass(frozen=True)
class BenchRow:
    """One contender on one problem.

    contender: its name in tables. family and config are a kernel's of ours ('' for a peer), the
    one that served where attention() chose. semantics: the problem's words, or 'plain'; batch and
    lengths as in Problem. verdict: of its output, before it was timed; 'absent' for a peer that
    cannot take part, 'error' for a kernel that did not come to its end. note: why, or a peer's
    version. ms: the median; spread: interquartile range over it; tflops: 4 b h s_q s_k d, halved
    when causal, over the median. max_error, error_bound, rel_l2: against float64. sm_clock_mhz and
    power_w: while it was timed. registers: per thread; spill_bytes: spilled stores and loads per
    thread; smem_bytes: of a CTA. The rest is Environment's, and when the row was made (UTC, ISO).
    """

    contender: str
    kind: Kind
    family: str
    config: str
    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_k: int
    d: int
    dtype: str
    semantics: str
    verdict: Verdict
    note: str = ""
    ms: float | None = None
    best_ms: float | None = None
    spread: float | None = None
    tflops: float | None = None
    max_error: float | None = None
    error_bound: float | None = None
    rel_l2: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    protocol: str = ""
    registers: int | None = None
    spill_bytes: int | None = None
    smem_bytes: int | None = None
    ctas_per_sm: int | None = None
    gpu: str = ""
    arch: int = 0
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    flashsmith: str = ""
    revision: str = ""
    python: str = ""
    time: str = ""

    @property
    def problem(self) -> Problem:
        """The problem that was timed. Raises ArgumentError for a row that names none."""
        return Problem.parse(
            f"b{self.batch} s{self.seq_q}:{self.seq_k} h{self.heads_q}:{self.heads_k} d{self.d} "
            f"{self.dtype} {self.semantics}"
        )


def problem_columns(problem: Problem) -> dict[str, Any]:
    """BenchRow's columns that name the problem."""
    return {
        **{name: getattr(problem, name) for name in _PROBLEM_SIZES},
        "dtype": problem.dtype.name.lower(),
        "semantics": problem.kind,
    }


def now() -> str:
    """The time, as rows have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_rows(path: str | Path, rows: Sequence[BenchRow]) -> None:
    """Writes all rows into a new file: .csv, .json or .parquet, by its ending.

    Raises ArgumentError for another ending, DependencyError for Parquet without pyarrow.
    """
    path = Path(path)
    writer = _by_ending(
        path, {".csv": _write_csv, ".json": _write_json, ".parquet": _write_parquet}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(path) as unfinished:
        writer(unfinished, rows)


def read_rows(path: str | Path) -> list[BenchRow]:
    """The rows of a file; columns that BenchRow does not have are passed over.

    Raises ArgumentError when the file is none of the three kinds, cannot be read, lacks a column
    without which a row means nothing, or has a value that its column cannot hold.
    """
    path = Path(path)
    reader = _by_ending(path, _READERS)
    records = reader(path)
    return [row_of(record, f"{path}, row {number}") for number, record in enumerate(records, 1)]


class RowWriter(CsvAppender):
    """Appends rows to a CSV file.

    Raises ArgumentError when the file's ending is not .csv, or it has other columns than BenchRow.
    """

    def __init__(self, path: str | Path) -> None:
        _by_ending(Path(path), {".csv": None})
        super().__init__(path, COLUMNS)

    def write(self, row: BenchRow) -> None:
        """Appends one row."""
        self.append(asdict(row))


def rows_as_csv(rows: Iterable[BenchRow], file: TextIO) -> None:
    """Writes header and rows into an open file."""
    writer = _csv_writer(file)
    writer.writeheader()
    writer.writerows(map(asdict, rows))


def rows_as_json(rows: Iterable[BenchRow]) -> list[dict[str, Any]]:
    """The rows as JSON takes them: infinities and NaN, which it lacks, as words."""
    return [for_json(asdict(row)) for row in rows]


def require_parquet() -> None:
    """Raises DependencyError, naming the extra, where Parquet files cannot be written."""
    _pyarrow()


COLUMNS = tuple(column.name for column in fields(BenchRow))
_PROBLEM_SIZES = ("batch", "seq_q", "seq_k", "heads_q", "heads_k", "d")


def _by_ending(path: Path, choices: dict[str, Any]) -> Any:
    if path.suffix not in choices:
        raise ArgumentError(f"{path}: the ending must be {' or '.join(choices)}")
    return choices[path.suffix]


# --- writing -------------------------------------------------------------------------------------


def _csv_writer(file: TextIO) -> csv.DictWriter[str]:
    return csv.DictWriter(file, COLUMNS, lineterminator="\n")


def _write_csv(path: Path, rows: Iterable[BenchRow]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows_as_csv(rows, file)


def _write_json(path: Path, rows: Iterable[BenchRow]) -> None:
    path.write_text(json.dumps(rows_as_json(rows), indent=1) + "\n", encoding="utf-8")


def _write_parquet(path: Path, rows: Iterable[BenchRow]) -> None:
    pyarrow, parquet = _pyarrow()
    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, (kind, _) in _TYPES.items()])
    table = pyarrow.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    parquet.write_table(table, path)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DependencyError(
            f"Parquet files need pyarrow: {install_extra('parquet')}, or write .csv or .json"
        ) from None
    return pyarrow, parquet


# --- reading -------------------------------------------------------------------------------------


def _read_csv(path: Path) -> list[dict[str, Any]]:
    return [dict(record) for _, record in read_csv(path)[1]]


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        records = read_json(path, MOST_BYTES)
    except UnusableTextError as error:
        raise ArgumentError(f"{path}{error.place}: cannot be read as json: {error}") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ArgumentError(f"{path}: must hold a list of objects, one a row")
    return records


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    pyarrow, parquet = _pyarrow()
    if not os.path.isfile(path):
        raise ArgumentError(f"{path}: cannot be read as parquet: it is no file")
    try:
        records: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        # Their messages go on for lines.
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"{path}: cannot be read as parquet: {reason}") from error
    return records


def row_of(record: Mapping[str, Any], where: str) -> BenchRow:
    """The row of a record, whose values may be texts; ``where`` begins the errors' messages.

    Raises ArgumentError when it lacks a column without which a row means nothing, or has a value
    that its column cannot hold.
    """
    missing = [name for name in _REQUIRED if record.get(name) is None]
    if missing:
        raise ArgumentError(
            f"{where}: lacks {', '.join(missing)}; these are no rows of a benchmark"
        )
    known = {name: record[name] for name in COLUMNS if record.get(name) is not None}
    return BenchRow(**{name: _value(name, value, where) for name, value in known.items()})


def _value(name: str, value: Any, where: str) -> Any:
    kind, optional = _TYPES[name]
    if value == "" and optional:
        return None
    found = _READ[kind](value)
    if found is None:
        raise ArgumentError(f"{where}: {name}={quoted(value, 80)} is no {kind.__name__}")
    if name in _CHOICES and found not in _CHOICES[name]:
        allowed = ", ".join(_CHOICES[name])
        raise ArgumentError(f"{where}: {name}={quoted(value, 80)}: allowed are {allowed}")
    return found


def _text(value: Any) -> str | None:
    if isinstance(value, str) and len(value) <= MOST_CHARACTERS:
        with contextlib.suppress(UnicodeEncodeError):  # Parquet does not look
            value.encode()
            return value
    return None


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) <= LARGEST else None


def _number(value: Any) -> float | None:
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER and value.isascii():
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is int and abs(value) <= LARGEST:
        return float(value)
    return value if isinstance(value, float) else None


_READ: dict[type, Callable[[Any], Any]] = {str: _text, int: _whole, float: _number}
_WHOLE = re.compile(r"-?\d{1,19}", re.ASCII)
_LONGEST_NUMBER = 100
_CHOICES = {"kind": get_args(Kind), "verdict": get_args(Verdict)}


def _column_types() -> dict[str, tuple[type, bool]]:
    """Of every column: str, int or float, and whether it may be None."""
    types: dict[str, tuple[type, bool]] = {}
    for name, hint in get_type_hints(BenchRow).items():
        members = get_args(hint)
        optional = type(None) in members
        literal = bool(members) and not optional
        types[name] = (str if literal else members[0] if optional else hint, optional)
    return types


_TYPES = _column_types()
_REQUIRED = tuple(column.name for column in fields(BenchRow) if column.default is MISSING)
_READERS = {".csv": _read_csv, ".json": _read_json, ".parquet": _read_parquet}
