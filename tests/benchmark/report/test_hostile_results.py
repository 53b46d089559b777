"""Thousands of damaged files of results: a page, or one line that names the file."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ablations import TIMED
from hostile_results import ESCAPE, HOSTILE, MATH, damaged, good_files
from sample_rows import ROOFLINE, bench_rows, row, search_rows
from test_page import Reader

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.measurement_files import GrowingFile, write_rows
from flashsmith.benchmark.progression_plot import draw_ablation, save_picture
from flashsmith.benchmark.report import make_page, read_results, write_page
from flashsmith.benchmark.report.page import LIMITS
from flashsmith.benchmark.report.results import Results
from flashsmith.errors import ArgumentError

GOOD = good_files()


def complaints(path: Path) -> Iterator[str]:
    """What is wrong with how a file is reported, or refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results = read_results([path])
            page = make_page(replace(results, rooflines=(*results.rooflines, ROOFLINE)))
    except ArgumentError as error:
        said = str(error)
        if not said.isprintable():
            yield f"more than a line: {said[:300]!r}"
        if len(said) > 1500:
            yield f"{len(said)} characters: {said[:300]!r}"
        if str(path) not in said:
            yield f"does not name the file: {said[:300]!r}"
        return
    except Exception as error:
        yield f"{type(error).__name__}: {str(error)[:300]}"
        return
    for name, chart in page.charts.items():
        yield from (f"{name}: {complaint}" for complaint in complaints_of_chart(chart))
    text = page.html
    text.encode()
    if not text.replace("\n", "").isprintable():
        yield "the page has control characters"
    if "<img src=" + HOSTILE[10:20] in text or text.count("</script>") != 1:
        yield "a file's text is markup of the page"


def complaints_of_chart(text: str) -> Iterator[str]:
    """What is wrong with an SVG file."""
    try:
        chart = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        yield f"no XML: {error}"
        return
    for shape in chart.iter():
        for name, value in shape.attrib.items():
            if re.search(r"\b(nan|inf)\b", value) and name != "aria-label":
                yield f"{name}={value!r}"


def wrong_with(count: int, folder: Path, seed: int) -> list[str]:
    draw = random.Random(seed)
    found: list[str] = []
    for number in range(count):
        name = draw.choice(list(GOOD))
        path = folder / f"{number}-{name}"
        path.write_bytes(damaged(name, GOOD[name], draw))
        found += (f"{path.name}: {complaint}" for complaint in complaints(path))
        path.unlink()
    return found


@pytest.mark.parametrize("count", [400, pytest.param(6000, marks=pytest.mark.full)])
def test_a_damaged_file_is_a_page_or_one_line(count: int, tmp_path: Path) -> None:
    wrong = wrong_with(count, tmp_path, seed=1411)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:30])


def test_the_files_are_sound_before_they_are_damaged(tmp_path: Path) -> None:
    for name, text in GOOD.items():
        (tmp_path / name).write_text(text)
    results = read_results([tmp_path / name for name in GOOD])
    assert len(results.sources) == len(GOOD)
    assert all(source.count for source in results.sources)


# --- what is drawn --------------------------------------------------------------------------------

NAMES = ("$", "a $b$ c", MATH, ESCAPE, "日本語 \U0001f600", "\ufffd\u0378", " ")


