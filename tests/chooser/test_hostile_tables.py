"""Tables of winners that are none: ignored with a note, wherever a table is used."""

from __future__ import annotations

import importlib
import json
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import typer
from hostile_tables import (
    GOOD_TEXT,
    HOSTILE_PATHS,
    HOSTILE_TABLES,
    REPLACED_TABLES,
    Make,
    at_first,
    random_table,
    raw,
)
from typer.testing import CliRunner
from winner_samples import H200, TUNED, tuned_table

from flashsmith.chooser import attention, choice, choose, choose_config, forget_choices
from flashsmith.chooser.winners import WinnersTable, storage
from flashsmith.cli import app
from flashsmith.errors import FlashsmithError
from flashsmith.families import Problem, is_legal
from flashsmith.runtime import OperationResult
from flashsmith.runtime.prepared_call import PreparedCall

forward_pass = importlib.import_module("flashsmith.runtime.forward_pass")
COMMAND = typer.main.get_command(app)
PROBLEMS = [Problem.parse(TUNED), Problem.parse("b2 s300:900 h8:2 d128 bf16 causal")]


@pytest.fixture(autouse=True)
def _nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shipped table, and no kernel: what is tested ends where one would be looked for."""
    monkeypatch.setattr(storage, "SHIPPED_FOLDER", tmp_path / "nothing")
    monkeypatch.setattr(forward_pass, "kernel_for", lambda *arguments: object())
    monkeypatch.setattr(
        PreparedCall, "run", lambda prepared, *_: OperationResult(prepared.outputs, None, None)
    )
    # Made anew for every call otherwise, which takes ten times as long as the call.
    monkeypatch.setattr("typer.testing._get_command", lambda _: COMMAND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choice, "_said", set())
    (tmp_path / "good.json").write_text(GOOD_TEXT)


# --- uses: each yields what is wrong --------------------------------------------------------------


def said_wrong(text: str, what: str, most: int = 50_000) -> Iterator[str]:
    if not text.replace("\n", "").isprintable():
        yield f"{what}: has control characters: {text[:200]!r}"
    if len(text) > most:
        yield f"{what}: has {len(text):,} characters"


def in_attention(path: Path) -> Iterator[str]:
    q = np.zeros((1, 8, 1, 16), np.float16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            forget_choices()
            attention(q, q, q)
            for problem in PROBLEMS:
                config = choose_config(problem, H200)
                if not is_legal(config, H200) or config.d_head != problem.d:
                    yield f"{config} serves no {problem}"
    texts = [str(warning.message) for warning in caught]
    if len(texts) > len(set(texts)):
        yield f"a note is repeated: {texts}"
    if len(texts) > 9:
        yield f"{len(texts)} warnings"
    for text in texts:
        yield from said_wrong(text.replace("\n", "\0"), "a warning")


def in_choose(path: Path) -> Iterator[str]:
    for problem in PROBLEMS:
        answer = choose(problem, H200)
        json.dumps(answer.to_json())
        yield from said_wrong(str(answer), "choose()")


def command(*words: str, statuses: tuple[int, ...]) -> Callable[[Path], Iterator[str]]:
    """A use by the command line; FILE in ``words`` is the table."""

    def use(path: Path) -> Iterator[str]:
        given = [str(path) if word == "FILE" else word for word in words]
        result = CliRunner().invoke(app, given)
        status = result.exit_code
        if isinstance(result.exception, FlashsmithError):
            status = 2
            yield from said_wrong(str(result.exception), "its error")
        elif result.exception is not None and not isinstance(result.exception, SystemExit):
            yield f"{type(result.exception).__name__}: {str(result.exception)[:200]}"
            return
        if status not in statuses:
            yield f"status {status}: {result.output[-300:]}{result.exception or ''}"
        # JSON is the entry itself, with each text of the file once.
        most = 60_000 if "--json" in words else 50_000
        yield from said_wrong(result.output.replace(os.fspath(path), ""), "its output", most)
        if "--json" in words and status == 0:
            json.loads(result.stdout)

    return use


USES: dict[str, Callable[[Path], Iterator[str]]] = {
    "attention()": in_attention,
    "choose()": in_choose,
    "choose": command("choose", TUNED, "--device", "H200", statuses=(0,)),
    "choose --json": command("choose", TUNED, "--device", "H200", "--json", statuses=(0,)),
    "path": command("winners", "path", statuses=(0,)),
    "show": command("winners", "show", "--ranks", "9", statuses=(0,)),
    "show --json": command("winners", "show", "--json", statuses=(0,)),
    "show FILE": command("winners", "show", "FILE", statuses=(0, 2)),
    "validate": command("winners", "validate", statuses=(0, 1)),
    "validate FILE": command("winners", "validate", "FILE", statuses=(0, 1, 2)),
    "export": command("winners", "export", "--gpu", "H200", "-o", "out.json", statuses=(0, 2)),
    "merge FILE": command("winners", "merge", "FILE", "--into", "new.json", statuses=(0, 1, 2)),
    "merge into it": command("winners", "merge", "good.json", statuses=(0, 2)),
    "merge it into itself": command("winners", "merge", "FILE", statuses=(0, 1, 2)),
}


def complaints(name: str, path: Path, uses: Iterable[str] = USES) -> Iterator[str]:
    """What is wrong with how a table at ``path`` is used, the user's own."""
    for use in uses:
        forget_choices()
        try:
            for complaint in USES[use](path):
                yield f"{name}, {use}: {complaint}"
        except Exception as error:
            yield f"{name}, {use}: {type(error).__name__}: {str(error)[:300]}"


