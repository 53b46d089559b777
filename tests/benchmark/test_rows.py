"""Rows: what is written comes back, row by row, and what is no row is refused."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsmith.benchmark import measurement_files as rows_module
from flashsmith.benchmark.measurement import Measurement, problem_columns
from flashsmith.benchmark.measurement_files import (
    COLUMNS,
    GrowingFile,
    read_rows,
    rows_as_json,
    write_rows,
)
from flashsmith.errors import ArgumentError, DependencyError
from flashsmith.families import Problem

ROW = Measurement(
    implementation="attention()",
    kind="ours",
    family="mma_sync",
    config="(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles",
    **problem_columns(Problem.parse("b16 s4096 h16:4 d128 fp16 causal")),
    verdict="pass",
    ms=1.25,
)


def random_rows() -> st.SearchStrategy[Measurement]:
    # Surrogates cannot be encoded; NaN is not equal to itself; csv reads a lone \r as a line's end.
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"))
    numbers = {float: st.floats(allow_nan=False), int: st.integers(-(2**53), 2**53), str: text}
    columns: dict[str, st.SearchStrategy[Any]] = {}
    hints = get_type_hints(Measurement)
    scalars = (name for name in hints if name not in ("instructions", "conflicts"))
    for name, hint in ((name, hints[name]) for name in scalars):
        members = get_args(hint)
        if type(None) in members:
            columns[name] = st.none() | numbers[members[0]]
        elif members:
            columns[name] = st.sampled_from(members)
        else:
            columns[name] = numbers[hint]
    return st.builds(Measurement, **columns)


SUFFIXES = [
    ".csv",
    ".jsonl",
    ".json",
    *([".parquet"] if importlib.util.find_spec("pyarrow") else []),
]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"

    @settings(max_examples=60, deadline=None)
    @given(st.lists(random_rows(), max_size=4))
    def round_trip(rows: list[Measurement]) -> None:
        write_rows(path, rows)
        assert read_rows(path) == rows

    round_trip()


def test_nan_comes_back_as_nan(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        path = tmp_path / f"rows{suffix}"
        write_rows(path, [replace(ROW, max_error=math.nan, rel_l2=math.inf)])
        (row,) = read_rows(path)
        assert row.max_error is not None
        assert math.isnan(row.max_error)
        assert row.rel_l2 == math.inf


def test_a_row_knows_its_problem() -> None:
    for text in ("b16 s4096 h16:4 d128 fp16 causal", "b2 s7:300 h3 d96 bf16 packed"):
        problem = Problem.parse(text)
        assert replace(ROW, **problem_columns(problem)).problem == problem


def test_every_appended_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with GrowingFile(path) as writer:
        assert read_rows(path) == []
        writer.write(ROW)
        assert read_rows(path) == [ROW]
    with GrowingFile(path) as writer:
        writer.write(replace(ROW, ms=None))
    assert read_rows(path) == [ROW, replace(ROW, ms=None)]


def test_a_file_of_other_columns_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("name,ms\nx,1\n")
    with pytest.raises(ArgumentError, match="other columns"):
        GrowingFile(path)
    assert path.read_text() == "name,ms\nx,1\n"


def test_a_note_of_several_lines_is_one_line_and_costs_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for _ in range(2):
        with GrowingFile(path) as writer:
            writer.write(replace(ROW, note="illegal:\n  one\n  two"))
    assert [row.note for row in read_rows(path)] == ["illegal:; one; two"] * 2
    assert path.read_bytes().count(b"\n") == 3
    # What an older version wrote, cut off within its note: the whole line goes, and no other.
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[1].replace(b"illegal:;", b'"illegal:\n')[:-4])
    with GrowingFile(path) as writer:
        writer.write(ROW)
    assert len(read_rows(path)) == 3


def test_a_line_that_was_cut_off_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with GrowingFile(path) as writer:
        writer.write(ROW)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-40:-20])
    with GrowingFile(path) as writer:
        writer.write(ROW)
    assert read_rows(path) == [ROW, ROW]


def test_columns_may_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    known = {name: value for name, value in asdict(ROW).items() if name not in ("power_w", "gpu")}
    known["of a later version"] = 1
    path.write_text(
        ",".join(known) + "\n" + ",".join(f'"{"" if v is None else v}"' for v in known.values())
    )
    assert read_rows(path) == [ROW]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b\n1,2\n", "row 1: lacks contender, kind"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_row_is_refused(tmp_path: Path, text: str | None, named: str) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArgumentError, match=named):
        read_rows(path)


def test_a_value_that_does_not_fit_is_located(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_rows(path, [ROW, ROW])
    path.write_text(path.read_text().replace('"ms": 1.25', '"ms": "quick"', 1))
    with pytest.raises(ArgumentError, match=r"rows\.json, row 1: ms='quick' is not of type float"):
        read_rows(path)


def test_json_must_be_a_list_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"kernels": []}')
    with pytest.raises(ArgumentError, match="a list of objects"):
        read_rows(path)
    path.write_text("[{")
    with pytest.raises(ArgumentError, match="cannot be read as json"):
        read_rows(path)


@pytest.mark.parametrize("name", ["rows.txt", "rows"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    for action in (lambda path: write_rows(path, []), read_rows):
        with pytest.raises(ArgumentError, match="the ending must be"):
            action(tmp_path / name)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DependencyError, match=r"pip install '\.\[parquet\]'"):
        write_rows(tmp_path / "rows.parquet", [ROW])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rows.csv", "rows.json"])
def test_rows_are_not_written_through_a_link_beside_them(tmp_path: Path, name: str) -> None:
    """Put where the unfinished file would be, were its name the process's number."""
    (tmp_path / f".{name}.{os.getpid()}").symlink_to(tmp_path / "target")
    write_rows(tmp_path / name, [ROW])
    assert read_rows(tmp_path / name) == [ROW]
    assert not (tmp_path / "target").exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rows.json"
    write_rows(path, [ROW])
    monkeypatch.setattr(rows_module.json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_rows(path, [])
    assert [file.name for file in tmp_path.iterdir()] == ["rows.json"]
    monkeypatch.undo()
    assert read_rows(path) == [ROW]


def test_json_rows_are_plain_json() -> None:
    (plain,) = rows_as_json([replace(ROW, ms=math.inf)])
    assert plain["ms"] == "inf"
    assert tuple(plain) == COLUMNS


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_keeps_what_a_kernel_did(tmp_path: Path, suffix: str) -> None:
    did = replace(ROW, instructions={"mma": 128}, conflicts={"ldmatrix": 8.0, "O st": None})
    write_rows(tmp_path / f"rows{suffix}", [did, ROW])
    assert read_rows(tmp_path / f"rows{suffix}") == [did, ROW]
    write_rows(tmp_path / "rows.csv", [did])
    assert read_rows(tmp_path / "rows.csv") == [ROW]


def test_json_lines_grow_and_lose_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    odd = replace(ROW, ms=math.inf, note="two\nlines", family="")
    with GrowingFile(path) as file:
        file.write(ROW)
        assert read_rows(path) == [ROW]
        file.write(odd)
    whole = path.read_bytes()
    assert whole.count(b"\n") == 2
    for end in (1, 30, len(whole.splitlines()[0]) - 1):
        path.write_bytes(whole + whole[:end])
        assert read_rows(path) == [ROW, odd]
        with GrowingFile(path) as file:
            file.write(ROW)
        assert read_rows(path) == [ROW, odd, ROW]
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"contender": "ours"}\n', r"rows\.jsonl, row 1: lacks kind"),
        ("{}\n[]\n", r"rows\.jsonl, line 2: must hold an object"),
        ("{}\n{\n", r"rows\.jsonl, line 2: cannot be read: it is not JSON"),
    ],
)
def test_what_is_no_line_of_a_measurement_is_located(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=named):
        read_rows(path)


def test_json_lines_that_are_none_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("name,ms\nx,1\n")
    with pytest.raises(ArgumentError, match=r"^jsonl: .*line 1: .*give another file"):
        GrowingFile(path)
