"""The page's text: what is escaped, what is in it, that it fetches nothing; and its files."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ablations import ABLATION, PLAIN, TIMED
from sample_rows import (
    CONFIG,
    HOSTILE,
    PROFILED,
    ROOFLINE,
    bench_rows,
    cache_rows,
    elsewhere,
    row,
    search_rows,
    wrong_row,
)

from flashsmith.benchmark.report import make_page, read_results, write_page
from flashsmith.benchmark.report.page import page_templates
from flashsmith.benchmark.report.results import Results, Source
from flashsmith.errors import ArgumentError, DependencyError

RAW = Path(__file__).parents[3] / "benchmarks" / "h200"
DOCS = Path(__file__).parents[3] / "docs"


class Reader(HTMLParser):
    """Checks that every element is closed, and keeps the text of each section's cells."""

    VOID = ("meta", "link")

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.section = ""
        self.cells: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self.charts: list[dict[str, str | None]] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        self.links += [str(facts[name]) for name in ("src", "srcset", "href") if name in facts]
        if tag == "section":
            self.section = facts["id"] or ""
        if tag == "svg":
            self.charts.append(facts)
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
        ablations=(TIMED,),
        profiles=(PROFILED, replace(PROFILED, verdict="error", note="needs 300 KiB")),
        rooflines=(ROOFLINE,),
        sources=(Source(Path("x/rows.csv"), "benchmark rows", 3),),
    )


PLAIN_RESULTS = Results(rows=tuple(bench_rows()))


# --- what is on the page -------------------------------------------------------------------------


def test_nothing_of_the_page_is_elsewhere(full: Results) -> None:
    page, reader = page_of(full), read(full)
    assert len(reader.links) > 10
    assert all(link.startswith(("data:", "#")) for link in reader.links)
    assert "default-src 'none'" in unescape(page)
    assert not re.search(r"url\(|@import", page)


def test_a_hostile_name_is_only_text(full: Results) -> None:
    assert HOSTILE not in page_of(full)
    assert HOSTILE in read(full).cells["failures"]
    titled = make_page(Results(), HOSTILE).html
    assert HOSTILE not in titled
    assert titled.count("&lt;img src=") == 2


def test_every_chart_says_what_it_shows(full: Results) -> None:
    charts = read(full).charts
    # Ratios, full, causal, the roofline.
    assert len(charts) == 4
    assert charts[0]["aria-label"] == (
        "Throughput of flashsmith over that of its peers, forward on NVIDIA H200: "
        "12 ratios in 2 rows"
    )
    assert charts[1]["aria-label"] == (
        "TFLOP/s by length, d 128, fp16, full, 16 heads: 360 flashsmith, 327 fa2, 540 cudnn"
    )


def test_nobody_reads_ours(full: Results) -> None:
    """Files call flashsmith's rows 'ours': whose they are is not said on a page."""
    text = re.sub(r"<(script|style)>.*?</\1>", "", page_of(full), flags=re.S)
    assert "flashsmith" in text
    assert not re.search(r"\bours?\b", text)


def test_the_overview_has_ratios_by_head_dimension_and_mask(full: Results) -> None:
    cells = read(full).cells["overview"]
    assert cells[:10] == [
        "head dimension, mask", "problems", "TFLOP/s from", "to", "/ fa2", "least", "most",
        "/ cudnn", "least", "most",
    ]  # fmt: skip
    assert cells[10:20] == [
        "d 128, causal", "3", "280", "300", "1.10", "1.10", "1.10", "0.67", "0.67", "0.67",
    ]  # fmt: skip
    assert cells[20] == "d 128, full"


def test_means_of_ratios_are_geometric() -> None:
    rows = [row(seq=512), row(seq=1024), row("fa2", 512, 100.0), row("fa2", 1024, 400.0)]
    page = text_of(page_of(Results(rows=tuple(rows))))
    assert "1.500 times fa2, the geometric mean; 0.75 to 3.00; ahead in 1 of 2 problems" in page


def test_the_problems_have_their_ratios_and_config(full: Results) -> None:
    cells = read(full).cells["problems"]
    headings = cells[: cells.index("config") + 1]
    assert headings == [
        "problem", "flashsmith", "fa2", "cudnn", "/ fa2", "/ cudnn", "/ best", "spread", "MHz", "W",
        "config",
    ]  # fmt: skip
    first = cells[cells.index("d 128, fp16, full, 16 heads, 16 x 1024") :][: len(headings)]
    assert first[1:] == [
        "340", "309", "510", "1.10", "0.67", "0.67", "1.0%", "1,600", "650", CONFIG,
    ]  # fmt: skip
    assert cells[-3:] == ["flash_attn_3", "not installed", "6"]


