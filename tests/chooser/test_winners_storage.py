"""Tables on disk: where they are, and that nothing harms one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest
from winner_samples import BIG, H200, TUNED, add, ranked, tuned_table

from flashsmith.chooser.winners import (
    WinnersTable,
    record_winners,
    require_user_table_path,
    storage,
    table,
    update_table,
    user_table_path,
)
from flashsmith.errors import TableError
from flashsmith.families import Problem


def test_the_user_table_is_where_the_variable_says(own_table: Path) -> None:
    assert user_table_path() == own_table
    assert len(WinnersTable.user()) == 0
    record_winners(Problem.parse(TUNED), H200, [ranked(BIG, 5.7)])
    assert [entry.best.ms for entry in WinnersTable.user()] == [5.7]


def test_without_the_variable_it_is_in_the_users_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHSMITH_TABLE")
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    assert user_table_path() == Path("/somewhere/flashsmith/winners.json")


def test_without_a_home_there_is_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHSMITH_TABLE")
    monkeypatch.setattr(platformdirs, "user_data_path", lambda *_, **__: Path("~/x"))
    assert user_table_path() is None
    assert len(WinnersTable.user()) == 0
    with pytest.raises(TableError, match="FLASHSMITH_TABLE"):
        require_user_table_path()


def test_the_users_entries_stand_before_the_shipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(storage, "SHIPPED_FOLDER", tmp_path / "shipped")
    shipped = tuned_table()
    add(shipped, "b1 s512 h8 d128 fp16", {BIG: 0.02})
    shipped.save(tmp_path / "shipped" / "h200.json")
    record_winners(Problem.parse(TUNED), H200, [ranked(BIG, 9.9)])
    assert [entry.best.ms for entry in WinnersTable.merged()] == [0.02, 9.9]
    assert [entry.best.ms for entry in WinnersTable.shipped()] == [0.02, 5.7]


def test_a_figure_without_a_time_was_measured_now(own_table: Path) -> None:
    dated, undated = ranked(BIG, 5.7, time="2001-01-01"), ranked(BIG, 5.7)
    undated = type(undated)(undated.family, undated.config, undated.ms, undated.tflops, {})
    entry = record_winners(Problem.parse(TUNED), H200, [undated])
    assert entry.time > "2026"
    assert record_winners(Problem.parse(TUNED), H200, [dated]).time == "2001-01-01"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99, "entries": []}'])
def test_an_unusable_table_is_noted_and_never_overwritten(own_table: Path, text: str) -> None:
    own_table.parent.mkdir()
    own_table.write_text(text)
    table = WinnersTable.merged()
    assert any(note.startswith(str(own_table)) and "ignored" in note for note in table.notes)
    with pytest.raises(TableError, match=str(own_table)):
        record_winners(Problem.parse(TUNED), H200, [ranked(BIG, 5.7)])
    assert own_table.read_text() == text


def test_entries_of_a_later_version_survive_an_update(own_table: Path) -> None:
    table = tuned_table()
    later = add(table, "b1 s512 h8 d128 fp16", {BIG: 0.02}, time="2030-01-01")
    table.save(own_table)
    data = json.loads(own_table.read_text())
    (record,) = [entry for entry in data["entries"] if entry["problem"] == str(later.problem)]
    record["semantics"] = "causal+alibi"
    own_table.write_text(json.dumps({**data, "entries": [*data["entries"], "a word"]}))
    for _ in range(2):
        update_table(own_table, lambda table: add(table, "s1 d128 fp16", {BIG: 1.0}))
        written = json.loads(own_table.read_text())
        assert len(written["entries"]) == 4
        assert record in written["entries"]
        assert "a word" in written["entries"]
        environment = record["ranked"][0]["environment"]
        assert written["environments"][environment]["time"] == "2030-01-01"
    assert len(WinnersTable.load(own_table)) == 2


def test_a_write_that_fails_leaves_the_table_as_it_was(
    own_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_table().save(own_table)
    before = own_table.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TableError, match="No space left"):
        record_winners(Problem.parse("s1 d128 fp16"), H200, [ranked(BIG, 5.7)])
    assert own_table.read_bytes() == before
    assert sorted(path.name for path in own_table.parent.iterdir()) == [
        "winners.json",
        "winners.json.lock",
    ]


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a link to nowhere"])
def test_what_is_no_file_is_not_replaced_by_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    {
        "a folder": lambda: path.mkdir(),
        "a pipe": lambda: os.mkfifo(path),
        "a link to nowhere": lambda: path.symlink_to(tmp_path / "gone"),
    }[kind]()
    with pytest.raises(TableError, match="not a regular file"):
        tuned_table().save(path)
    assert not path.is_file()
    assert os.listdir(tmp_path) == ["table.json"]


def test_a_lock_that_is_not_given_up(own_table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LOCK_PATIENCE", 0.0)

    def locked_out(table: WinnersTable) -> None:
        with pytest.raises(TableError, match="another process has held its lock"):
            update_table(own_table, lambda _: None)

    update_table(own_table, locked_out)
    update_table(own_table, lambda _: None)


def test_a_lock_that_is_a_link_is_not_followed(own_table: Path, tmp_path: Path) -> None:
    lock = own_table.with_name(own_table.name + ".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.symlink_to(tmp_path / "made.by.nobody")
    with pytest.raises(TableError, match="cannot be locked"):
        update_table(own_table, lambda _: None)
    assert not (tmp_path / "made.by.nobody").exists()


WRITER = """
import sys
from winner_samples import BIG, H200, ranked
from flashsmith.families import Problem
from flashsmith.chooser.winners import record_winners
for seq in range(1, 16):
    problem = f"b{sys.argv[1]} s{64 * seq} h1 d128 fp16"
    record_winners(Problem.parse(problem), H200, [ranked(BIG, 1.0, problem)])
"""


def test_two_processes_lose_none_of_their_entries(own_table: Path) -> None:
    folder = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, batch], env=environment)
        for batch in ("1", "2")
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    table = WinnersTable.load(own_table)
    assert len(table) == 30
    assert table.notes == []


def test_what_is_shipped_is_sound() -> None:
    assert WinnersTable.shipped().validate() == []
    for path in storage.shipped_files():
        assert json.loads(path.read_text())["schema"] == 1


def test_what_is_shipped_is_written_as_tables_are_written(tmp_path: Path) -> None:
    for path in storage.shipped_files():
        WinnersTable.load(path).save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_text() == path.read_text()


def test_a_change_of_one_entry_is_a_change_of_one_line(tmp_path: Path) -> None:
    table, path = tuned_table(), tmp_path / "table.json"
    other = add(table, "b1 s512 h8 d128 fp16", {BIG: 0.02})
    table.save(path)
    before = path.read_text().splitlines()
    assert sum(BIG in line for line in before) == 2
    add(table, str(other.problem), {BIG: 0.03})
    table.save(path)
    after = path.read_text().splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 1
    assert "0.03" in changed[0]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_table_in_any_layout_of_json_is_read(tmp_path: Path, indent: int | None) -> None:
    """As older versions wrote it, a line for every value."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps(tuned_table().to_json(), indent=indent))
    assert WinnersTable.load(path).to_json() == tuned_table().to_json()
