"""The page's text: what is escaped, what is in it, that it fetches nothing; and its files."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ladders import LADDER, PLAIN, TIMED
from sample_rows import (
    CONFIG,
    HOSTILE,
    PROFILED,
    ROOFLINE,
    bench_rows,
    elsewhere,
    row,
    search_rows,
    wrong_row,
)

from flashsmith.benchmark.report import make_page, write_page
from flashsmith.benchmark.report.html import Html, element, join
from flashsmith.benchmark.report.results import Results, Source
from flashsmith.benchmark.report.table import Entry, number, table
from flashsmith.benchmark.rows import BenchRow
from flashsmith.errors import ArgumentError


class Reader(HTMLParser):
    """Checks that every element is closed, and keeps the text of each section's cells."""

    VOID = ("meta", "link", "img", "source", "br")

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.section = ""
        self.cells: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        self.links += [str(facts[name]) for name in ("src", "srcset", "href") if name in facts]
        if tag == "section":
            self.section = facts["id"] or ""
        if tag == "img":
            self.images.append(facts)
        if tag in ("td", "th"):
            self.cells.setdefault(self.section, []).append("")
        if tag == "p":
            self.notes.append("")
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.stack):
            self.cells[self.section][-1] += data
        elif "p" in self.stack:
            self.notes[-1] += data


_pages: dict[int, tuple[Results, str]] = {}


def page_of(results: Results) -> str:
    """The page's text; drawn once for the same results, since drawing takes its time."""
    if id(results) not in _pages:
        _pages[id(results)] = (results, make_page(results).html)
    return _pages[id(results)][1]


def read(results: Results) -> Reader:
    reader = Reader()
    reader.feed(page_of(results))
    assert reader.stack == []
    return reader


@pytest.fixture(scope="module")
def full() -> Results:
    return Results(
        rows=(*bench_rows(), wrong_row(), *search_rows()),
        ladders=(TIMED,),
        profiles=(PROFILED, replace(PROFILED, verdict="error", note="needs 300 KiB")),
        rooflines=(ROOFLINE,),
        sources=(Source(Path("x/rows.csv"), "benchmark rows", 3),),
    )


PLAIN_RESULTS = Results(rows=tuple(bench_rows()))


# --- HTML ----------------------------------------------------------------------------------------


def test_text_is_escaped_once_and_markup_is_not() -> None:
    assert element("b", "<&\"'") == "<b>&lt;&amp;&quot;&#x27;</b>"
    assert element("p", element("b", "&")) == "<p><b>&amp;</b></p>"
    assert element("td", "x", title='"<', class_="a", data_value=1.5) == (
        '<td title="&quot;&lt;" class="a" data-value="1.5">x</td>'
    )
    assert element("img", alt="", hidden=True, width=None, height=False) == '<img alt="" hidden>'
    assert join(["<", Html("<i>")]) == "&lt;<i>"


def test_a_column_with_a_figure_aligns_right_and_sorts_by_it() -> None:
    text = table("t", ["name", "rate"], [("a", number(1234.5, 1)), ("b", Entry("–"))])
    assert '<th scope="col">name</th><th scope="col" class="figure">rate</th>' in text
    assert '<td class="figure" data-value="1234.5">1,234.5</td>' in text
    assert '<td class="figure">–</td>' in text


# --- what is on the page -------------------------------------------------------------------------


def test_nothing_of_the_page_is_elsewhere(full: Results) -> None:
    page, reader = page_of(full), read(full)
    assert len(reader.links) > 15
    assert all(link.startswith(("data:", "#")) for link in reader.links)
    assert "default-src 'none'" in unescape(page)
    assert not re.search(r"url\(|@import", page)


def test_a_hostile_name_is_only_text(full: Results) -> None:
    assert HOSTILE not in page_of(full)
    assert HOSTILE in read(full).cells["failures"]
    titled = make_page(Results(), HOSTILE).html
    assert HOSTILE not in titled
    assert titled.count("&lt;img src=") == 2