def test_a_wrong_output_stands_in_place_of_a_rate() -> None:
    bad = row("fa2", verdict="fail", note=HOSTILE)
    page = page_of(Results(rows=(row(), bad, row("fa2", 512))))
    assert re.search(r'<td class="n bad" title="&lt;img [^"]*">FAIL</td>', page)
    page = page_of(Results(rows=(replace(row(), verdict="error"), row("cudnn"))))
    assert '<td class="n bad" title="">ERROR</td>' in page


def test_over_caches_rates_are_terabytes_below_what_the_dram_gives() -> None:
    page = read(Results(rows=(*cache_rows(), *bench_rows()), rooflines=(ROOFLINE,)))
    cells = page.cells["problems"]
    assert page.charts[0]["aria-label"].startswith("Throughput of flashsmith")
    heading = cells.index("of DRAM")
    assert cells[heading - 3 : heading + 4] == [
        "problem", "flashsmith", "us", "of DRAM", "free split", "fa2", "cudnn",
    ]  # fmt: skip
    largest = cells.index("d 128, bf16, decode, 32:8 heads, 1 query, 8 x 8192")
    # 268.6 MB in 90 us, of 4 TB/s.
    assert cells[largest + 1 : largest + 5] == ["2.98", "90.0", "74.6%", "3.32"]
    assert cells[largest + 5 : largest + 9] == ["–", "2.39", "–", "1.25"]
    chart = next(one for one in page.charts if "TB/s" in str(one["aria-label"]))
    label = str(chart["aria-label"])
    assert label.startswith("TB/s by length, d 128, bf16, decode, 32:8 heads, 1 query: ")
    assert "2.98 flashsmith, 3.32 free split, 2.39 cudnn, 4.00 DRAM read" in label
    # Of attention nothing changes.
    plain = read(Results(rows=tuple(bench_rows()))).cells["problems"]
    first = plain.index("d 128, fp16, full, 16 heads, 16 x 1024")
    assert plain[first : first + 3] == cells[(at := cells.index(plain[first])) : at + 3]
    overview = page.cells["overview"]
    # A table of one unit, which its heading names.
    heading = overview.index("TB/s from")
    kind = overview.index("d 128, full", heading)
    assert overview[kind + 1 : kind + 4] == ["3", "0.53", "2.98"]
    assert overview.index("TFLOP/s from") < heading


def test_of_a_page_of_caches_alone_the_fastest_has_terabytes() -> None:
    html = page_of(Results(rows=tuple(cache_rows())))
    assert "2.98 TB/s<small>at most: d 128, bf16, decode" in html
    assert "of DRAM" in html


def test_rows_and_charts_say_what_filters_choose_by(full: Results) -> None:
    page = page_of(full)
    assert '<tr data-d="128" data-dtype="fp16" data-mask="causal"><th scope="row">' in page
    assert '<figure data-d="128" data-dtype="fp16" data-mask="causal">' in page
    # A roofline has kernels of all masks.
    assert '<figure data-d="128" data-dtype="fp16">' in page


def test_a_long_table_says_what_is_left_out() -> None:
    rows = tuple(row(d=8 * n, verdict="fail", note="o") for n in range(1, 1600))
    reader = read(Results(rows=rows))
    assert reader.cells["failures"].count("fail") == 1500
    assert "99 more rows are left out." in reader.notes


def test_failures_are_listed_with_their_reason(full: Results) -> None:
    results = replace(
        full, ablations=(replace(ABLATION, steps=(replace(PLAIN, problems=("NaN",)),)),)
    )
    cells = read(results).cells["failures"]
    assert f"output is {HOSTILE}" in cells
    assert [PLAIN.config, "ablation on NVIDIA H200", "fail", "NaN"] == cells[-4:]
    assert 'class="bad">2<small>of ' in page_of(results)


def test_all_is_well_says_so() -> None:
    page = page_of(PLAIN_RESULTS)
    assert 'class="good">0<small>of 18 outputs' in page
    assert 'id="failures"' not in page


