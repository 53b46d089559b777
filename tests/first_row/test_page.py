"""docs/add-a-family.md: it shows files of the package as they are, and its commands run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "add-a-family.md"
FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)```$", re.MULTILINE | re.DOTALL)


LINK = re.compile(r"\[`[\w./]+`\]\(\.\./tests/first_row/first_row/([\w./]+)\)")


def test_it_shows_or_links_every_file_of_the_package() -> None:
    text = PAGE.read_text()
    shown, linked = dict(FILE.findall(text)), set(LINK.findall(text))
    package = HERE / "first_row"
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.*")}
    files = {name: path for name, path in files.items() if "__pycache__" not in name}
    files["pyproject.toml"] = HERE / "pyproject.toml"
    assert shown.keys() | linked == files.keys()
    assert {"operation.py", "reference.py", "family.py"} <= shown.keys()
    for name, text in shown.items():
        assert text == files[name].read_text(), f"{PAGE.name} shows another {name}"


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found, variables = [], {}
    for line in "".join(blocks).splitlines():
        if assigned := re.fullmatch(r"(\w+)='(.*)'", line):
            variables[f"${assigned[1]}"] = assigned[2]
        else:
            found.append([variables.get(word, word) for word in shlex.split(line)])
    return found


def test_its_commands_run_where_the_package_is_installed(installed: dict[str, str]) -> None:
    """In one process, which finds the package by its entry point alone."""
    first, *ours = commands()
    assert first[:2] == ["pip", "install"]
    assert {words[1] for words in ours} == {"configs", "explain", "run", "tune"}
    assert all(words[0] == "flashsmith" for words in ours)
    (python,) = re.findall(r"^```python\n(.*?)^```", _without_files(), re.MULTILINE | re.DOTALL)
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from flashsmith.cli import app\n"
        f"for words in {[words[1:] for words in ours]!r}:\n"
        "    done = CliRunner().invoke(app, words)\n"
        "    print(done.output)\n"
        "    if done.exception: print(repr(done.exception))\n"
        "    assert done.exit_code == 0, words\n"
        f"{python}\nassert (o == 1).all()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=installed, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "(FP16, 64, 2): first_row+staged",
        "32 n_warps, the threads of a CTA, must be at most d_head",
        "1 of 1 kernel passed",
        "b2 s5 h3 d40 fp16 first_row",
        "b1 s5 h66 d64 fp16 first_row, plain, random inputs, emulator: right",
    ):
        assert said in done.stdout, done.stdout


def _without_files() -> str:
    return FILE.sub("", PAGE.read_text())
