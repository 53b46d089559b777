"""Tables of the page: aligned, sortable by a few lines of script, whole without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashsmith.benchmark.report.html import Html, element, join


@dataclass(frozen=True)
class Entry:
    """What a cell shows, and what it sorts by where that is not its text.

    `kind` is a class of the style sheet: 'good', 'bad', 'faint', 'code'.
    """

    text: str
    value: float | None = None
    kind: str = ""
    hint: str = ""


def number(value: float | None, digits: int = 0, kind: str = "") -> Entry:
    """A figure, grouped by thousands; a dash where there is none."""
    if value is None:
        return Entry("–", None, "faint")
    return Entry(f"{value:,.{digits}f}", value, kind)


def percent(share: float | None) -> Entry:
    """A share as per cent; a dash where there is none."""
    return Entry("–", None, "faint") if share is None else Entry(f"{share:.1%}", share)


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Entry | str]]) -> Html:
    """A table whose columns of figures align right; a row has a cell for each heading."""
    cells = [[Entry(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    figures = [any(row[place].value is not None for row in cells) for place in range(len(headings))]
    head = element(
        "tr",
        *(
            element("th", heading, scope="col", class_="figure" if figure else None)
            for heading, figure in zip(headings, figures, strict=True)
        ),
    )
    body = join(
        element("tr", *(_cell(cell, figure) for cell, figure in zip(row, figures, strict=True)))
        for row in cells
    )
    # A wide table scrolls in a box of its own; the keyboard reaches it.
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", head),
            element("tbody", body),
            class_="sortable",
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def _cell(cell: Entry, figure: bool) -> Html:
    classes = " ".join(filter(None, ("figure" if figure else "", cell.kind)))
    return element(
        "td",
        cell.text,
        class_=classes or None,
        data_value=cell.value,
        title=cell.hint or None,
    )
