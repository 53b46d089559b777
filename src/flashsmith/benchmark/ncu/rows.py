"""ProfileRow: what the profiler found out about one kernel on one problem; and the file of them."""

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
    """A measurement that the profiler took: one kernel on one problem, with what was counted.

    verdict: of its output, before it was profiled; 'error' when it cannot run here. note: why, how
    long each launch of a call with several took, and which columns this GPU has no counter for.
    duration_us and what follows are the profiler's, of the call with the median duration, with cold
    caches and the clocks as they were; of several launches sums, or means by duration:
    tensor_pct, mufu_pct, issue_pct: of what these could do while the SMs were active.
    occupancy_pct, max_occupancy_pct: resident warps, reached and possible. wavefronts: of shared
    memory, wavefronts_ideal: without bank conflicts; emulated_wavefronts(_ideal): what the
    emulator counts for the same launch. l2_bytes: through L2 in both directions.
    stalls: why warps waited, worst first, in cycles per instruction issued.
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
        """What makes two rows the same measurement: config, problem and GPU."""
        return self.config, str(self.problem), self.gpu


# In the order of the file.
_IN_ORDER = """
    config family batch seq_q seq_k heads_q heads_k d dtype semantics gpu verdict note duration_us
    tflops sm_clock_mhz tensor_pct mufu_pct issue_pct occupancy_pct max_occupancy_pct registers
    smem_bytes wavefronts wavefronts_ideal emulated_wavefronts emulated_wavefronts_ideal l2_bytes
    l2_hit_pct dram_read_bytes dram_write_bytes stalls arch driver ncu flashsmith revision time
"""
COLUMNS = tuple(_IN_ORDER.split())
_REQUIRED = COLUMNS[: COLUMNS.index("note")]


class Ledger(GrowingFile):
    """A file of ProfileRows that grows, CSV or JSON Lines; what it holds is in ``rows``.

    Raises ArgumentError when it is no such file.
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
    """Header and rows into an open file."""
    rows_as_csv(rows, file, COLUMNS)


def read_profile(path: str | Path) -> list[ProfileRow]:
    """The rows of a file. Raises ArgumentError when it is no file of ProfileRows."""
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
    """The rows as JSON takes them."""
    return rows_as_json(rows, COLUMNS)


def _rows(path: str | Path, records: Sequence[Mapping[str, Any]]) -> list[ProfileRow]:
    return [_row(record, f"{path}, row {number}") for number, record in enumerate(records, 1)]


def _row(record: Mapping[str, Any], where: str) -> ProfileRow:
    row = checked_row(ProfileRow, record, where, _REQUIRED)
    for name in COLUMNS:
        value = getattr(row, name)
        # Nothing that a profiler counts is infinite, or more than all that a GPU does in a day.
        if isinstance(value, float) and not abs(value) <= LARGEST:
            raise ArgumentError(
                f"{where}: {name}={quoted(record[name], 80)} is no float below {LARGEST:.0e}"
            )
    try:
        _ = row.key
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error
    return row