def test_every_image_says_what_it_shows(full: Results) -> None:
    images = read(full).images
    # Full, causal, the ladder, the space, the roofline.
    assert len(images) == 5
    assert images[0]["alt"] == (
        "TFLOP/s by length, d 128, fp16, full, 16 heads: ours 360, fa2 327, cudnn 540"
    )


def test_the_problems_have_their_ratios_and_config(full: Results) -> None:
    cells = read(full).cells["problems"]
    headings = cells[: cells.index("W") + 1]
    assert headings == [
        "problem", "length", "batch", "ours", "fa2", "cudnn", "ours/fa2", "ours/cudnn",
        "ours/best", "config", "spread", "MHz", "W",
    ]  # fmt: skip
    first = cells[cells.index("1024") - 1 :][: len(headings)]
    assert first == [
        "d 128, fp16, full, 16 heads", "1024", "16", "340", "309", "510", "1.10", "0.67", "0.67",
        CONFIG, "1.0%", "1,600", "650",
    ]  # fmt: skip
    assert cells[-3:] == ["flash_attn_3", "not installed", "6"]


def test_failures_are_listed_with_their_reason(full: Results) -> None:
    results = replace(full, ladders=(replace(LADDER, steps=(replace(PLAIN, problems=("NaN",)),)),))
    cells = read(results).cells["failures"]
    assert f"output is {HOSTILE}" in cells
    assert [PLAIN.config, "the ladder on NVIDIA H200", "fail", "NaN"] == cells[-4:]
    assert 'class="bad">2<small>of ' in page_of(results)


def test_all_is_well_says_so() -> None:
    page = page_of(PLAIN_RESULTS)
    assert 'class="good">0<small>of 18 outputs' in page
    assert 'id="failures"' not in page


def test_the_search_tells_what_became_of_its_configs(full: Results) -> None:
    reader = read(full)
    assert "The search: 16 measured, 1 wrong, 1 dropped." in reader.notes
    assert "wrong: o[0]" in reader.cells["space"][-1]


def test_the_ladders_table_and_its_changes(full: Results) -> None:
    assert "<li><code>+ swizzled</code>: time x 0.21; registers 170 -&gt; 174;" in page_of(full)
    assert "75.0%" in read(full).cells["ladder"]


def test_the_roofline_places_kernels_below_their_tightest_ceiling(full: Results) -> None:
    cells = read(full).cells["roofline"]
    at = cells.index("mma.sync fed by ldmatrix, 32 rows a warp, fp16")
    assert cells[at - 3 : at + 3] == [
        CONFIG, "340", "512", "mma.sync fed by ldmatrix, 32 rows a warp, fp16", "500", "68.0%",
    ]  # fmt: skip


def test_a_config_that_no_longer_parses_is_not_placed() -> None:
    rows = [replace(one, config="(FP99, 1): x") for one in bench_rows()]
    reader = read(Results(rows=tuple(rows), rooflines=(ROOFLINE,)))
    assert "roofline" not in reader.cells
    assert len(reader.images) == 2


def test_without_a_roofline_the_command_is_named() -> None:
    notes = read(PLAIN_RESULTS).notes
    assert "No ceilings were measured for NVIDIA H200; 'flashsmith roofline' does that." in notes


def test_the_profilers_rows(full: Results) -> None:
    cells = read(full).cells["profiler"]
    assert {"812.5", "61.2", "1.10", "math pipe 1.2, <wait> 0.8", "needs 300 KiB"} <= set(cells)


def test_one_environment_is_listed_without_alarm(full: Results) -> None:
    reader = read(PLAIN_RESULTS)
    assert reader.cells["environment"][8:] == [
        "NVIDIA H200", "90", "580.159.04", "13.0", "2.11.0+cu130", "0.1.0", "v0.1-2-gabc", "3.12.3",
    ]  # fmt: skip
    assert not any("environments" in note for note in reader.notes)


