"""Tables and consoles: boxes and colours on a terminal, plain Markdown tables elsewhere.

On a terminal, tables fit the width without breaking words. Prose is wrapped, and long cells become
a numbered list above the table. A table that is still too wide is split into several tables.
Elsewhere, a table has one line per row, of any width, so that programs can search, cut and parse
it. The parser of short forms can read the `| ... |` rows.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from flashsmith.printable import printable

# A width that no line exceeds. Output is laid out before it is printed, so rich must not wrap it.
_UNWRAPPED = 10_000
# The width of prose when the output is not a terminal and COLUMNS is unset.
_PIPED_WIDTH = 120
# Prose is not wrapped to fewer characters than _LEAST_PROSE. A column with cells longer than _LONG
# may become a list.
_LEAST_PROSE = 16
_LONG = 30

# A cell is a plain string, or a Text, which also has a style for terminals.
Cell = str | Text
_Rows = Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    heading: '\\n' in it starts a new line on a terminal.
    right: whether its cells are right-aligned.
    prose: whether its cells may be wrapped at spaces.
    """

    heading: str
    right: bool = False
    prose: bool = False


def make_columns(headings: str) -> list[Column]:
    """Makes columns from headings such as 'kernel | ms> | note~': '>' aligns to the right, '~'
    marks prose."""
    return [
        Column(heading.rstrip(">~"), heading.endswith(">"), heading.endswith("~"))
        for heading in headings.split(" | ")
    ]


@dataclass(frozen=True)
class _Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


