"""The profiler's raw page as CSV: one launch a line, one metric a column, units in the second."""

from __future__ import annotations

import csv
from dataclasses import dataclass

_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# What `--print-units base` gives; some versions spell the unit out, some scale it all the same.
_BASE = {"byte": 1.0, "hz": 1.0, "second": 1e9, "s": 1e9}
_NAME = "Kernel Name"
_IDENTITY = "ID"


@dataclass(frozen=True)
class ProfiledLaunch:
    """One launch: its kernel's name as the profiler prints it, and its metrics in base units
    (nanoseconds, bytes, hertz, per cent)."""

    kernel: str
    metrics: dict[str, float]


class CutOff(ValueError):
    """The page ends within a line. `launches` are those before it."""

    def __init__(self, launches: list[ProfiledLaunch]) -> None:
        super().__init__(f"the profiler's page ends within the line of launch {len(launches)}")
        self.launches = launches


def parse_raw_page(text: str) -> list[ProfiledLaunch]:
    """The launches on a page, in the order they ran; lines around the page are passed over.

    Cells that hold no number are left out. Raises ValueError where there is no page, and CutOff
    where it ends too early.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines:
        raise ValueError("the profiler printed no page of metrics")
    header, *rows = csv.reader(lines)
    if _NAME not in header or _IDENTITY not in header:
        raise ValueError(f"the profiler's page has no column {_NAME!r}")
    # Every cell is quoted, and a quote within one is doubled.
    closed = lines[-1].count('"') % 2 == 0 and lines[-1].endswith('"')
    if len((rows or [header])[-1]) < len(header) or not closed:
        raise CutOff(_launches(header, rows[:-1]))
    return _launches(header, rows)


def _launches(header: list[str], rows: list[list[str]]) -> list[ProfiledLaunch]:
    if not rows:
        return []
    units = dict(zip(header, rows[0], strict=True))
    # The line of units names no launch.
    launches = rows[1:] if not units[_IDENTITY] else rows
    units = units if not units[_IDENTITY] else {}
    found = []
    for row in launches:
        cells = dict(zip(header, row, strict=True))
        numbers = {
            name: number * _factor(units.get(name, ""))
            for name, cell in cells.items()
            if (number := _number(cell)) is not None
        }
        found.append(ProfiledLaunch(cells[_NAME], numbers))
    return found


def _number(cell: str) -> float | None:
    try:
        number = float(cell.replace(",", ""))
    except ValueError:
        return None
    return number if number == number else None


def _factor(unit: str) -> float:
    """From a unit to its base: ns, bytes or hertz."""
    for base, to_base in _BASE.items():
        if unit == base:
            return to_base
        if unit[1:] == base and unit[0] in _PREFIXES:
            return _PREFIXES[unit[0]] * to_base
    return 1.0
