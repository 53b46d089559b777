"""Tables and consoles: boxes and colour on a terminal, a plain Markdown table anywhere else.

Piped output is never wrapped, cut or coloured, so that a short form can be copied out of it; the
parser of short forms also reads the `| ... |` rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from flashsmith.printable import printable

# Wider than any line here: off a terminal nothing may wrap.
_UNWRAPPED = 10_000


# A Text carries a style, for terminals.
Cell = str | Text


@dataclass(frozen=True)
class Column:
    """One column: its heading ('\\n' stacks it on a terminal) and whether it aligns right."""

    heading: str
    right: bool = False


class _SafeConsole(Console):
    """A console that prints others' texts without their control characters."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(
            *(printable(item, lines=True) if isinstance(item, str) else item for item in objects),
            **options,
        )


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file` (standard output by default), plain unless that is a terminal.

    Control characters in texts and cells are shown escaped.
    """
    stream = file if file is not None else sys.stdout
    if stream.isatty():
        return _SafeConsole(file=stream, highlight=False)
    return _SafeConsole(
        file=stream, width=_UNWRAPPED, force_terminal=False, no_color=True, highlight=False
    )


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    """The rows as an aligned Markdown table."""
    headings = [column.heading.replace("\n", " ") for column in columns]
    texts = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, texts_below)) for texts_below in zip(headings, *texts, strict=True)]

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
    return "\n".join([line(headings), f"|{rule}|", *map(line, texts)])


def rich_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], narrow: bool = False
) -> Table:
    """The rows as a rich table; `narrow` keeps a single space between columns."""
    table = Table(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        padding=(0, 0 if narrow else 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        table.add_column(
            column.heading, justify="right" if column.right else "left", overflow="fold"
        )
    for row in rows:
        # Short forms would be read as markup, were they plain strings.
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return table


def fits(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> bool:
    """Whether the rows can be printed without folding a cell."""
    if not console.is_terminal:
        return True
    unbounded = console.options.update(max_width=_UNWRAPPED)
    return Measurement.get(console, unbounded, rich_table(columns, rows)).maximum <= console.width


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]
) -> None:
    """Print a table the way `console` can show it; a row has one cell per column."""
    if console.is_terminal:
        console.print(rich_table(columns, rows, narrow=not fits(console, columns, rows)))
    else:
        console.print(plain_table(columns, rows), markup=False, soft_wrap=True)
