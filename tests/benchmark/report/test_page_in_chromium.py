"""The page in a real browser: it shows, fetches nothing, sorts, filters and adapts, no error."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from ablations import TIMED
from chromium import Chromium, find_chromium
from sample_rows import PROFILED, ROOFLINE, bench_rows, elsewhere, row, search_rows, wrong_row

from flashsmith.benchmark.report import make_page, read_results, write_page
from flashsmith.benchmark.report.results import Results, Source

RAW = Path(__file__).parents[3] / "benchmarks"
CHROMIUM = find_chromium()
# Not among the skips that CI accepts: there the page must be looked at.
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: it is not installed (apt-get install chromium)"
)

D_64 = [
    row(seq=seq, d=64, semantics=semantics, tflops=0.1 * seq)
    for semantics in ("plain", "causal")
    for seq in (2048, 4096, 8192)
]
RESULTS = Results(
    rows=(*bench_rows(), *elsewhere(bench_rows()), wrong_row(), *search_rows(), *D_64),
    ablations=(TIMED,),
    profiles=(PROFILED,),
    rooflines=(ROOFLINE,),
    sources=(Source(Path("rows.csv"), "benchmark rows", 44),),
)
TABLES = 15
ROWS = "[...document.querySelector('#problems tbody').rows]"
COLUMN = ROWS + ".map(r => r.cells[{}].textContent)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    write_page(make_page(RESULTS, "Kernels & <peers>"), out)
    return out


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Chromium]:
    assert CHROMIUM is not None
    with Chromium(CHROMIUM) as browser:
        browser.resize(1280, 900)
        browser.prefer("light")
        browser.open(page)
        yield browser


def test_it_shows_all_of_its_parts(browser: Chromium) -> None:
    assert browser.evaluate("document.title") == "Kernels & <peers>"
    assert browser.evaluate("document.querySelector('h1').textContent") == "Kernels & <peers>"
    # By kind and problems of 2 GPUs, failed, gaps, ablation, the space: lost, problems, best, a
    # heat map, roofline, profiler, environment, files.
    assert browser.evaluate("document.querySelectorAll('table').length") == TABLES
    shown = browser.evaluate("[...document.querySelectorAll('section')].map(s => s.id)")
    assert shown == [
        "overview", "failures", "throughput", "problems", "ablation", "space", "roofline",
        "profiler", "environment", "files",
    ]  # fmt: skip
    linked = browser.evaluate("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert linked == shown


def test_every_chart_is_drawn_and_described(browser: Chromium) -> None:
    boxes = browser.evaluate(
        "[...document.querySelectorAll('svg')].map(s => [s.getBBox().width, s.clientWidth])"
    )
    # Ratios of 2 GPUs, 4 and 2 kinds of problem on them, 2 rooflines.
    assert len(boxes) == 10
    assert all(drawn > 300 and shown > 300 for drawn, shown in boxes)
    described = "[...document.querySelectorAll('svg')].map(s => s.ariaLabel.length > 20)"
    assert all(browser.evaluate(described))


# What leaves the box of the chart that it is in.
OUTSIDE = """[...document.querySelectorAll('svg.chart')].flatMap(svg => {
            const box = svg.getBoundingClientRect();
            return [...svg.children].filter(one => {
                const own = one.getBoundingClientRect();
                return own.left < box.left - 1 || own.right > box.right + 1
                    || own.top < box.top - 1 || own.bottom > box.bottom + 1;
            }).map(one => one.outerHTML);
        })"""


def test_no_shape_of_a_chart_leaves_it(browser: Chromium) -> None:
    assert browser.evaluate(OUTSIDE) == []


def test_nor_does_one_of_what_was_measured(tmp_path: Path) -> None:
    """Real names and rates, on two GPUs: a label that is cut off is found by looking alone."""
    files = [*RAW.glob("h200/attention-speed.csv"), *RAW.glob("h200/backward-*.csv")]
    files += [
        *RAW.glob("h*00/verdict-*"),
        *RAW.glob("h*00/decode.jsonl.gz"),
        RAW / "h200/roofline.txt",
    ]
    write_page(make_page(read_results(sorted(files))), tmp_path / "page.html")
    assert CHROMIUM is not None
    with Chromium(CHROMIUM) as browser:
        browser.resize(1280, 900)
        browser.open(tmp_path / "page.html")
        assert browser.evaluate("document.querySelectorAll('svg.chart').length") > 50
        assert browser.evaluate(OUTSIDE) == []
        for chart in sorted((tmp_path / "page-charts").iterdir())[::10]:
            browser.open(chart)
            assert browser.evaluate(OUTSIDE) == [], chart.name


def test_pointing_at_a_length_shows_its_figures(browser: Chromium) -> None:
    hit = "document.querySelectorAll('#throughput .hit')[1]"
    browser.evaluate(f"{hit}.scrollIntoView()")
    x, y = browser.evaluate(
        f"(() => {{ const box = {hit}.getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = "document.querySelector('.tip')"
    assert browser.evaluate(f"{tip}.hidden") is False
    lines = browser.evaluate(f"{tip}.textContent").split("\n")
    assert lines == ["length 1024, batch 16", "510  cudnn", "340  flashsmith", "309  fa2"]
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.evaluate(f"{tip}.hidden") is True
    browser.evaluate("scrollTo(0, 0)")


def test_nothing_is_fetched_and_nothing_goes_wrong(browser: Chromium, page: Path) -> None:
    requests = [url for url in browser.requests() if url != "about:blank"]
    assert requests[0] == page.resolve().as_uri()
    assert {url[:5] for url in requests[1:]} <= {"data:"}
    assert browser.complaints() == []


def test_a_name_that_looks_like_markup_stays_text(browser: Chromium) -> None:
    text = browser.evaluate("document.querySelector('#failures tbody').textContent")
    assert '<img src="http://example.org/x.png" onerror="alert(1)">' in text
    assert browser.evaluate("document.querySelectorAll('td img, td b').length") == 0


def test_a_failure_is_red(browser: Chromium) -> None:
    red = browser.evaluate("getComputedStyle(document.querySelector('#failures td.bad')).color")
    assert red == "rgb(179, 38, 30)"


def test_a_click_sorts_by_figures_and_a_second_one_turns_it_round(browser: Chromium) -> None:
    headings = browser.evaluate(
        "[...document.querySelectorAll('#problems table')[0].tHead.rows[0].cells]"
        ".map(h => h.textContent)"
    )
    flashsmith = headings.index("flashsmith")
    column = COLUMN.format(flashsmith)
    click = f"document.querySelectorAll('#problems thead button')[{flashsmith}].click()"
    browser.evaluate(click)
    rising = browser.evaluate(column)
    figures = [float(text) for text in rising if text[0].isdigit()]
    assert figures == sorted(figures)
    assert len(figures) == 12
    assert rising[-1] == "FAIL"
    browser.evaluate(click)
    falling = browser.evaluate(column)
    assert [float(text) for text in falling[:12]] == figures[::-1]
    assert falling[-1] == "FAIL"
    state = "document.querySelector('#problems th[aria-sort]').ariaSort"
    assert browser.evaluate(state) == "descending"


def test_a_filter_of_the_page_leaves_one_mask(browser: Chromium) -> None:
    select = "document.querySelector('.filters [name=mask]')"
    change = (
        f"{select}.value = 'VALUE'; {select}.dispatchEvent(new Event('change', {{bubbles: true}}))"
    )
    shown = "[...document.querySelectorAll('{}')].filter(one => one.offsetParent).length"
    figures = shown.format("#throughput figure")
    assert browser.evaluate(f"[...{select}.options].map(o => o.text)") == ["all", "causal", "full"]
    before = browser.evaluate(figures)
    browser.evaluate(change.replace("VALUE", "causal"))
    assert browser.evaluate(figures) == 3
    rows = f"{ROWS}.filter(r => !r.hidden).map(r => r.cells[0].textContent)"
    left = browser.evaluate(rows)
    assert len(left) == 6
    assert all("causal" in problem for problem in left)
    browser.evaluate(change.replace("VALUE", ""))
    assert browser.evaluate(figures) == before
    assert len(browser.evaluate(rows)) == 13


def test_a_long_table_has_a_filter_of_its_own(browser: Chromium) -> None:
    box = "document.querySelector('#problems .rows-filter')"
    assert browser.evaluate(f"{box}.textContent") == "13 of 13 rows"
    typed = f"{box}.firstChild"
    browser.evaluate(f"{typed}.value = 'CAUSAL 4096'; {typed}.dispatchEvent(new Event('input'))")
    assert browser.evaluate(f"{box}.textContent") == "2 of 13 rows"
    browser.evaluate(f"{typed}.value = ''; {typed}.dispatchEvent(new Event('input'))")
    assert browser.evaluate(f"{box}.textContent") == "13 of 13 rows"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_column_stays_where_a_table_scrolls(browser: Chromium, width: int) -> None:
    browser.resize(width, 900)
    table = "document.querySelector('#problems .scroll')"
    left = f"{table}.querySelector('tbody th').getBoundingClientRect().left"
    before = browser.evaluate(left)
    browser.evaluate(f"{table}.scrollLeft = 200")
    moved, after = browser.evaluate(f"{table}.scrollLeft"), browser.evaluate(left)
    browser.evaluate(f"{table}.scrollLeft = 0")
    browser.resize(1280, 900)
    assert moved > 100
    assert after == before


@pytest.mark.parametrize("width", [360, 390, 800, 1280, 1920])
def test_the_page_never_scrolls_sideways(browser: Chromium, width: int) -> None:
    browser.resize(width, 900)
    wide = browser.evaluate("document.documentElement.scrollWidth")
    browser.resize(1280, 900)
    assert wide <= width


def test_paper_holds_the_width_of_the_tables(browser: Chromium) -> None:
    browser.resize(794, 1123)  # A4 at 96 pixels an inch
    browser.prefer("light", media="print")
    wide = browser.evaluate("document.documentElement.scrollWidth")
    browser.prefer("light")
    browser.resize(1280, 900)
    assert wide <= 794


def test_dark_pages_get_dark_charts_and_paper_light_ones(browser: Chromium) -> None:
    def colours() -> list[str]:
        line = "getComputedStyle(document.querySelector('#throughput .line.c0')).stroke"
        return browser.evaluate(f"[getComputedStyle(document.body).backgroundColor, {line}]")

    light = ["rgb(244, 245, 247)", "rgb(11, 92, 173)"]
    assert colours() == light
    browser.prefer("dark")
    assert colours() == ["rgb(18, 20, 25)", "rgb(108, 182, 255)"]
    browser.prefer("dark", media="print")
    assert colours() == ["rgb(255, 255, 255)", light[1]]
    browser.prefer("light")


def test_without_its_script_the_page_is_whole(browser: Chromium, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(page)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.evaluate("document.querySelectorAll('table').length") == TABLES
    assert browser.evaluate("document.querySelectorAll('button, input, select').length") == 0
    # The browser itself shows what a pointer is on.
    assert browser.evaluate("document.querySelectorAll('.hit title').length") > 9
    browser.open(page)
    assert browser.evaluate("document.querySelectorAll('button').length") > 9


def test_a_screenshot_of_the_whole_page_is_not_empty(browser: Chromium, tmp_path: Path) -> None:
    shot = browser.screenshot()
    (tmp_path / "report.png").write_bytes(shot)
    width, height = struct.unpack(">II", shot[16:24])
    assert width == 1280
    assert height > 2000
    # A page of one colour would be a few kilobytes.
    assert len(shot) > 200_000
