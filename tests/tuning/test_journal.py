"""The journal: what is in it after whatever happened to the writer."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from flashsmith.errors import ArgumentError
from flashsmith.tuning.journal import Journal

RECORDS = [{"kind": "times", "n": n, "text": "a\nb"} for n in range(4)]


def write(path: Path, environment: str = "here") -> None:
    journal = Journal(path, environment)
    journal.add(RECORDS[:1])
    journal.add(RECORDS[1:])
    journal.close()


def read(path: Path, environment: str = "here", fresh: bool = False) -> Journal:
    journal = Journal(path, environment, fresh=fresh)
    journal.close()
    return journal


def facts(journal: Journal) -> list[int]:
    return [record["n"] for record in journal.records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "journal.jsonl"
    write(path)
    return path


def test_what_was_added_is_there(path: Path) -> None:
    journal = read(path)
    assert [{k: r[k] for k in ("kind", "n", "text")} for r in journal.records] == RECORDS
    assert (journal.foreign, journal.damaged) == (0, 0)
    write(path)
    assert facts(read(path)) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_journal_cut_anywhere_gives_its_whole_lines_and_goes_on(path: Path) -> None:
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        journal = Journal(path, "here")
        assert facts(journal) == list(range(whole))
        assert journal.damaged == 0
        journal.add([{"kind": "times", "n": 9}])
        journal.close()
        assert facts(read(path)) == [*range(whole), 9]


def test_lines_that_cannot_be_read_are_passed_over(path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[1] = lines[1][:-5]
    lines[2] = json.dumps({**json.loads(lines[2]), "format": 99})
    path.write_text("\n".join([*lines, "[]", ""]))
    journal = read(path)
    assert facts(journal) == [0, 3]
    assert journal.damaged == 3


def test_another_environments_records_do_not_count_but_stay(path: Path) -> None:
    write(path, "elsewhere")
    journal = read(path)
    assert facts(journal) == [0, 1, 2, 3]
    assert journal.foreign == 4
    assert facts(read(path, "elsewhere")) == [0, 1, 2, 3]


def test_fresh_forgets_everything(path: Path) -> None:
    assert read(path, fresh=True).records == []
    assert path.read_bytes() == b""


def test_one_writer_at_a_time(path: Path) -> None:
    journal = Journal(path, "here")
    with pytest.raises(ArgumentError, match=r"^out='.*folder': another sweep is writing there"):
        Journal(path, "here", fresh=True)
    assert path.read_bytes()  # whoever came too late forgot nothing
    journal.close()
    read(path)


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b'{"format": 1, "n": ' + b"9" * 5000 + b"}", b'{"n": "\\ud800"}', b"\xff\xfe"],
    ids=["deep", "digits", "surrogate", "no text"],
)
def test_a_line_that_no_reader_can_take_is_damaged(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line + b"\n")
    journal = read(path)
    assert (journal.damaged, facts(journal)) == (1, [0, 1, 2, 3])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"^out='.*file': cannot be written"):
        Journal(tmp_path / "file" / "journal.jsonl", "here")


def test_a_disk_that_is_really_full_is_said_in_words_and_closing_says_nothing(path: Path) -> None:
    journal = Journal(path, "here")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As on a full disk, no byte more is taken.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        with pytest.raises(ArgumentError, match="cannot be written"):
            journal.add(RECORDS)
        journal.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert facts(read(path)) == [0, 1, 2, 3]


def test_a_full_disk_is_said_in_words(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, "here")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArgumentError, match=r"No space left on device.*make room"):
        journal.add(RECORDS)
    journal.close()


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_journal_that_is_no_file_of_its_own_is_refused(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "journal.jsonl", tmp_path / "target"
    target.write_text("mine")
    if kind == "link":
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    with pytest.raises(ArgumentError, match="cannot be written"):
        Journal(path, "here", fresh=True)
    assert target.read_text() == "mine"