def test_mixed_environments_are_flagged_and_kept_apart() -> None:
    reader = read(Results(rows=(*bench_rows(), *elsewhere(bench_rows()))))
    assert any("2 environments, which differ in: GPU, driver." in note for note in reader.notes)
    assert "1: NVIDIA H100, v0.1-2-gabc, interleaved" in reader.cells["problems"]
    # A chart for each GPU and mask.
    assert len(reader.images) == 4


def test_rows_without_an_environment_say_so() -> None:
    nowhere = {"gpu": "", "arch": 0, "driver": "", "cuda": "", "torch": "", "flashsmith": "",
               "revision": "", "python": ""}  # fmt: skip
    reader = read(Results(rows=tuple(row(seq=seq, **nowhere) for seq in (512, 1024))))
    assert "Some rows do not say where they were measured." in reader.notes
    assert "environment" not in reader.cells


def test_a_ladder_alone_is_a_page() -> None:
    reader = read(Results(ladders=(LADDER,)))
    assert set(reader.cells) == {"ladder", "files"}
    assert len(reader.images) == 1


# --- files ---------------------------------------------------------------------------------------


def test_the_charts_lie_beside_the_page(full: Results, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    written = write_page(make_page(full), out)
    assert written[0] == out
    names = [path.name for path in written[1:]]
    assert [path.parent for path in written[1:]] == [tmp_path / "new" / "page-charts"] * 5
    assert names == sorted(set(names))
    assert names[0] == "01-throughput-d-128-fp16-full-16-heads-b16.png"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])


def test_the_same_results_give_the_same_page(full: Results) -> None:
    results = Results(rows=tuple(bench_rows()[:4]))
    assert make_page(results) == make_page(results)


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written"):
        write_page(make_page(Results()), tmp_path / "file" / "page.html")


def test_charts_are_not_written_where_a_link_leads(full: Results, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "01-holiday.png").write_bytes(b"mine")
    (tmp_path / "page-charts").symlink_to(photos)
    with pytest.raises(ArgumentError, match=r"cannot be written: .*symbolic link"):
        write_page(make_page(full), tmp_path / "page.html")
    assert [path.read_bytes() for path in photos.iterdir()] == [b"mine"]


def test_charts_of_an_earlier_page_go(full: Results, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    charts = tmp_path / "page-charts"
    write_page(make_page(full), out)
    (charts / "99-of-an-earlier-page.png").touch()
    (charts / "mine.png").touch()
    written = write_page(make_page(full), out)
    assert set(charts.iterdir()) == {*written[1:], charts / "mine.png"}


def key_figures(rows: list[BenchRow]) -> str:
    html = make_page(Results(rows=tuple(rows))).html
    keys = html[html.index('class="key"') : html.index("</dl>")]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", keys)).split())


def test_the_key_figures_are_of_one_version_and_say_so() -> None:
    """An old file beside a new one once changed the headline, and nobody was told."""
    new = [replace(one, revision="v2", time="2026-11-22T00:00:00+00:00") for one in bench_rows()]
    old = [
        replace(one, ms=2 * one.ms, tflops=one.tflops / 2)
        if one.contender == "ours" and one.ms and one.tflops
        else one
        for one in (replace(one, revision="v1") for one in bench_rows())
    ]
    alone, both = key_figures(new), key_figures([*old, *new])
    assert "ours / fa2 1.100 " in alone
    assert "ours / fa2 1.100 " in both
    assert " alone" not in alone
    assert "6 of 6 problems; of v2 alone (older, not in it: v1 0.550 in 6)" in both


def test_every_chart_is_a_step() -> None:
    """Drawing takes a second or so for each: a folder of results has hundreds."""
    steps: list[tuple[str, int, int]] = []
    page = make_page(
        Results(rows=tuple(bench_rows())),
        step=lambda what, done, total: steps.append((what, done, total)),
    )
    assert len(page.pictures) == 2
    assert steps == [("drawing charts", done, 2) for done in (0, 1, 2)]
