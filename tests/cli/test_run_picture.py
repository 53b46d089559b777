"""docs/run.svg, README's picture, shows what `flashsmith run` prints."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "run.svg"
COLUMNS = 13


def texts(path: Path) -> list[str]:
    """The texts of the picture, cell by cell."""
    found = re.findall(r">([^<>]+)</text>", path.read_text())
    cells = (html.unescape(text).replace("\xa0", " ").strip() for text in found)
    return [cell for cell in cells if cell]


@pytest.fixture(scope="module")
def figures() -> list[list[str]]:
    """The table's rows: number, verdict, error, bound, registers, spills, KiB, CTAs, ..."""
    cells = texts(PICTURE)
    first = cells.index("pass") - 1
    return [cells[first + n * COLUMNS :][:COLUMNS] for n in range(7)]


def test_the_picture_is_what_a_run_prints(
    load_tool: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """Draw it again with `python tools/docs/run_picture.py` where kernels have changed."""
    drawn = tmp_path / "run.svg"
    load_tool("docs/run_picture.py").draw_run(drawn)
    assert texts(PICTURE) == texts(drawn), "run: python tools/docs/run_picture.py"


def test_the_page_on_the_command_agrees_with_the_picture(figures: list[list[str]]) -> None:
    assert [row[0] for row in figures] == list("1234567")
    registers = [int(row[4]) for row in figures]
    ctas = [int(row[7]) for row in figures]
    instructions = [int(row[8].replace(",", "")) for row in figures]
    ldmatrix, o_stores = ([float(row[n]) for row in figures] for n in (9, 11))
    # docs/command.md says what each step changes; swizzled: the factors from 8 to 1.
    assert (ldmatrix[:2], o_stores[:2]) == ([8.0, 1.0], [8.0, 1.0])
    # load_2_2_2: fewer registers, enough for a third CTA.
    assert registers[3] < registers[2]
    assert (ctas[2], ctas[3]) == (2, 3)
    # buffer moves loads only; opt_softmax executes fewer instructions, and so does Q in registers,
    # which costs the third CTA.
    assert instructions[4] == instructions[3]
    assert instructions[6] < instructions[5] < instructions[4]
    assert (ctas[5], ctas[6]) == (3, 2)
