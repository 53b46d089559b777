"""ProfileRow: what the profiler found out about one kernel on one problem; and the file of them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TextIO, get_args, get_type_hints

from flashsmith.benchmark.csv_append import CsvAppender
from flashsmith.benchmark.csv_read import read_csv
from flashsmith.benchmark.typed_records import LARGEST
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.printable import quoted


@dataclass(frozen=True)
class ProfileRow:
    """One kernel on one problem.

    verdict: of its output, before it was profiled; 'error' when it cannot run here. note: why, and
    which columns this GPU has no counter for. duration_us and what follows are the profiler's, of
    the launch with the median duration, with cold caches and the clocks as they were:
    tensor_pct, mufu_pct, issue_pct: of what these could do while the SMs were active.
    occupancy_pct, max_occupancy_pct: resident warps, reached and possible. wavefronts: trips to
    shared memory, wavefronts_ideal: without bank conflicts; emulated_wavefronts(_ideal): what the
    emulator counts for the same launch. l2_bytes: through L2 in both directions.
    stalls: why warps waited, worst first, in cycles per instruction issued.
    """

    config: str
    family: str
    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_k: int
    d: int
    dtype: str
    semantics: str
    gpu: str
    verdict: Literal["pass", "fail", "error"]
    note: str = ""
    duration_us: float | None = None
    tflops: float | None = None
    sm_clock_mhz: float | None = None
    tensor_pct: float | None = None
    mufu_pct: float | None = None
    issue_pct: float | None = None
    occupancy_pct: float | None = None
    max_occupancy_pct: float | None = None
    registers: int | None = None
    smem_bytes: int | None = None
    wavefronts: int | None = None
    wavefronts_ideal: int | None = None
    emulated_wavefronts: int | None = None
    emulated_wavefronts_ideal: int | None = None
    l2_bytes: int | None = None
    l2_hit_pct: float | None = None
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    stalls: str = ""
    arch: int = 0
    driver: str = ""
    ncu: str = ""
    flashsmith: str = ""
    revision: str = ""
    time: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes two rows the same measurement: config, problem and GPU."""
        return self.config, str(self.problem), self.gpu

    @property
    def problem(self) -> Problem:
        """The problem that was profiled."""
        return Problem.parse(
            f"b{self.batch} s{self.seq_q}:{self.seq_k} h{self.heads_q}:{self.heads_k} d{self.d} "
            f"{self.dtype} {self.semantics}"
        )


COLUMNS = tuple(column.name for column in fields(ProfileRow))
_VERDICTS = ("pass", "fail", "error")
_LONGEST_NUMBER = 100
_REQUIRED = tuple(column.name for column in fields(ProfileRow) if column.default is MISSING)


class Ledger(CsvAppender):
    """A CSV file of ProfileRows that grows; what it holds is in ``rows``.

    Raises ArgumentError when it is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, COLUMNS)
        self.rows = read_profile(path)

    def write(self, row: ProfileRow) -> None:
        """Appends one row."""
        self.append(asdict(row))
        self.rows.append(row)


def write_profile(rows: Iterable[ProfileRow], file: TextIO) -> None:
    """Header and rows into an open file."""
    writer = _writer(file)
    writer.writeheader()
    writer.writerows(map(asdict, rows))


def read_profile(path: str | Path) -> list[ProfileRow]:
    """The rows of a file. Raises ArgumentError when it is no file of ProfileRows."""
    try:
        columns, records = read_csv(path)
    except ArgumentError as error:
        raise ArgumentError(f"csv: {error}") from error
    if columns and columns != COLUMNS:
        raise ArgumentError(
            f"csv: {path} has other columns than this version writes; give another file"
        )
    return [_row(record, f"{path}, row {number}") for number, (_, record) in enumerate(records, 1)]


def _writer(file: TextIO) -> csv.DictWriter[str]:
    return csv.DictWriter(file, COLUMNS, lineterminator="\n")


def _row(record: dict[str, str], where: str) -> ProfileRow:
    try:
        row = ProfileRow(**{name: _value(name, text) for name, text in record.items()})
        _ = row.key
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"csv: {where}: {error}") from error
    return row


def _value(name: str, text: str) -> Any:
    kind = _TYPES[name]
    if text == "" and kind is not str:
        if name in _REQUIRED:
            raise ValueError(f"{name} is empty")
        return None
    if kind is str:
        if name == "verdict" and text not in _VERDICTS:
            raise ValueError(f"verdict={quoted(text, 80)}: allowed are {', '.join(_VERDICTS)}")
        return text
    try:
        value = kind(text) if text.isascii() and len(text) <= _LONGEST_NUMBER else math.nan
    except ValueError:
        value = math.nan
    # Nothing that a profiler counts is infinite, or more than all that a GPU does in a day.
    if not abs(value) <= LARGEST:
        raise ValueError(f"{name}={quoted(text, 80)} is no {kind.__name__} below {LARGEST:.0e}")
    return value


def _column_types() -> dict[str, type]:
    types: dict[str, type] = {}
    for name, hint in get_type_hints(ProfileRow).items():
        members = get_args(hint)
        types[name] = members[0] if type(None) in members else str if members else hint
    return types


_TYPES = _column_types()
