"""The reader of measurements, under the name that the docs have had for it."""

from flashsmith.benchmark.measurement import Measurement as BenchRow
from flashsmith.benchmark.measurement import Verdict, now, problem_columns
from flashsmith.benchmark.measurement_files import (
    read_rows,
    row_of,
    rows_as_csv,
    rows_as_json,
    write_rows,
)

__all__ = [
    "BenchRow",
    "Verdict",
    "now",
    "problem_columns",
    "read_rows",
    "row_of",
    "rows_as_csv",
    "rows_as_json",
    "write_rows",
]
