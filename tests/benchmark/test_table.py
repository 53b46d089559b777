"""Tables: plain and whole in a pipe, boxed on a terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.text import Text

from flashsmith.benchmark.table import (
    Column,
    make_console,
    page_width,
    plain_table,
    print_table,
    print_text,
)
from flashsmith.families import parse_kernel_name_into_config as parse

COLUMNS = [Column("kernel"), Column("CTAs\n/SM", right=True)]
ROWS = [("k" * 150, "2"), ("short", "10")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_table_aligns_and_never_cuts() -> None:
    head, rule, first, second = plain_table(COLUMNS, ROWS).splitlines()
    assert head == "| kernel" + " " * 145 + "| CTAs /SM |"
    assert rule == "|" + "-" * 152 + "|---------:|"
    assert first == f"| {'k' * 150} |        2 |"
    assert second == f"| short{' ' * 145} |       10 |"


def test_plain_table_without_rows_has_its_headings() -> None:
    assert plain_table(COLUMNS, []).splitlines() == [
        "| kernel | CTAs /SM |",
        "|--------|---------:|",
    ]


def test_a_pipe_gets_the_plain_table(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    print_table(make_console(out), COLUMNS, [(Text("k" * 150, "red"), "2"), ROWS[1]])
    assert out.getvalue() == plain_table(COLUMNS, ROWS) + "\n"


def test_a_terminal_gets_colour(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    print_table(make_console(out), COLUMNS, [(Text("k" * 150, "red"), "2"), ROWS[1]])
    assert "\x1b[31m" in out.getvalue()
    assert "k" * 150 in out.getvalue()


HOSTILE = "a\x1b[2Jb\x9bc\rd\x07"


def test_no_control_character_of_a_text_reaches_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    for out in (Terminal(), io.StringIO()):
        console = make_console(out)
        print_table(console, COLUMNS, [(HOSTILE, "2"), ROWS[1]])
        console.print(f"{HOSTILE}\n{HOSTILE}", markup=False)
        printed = out.getvalue()
        assert printed.count(r"a\x1b[2Jb\x9bc\rd\x07") == 3
        # What is left is the table's own style.
        assert not set(re.sub(r"\x1b\[[\d;]*m", "", printed)) & set("\x1b\x9b\r\x07")


FORM = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax"
LONG_FORM = (
    "(BF16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
    "+longest_first+rescale_8+section_16"
)
FIGURES = [Column(f"figure\n{n}", right=True) for n in range(12)]
PROSE = "the tiles of Q, K and V must fit in the shared memory that the device gives one CTA"
WIDE = {
    "kernels": (
        [Column("kernel"), *FIGURES],
        [(form, *(f"{n}.2e-04" for n in range(12))) for form in (FORM, LONG_FORM)],
    ),
    "prose": (
        [Column("rule"), Column("here", prose=True), Column("what it asks", prose=True)],
        [("Q_and_K_load_counts_agree", "Q_mma_load_K_tiles=0, d_head=128", PROSE)] * 2,
    ),
    "two long texts": (
        [Column("GPU"), Column("table of winners"), Column("config"), *FIGURES[:4]],
        [("H200", "some/folder/of/mine/winners.json", FORM, *"1234")] * 2
        + [("H200", "some/folder/of/mine/winners.json", LONG_FORM, *"5678")],
    ),
}


def shown(kind: str, stream: io.StringIO) -> list[str]:
    print_table(make_console(stream), *WIDE[kind])
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()


def is_list(line: str) -> bool:
    """Whether it is of a list of short forms, two columns wide."""
    return line.count("|") == 3


def words_of(kind: str) -> set[str]:
    """What may not be broken: the words between spaces, in cells and in headings."""
    columns, rows = WIDE[kind]
    cells = [str(cell) for row in rows for cell in row] + [c.heading for c in columns if c.right]
    return {word for cell in cells for word in cell.split()}


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_no_table_is_wider_than_the_page_and_no_word_is_broken(
    monkeypatch: pytest.MonkeyPatch, kind: str, width: int, stream: type[io.StringIO]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    lines = shown(kind, stream())
    on_terminal = stream is Terminal
    for line in lines:
        # Piped short forms stay whole, so that they can be copied.
        assert len(line) <= width or (not on_terminal and is_list(line))
    text = "\n".join(lines)
    if on_terminal:
        # A short form that is longer than a line continues behind a '+'.
        text = re.sub(r"\+\n +", "+", text)
    for word in words_of(kind):
        assert word in text


@pytest.mark.parametrize("width", [80, 120])
def test_piped_short_forms_parse_back(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [line for line in shown("kernels", io.StringIO()) if "P16" in line or "F16" in line]
    assert [str(parse(row)) for row in rows] == [FORM, LONG_FORM]


def test_long_texts_stand_above_once_with_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown("two long texts", io.StringIO())
    assert [line for line in lines if "P16" in line or "F16" in line] == [
        f"| 1 | {FORM.ljust(len(LONG_FORM))} |",
        f"| 2 | {LONG_FORM} |",
    ]
    assert lines[-3:] == [
        "| H200 |                1 |      1 |        1 |        2 |        3 |        4 |",
        "| H200 |                1 |      1 |        1 |        2 |        3 |        4 |",
        "| H200 |                1 |      2 |        5 |        6 |        7 |        8 |",
    ]


def test_tables_of_one_row_key_have_it_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many figures for the page: several tables."""
    monkeypatch.setenv("COLUMNS", "80")
    headings = [line for line in shown("kernels", io.StringIO()) if "figure" in line]
    assert len(headings) > 1
    assert all(line.startswith("| # | figure ") for line in headings)
    assert sum(line.count("figure") for line in headings) == 12


def test_prose_is_wrapped_in_rows_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = shown("prose", io.StringIO())
    assert lines[2].startswith("| Q_and_K_load_counts_agree | Q_mma_load_K_tiles=0, d_head=128 ")
    assert lines[3].startswith("|                           |  ")
    assert " ".join(line.split("|")[3].strip() for line in lines[2:4]) == PROSE


def test_without_a_terminal_or_COLUMNS_a_page_has_120_columns(monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    assert page_width(make_console(io.StringIO())) == 120


def test_text_is_wrapped_with_its_indent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = f"  kernel  {FORM}  3.5 ms"
    boxed, piped = Terminal(), io.StringIO()
    for stream in (boxed, piped):
        print_text(make_console(stream), text, indent=10)
    assert boxed.getvalue().splitlines() == [
        "  kernel  (FP16, 128, 64, 64, 4): async+eager+swizzled+",
        "          load_2_2_2_tiles+buffer+opt_softmax  3.5 ms",
    ]
    assert piped.getvalue().splitlines() == ["  kernel", f"          {FORM}", "          3.5 ms"]