def test_the_search_tells_what_became_of_its_configs(full: Results) -> None:
    reader = read(full)
    assert "The search: 16 measured, 1 wrong, 1 dropped." in reader.notes
    cells = reader.cells["space"]
    assert "wrong: o[0]" in cells
    at = cells.index("d 128, fp16, full, 16 heads, 16 x 4096", cells.index("best config"))
    assert cells[at + 1 : at + 9] == [
        "mma_sync", "8", "1", "1", "335 TFLOP/s", "99.7%", "80.9%", "79.7%",
    ]  # fmt: skip


def test_of_a_large_search_the_best_are_listed_and_the_rest_is_counted() -> None:
    rows = [
        replace(one, d=8 * d, config=config, implementation=config, tflops=100.0 + n)
        for d in range(1, 201)
        for n in range(8)
        for one in [row(protocol="final")]
        for config in [f"(FP16, {8 * d}, 64, {n}, 4): async"]
    ]
    reader = read(Results(rows=tuple(rows)))
    text = "1,000 slower configs are left out; the files have them, and the table above counts them"
    assert f"{text}." in reader.notes
    assert "100 more heat maps are left out." in reader.notes
    assert reader.cells["space"].count("107.0 TFLOP/s") == 200
    assert reader.cells["space"].count("104.0 TFLOP/s") == 0


def test_an_ablations_table_and_its_changes(full: Results) -> None:
    assert "<li><code>+ swizzled</code>: time x 0.21; registers 170 -&gt; 174;" in page_of(full)
    assert read(full).cells["ablation"][-11:-7] == ["2. + swizzled", "250", "75.0%", "8.000"]


def test_the_roofline_places_kernels_below_their_tightest_ceiling(full: Results) -> None:
    cells = read(full).cells["roofline"]
    at = cells.index("mma.sync fed by ldmatrix, 32 rows a warp, fp16")
    assert cells[at - 2 : at + 4] == [
        "340", "512", "mma.sync fed by ldmatrix, 32 rows a warp, fp16", "500", "68.0%", CONFIG,
    ]  # fmt: skip


def test_a_config_that_no_longer_parses_is_not_placed() -> None:
    rows = [replace(one, config="(FP99, 1): x") for one in bench_rows()]
    reader = read(Results(rows=tuple(rows), rooflines=(ROOFLINE,)))
    assert "roofline" not in reader.cells
    assert len(reader.charts) == 3


def test_without_a_roofline_the_command_is_named() -> None:
    notes = read(PLAIN_RESULTS).notes
    said = "No ceilings were measured for NVIDIA H200; 'flashsmith roofline' measures them."
    assert said in notes


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
    assert "NVIDIA H100" in reader.cells["problems"]
    # Ratios of each GPU, and a chart for each GPU and mask, which its title names.
    assert len(reader.charts) == 6
    full = "TFLOP/s by length, d 128, fp16, full, 16 heads, NVIDIA "
    named = [str(chart["aria-label"]).removeprefix(full)[:4] for chart in reader.charts[2::2]]
    assert sorted(named) == ["H100", "H200"]


def test_gpus_have_tables_and_headlines_of_their_own() -> None:
    rows = (*bench_rows(), *elsewhere(bench_rows()), row(gpu="NVIDIA H100", semantics="backward"))
    page = page_of(Results(rows=rows))
    for gpu in ("NVIDIA H200", "NVIDIA H100"):
        assert f"<dt>flashsmith, forward on {gpu}</dt>" in page
        assert f"<span>forward on {gpu}: geometric means for each" in page
        assert f"<span>TFLOP/s of every problem, on {gpu}</span>" in page
    assert "<dt>flashsmith, backward on NVIDIA H100</dt>" in page
    assert "backward on NVIDIA H200" not in page


def test_a_headline_is_the_most_that_the_tables_show() -> None:
    """The version that was measured last is not the one that was fastest."""
    new = row(d=64, tflops=100.0, revision="v2", time="2026-11-30T00:00:00+00:00")
    page = text_of(page_of(Results(rows=(*bench_rows(), new))))
    assert (
        "forward on NVIDIA H200 360 TFLOP/s at most: d 128, fp16, full, 16 heads, 8 x 8192" in page
    )


def test_rows_without_an_environment_say_so() -> None:
    nowhere = {"gpu": "", "arch": 0, "driver": "", "cuda": "", "torch": "", "flashsmith": "",
               "revision": "", "python": ""}  # fmt: skip
    reader = read(Results(rows=tuple(row(seq=seq, **nowhere) for seq in (512, 1024))))
    assert "Some rows have no environment." in reader.notes
    assert "environment" not in reader.cells