@pytest.mark.parametrize("name", ["x" * 3000, ESCAPE + MATH, HOSTILE, *NAMES])
def test_any_name_can_be_shown(name: str) -> None:
    """In every kind of chart and table: as text, not as markup."""
    rows = [replace(one, gpu=name, semantics=name, protocol=name) for one in bench_rows()[:8]]
    rows += [replace(one, implementation=name, kind="peer") for one in rows[:3]]
    rows += [replace(one, gpu=name) for one in bench_rows()[:4]]
    rows += [row(f"{name} {n}", 4096, 100.0 + n, dtype=name, d=64) for n in range(6)]
    rows += [replace(one, config=f"{one.config}+{name}") for one in search_rows()[:8]]
    steps = tuple(replace(step, config=name) for step in TIMED.steps)
    ablation = replace(TIMED, peer=name, counted=name, device=name, steps=steps)
    rooflines = (replace(ROOFLINE, gpu=name),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = make_page(Results(rows=tuple(rows), rooflines=rooflines, ablations=(ablation,)))
    assert len(page.charts) >= 4
    reader = Reader()
    reader.feed(page.html)
    assert reader.stack == []
    for text in (page.html, *page.charts.values()):
        assert text.replace("\n", "").isprintable()
        assert HOSTILE not in text
    assert [one for chart in page.charts.values() for one in complaints_of_chart(chart)] == []


@pytest.mark.parametrize(
    "name",
    ["x" * 3000, ESCAPE + MATH, *(pytest.param(name, marks=pytest.mark.full) for name in NAMES)],
)
def test_any_name_can_be_drawn_with_matplotlib(name: str, tmp_path: Path) -> None:
    """As text, not as a formula."""
    steps = tuple(replace(step, config=name) for step in TIMED.steps)
    ablation = replace(TIMED, peer=name, counted=name, device=name, steps=steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_picture(draw_ablation(ablation), tmp_path / "ablation.png")


def test_a_long_name_is_a_files_name(tmp_path: Path) -> None:
    rows = [replace(one, semantics="x" * 3000) for one in bench_rows()[:4]]
    written = write_page(make_page(Results(rows=tuple(rows))), tmp_path / "page.html")
    assert len(written) == 3
    assert all(len(path.name) < 120 for path in written)


def test_figures_of_any_size_are_drawn() -> None:
    for rates in ((1e-12, 1e12), (1e12, 1e12), (1e-12, 1e-12)):
        rows = []
        for seq, rate in zip((512, 1024), rates, strict=True):
            rows += [row(seq=seq, tflops=rate), row("fa2", seq, 1e3), row("cudnn", seq, 1e-12)]
            rows += [row(f"(FP16, 128, 64, {n}, 4): x", seq, rate * (n + 1) ** n) for n in range(9)]
        page = make_page(Results(rows=tuple(rows), rooflines=(ROOFLINE,)))
        assert [one for chart in page.charts.values() for one in complaints_of_chart(chart)] == []


def test_more_than_can_be_shown_is_left_out_and_said() -> None:
    rows = [row(name, 1024, 300.0, d=8 * n) for n in range(1, 141) for name in ("ours", "fa2")]
    page = make_page(Results(rows=tuple(rows)))
    assert len(page.charts) == 1 + LIMITS["charts"]
    assert "110 more rows are in the table." in page.html
    assert "40 more charts are left out." in page.html
    peers = [row(f"peer {n}", 1024, 100.0 + n, kind="peer") for n in range(20)]
    page = make_page(Results(rows=(row(), *peers)))
    assert "8 more peers are left out." in page.html
    tiles = [f"(FP16, 128, {8 * n}, 64, 4): async+load_{n % 2}_0_0_tiles" for n in range(1, 60)]
    searched = [row(tile, 4096, 100.0 + n, protocol="final") for n, tile in enumerate(tiles)]
    assert "19 slower tiles are left out." in make_page(Results(rows=tuple(searched))).html


# --- what is said ---------------------------------------------------------------------------------


def written(folder: Path, *rows: Measurement) -> Path:
    write_rows(folder / "rows.json", rows)
    return folder / "rows.json"


def test_what_is_no_figure_is_left_out_and_said(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    good, *bad = (row(seq=seq) for seq in (512, 1024, 2048, 4096))
    path = written(
        tmp_path, good, replace(bad[0], ms=nan, tflops=inf), replace(bad[1], ms=-1.0),
        replace(bad[2], tflops=0.0, max_error=inf),
    )  # fmt: skip
    results = read_results([path])
    assert results.sources[0].left_out == (
        "row 2: ms is nan", "row 2: tflops is inf", "row 3: ms is -1", "row 4: tflops is 0",
    )  # fmt: skip
    assert [(one.ms is None, one.tflops is None) for one in results.rows] == [
        (False, False), (True, True), (True, False), (False, True),
    ]  # fmt: skip
    assert results.rows[3].max_error == inf
    said = re.search(r'<p class="note alarm">(Left out of [^<]*)</p>', make_page(results).html)
    assert said is not None
    assert said[1] == (
        "Left out of rows.json, not finite or not above 0: row 2: ms is nan; row 2: tflops is inf; "
        "row 3: ms is -1; row 4: tflops is 0."
    )


def test_a_failure_whose_time_is_no_figure_is_shown(tmp_path: Path) -> None:
    path = written(tmp_path, row(), row("mine", verdict="fail", ms=float("nan"), note="o is NaN"))
    page = make_page(read_results([path])).html
    assert 'id="failures"' in page
    assert "o is NaN" in page


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("rows.csv", ("pass", "great"), r", row 1: verdict='great': allowed are pass, fail"),
        ("rows.csv", (",1024,", f",{'9' * 5000},"), r", row 1: seq_q='9+'.*out of range"),
        ("rows.csv", (",16,", ",١٦,"), r", row 1: batch='١٦' is not of type int"),
        ("rows.csv", ("ours,", "ours,ours,"), r", line 2: has 39 values for 38 columns"),
        ("rows.csv", ("kind,", "batch,"), r", line 1: the column 'batch' occurs twice"),
        ("rows.json", ('"seq_q": 1024', '"seq_q": [1]'), r", row 1: seq_q=\[1\] is not of type"),
        ("rows.json", ('"note": ""', '"note": {}'), r", row 1: note=\{\} is not of type str"),
        (
            "rows.json",
            ('"contender": "ours"', '"contender": 1'),
            r", row 1: contender=1 is not of type str",
        ),
        ("rows.json", ("1024", "1" * 5000), r": cannot be read: it has a number of 5,000"),
        ("rows.json", ('"ours"', r'"\ud800"'), r": cannot be read: a text in it has a lone"),
        ("ablation.json", (": 170", ": \"x\""), r": .*steps\[0\].registers='x' is not of type int"),
        ("ablation.json", ('"ms": 39.0', '"ms": 0'), r": .*steps\[0\].time: ms is 0, not finite"),
        ("roofline.json", ('"rate": 500.0', '"rate": "nan"'), r": .*ceilings\[1\]: rate is nan"),
        ("run.json", ('"kernels": [', '"kernels": [3, '), r": kernel 1: "),
        ("profile.csv", ("812.5", "inf"), r", row 1: duration_us='inf' is not a float below"),
        ("speed.csv", ("float16", "int8"), r", line 2: 'int8' is not supported here"),
    ],
)  # fmt: skip
def test_the_place_is_named(name: str, change: tuple[str, str], said: str, tmp_path: Path) -> None:
    assert change[0] in GOOD[name]
    (tmp_path / name).write_text(GOOD[name].replace(*change, 1), encoding="utf-8")
    with pytest.raises(ArgumentError, match=re.escape(name) + said):
        read_results([tmp_path / name])


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_byte_order_mark_and_line_ends_do_not_matter(bom: str, end: str, tmp_path: Path) -> None:
    text = bom + GOOD["rows.csv"].replace("\n", end)
    (tmp_path / "rows.csv").write_bytes(text.encode())
    assert len(read_results([tmp_path / "rows.csv"]).rows) == 21
    (tmp_path / "rows.json").write_bytes((bom + GOOD["rows.json"]).encode())
    assert len(read_results([tmp_path / "rows.json"]).rows) == 21


# --- other readers --------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".csv", ".json", ".parquet"])
@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "folder", "library"])
def test_what_is_no_file_of_results(kind: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{ending}"
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
        "folder": lambda: path.mkdir(),
        "library": lambda: path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(2000)),
    }[kind]()
    assert list(complaints(path)) == []


@pytest.mark.parametrize("kind", ["pipe", "binary"])
def test_a_csv_is_not_continued_where_there_is_none(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(ArgumentError, match=r"^csv: .*give another file"):
        GrowingFile(path, ("a", "b"))
