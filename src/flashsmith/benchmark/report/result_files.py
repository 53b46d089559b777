"""Reads result files. The kind of a file is recognised by its content, not by its name."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.measurement_files import MOST_BYTES, read_csv, read_lines, read_rows
from flashsmith.benchmark.ncu import read_profile
from flashsmith.benchmark.progression import KIND, Ablation
from flashsmith.benchmark.report import converted_rows
from flashsmith.benchmark.report.results import PASSED_OVER, Results, Source
from flashsmith.benchmark.roofline import Roofline
from flashsmith.benchmark.roofline.roofline_table import parse_roofline
from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.safe_json import UnusableTextError, read_json, read_text

_ROW_COLUMNS = {"contender", "kind", "seq_q", "verdict"}
# The figures of a row that are drawn and compared; each must lie in a usable range.
_FIGURES = ("ms", "best_ms", "spread", "tflops", "sm_clock_mhz", "power_w")
_MAY_BE_ZERO = ("spread", "sm_clock_mhz", "power_w")
SMALLEST, LARGEST = 1e-12, 1e12
_PROFILE_COLUMNS = {"config", "duration_us", "stalls"}
READS = (
    "rows of 'flashsmith bench' and 'tune' (.csv, .jsonl, .json, .parquet), the JSON of "
    "'flashsmith progression', 'roofline' and 'run', the CSV of 'flashsmith ncu', the table of "
    "'flashsmith roofline' (.txt); CSV and JSON also with .gz"
)
# The limit on decompressed data, because a small file may decompress to more than fits.
_MOST_DECOMPRESSED = 1 << 30


class _NoResult(ArgumentError):
    """A file that can be read but is not a result of flashsmith."""


def read_results(paths: Sequence[Path]) -> Results:
    """Reads all `paths` and combines their results.

    A file of an unknown kind is skipped, with a note in its Source, if at least one other file is
    of a known kind.

    Raises ArgumentError if a file is missing or damaged, or if no file is of a known kind. The
    message names the file and, if possible, the line or row.
    """
    results, unknown, seen = Results(), list[_NoResult](), set[str]()
    for path in paths:
        try:
            found = _read(path)
        except _NoResult as error:
            unknown.append(error)
            what = f"{PASSED_OVER}: not a result of flashsmith"
            found = Results(sources=(Source(path, what, 0),))
        found = _without(found, seen)
        parts = {one.name: getattr(results, one.name) + getattr(found, one.name) for one in _PARTS}
        results = Results(**parts)
    if unknown and len(unknown) == len(paths):
        raise unknown[0]
    return results


_PARTS = fields(Results)


def _without(results: Results, seen: set[str]) -> Results:
    """The results without the rows that an earlier file also contains, such as the CSV and the JSON
    of one run.

    `seen` are the rows of earlier files. The new rows are added to it.
    """
    left: dict[str, Any] = {}
    dropped = 0
    for name in ("rows", "profiles"):
        # Rows are compared as strings, because a NaN does not equal itself.
        texts = [(repr(row), row) for row in getattr(results, name)]
        left[name] = tuple(row for text, row in texts if text not in seen)
        dropped += len(texts) - len(left[name])
        seen.update(text for text, _ in texts)
    if not dropped:
        return results
    (source,) = results.sources
    what = f"{source.what}, {dropped:,} of them also in earlier files"
    return replace(results, **left, sources=(replace(source, what=what),))


def _read(path: Path) -> Results:
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "there is no such file"
        raise ArgumentError(f"{path}: {what}; give result files: {READS}")
    if path.suffix == ".gz":
        return _read_compressed(path)
    readers = {
        ".csv": _read_csv,
        ".json": _read_json,
        ".jsonl": _read_lines,
        ".parquet": _read_rows,
        ".txt": _read_text,
    }
    if path.suffix not in readers:
        raise ArgumentError(f"{path}: the ending must be {', '.join(readers)}; results are {READS}")
    return readers[path.suffix](path)


def _read_compressed(path: Path) -> Results:
    """Reads the results in a compressed file."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.stem
        try:
            with gzip.open(path) as compressed:
                content = compressed.read(_MOST_DECOMPRESSED + 1)
            if len(content) > _MOST_DECOMPRESSED:
                raise ArgumentError(f"{path}: decompresses to more than 1 GiB; split it")
            plain.write_bytes(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ArgumentError(f"{path}: cannot be decompressed: {error}") from error
        try:
            found = _read(plain)
        except ArgumentError as error:
            raise type(error)(str(error).replace(str(plain), str(path))) from error
    return replace(found, sources=tuple(replace(one, path=path) for one in found.sources))


def _read_text(path: Path) -> Results:
    """Reads the roofline from the table that 'flashsmith roofline' prints."""
    try:
        roofline = parse_roofline(read_text(path))
    except UnusableTextError as error:
        raise _NoResult(f"{path}{error.place}: {error}; results are {READS}") from error
    if roofline is None:
        raise _NoResult(
            f"{path}: the ending must be .csv, .json, .parquet, or .txt with the table of "
            f"'flashsmith roofline'; results are {READS}"
        )
    source = Source(path, "the roofline, as printed", len(roofline.ceilings))
    return Results(rooflines=(roofline,), sources=(source,))


def _rows(path: Path, what: str, rows: Sequence[Measurement]) -> Results:
    """The rows whose figures can be used. A row whose rate or time is NaN, infinite or negative can
    be neither drawn nor compared."""
    kept, left_out = [], []
    for number, row in enumerate(rows, 1):
        values = {name: getattr(row, name) for name in _FIGURES}
        unusable = [name for name, value in values.items() if not _is_figure(name, value)]
        left_out += [f"row {number}: {name} is {values[name]:g}" for name in unusable]
        blank: dict[str, Any] = dict.fromkeys(unusable)
        kept.append(replace(row, **blank) if blank else row)
    source = Source(path, what, len(rows), tuple(left_out))
    return Results(rows=tuple(kept), sources=(source,))


def _is_figure(name: str, value: float | None) -> bool:
    least = 0.0 if name in _MAY_BE_ZERO else SMALLEST
    return value is None or least <= value <= LARGEST


def _read_lines(path: Path) -> Results:
    records = read_lines(path)
    # The first line determines the kind of file, because a log may contain lines of several kinds,
    # and some of these also have a few of these names.
    if records and 2 * len(_ROW_COLUMNS & records[0].keys()) < len(_ROW_COLUMNS):
        shown = quoted(", ".join(records[0]), 120)[1:-1]
        raise _NoResult(
            f"{path}, row 1: these fields do not belong to a result: {shown}; results are {READS}"
        )
    profiled = any("ncu" in record for record in records)
    return _read_profile(path) if profiled else _read_rows(path)


def _read_rows(path: Path) -> Results:
    return _rows(path, "benchmark rows", read_rows(path))


# --- CSV -----------------------------------------------------------------------------------------


def _read_csv(path: Path) -> Results:
    columns, _ = read_csv(path)
    if set(columns) >= _ROW_COLUMNS:
        return _read_rows(path)
    if set(columns) >= converted_rows.SPEED_COLUMNS:
        return _rows(path, "rows of semantics-speed.csv", converted_rows.read_speed(path))
    if set(columns) >= _PROFILE_COLUMNS:
        return _read_profile(path)
    if not columns:
        raise _NoResult(f"{path}: is empty; results are {READS}")
    shown = quoted(", ".join(columns), 120)[1:-1]
    raise _NoResult(
        f"{path}, line 1: these columns do not belong to a result: {shown}; results are {READS}"
    )


def _read_profile(path: Path) -> Results:
    rows = tuple(read_profile(path))
    return Results(profiles=rows, sources=(Source(path, "profiled kernels", len(rows)),))


# --- JSON ----------------------------------------------------------------------------------------


def _read_json(path: Path) -> Results:
    value = _load(path)
    if isinstance(value, list):
        return _read_rows(path)
    try:
        found = _from_object(path, value) if isinstance(value, dict) else None
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error
    if found is None:
        raise _NoResult(f"{path}: is JSON, but not a result; results are {READS}")
    return found


def _load(path: Path) -> Any:
    try:
        return read_json(path, MOST_BYTES)
    except UnusableTextError as error:
        raise ArgumentError(f"{path}{error.place}: cannot be read: {error}") from error


def _from_object(path: Path, value: dict[str, Any]) -> Results | None:
    if value.get("kind") == KIND:
        ablation = Ablation.from_json(value)
        source = Source(path, "an ablation", len(ablation.steps))
        return Results(ablations=(ablation,), sources=(source,))
    if "ceilings" in value:
        roofline = Roofline.from_json(value)
        source = Source(path, "the roofline", len(roofline.ceilings))
        return Results(rooflines=(roofline,), sources=(source,))
    if "entries" in value and "environments" in value:
        what = f"a table of winners, which is not a measurement: {PASSED_OVER}"
        return Results(sources=(Source(path, what, 0),))
    if "kernels" in value and "backend" in value:
        return _rows(path, "kernels of 'flashsmith run'", converted_rows.rows_of_run(value))
    return None


def with_stored_rooflines(results: Results) -> Results:
    """The results, to which the rooflines are added that this machine has stored for the GPUs in
    the rows.

    Raises ArgumentError if a stored roofline is damaged.
    """
    from flashsmith.benchmark.roofline import load_roofline, roofline_path

    known = {roofline.gpu for roofline in results.rooflines}
    wanted = dict.fromkeys(row.gpu for row in results.rows if row.gpu and row.gpu not in known)
    try:
        for gpu in wanted:
            roofline_path(gpu)
    except ArgumentError:
        # Without a home folder, no roofline can be stored.
        return results
    stored = [found for gpu in wanted if (found := load_roofline(gpu)) is not None]
    return replace(results, rooflines=(*results.rooflines, *stored))