def wrong_with(tables: dict[str, Make], own: Path, uses: Iterable[str] = USES) -> list[str]:
    own.parent.mkdir(exist_ok=True)
    found: list[str] = []
    for name, make in tables.items():
        make(own)
        found += complaints(name, own, uses)
        own.unlink() if own.is_symlink() or not own.is_dir() else own.rmdir()
    return found


def every(tables: dict[str, Make], step: int) -> dict[str, Make]:
    return dict(list(tables.items())[::step])


# The plain run tries each table with attention() and a fifth of the other uses, by turns.
TURNS = 5
BY_TURNS = [["attention()", *list(USES)[1 + turn :: TURNS]] for turn in range(TURNS)]


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        *((name, BY_TURNS[turn % TURNS]) for turn, name in enumerate(HOSTILE_TABLES)),
        *(pytest.param(name, list(USES), marks=pytest.mark.full) for name in HOSTILE_TABLES),
    ],
    ids=lambda it: it if isinstance(it, str) else f"{len(it)} uses",
)
def test_no_table_takes_anything_down(name: str, uses: list[str], own_table: Path) -> None:
    wrong = wrong_with({name: HOSTILE_TABLES[name]}, own_table, uses)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.full)])
def test_any_value_at_any_place(step: int, own_table: Path) -> None:
    wrong = wrong_with(every(REPLACED_TABLES, step), own_table)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("count", [6, pytest.param(2000, marks=pytest.mark.full)])
def test_random_tables(count: int, own_table: Path) -> None:
    draw = random.Random(1410)
    wrong = wrong_with({f"random {n}": raw(random_table(draw)) for n in range(count)}, own_table)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("text", HOSTILE_PATHS)
def test_no_path_takes_anything_down(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSMITH_TABLE", text.format(tmp_path))
    before = sorted(Path("/dev").glob("*.lock")) + sorted(tmp_path.parent.glob("*.lock"))
    path = storage.user_table_path()
    assert path is not None
    wrong = list(complaints(text, path))
    assert not wrong, "\n".join(wrong)
    assert before == sorted(Path("/dev").glob("*.lock")) + sorted(tmp_path.parent.glob("*.lock"))


def test_a_table_that_may_not_be_read(own_table: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("needs an ordinary user: root may write everywhere")
    own_table.parent.mkdir()
    own_table.write_text(GOOD_TEXT)
    for path, mode in ((own_table, 0o000), (own_table.parent, 0o000)):
        path.chmod(mode)
        wrong = list(complaints("unreadable", own_table))
        path.chmod(0o700)
        assert not wrong, "\n".join(wrong)


# --- what is promised -----------------------------------------------------------------------------


def warned() -> list[str]:
    forget_choices()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choose_config(PROBLEMS[0], H200)
    return [str(warning.message) for warning in caught if "cost model" not in str(warning.message)]


def test_a_note_is_given_once_for_each_version_of_a_file(own_table: Path) -> None:
    own_table.parent.mkdir()
    own_table.write_text("{")
    (note,) = warned()
    assert note.startswith(f"flashsmith: {own_table}, line 1, column 2: no readable table")
    assert warned() == warned() == []
    own_table.write_text("[{")
    assert len(warned()) == 1
    assert warned() == []
    os.utime(own_table, ns=(1, 1))
    assert len(warned()) == 1
    own_table.write_text(GOOD_TEXT)
    assert warned() == []


def test_the_rest_of_a_table_serves(own_table: Path) -> None:
    data = json.loads(GOOD_TEXT)
    data["entries"] = [{**data["entries"][0], "arch": 10**290}] * 300 + data["entries"]
    own_table.parent.mkdir()
    own_table.write_text(json.dumps(data))
    answer = choose(TUNED, H200)
    assert answer.evidence == "table"
    assert len([note for note in answer.notes if "ignored" in note]) == 3
    assert "so are 198 more; `flashsmith winners validate` lists them" in answer.notes
    table = WinnersTable.load(own_table)
    assert (len(table), table.ignored, len(table.validate())) == (1, 300, 201)
    assert table.notes[-1] == f"{own_table}: 100 more entries are ignored"


def test_merge_takes_what_it_can_lists_the_rest_and_fails(own_table: Path, tmp_path: Path) -> None:
    data = json.loads(GOOD_TEXT)
    data["entries"] = [{**data["entries"][0], "gpu": "\x1b[31m"}, *data["entries"], 7]
    (tmp_path / "mixed.json").write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["winners", "merge", "mixed.json"])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "mixed.json: 1 of 1 entries taken over",
        r"note: mixed.json: entry 0 is ignored: gpu is '\x1b[31m', not a name",
        "note: mixed.json: entry 2 is ignored: it is 7, not a mapping",
        f"{own_table}: 1 entry",
    ]
    assert WinnersTable.load(own_table).to_json() == tuned_table().to_json()
    assert CliRunner().invoke(app, ["winners", "merge", "good.json"]).exit_code == 0


def test_a_table_that_cannot_be_read_is_not_merged_into(own_table: Path) -> None:
    own_table.parent.mkdir()
    own_table.write_text("{")
    assert isinstance(
        CliRunner().invoke(app, ["winners", "merge", "good.json"]).exception, FlashsmithError
    )
    assert own_table.read_text() == "{"
    assert [path.name for path in own_table.parent.iterdir()] == [own_table.name]


def test_a_time_that_is_no_text_is_none(own_table: Path) -> None:
    own_table.parent.mkdir()
    at_first("ms", 5.5)(own_table)
    data = json.loads(own_table.read_text())
    data["environments"]["ENV"]["time"] = {"\x1b": 1}
    own_table.write_text(json.dumps(data))
    (entry,) = WinnersTable.load(own_table)
    assert entry.time == ""
