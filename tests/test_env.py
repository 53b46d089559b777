"""Environment variables that hold what they should not: one line, in Python and on the console."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashsmith import env
from flashsmith.cli import main
from flashsmith.errors import FlashsmithError
from flashsmith.families import get_kernel_configs
from flashsmith.semantics.sizes import CANONICAL, FREE

NO_COUNTS = (
    "9" * 5000,
    "9" * 19,
    "١٢",
    "１２",
    "²",
    "-1",
    "0",
    "+3",
    "1_0",
    "1e3",
    " 4",
    "\x1b[31m",
    "lots",
)
NO_SWITCHES = ("yes", "true", "2", "01", "١", "1" * 5000, "\x1b[31m")
NO_KERNELS = (
    "9" * 5000, "9" * 5000 + ",64", "١٢,٦٤", "(" * 5000,
    "(FP16, " + "9" * 5000 + ", 64, 64, 4): async",
    "\x1b[31m", " " * 9000 + "(FP16", "/dev/null", "/dev/zero", "a" * 5000 + "/b",
)  # fmt: skip
CASES: list[tuple[str, str, Callable[[], object]]] = [
    *((env.JOBS.name, value, env.jobs) for value in NO_COUNTS),
    *((env.CACHE_LIMIT.name, value, env.cache_limit_mib) for value in NO_COUNTS),
    *((env.JIT.name, value, env.jit_enabled) for value in NO_SWITCHES),
    *((env.KERNELS.name, value, get_kernel_configs) for value in NO_KERNELS),
]


@pytest.mark.parametrize(
    ("name", "value", "read"), CASES, ids=[f"{name}={value[:9]!a}" for name, value, _ in CASES]
)
def test_a_bad_value_is_one_line(
    name: str, value: str, read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(FlashsmithError) as caught:
        read()
    said = str(caught.value)
    assert said.isprintable()
    # The valid keys of KERNELS take most of it.
    assert len(said) < 1500
    assert name in said or "cannot parse" in said


def test_good_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.JOBS.name, "007")
    monkeypatch.setenv(env.JIT.name, "0")
    monkeypatch.setenv(env.CACHE_LIMIT.name, "9" * 18)
    assert (env.jobs(), env.jit_enabled(), env.cache_limit_mib()) == (7, False, 10**18 - 1)


COMMANDS = {
    env.CACHE_LIMIT.name: ("9" * 5000, ("cache", "prune")),
    env.JOBS.name: ("١٢", ("build", "-k", "prog")),
    env.JIT.name: ("yes", ("winners", "path")),
    env.KERNELS.name: ("9" * 5000 + ",64", ("configs",)),
}


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The command line's exit status."""
    monkeypatch.setattr(sys, "argv", ["flashsmith", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


CHECKED = {env.SWITCH: "yes", env.COUNT: "lots", env.ORDERS: "Canonical"}


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
def test_every_command_checks_every_variable(
    variable: env.Variable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`winners path` reads none of those that are checked; paths and KERNELS may be any text."""
    monkeypatch.setenv(variable.name, CHECKED.get(variable.values, "no such thing"))
    if variable.values in CHECKED:
        assert run(monkeypatch, "winners", "path") == 2
        assert capsys.readouterr().err.startswith(f"flashsmith: {variable.name}=")
    else:
        assert variable in (
            *(env.KERNELS, env.CACHE_DIR, env.TABLE, env.CUDA_HOME, env.CROSS_CUDA),
        )
        assert run(monkeypatch, "winners", "path") == 0


def test_the_values_of_bits_are_those_of_calls() -> None:
    assert " or ".join((CANONICAL, FREE)) == env.ORDERS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_value_is_one_line_on_the_console(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, words = COMMANDS[name]
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "2000")  # which is as wide as a line may be
    assert run(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flashsmith: {name}=")


def test_the_table_of_variables_shows_bad_values_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env.JIT.name, "yes\x1b[31m")
    assert run(monkeypatch, "env") == 2
    shown = capsys.readouterr()
    assert r"| yes\x1b[31m" in shown.out
    assert "\x1b" not in shown.out
    assert shown.err == "flashsmith: FLASHSMITH_JIT='yes\\x1b[31m': allowed are 0 and 1\n"


def test_a_path_with_control_characters_is_escaped_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program gets it as it is."""
    path = tmp_path / "\x1b[31m.json"
    monkeypatch.setenv(env.TABLE.name, str(path))
    assert run(monkeypatch, "winners", "path") == 0
    assert capsys.readouterr().out == f"{path}\n"
    path.write_text("{")
    assert run(monkeypatch, "winners", "validate") == 1
    assert r"\x1b[31m.json" in (shown := capsys.readouterr().out)
    assert "\x1b" not in shown
