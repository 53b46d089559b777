"""What long work tells on standard error."""

from __future__ import annotations

import io
import sys

import pytest

from flashsmith import time_left
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.builder import BuildEvent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_lines_as_they_happen(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter() as reporter:
        reporter.build(BuildEvent("compile", "2 configs for sm_80", 0, 2))
        assert capsys.readouterr().err == "building 2 configs for sm_80\n"
        reporter.build(BuildEvent("link", "linking", 2, 2))
        reporter.build(BuildEvent("warn", "it spills [/red]", 2, 2))
        reporter.build(BuildEvent("done", "2 configs in 3.0 s", 2, 2))
        reporter.step("proving a", 0, 2)
        reporter.step("proving b", 1, 2)
    assert capsys.readouterr().err.splitlines() == [
        "warning: it spills [/red]",
        "2 configs in 3.0 s",
        "proving a (1 of 2)",
        "proving b (2 of 2)",
    ]


def test_lines_say_what_is_left(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the estimates, corrected by what the steps took: here ten times as long."""
    now = [100.0]
    monkeypatch.setattr(time_left.time, "monotonic", lambda: now[0])
    with ProgressReporter() as reporter:
        reporter.expect("emulating", [10.0, 30.0])
        reporter.step("proving a", 0, 2)
        now[0] += 100.0
        reporter.step("proving b", 1, 2)
        reporter.step("measuring c", 0, 3)
        now[0] += 20.0
        reporter.step("measuring d", 1, 3)
    assert capsys.readouterr().err.splitlines() == [
        "emulating is estimated to take about 40s",
        "proving a (1 of 2, estimate: about 40s)",
        # (100 + 4) / (10 + 4) of 30: a tenth of the estimate weighs as much as what was seen.
        "proving b (2 of 2, about 3m43s left)",
        "measuring c (1 of 3)",
        "measuring d (2 of 3, about 31s left)",
    ]


def test_lines_that_differ_in_numbers_alone_come_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time_left.time, "monotonic", lambda: now[0])
    with ProgressReporter() as reporter:
        for done in range(100):
            reporter.step("drawing charts", done, 100)
            now[0] += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7
    assert lines[:2] == [
        "drawing charts (1 of 100)",
        "drawing charts (16 of 100, about 1m25s left)",
    ]


def test_a_build_counts_host_code_as_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter() as reporter:
        reporter.build(BuildEvent("host", "host code: bindings  4.4 s", 8, 15))
    assert capsys.readouterr().err == "  [8/15] host code: bindings  4.4 s\n"


def test_a_bar_says_what_is_left(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with ProgressReporter() as reporter:
        reporter.build(BuildEvent("compile", "7 configs", 7, 15, None, 75.4))
        reporter._bar.refresh()
    assert "7/15" in out.getvalue()
    assert "about 1m15s left" in out.getvalue()


def test_waiting_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter() as reporter:
        for seconds in range(5):
            reporter.build(BuildEvent("wait", f"another process builds it ({seconds} s)", 0, 2))
    assert capsys.readouterr().err == "another process builds it (0 s)\n"


def test_quiet_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter(quiet=True) as reporter:
        reporter.say("anything")
        reporter.step("anything", 0, 1)
        reporter.build(BuildEvent("done", "anything", 1, 1))
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with ProgressReporter() as reporter:
        reporter.step("proving [a kernel]", 1, 3)
        reporter.say("this stays")
    drawn = out.getvalue()
    assert "proving [a kernel]" in drawn
    assert "1/3" in drawn
    assert "this stays\n" in drawn
    assert drawn.endswith("\x1b[2K")


def test_a_bars_first_time_is_called_an_estimate(monkeypatch) -> None:
    """Before a step is done nothing was measured; and what has passed says that it is that."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with ProgressReporter() as reporter:
        reporter.build(BuildEvent("compile", "7 configs", 0, 15, None, 75.4))
        reporter._bar.refresh()
        first = out.getvalue()
        reporter.build(BuildEvent("compile", "7 configs", 1, 15, None, 70.4))
        reporter._bar.refresh()
    assert "estimate: about 1m15s" in first
    assert "left" not in first
    assert "0s so far" in first
    assert "about 1m10s left" in out.getvalue()
