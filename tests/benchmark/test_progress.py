"""What long work tells on standard error."""

from __future__ import annotations

import io
import sys

import pytest

from flashsmith.benchmark.progress import Narrator
from flashsmith.builder import BuildEvent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_lines_as_they_happen(capsys: pytest.CaptureFixture[str]) -> None:
    with Narrator() as narrator:
        narrator.build(BuildEvent("compile", "2 configs for sm_80", 0, 2))
        assert capsys.readouterr().err == "building 2 configs for sm_80\n"
        narrator.build(BuildEvent("link", "linking", 2, 2))
        narrator.build(BuildEvent("warn", "it spills [/red]", 2, 2))
        narrator.build(BuildEvent("done", "2 configs in 3.0 s", 2, 2))
        narrator.step("proving a", 0, 2)
        narrator.step("proving b", 1, 2)
    assert capsys.readouterr().err.splitlines() == [
        "warning: it spills [/red]",
        "2 configs in 3.0 s",
        "proving a (1 of 2)",
        "proving b (2 of 2)",
    ]


def test_waiting_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Narrator() as narrator:
        for seconds in range(5):
            narrator.build(BuildEvent("wait", f"another process builds it ({seconds} s)", 0, 2))
    assert capsys.readouterr().err == "another process builds it (0 s)\n"


def test_quiet_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Narrator(quiet=True) as narrator:
        narrator.say("anything")
        narrator.step("anything", 0, 1)
        narrator.build(BuildEvent("done", "anything", 1, 1))
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with Narrator() as narrator:
        narrator.step("proving [a kernel]", 1, 3)
        narrator.say("this stays")
    drawn = out.getvalue()
    assert "proving [a kernel]" in drawn
    assert "1/3" in drawn
    assert "this stays\n" in drawn
    assert drawn.endswith("\x1b[2K")
