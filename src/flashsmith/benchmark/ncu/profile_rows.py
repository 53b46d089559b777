"""ProfileRow: the profiler's measurements of one kernel on one problem; and files of such rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from flashsmith.benchmark.measurement import Kind, Measurement
from flashsmith.benchmark.measurement_files import (
    GrowingFile,
    checked_row,
    read_csv,
    read_lines,
    rows_as_csv,
    rows_as_json,
)
from flashsmith.benchmark.records import LARGEST
from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted


@dataclass(frozen=True, kw_only=True)
class ProfileRow(Measurement):
    """One kernel on one problem, with the counters of the profiler.

    The fields from duration_us on describe the call with the median duration, with cold caches
    and without control of the clocks. If a call has several launches, the fields are sums, or means
    weighted by duration.

    verdict: the result of checking the output before profiling; 'error' if the kernel cannot run
    here.
    note: why the check failed. If it passed: the duration of each launch of a call with several,
    and the columns for which this GPU has no counter.
    tensor_pct, mufu_pct, issue_pct: utilisation while the SMs were active.
    occupancy_pct, max_occupancy_pct: achieved and theoretical occupancy, as shares of the warps
    that an SM can hold.
    wavefronts, wavefronts_ideal: shared-memory wavefronts: the counted number, and the number
    without bank conflicts. emulated_wavefronts(_ideal): the same numbers from the emulator.
    l2_bytes: bytes through the L2 in both directions.
    stalls: why warps waited, in cycles per issued instruction, the longest first.
    """

    implementation: str = ""
    kind: Kind = "ours"
    duration_us: float | None = None
    tensor_pct: float | None = None
    mufu_pct: float | None = None
    issue_pct: float | None = None
    occupancy_pct: float | None = None
    max_occupancy_pct: float | None = None
    wavefronts: int | None = None
    wavefronts_ideal: int | None = None
    emulated_wavefronts: int | None = None
    emulated_wavefronts_ideal: int | None = None
    l2_bytes: int | None = None
    l2_hit_pct: float | None = None
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    stalls: str = ""
    ncu: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The config, problem and GPU, which identify a measurement: rows with the same key are
        repeats."""
        return self.config, str(self.problem), self.gpu


# The columns in the order that files have.
_IN_ORDER = """
    config family batch seq_q seq_k heads_q heads_k d dtype semantics gpu verdict note duration_us
    tflops sm_clock_mhz tensor_pct mufu_pct issue_pct occupancy_pct max_occupancy_pct registers
    smem_bytes wavefronts wavefronts_ideal emulated_wavefronts emulated_wavefronts_ideal l2_bytes
    l2_hit_pct dram_read_bytes dram_write_bytes stalls arch driver ncu flashsmith revision time
"""
COLUMNS = tuple(_IN_ORDER.split())
_REQUIRED = COLUMNS[: COLUMNS.index("note")]


class ProfileRowFile(GrowingFile):
    """A CSV or JSON Lines file to which ProfileRows are appended; ``rows`` are the rows that it
    already contains.

    Raises ArgumentError if the file exists but does not contain ProfileRows.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, COLUMNS)
        self.rows = read_profile(path)

    def write(self, row: Measurement) -> None:
        """Appends one row."""
        super().write(row)
        if isinstance(row, ProfileRow):
            self.rows.append(row)


def write_profile(rows: Iterable[ProfileRow], file: TextIO) -> None:
    """Writes a header and the rows to an open file."""
    rows_as_csv(rows, file, COLUMNS)


def read_profile(path: str | Path) -> list[ProfileRow]:
    """Reads the rows in a file. Raises ArgumentError if the file does not contain ProfileRows."""
    if Path(path).suffix == ".jsonl":
        return _rows(path, read_lines(Path(path)))
    try:
        columns, records = read_csv(path)
        if columns and columns != COLUMNS:
            raise ArgumentError(
                f"{path} has other columns than this version writes; give another file"
            )
        return _rows(path, [record for _, record in records])
    except ArgumentError as error:
        raise ArgumentError(f"csv: {error}") from error


def profile_as_json(rows: Iterable[ProfileRow]) -> list[dict[str, Any]]:
    """The rows as JSON."""
    return rows_as_json(rows, COLUMNS)


def _rows(path: str | Path, records: Sequence[Mapping[str, Any]]) -> list[ProfileRow]:
    return [_row(record, f"{path}, row {number}") for number, record in enumerate(records, 1)]


def _row(record: Mapping[str, Any], where: str) -> ProfileRow:
    row = checked_row(ProfileRow, record, where, _REQUIRED)
    for name in COLUMNS:
        value = getattr(row, name)
        # A count cannot be infinite or larger than what a GPU can do in a day.
        if isinstance(value, float) and not abs(value) <= LARGEST:
            raise ArgumentError(
                f"{where}: {name}={quoted(record[name], 80)} is not a float below {LARGEST:.0e}"
            )
    try:
        _ = row.key
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error
    return row
