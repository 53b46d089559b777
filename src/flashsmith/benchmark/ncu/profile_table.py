"""Prints profiled kernels as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from flashsmith.benchmark.ncu.profile_rows import ProfileRow
from flashsmith.benchmark.table import make_columns, print_table, print_text

_COLUMNS = make_columns(
    "kernel | problem | us> | TFLOP/s> | MHz> | tensor\n%> | MUFU\n%> | issue\n%> | "
    "occupancy\n% of %> | regs> | wavefronts\nover ideal> | emulated> | L2\nGB> | DRAM\nGB> | "
    "DRAM\nTB/s> | waits, cycles per issue~ | note~"
)


def print_profile(console: Console, rows: Sequence[ProfileRow]) -> None:
    """Prints the rows as a table, in the order given."""
    print_table(console, _COLUMNS, [_cells(row) for row in rows])
    if any(row.verdict == "pass" for row in rows):
        print_text(
            console,
            "Each kernel ran alone, with caches cold and without clock control. TFLOP/s come from "
            "the profiler; 'flashsmith bench' is more accurate. wavefronts: of shared memory.",
        )


def _cells(row: ProfileRow) -> tuple[str, ...]:
    occupancy = f"{_number(row.occupancy_pct)} of {_number(row.max_occupancy_pct)}"
    dram = None
    if row.dram_read_bytes is not None and row.dram_write_bytes is not None:
        dram = row.dram_read_bytes + row.dram_write_bytes
    return (
        row.config,
        str(row.problem),
        _number(row.duration_us, 1),
        _number(row.tflops),
        _number(row.sm_clock_mhz),
        _number(row.tensor_pct, 1),
        _number(row.mufu_pct, 1),
        _number(row.issue_pct, 1),
        occupancy if row.occupancy_pct is not None else "",
        _number(row.registers),
        _ratio(row.wavefronts, row.wavefronts_ideal),
        _ratio(row.emulated_wavefronts, row.emulated_wavefronts_ideal),
        _number(row.l2_bytes, 2, 1e-9),
        _number(dram, 2, 1e-9),
        _number(dram / row.duration_us if dram and row.duration_us else None, 2, 1e-6),
        row.stalls,
        row.note if row.verdict == "pass" else f"{row.verdict.upper()}: {row.note}",
    )


def _number(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:.{digits}f}"


def _ratio(actual: int | None, ideal: int | None) -> str:
    return f"{actual / ideal:.2f}x" if actual is not None and ideal else ""
