"""The journal: what is in it after whatever happened to the writer."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.measurement import Proof
from flashsmith.benchmark.timing import Samples
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, parse_kernel_name_into_config
from flashsmith.tuning.journal import Journal
from flashsmith.tuning.trial import FINAL, PROVE, Build, Record

CONFIG = parse_kernel_name_into_config("(FP16, 64, 64, 64, 4): async+load_0_2_2_tiles")
PROBLEM = Problem.parse("b2 s512:900 h4:2 d64 fp16 causal")
BUILD = Build.of(PROBLEM, CONFIG)
ORIGIN = {"gpu": "a\nb", "time": "2026-11-22"}
RECORDS = [
    Record("compile", builds=(BUILD,), facts=KernelFacts(255, 8, 4, 49152, 2)),
    Record(PROVE, PROBLEM, (BUILD,), proof=Proof("pass", "", 1e-4, 1e-3, 1e-4)),
    Record(FINAL, PROBLEM, (BUILD,), samples=(Samples((1.0, 2.0), 1500.0),), origin=ORIGIN),
    Record(FINAL, PROBLEM, (BUILD,), failure=("hang", "not done after 2 s")),
]


def write(path: Path, environment: str = "here") -> None:
    journal = Journal(path, environment)
    journal.part(environment).add(RECORDS[:1])
    journal.part(environment).add(RECORDS[1:])
    journal.close()


def read(path: Path, environment: str = "here", fresh: bool = False) -> Journal:
    journal = Journal(path, environment, fresh=fresh)
    journal.close()
    return journal


def numbers(journal: Journal) -> list[int]:
    """Which of RECORDS are in it."""
    return [RECORDS.index(record) for record in journal.records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "journal.jsonl"
    write(path)
    return path


def test_what_was_added_is_there(path: Path) -> None:
    journal = read(path)
    assert journal.records == RECORDS
    assert (journal.foreign, journal.damaged) == (0, 0)
    write(path)
    assert numbers(read(path)) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_journal_cut_anywhere_gives_its_whole_lines_and_goes_on(path: Path) -> None:
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        journal = Journal(path, "here")
        assert numbers(journal) == list(range(whole))
        assert journal.damaged == 0
        journal.part("here").add(RECORDS[2:3])
        journal.close()
        assert numbers(read(path)) == [*range(whole), 2]


def changed(path: Path, number: int, **changes: object) -> None:
    lines = path.read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **changes})
    path.write_text("\n".join([*lines, ""]))


def test_lines_that_cannot_be_read_are_passed_over(path: Path) -> None:
    changed(path, 2, format=99)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-5], *lines[2:], "[]", ""]))
    journal = read(path)
    assert numbers(journal) == [0, 3]
    assert journal.damaged == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": "prove"},
        {"stage": "dance"},
        {"stage": "rung 1", "kernels": [[str(CONFIG), "causal"]] * 2},
        {"problem": "b2 s512"},
        {"problem": None},
        {"problem": 7},
        {"kernels": []},
        {"kernels": [["(FP16, 64, 64): fast", "plain"]]},
        {"kernels": [["(FP16, 64, 64, 64, 4): async"]]},
        {"csrc": [1]},
        {"samples": [{"times_ms": ["fast"]}]},
        {"samples": [{"times_ms": []}]},
        {"samples": [{}]},
        {"samples": 3},
        {"stage": "compile", "problem": None, "samples": [], "facts": {"registers": 1}},
        {"samples": [], "failure": ["out of luck", "it lost"]},
        {"stage": "prove", "samples": [], "proof": {"verdict": "maybe"}},
    ],
    ids=str,
)
def test_a_line_of_another_shape_is_passed_over(path: Path, changes: dict[str, object]) -> None:
    changed(path, 2, **changes)
    journal = read(path)
    assert journal.damaged == 1
    assert len(journal.records) == 3


def test_records_of_other_sources_of_their_family_do_not_count(path: Path) -> None:
    """Only of the kernel's own family: another's may change."""
    changed(path, 1, csrc={"mma_sync": "0123456789ab"})
    changed(path, 2, csrc={"gone": "0123456789ab"})
    journal = read(path)
    assert numbers(journal) == [0, 3]
    assert (journal.foreign, journal.damaged) == (2, 0)


def test_a_journal_of_an_older_version_is_refused_and_stays(path: Path) -> None:
    old = {"format": 1, "environment": "here", "kind": "times", "problem": str(PROBLEM)}
    path.write_text(json.dumps(old) + "\n")
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(ArgumentError) as error:
            Journal(path, "here")
        assert str(error.value) == (
            f"out='{path.parent}': an older version of flashsmith wrote its journal.jsonl; "
            "continue with that version, give another folder, or start over with --fresh"
        )
    assert path.read_bytes() == before
    assert read(path, fresh=True).records == []


def test_another_environments_records_do_not_count_but_stay(path: Path) -> None:
    write(path, "elsewhere")
    journal = read(path)
    assert numbers(journal) == [0, 1, 2, 3]
    assert journal.foreign == 4
    assert numbers(read(path, "elsewhere")) == [0, 1, 2, 3]


def test_fresh_forgets_everything(path: Path) -> None:
    assert read(path, fresh=True).records == []
    assert path.read_bytes() == b""


def test_one_writer_at_a_time(path: Path) -> None:
    journal = Journal(path, "here")
    with pytest.raises(ArgumentError, match=r"^out='.*folder': another sweep is writing there"):
        Journal(path, "here", fresh=True)
    assert path.read_bytes()  # the second writer removed nothing
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
    assert (journal.damaged, numbers(journal)) == (1, [0, 1, 2, 3])


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
            journal.part("here").add(RECORDS)
        journal.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert numbers(read(path)) == [0, 1, 2, 3]


def test_a_full_disk_is_said_in_words(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, "here")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArgumentError, match=r"No space left on device.*make room"):
        journal.part("here").add(RECORDS)
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
