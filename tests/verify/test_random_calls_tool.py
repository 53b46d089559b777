"""tools/gpu/random_calls.py: kinds of each call in the emulator, and mistakes that it must find."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools/gpu"))

import random_calls
from random_calls import CLASSES, Kind, Task, checked, kinds, main, parsed, tasks

pytestmark = pytest.mark.torch
SMALL = 40
FORWARD = Kind("forward", "float16", 64, 64, "causal")
GRADIENTS = replace(FORWARD, call="gradients", function="alibi")
CACHE = replace(FORWARD, call="cache", cache="float8_e4m3fn", scattered=True)
OF_CODES = replace(CACHE, function="alibi")
LATENT = Kind("latent", "bfloat16", 576, 512, "causal", scattered=True)
PARTS = replace(FORWARD, call="parts", mask="full", function="alibi", scattered=True)


@pytest.mark.parametrize("kind", [FORWARD, PARTS, GRADIENTS, CACHE, OF_CODES, LATENT], ids=str)
def test_calls_are_right(kind: Kind) -> None:
    row = checked(Task(kind, (3,), 0, SMALL, "cpu"), 3)
    assert (row["ok"], row["reasons"]) == ("True", "")
    assert row["kind"] == str(kind)


@pytest.mark.parametrize("kind", [FORWARD, GRADIENTS, CACHE, LATENT], ids=str)
@pytest.mark.parametrize("mistake", ["scale", "causal"])
def test_another_meaning_is_wrong(
    kind: Kind, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference with another scale, or without the mask, does not agree."""
    make = CLASSES[kind.call]
    problem = make(kind, 3, 0, "cpu", SMALL)
    meaning = problem.meaning

    def mistaken(*args: Any, **keywords: Any) -> Any:
        found = meaning(*args, **keywords)
        if mistake == "scale":
            return replace(found, scale=found.scale * 1.1)
        return replace(found, causal=False, window=(None, -1))

    monkeypatch.setattr(problem, "meaning", mistaken)
    assert problem.run()


def test_kinds_hold_every_call_and_no_kind_twice() -> None:
    every = kinds()
    assert len(set(every)) == len(every)
    assert {it.call for it in every} == set(CLASSES)
    assert {it.d_v for it in every} >= {64, 72, 80, 96, 128, 256, 512}


def test_each_problem_has_one_task() -> None:
    options = parsed(["check", "rows.csv", "--problems", "400"])
    numbers = [n for task in tasks(options, "cpu", 2) for n in task.numbers]
    assert sorted(numbers) == list(range(400))


# Half a minute for all kinds: the kernels of each are chosen for every drawn problem.
ALL_FUNCTIONS = pytest.param("", 38, 50, marks=pytest.mark.full)


@pytest.mark.parametrize(("only", "kinds_of", "most"), [("d64", 11, 16), ALL_FUNCTIONS])
def test_problems_of_functions_share_their_kind_s_kernels(
    only: str,
    kinds_of: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """However many problems there are, a kind has the kernels of its typical problem."""
    asked = []

    def library_for(configs: Any, **keywords: Any) -> Any:
        asked.extend(configs)
        entry = SimpleNamespace(spill_bytes=0, beside=())
        return SimpleNamespace(entry=lambda config: entry)

    options = parsed(["build", "--functions", "--only", only, "--problems", "76"])
    every = tasks(options, "cpu", 76)
    assert len(every) == kinds_of
    assert {it.kind.call for it in every} == {"forward", "parts", "gradients", "cache"}
    assert all(it.kind.function and it.configs for it in every)
    monkeypatch.setattr(random_calls, "library_for", library_for)
    command = ["random_calls.py", "build", "--functions", "--only", only, "--problems", "76"]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    assert "Error" not in capsys.readouterr().out
    assert len(every) <= len(asked) <= most


def test_check_writes_a_row_for_each_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_calls, "kinds", lambda: [FORWARD])
    rows = tmp_path / "rows.csv"
    command = ["random_calls.py", "check", str(rows), "--problems", "2", "--longest", str(SMALL)]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    with rows.open() as file:
        assert [row["ok"] for row in csv.DictReader(file)] == ["True", "True"]


def test_build_collects_the_kernels_of_the_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries are not compiled here; their names are what counts."""
    asked = []

    def library_for(configs: Any, **keywords: Any) -> Any:
        asked.append((*configs, keywords["arch"]))
        raise SystemExit

    monkeypatch.setattr(random_calls, "kinds", lambda: [FORWARD, CACHE, LATENT, GRADIENTS])
    monkeypatch.setattr(random_calls, "library_for", library_for)
    monkeypatch.setattr(sys, "argv", ["random_calls.py", "build", "--problems", "4", "--jobs", "1"])
    with pytest.raises(SystemExit):
        main()
    assert asked[0][0].family.name == "wgmma"
    assert asked[0][1] == 90
    assert capsys.readouterr().out == ""


def test_build_finds_the_kernels_of_every_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = SimpleNamespace(spill_bytes=0, beside=())
    library = SimpleNamespace(entry=lambda config: entry)
    monkeypatch.setattr(random_calls, "library_for", lambda configs, **keywords: library)
    every = len(kinds())
    monkeypatch.setattr(
        sys, "argv", ["random_calls.py", "build", "--problems", f"{every}", "--longest", "80"]
    )
    assert main() == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) + 1 > every
    assert last.startswith(f"{len(lines) + 1} of {len(lines) + 1}: ")
