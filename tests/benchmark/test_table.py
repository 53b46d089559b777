"""Tables: plain and whole in a pipe, boxed on a terminal."""

from __future__ import annotations

import io
import re

from rich.text import Text

from flashsmith.benchmark.table import Column, fits, make_console, plain_table, print_table

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
    monkeypatch.setenv("COLUMNS", "40")
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


def test_fits_goes_by_the_terminals_width(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert not fits(make_console(Terminal()), COLUMNS, ROWS)
    assert fits(make_console(Terminal()), COLUMNS, ROWS[1:])
    assert fits(make_console(io.StringIO()), COLUMNS, ROWS)


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
