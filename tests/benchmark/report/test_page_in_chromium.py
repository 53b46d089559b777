"""The page in a real browser: it shows, fetches nothing, complains about nothing, sorts, adapts."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, find_chromium
from ladders import TIMED
from sample_rows import PROFILED, ROOFLINE, bench_rows, elsewhere, search_rows, wrong_row

from flashsmith.benchmark.report import make_page, write_page
from flashsmith.benchmark.report.results import Results, Source

CHROMIUM = find_chromium()
# Not among the skips that CI accepts: there the page must be looked at.
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: it is not installed (apt-get install chromium)"
)

RESULTS = Results(
    rows=(*bench_rows(), *elsewhere(bench_rows()), wrong_row(), *search_rows()),
    ladders=(TIMED,),
    profiles=(PROFILED,),
    rooflines=(ROOFLINE,),
    sources=(Source(Path("rows.csv"), "benchmark rows", 44),),
)
IMAGES = "Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))"
COLUMN = "[...document.querySelectorAll('#problems tbody tr')].map(r => r.cells[{}].textContent)"


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
    # Failed, problems, gaps, ladder, lost by the search, roofline, profiler, environment, files.
    assert browser.evaluate("document.querySelectorAll('table').length") == 9
    shown = browser.evaluate("[...document.querySelectorAll('section')].map(s => s.id)")
    assert shown == [
        "failures", "throughput", "problems", "ladder", "space", "roofline", "profiler",
        "environment", "files",
    ]  # fmt: skip
    linked = browser.evaluate("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert linked == shown


def test_every_chart_is_decoded_and_described(browser: Chromium) -> None:
    widths = browser.evaluate(IMAGES)
    # 2 kinds of problem on 2 GPUs, a ladder, a heat map, a roofline.
    assert len(widths) == 7
    assert min(widths) > 500
    assert all(browser.evaluate("[...document.images].map(i => i.alt.length > 20)"))


def test_nothing_is_fetched_and_nothing_goes_wrong(browser: Chromium, page: Path) -> None:
    browser.evaluate(IMAGES)
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
    ours = headings.index("ours")
    column = COLUMN.format(ours).replace("#problems tbody", "#problems .scroll:first-of-type tbody")
    click = f"document.querySelectorAll('#problems thead button')[{ours}].click()"
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


@pytest.mark.parametrize("width", [360, 800, 1280, 1920])
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
    colour = "getComputedStyle(document.body).backgroundColor"
    source = "document.images[0].currentSrc"
    assert browser.evaluate(colour) == "rgb(244, 245, 247)"
    browser.evaluate(f"window.lightChart = {source}")
    browser.prefer("dark")
    assert browser.evaluate(colour) == "rgb(18, 20, 25)"
    assert browser.comes_true(f"{source} !== window.lightChart")
    assert browser.evaluate(IMAGES)
    browser.prefer("dark", media="print")
    assert browser.evaluate(colour) == "rgb(255, 255, 255)"
    assert browser.comes_true(f"{source} === window.lightChart")
    browser.prefer("light")


def test_without_its_script_the_page_is_whole(browser: Chromium, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(page)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.evaluate("document.querySelectorAll('table').length") == 9
    assert browser.evaluate("document.querySelectorAll('button').length") == 0
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
