"""How the command reads its words: help, version, completion, and mistakes of a shell's user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flashsmith
from flashsmith.cli import app
from flashsmith.cli.command import split_text
from flashsmith.errors import ArgumentError, FlashsmithError, LaunchError

PROBLEM = "b16 s4096 h32:8 d128 bf16 causal"
TABLE = Path(flashsmith.__file__).parent / "chooser" / "tables" / "h100.json"


def run(*words: str) -> str:
    """What the command prints; raises what it raises."""
    result = CliRunner().invoke(app, words)
    if isinstance(result.exception, FlashsmithError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    """The message of an error."""
    with pytest.raises(FlashsmithError) as caught:
        run(*words)
    return str(caught.value)


@pytest.mark.parametrize("words", [(), ("build",), ("cache",), ("cache", "list"), ("winners",)])
def test_help_has_a_short_name(words: tuple[str, ...]) -> None:
    assert run(*words, "-h") == run(*words, "--help")


def test_the_version_has_a_short_name() -> None:
    assert run("-V") == run("--version") == f"flashsmith {flashsmith.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("flashsmith bu", "build"), ("flashsmith build --any", "--any-length")],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    """As the script that `flashsmith --show-completion bash` prints asks for it."""
    done = subprocess.run(
        [sys.executable, "-m", "flashsmith"],
        env={
            **os.environ,
            "_FLASHSMITH_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split()) - 1),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [offered], done.stderr


def test_completion_can_be_installed() -> None:
    shown = run("--help")
    assert "--install-completion" in shown
    assert "--show-completion" in shown


@pytest.mark.parametrize(
    "words",
    [
        ("choose",),
        ("build", "--for"),
        ("bench", "--problems"),
        ("run", "--problem"),
        ("tune", "--dry-run", "--problems"),
    ],
)
def test_a_problem_without_quotes_is_told_to_have_them(words: tuple[str, ...]) -> None:
    assert refused(*words, *PROBLEM.split()) == (
        f"{PROBLEM}: is one argument: put it in quotes, as '{PROBLEM}'"
    )


@pytest.mark.parametrize(
    ("words", "split"),
    [
        (["choose", *PROBLEM.split()], PROBLEM),
        (["--for", "s1:4096", "d64", "--json"], "s1:4096 d64"),
        (
            ["explain", "(FP16,", "128,", "64,", "64,", "4):", "async"],
            "(FP16, 128, 64, 64, 4): async",
        ),
        (["choose", PROBLEM, "b1 s64 h1 d64 fp16"], ""),
        (["-k", "64,32", "--seq", "128"], ""),
        (["report", "b1.csv", "s1.csv"], ""),
        (["-k", "(FP16, 128, 64, 64, 4): async; (FP16, 64, 64, 64, 4): async"], ""),
    ],
)
def test_which_words_were_one_text(words: list[str], split: str) -> None:
    assert " ".join(split_text(words)) == split


@pytest.mark.parametrize("command", ["build", "choose"])
def test_a_gpu_is_named_once(command: str) -> None:
    """--arch and --device are one option, of which the last was taken without a word."""
    problem = ["--for", PROBLEM] if command == "build" else [PROBLEM]
    message = refused(command, *problem, "--arch", "sm_80", "--device=H100")
    assert "--arch" in message
    assert "--device" in message
    assert "given 2 times" in message


def test_a_gpu_to_measure_on_has_an_architecture_of_its_own() -> None:
    message = refused("tune", "--dry-run", "--arch", "sm_90", "--device", "0")
    assert message.startswith("arch='sm_90': not with --device 0")


def test_options_that_may_be_repeated_and_flags_are() -> None:
    first, second = "b1 s64 h1 d64 fp16", "b1 s64 h1 d64 bf16"
    for words in (("build", "--for", first, "--for", second), ("build", "--json", "--json")):
        # Stopped by the next mistake, before anything is built.
        assert refused(*words, "-k", "nonsense").startswith(("--for", "kernels='nonsense'"))


@pytest.mark.parametrize("text", ["h32:8 d128 bf16 causal", "b16 h32:8 d128 bf16 causal"])
def test_a_problem_without_lengths_is_told_of_any_length(text: str) -> None:
    assert refused("build", "--for", text) == (
        f"problem='{text}': gives no length; add one, as s4096, or build for every batch and "
        "length with --for 'h32:8 d128 bf16 causal' --any-length"
    )


def test_other_mistakes_of_a_problem_keep_their_message() -> None:
    assert "dtype missing" in refused("build", "--for", "h32:8 d128")
    assert "unknown word 'casual'" in refused("build", "--for", "h32:8 d128 bf16 casual")


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--csv", "rows.csv"),
        ("run", "--jsonl", "rows.jsonl"),
        ("bench", "--csv", "rows.csv"),
        ("bench", "--json", "rows.json"),
        ("bench", "--jsonl", "rows.jsonl"),
        ("progression", "--csv", "rows.csv"),
        ("progression", "--plot", "steps.png"),
        ("roofline", "--show", "--output", "roofline.json"),
        ("report", str(TABLE), "--out", "page.html"),
        ("winners", "export", "--gpu", "H100", "--output", "winners.json"),
        ("winners", "merge", str(TABLE), "--into", "winners.json"),
        ("tune", "--dry-run", "--table", "winners.json"),
    ],
    ids=lambda words: " ".join(words[:1] + words[-2:-1]),
)
def test_a_folder_that_is_missing_is_not_made(words: tuple[str, ...], tmp_path: Path) -> None:
    """It may be mistyped, and is found after hours."""
    missing = tmp_path / "no" / "folder"
    *others, name = words
    message = refused(*others, str(missing / name))
    option = others[-1].lstrip("-")
    assert message == (
        f"{option}='{missing / name}': there is no folder '{missing}'; make it first, or give a "
        "file in another"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder_for_another(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    message = refused("run", "--csv", str(tmp_path / "file" / "rows.csv"))
    assert f"'{tmp_path / 'file'}' is not a folder" in message


def test_a_file_of_kernels_that_is_missing_is_called_that(tmp_path: Path) -> None:
    for name in ("nofile.txt", f"{tmp_path}/kernels"):
        message = refused("configs", "--kernels", name)
        assert f"kernels='{name}' is not a known key, and there is no such file in" in message
        assert "prog (7)" in message
    assert f"kernels='{tmp_path}' is a folder" in refused("run", "--kernels", str(tmp_path))


def test_a_familys_name_is_told_its_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELS", "wgmma")
    assert "KERNELS='wgmma' is not a known key; its kernels are those of hopper;" in refused("run")
    monkeypatch.setenv("KERNELS", "relu")
    message = refused("run")
    assert message.startswith("KERNELS='relu' is not a known key; valid keys")
    assert "prog-all (56)" in message


@pytest.mark.parametrize("words", [(), ("--kernels", "prog"), ("--kernels", "nonsense")])
def test_the_profiler_says_first_that_there_is_no_gpu(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashsmith.runtime, "gpu_count", lambda: 0)
    monkeypatch.delenv("KERNELS", raising=False)
    with pytest.raises(LaunchError, match="NVIDIA GPU, and there is none here"):
        run("ncu", *words)


def test_what_a_command_prints_into_a_file_is_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("configs", "--kernels", "prog").splitlines()
    assert len(lines) == 2 + 7 + 1
    assert len({line.count("|") for line in lines[:-1]}) == 1


def test_an_argument_error_is_no_traceback() -> None:
    assert issubclass(ArgumentError, FlashsmithError)
    done = subprocess.run(
        [sys.executable, "-m", "flashsmith", "choose", "b1", "s64"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("flashsmith: b1 s64: is one argument")
