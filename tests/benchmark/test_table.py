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


def words_of(kind: str) -> set[str]:
    """What may not be broken: the words between spaces, in cells and in headings."""
    columns, rows = WIDE[kind]
    cells = [str(cell) for row in rows for cell in row] + [c.heading for c in columns if c.right]
    return {word for cell in cells for word in cell.split()}


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("width", [80, 120])
def test_no_table_is_wider_than_the_terminal_and_no_word_is_broken(
    monkeypatch: pytest.MonkeyPatch, kind: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    lines = shown(kind, Terminal())
    assert max(map(len, lines)) <= width
    # A short form that is longer than a line continues behind a '+'.
    text = re.sub(r"\+\n +", "+", "\n".join(lines))
    for word in words_of(kind):
        assert word in text


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("width", ["", "80"])
def test_in_a_file_a_table_is_one_table(
    monkeypatch: pytest.MonkeyPatch, kind: str, width: str
) -> None:
    """A heading, a rule and a line for each row, all of one width, whatever COLUMNS says."""
    monkeypatch.setenv("COLUMNS", width)
    rows = WIDE[kind][1]
    lines = shown(kind, io.StringIO())
    assert len(lines) == 2 + len(rows)
    assert len({len(line) for line in lines}) == 1
    for line, row in zip(lines[2:], rows, strict=True):
        assert tuple(cell.strip() for cell in line.strip("|").split("|")) == row


def test_piped_short_forms_parse_back() -> None:
    rows = [line for line in shown("kernels", io.StringIO()) if "P16" in line or "F16" in line]
    assert [str(parse(row)) for row in rows] == [FORM, LONG_FORM]


def test_long_texts_stand_above_once_with_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm-256color")
    lines = shown("two long texts", Terminal())
    listed = [line for line in lines if "P16" in line or "F16" in line]
    assert [line.split(maxsplit=1) for line in listed] == [["1", FORM], ["2", LONG_FORM]]
    rows = [line.split() for line in lines if "H200" in line]
    assert [row[-5:] for row in rows] == [["1", *"1234"], ["1", *"1234"], ["2", *"5678"]]


def test_tables_of_one_row_key_have_it_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many figures for the terminal: several tables."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    headings = [line for line in shown("kernels", Terminal()) if "figure" in line]
    assert len(headings) > 1
    assert sum(line.count("figure") for line in headings) == 12


def test_prose_is_wrapped_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    lines = shown("prose", Terminal())
    first = next(n for n, line in enumerate(lines) if "Q_and_K_load_counts_agree" in line)
    assert not lines[first + 1].startswith("Q_and_K")
    start = lines[first].index("the tiles of Q")
    assert " ".join(line[start:].strip() for line in lines[first : first + 2]) == PROSE


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