class _SafeConsole(Console):
    """A console that escapes control characters in strings from untrusted sources."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(
            *(printable(item, lines=True) if isinstance(item, str) else item for item in objects),
            **options,
        )


def make_console(file: TextIO | None = None) -> Console:
    """A console for `file` (default: standard output); its output is plain unless `file` is a
    terminal.

    Control characters are shown escaped.
    """
    stream = file if file is not None else sys.stdout
    if stream.isatty():
        return _SafeConsole(file=stream, highlight=False)
    return _SafeConsole(
        file=stream, width=_UNWRAPPED, force_terminal=False, no_color=True, highlight=False
    )


def page_width(console: Console) -> int:
    """The number of columns available for output."""
    if console.is_terminal:
        return console.width
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns


def print_table(console: Console, columns: Sequence[Column], rows: _Rows) -> None:
    """Prints a table in the form that fits `console`. A row has one cell for each column."""
    table = _Table(tuple(columns), tuple(tuple(map(_escaped, row)) for row in rows))
    if not console.is_terminal:
        console.print(plain_table(table.columns, table.rows), markup=False, soft_wrap=True)
        return
    width = page_width(console)
    listed, tables = _laid_out(table, width)
    for heading, texts in listed:
        _print_list(console, heading, texts, named=len(listed) > 1)
    for part in tables:
        narrow = _boxed_width(part, narrow=False) > width
        console.print(rich_table(part.columns, part.rows, narrow), soft_wrap=True)


def print_text(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    """Prints a string. Lines are wrapped at spaces, and their continuations are indented.

    On a terminal, a short form that does not fit on a line is broken after a '+'. Elsewhere short
    forms are never broken.
    """
    width = page_width(console)
    for line in printable(text, lines=True).splitlines():
        wrapped = _wrapped(line, width, indent, whole_forms=not console.is_terminal)
        console.print("\n".join(wrapped), style=style, markup=False, soft_wrap=True)


def plain_table(columns: Sequence[Column], rows: _Rows) -> str:
    """The rows as an aligned Markdown table.

    A cell with several lines continues in the rows below.
    """
    headings = [column.heading.replace("\n", " ") for column in columns]
    texts = [
        list(line)
        for row in rows
        for line in itertools.zip_longest(*map(_lines_of, row), fillvalue="")
    ]
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


def _escaped(cell: Cell) -> Cell:
    """The cell with line feeds and control characters escaped, so that only the layout can add line
    feeds."""
    return cell if isinstance(cell, Text) else printable(cell)


def _lines_of(cell: Cell) -> list[str]:
    return printable(str(cell), lines=True).split("\n")


def rich_table(columns: Sequence[Column], rows: _Rows, narrow: bool = False) -> Table:
    """The rows as a table of the package rich; with `narrow`, columns are only one space apart."""
    table = Table(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        padding=(0, 0 if narrow else 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column.heading, justify="right" if column.right else "left", no_wrap=True)
    for row in rows:
        # rich would interpret a short form in a plain string as markup.
        table.add_row(
            *(cell if isinstance(cell, Text) else Text(printable(cell, lines=True)) for cell in row)
        )
    return table


# ---- layout ----


def _boxed_width(table: _Table, narrow: bool = True) -> int:
    console = Console(width=_UNWRAPPED)
    drawn = rich_table(table.columns, table.rows, narrow)
    return Measurement.get(console, console.options, drawn).maximum


def _laid_out(table: _Table, width: int) -> tuple[list[tuple[str, list[str]]], list[_Table]]:
    """Lays out a table to fit the width.

    Long cells become numbered lists with headings; the resulting tables refer to them by number.
    """
    listed: list[tuple[str, list[str]]] = []
    while _boxed_width(wrapped := _with_wrapped_prose(table, width)) > width:
        place = _longest_column(table)
        if place is None:
            return listed, _in_blocks(table, width)
        heading = table.columns[place].heading.replace("\n", " ")
        table, texts = _numbered(table, place)
        listed.append((heading, texts))
    return listed, [wrapped]


def _with_wrapped_prose(table: _Table, width: int) -> _Table:
    """Wraps the prose of a table, beginning with the widest column, until the table fits or no
    column can be wrapped further."""
    prose = [n for n, column in enumerate(table.columns) if column.prose]
    while (excess := _boxed_width(table) - width) > 0:
        lengths = {n: _column_width(table, n) for n in prose}
        for n in sorted(prose, key=lambda n: -lengths[n]):
            # A column is not made narrower than the next widest one, so that all columns are
            # wrapped to similar widths.
            next_one = max((other for other in lengths.values() if other < lengths[n]), default=0)
            target = max(lengths[n] - excess, next_one - 1, _LEAST_PROSE)
            folded = _with_column(table, n, [_fold(row[n], target) for row in table.rows])
            if _column_width(folded, n) < lengths[n]:
                table = folded
                break
        else:
            return table
    return table


def _fold(cell: Cell, width: int) -> Cell:
    lines = _wrapped(" ".join(str(cell).split("\n")), width, 0, whole_forms=True)
    folded = "\n".join(lines)
    return Text(folded, cell.style) if isinstance(cell, Text) else folded


def _column_width(table: _Table, place: int) -> int:
    return max((len(line) for row in table.rows for line in str(row[place]).split("\n")), default=0)


def _with_column(table: _Table, place: int, cells: Sequence[Cell]) -> _Table:
    rows = tuple(
        (*row[:place], cell, *row[place + 1 :]) for row, cell in zip(table.rows, cells, strict=True)
    )
    return replace(table, rows=rows)


def _longest_column(table: _Table) -> int | None:
    """The index of the column to shorten next; None if all cells are short.

    It is the column with the longest cells among the columns that may not be wrapped.
    """
    lengths = {
        n: _column_width(table, n)
        for n, column in enumerate(table.columns)
        if not (column.right or column.prose)
    }
    place = max(lengths, key=lambda n: lengths[n], default=None)
    return place if place is not None and lengths[place] > _LONG else None


def _numbered(table: _Table, place: int) -> tuple[_Table, list[str]]:
    """Replaces the cells of a column with numbers. Returns the table and the distinct cells."""
    texts = list(dict.fromkeys(str(row[place]) for row in table.rows))
    numbers = [str(texts.index(str(row[place])) + 1) for row in table.rows]
    column = Column("#" if place == 0 else table.columns[place].heading, right=True)
    columns = (*table.columns[:place], column, *table.columns[place + 1 :])
    table = _with_column(replace(table, columns=columns), place, numbers)
    if place and table.columns[0].heading == "#" and numbers == [str(r[0]) for r in table.rows]:
        return _without(table, place), texts  # The first column already has these numbers
    return table, texts


def _without(table: _Table, place: int) -> _Table:
    return _Table(
        table.columns[:place] + table.columns[place + 1 :],
        tuple(row[:place] + row[place + 1 :] for row in table.rows),
    )


def _in_blocks(table: _Table, width: int) -> list[_Table]:
    """Splits a table into several.

    Each begins with the first column, or with row numbers if the first column has duplicates.
    """
    if len({str(row[0]) for row in table.rows}) < len(table.rows):
        rows = tuple((str(number), *row) for number, row in enumerate(table.rows, 1))
        table = _Table((Column("#", right=True), *table.columns), rows)
    blocks = [_chosen(table, [0])]
    for place in range(1, len(table.columns)):
        wider = _joined(blocks[-1], _chosen(table, [place]))
        if _boxed_width(_with_wrapped_prose(wider, width)) > width:
            blocks.append(_chosen(table, [0, place]))
        else:
            blocks[-1] = wider
    return [_with_wrapped_prose(block, width) for block in blocks]


def _joined(left: _Table, right: _Table) -> _Table:
    rows = zip(left.rows, right.rows, strict=True)
    return _Table(left.columns + right.columns, tuple(a + b for a, b in rows))


def _chosen(table: _Table, places: Sequence[int]) -> _Table:
    return _Table(
        tuple(table.columns[n] for n in places),
        tuple(tuple(row[n] for n in places) for row in table.rows),
    )


def _print_list(console: Console, heading: str, texts: Sequence[str], *, named: bool) -> None:
    """Prints a numbered list of cells; `named` adds a heading, which is needed if there are several
    lists."""
    if named:
        print_text(console, heading, style="bold")
    for number, text in enumerate(texts, 1):
        print_text(console, f"{number:3} {text}", indent=4)


# ---- wrapping ----

_FORM = re.compile(r"\([A-Z]+\d+(?:, \w+)+\): [\w+]+")
_FORM_SPACE = "\0"


def _wrapped(line: str, width: int, indent: int, *, whole_forms: bool) -> list[str]:
    """Splits a line into lines of at most `width`, without breaking words."""
    kept = _FORM.sub(lambda form: form.group().replace(" ", _FORM_SPACE), line)
    pieces = re.findall(r"\s*\S+", kept)
    if not whole_forms:
        pieces = [part for piece in pieces for part in _parts_of(piece, width - indent)]
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1] + piece) <= width:
            lines[-1] += piece
        else:
            lines.append(" " * indent + piece.lstrip() if lines else piece)
    return [text.replace(_FORM_SPACE, " ") for text in lines] or [""]


def _parts_of(piece: str, width: int) -> list[str]:
    """Splits a short form that does not fit on a line after each '+'."""
    if len(piece.lstrip()) <= width or _FORM_SPACE not in piece:
        return [piece]
    return re.findall(r"[^+]+\+?", piece)