def test_an_ablation_alone_is_a_page() -> None:
    reader = read(Results(ablations=(ABLATION,)))
    assert set(reader.cells) == {"ablation", "files"}
    assert reader.charts == []


def test_no_results_are_a_page() -> None:
    assert set(read(Results()).cells) == {"files"}


# --- files ---------------------------------------------------------------------------------------


def test_the_charts_lie_beside_the_page(full: Results, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    out = tmp_path / "new" / "page.html"
    written = write_page(make_page(full), out)
    assert written[0] == out
    names = [path.name for path in written[1:]]
    assert [path.parent for path in written[1:]] == [tmp_path / "new" / "page-charts"] * 4
    assert names == sorted(set(names))
    assert names[1] == "002-d-128-fp16-full-16-heads.svg"
    for path in written[1:]:
        chart = ElementTree.parse(path).getroot()
        assert chart.tag == "{http://www.w3.org/2000/svg}svg"
        # Its colours are in it, its title is, and points say what they are.
        assert "--c0: #" in path.read_text()
        assert len(list(chart.iter("{http://www.w3.org/2000/svg}title"))) > 2


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
    (photos / "001-holiday.svg").write_bytes(b"mine")
    (tmp_path / "page-charts").symlink_to(photos)
    with pytest.raises(ArgumentError, match=r"cannot be written: .*symbolic link"):
        write_page(make_page(full), tmp_path / "page.html")
    assert [path.read_bytes() for path in photos.iterdir()] == [b"mine"]


def test_charts_of_an_earlier_page_go(full: Results, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    charts = tmp_path / "page-charts"
    write_page(make_page(full), out)
    (charts / "099-of-an-earlier-page.svg").touch()
    (charts / "mine.svg").touch()
    written = write_page(make_page(full), out)
    assert set(charts.iterdir()) == {*written[1:], charts / "mine.svg"}


def test_without_jinja2_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    page_templates.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DependencyError, match=r"the report needs Jinja2.*\.\[cli\]"):
        make_page(Results())


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def test_the_key_figures_are_of_each_problems_last_version_and_say_so() -> None:
    """An old file beside a new one once changed the headline, and nobody was told."""
    new = [replace(one, revision="v2", time="2026-11-22T00:00:00+00:00") for one in bench_rows()]
    old = [
        replace(one, ms=2 * one.ms, tflops=one.tflops / 2)
        if one.implementation == "ours" and one.ms and one.tflops
        else one
        for one in (replace(one, revision="v1") for one in bench_rows())
    ]
    old.append(row(seq=2048, revision="v1", tflops=1.0))
    alone, both = (make_page(Results(rows=tuple(rows))).html for rows in (new, [*old, *new]))
    for page in (alone, both):
        tiles = text_of(page[page.index('class="tiles"') : page.index("</dl>")])
        assert "1.100 times fa2, the geometric mean" in tiles
        assert "ahead in 6 of 6 problems" in tiles
    said = "Rows come from 2 versions. For each problem on a GPU, only the most recent measurement"
    assert said not in alone
    assert said in both
    assert (
        "v2 NVIDIA H200 forward 2026-11-22 6 1.100 0.667 "
        "v1 NVIDIA H200 forward 2026-11-21 7 0.550 0.333"
    ) in text_of(both)
    # The ratios by kind are of each problem's last version, the charts name theirs.
    assert "d 128, full 4 1 360 1.10" in text_of(both)
    assert "<h3>d 128, fp16, full, 16 heads, v1</h3>" in both


@pytest.mark.parametrize(
    ("name", "chart_name"),
    [
        ("full", "d-128-fp16-full-16-heads-csrc-51bdeeddc9db.svg"),
        ("causal", "d-128-fp16-causal-16-heads.svg"),
    ],
)
def test_the_charts_of_the_documents_are_those_of_the_committed_rows(
    name: str, chart_name: str
) -> None:
    """`flashsmith report attention-speed.csv` writes them; copy them again where they differ."""
    charts = make_page(read_results([RAW / "attention-speed.csv"])).charts
    (chart,) = (text for number, text in charts.items() if number[4:] == chart_name)
    committed = (DOCS / f"speed-d128-{name}.svg").read_text(encoding="utf-8")
    assert chart.partition("</style>")[2] == committed.partition("</style>")[2]
