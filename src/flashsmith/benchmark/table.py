"""Tables and consoles: boxes and colour on a terminal, a plain Markdown table anywhere else.

Piped output is never wrapped, cut or coloured, so that a short form can be copied out of it; the
parser of short forms also reads the `| ... |` rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# Wider than any line here: off a terminal nothing may wrap.
_UNWRAPPED = 10_000


@dataclass(frozen=True)
class Column:
    """One column: its heading ('\\n' stacks it on a terminal) and whether it aligns right."""

    heading: str
    right: bool = False


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file` (standard output by default), plain unless that is a terminal."""
    stream = file if file is not None else sys.stdout
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(
        file=stream, width=_UNWRAPPED, force_terminal=False, no_color=True, highlight=False
    )


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """The rows as an aligned Markdown table."""
    headings = [column.heading.replace("\n", " ") for column in columns]
    widths = [
        max(len(heading), *(len(row[place]) for row in rows)) if rows else len(heading)
        for place, heading in enumerate(headings)
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = "|".join(
        "-" * (width + 1) + (":" if column.right else "-")
        for width, column in zip(widths, columns, strict=True)
    )
    return "\n".join([line(headings), f"|{rule}|", *map(line, rows)])


def rich_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], row_styles: Sequence[str] | None
) -> Table:
    """The rows as a rich table; `row_styles` names one style a row."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(
            column.heading, justify="right" if column.right else "left", overflow="fold"
        )
    for position, row in enumerate(rows):
        table.add_row(
            *(Text(cell) for cell in row), style=row_styles[position] if row_styles else ""
        )
    return table


def fits(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the rows can be printed without folding a cell."""
    if not console.is_terminal:
        return True
    unbounded = console.options.update(max_width=_UNWRAPPED)
    needed = Measurement.get(console, unbounded, rich_table(columns, rows, None))
    return needed.maximum <= console.width


def print_table(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    row_styles: Sequence[str] | None = None,
) -> None:
    """Print a table the way `console` can show it; a row has one text per column."""
    if console.is_terminal:
        console.print(rich_table(columns, rows, row_styles))
    else:
        console.print(plain_table(columns, rows), markup=False, soft_wrap=True)
