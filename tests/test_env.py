"""Environment variables that hold what they should not: one line, in Python and on the console."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from flashsmith import env
from flashsmith.configs import get_kernel_configs
from flashsmith.errors import FlashsmithError

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


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_value_is_one_line_on_the_console(name: str, tmp_path) -> None:
    value, words = COMMANDS[name]
    variables = {env.CACHE_DIR.name: str(tmp_path), "PYTHONPATH": ":".join(sys.path), name: value}
    done = subprocess.run(
        [sys.executable, "-m", "flashsmith", *words],
        capture_output=True, text=True, env=variables, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "flashsmith: " in line]
    assert name in line
    assert "Traceback" not in done.stderr


def test_the_table_of_variables_shows_bad_values_too(tmp_path) -> None:
    variables = {"PYTHONPATH": ":".join(sys.path), env.JIT.name: "yes\x1b[31m"}
    done = subprocess.run(
        [sys.executable, "-m", "flashsmith", "env"], capture_output=True, text=True, env=variables
    )
    assert done.returncode == 2
    assert r"| yes\x1b[31m" in done.stdout
    assert done.stderr == "flashsmith: FLASHSMITH_JIT='yes\\x1b[31m': allowed are 0 and 1\n"
    assert "\x1b" not in done.stdout


def test_a_path_with_control_characters_is_escaped_for_people(tmp_path) -> None:
    """Another program gets it as it is."""
    folder = f"{tmp_path}/\x1b[31m"
    variables = {"PYTHONPATH": ":".join(sys.path), env.CACHE_DIR.name: folder}
    for words, shown in ((["path"], f"{folder}\n"), ([], None)):
        done = subprocess.run(
            [sys.executable, "-m", "flashsmith", "cache", *words],
            capture_output=True, text=True, env=variables,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == shown if shown else "\x1b" not in done.stdout
