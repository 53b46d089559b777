"""The page: its sections in order, one HTML file, and the charts as PNG files beside it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import flashsmith
from flashsmith.benchmark.report import kernels, overview, pictures
from flashsmith.benchmark.report.assets import SCRIPT, style_sheet
from flashsmith.benchmark.report.cells import make_cells, make_groups
from flashsmith.benchmark.report.comparison import cells_table
from flashsmith.benchmark.report.html import Html, element
from flashsmith.benchmark.report.pictures import Picture
from flashsmith.benchmark.report.placing import place
from flashsmith.benchmark.report.results import Results, Setting, setting_of
from flashsmith.benchmark.report.section import Section, figures, note, section
from flashsmith.benchmark.report.space import make_heat_maps
from flashsmith.benchmark.rows import BenchRow
from flashsmith.builder.safe_files import no_follow
from flashsmith.errors import ArgumentError

# Nothing may be fetched, whatever a file's text says.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class Page:
    """The page's text, and its pictures by name."""

    html: str
    pictures: tuple[Picture, ...]


# What is drawn next, how many charts are there, and of how many.
Step = Callable[[str, int, int], None]


def make_page(
    results: Results,
    title: str = "flashsmith report",
    step: Step = lambda what, done, total: None,
) -> Page:
    """The page of the results; `step` is called with every chart of a group of problems."""
    cells = make_cells(results.compared)
    groups = make_groups(cells)
    settings = _settings([cell.row for cell in cells])
    names = [settings[setting_of(group.first)] for group in groups]
    throughput: list[Picture] = []
    step("drawing charts", 0, len(groups))
    for picture in pictures.throughput_pictures(groups, names):
        throughput.append(picture)
        step("drawing charts", len(throughput), len(groups))
    ladders = list(pictures.ladder_pictures(results.ladders))
    heat_maps = make_heat_maps(results.rows)
    space = list(pictures.space_pictures(heat_maps))
    placings = place(groups, results.rooflines)
    roofline = list(pictures.roofline_pictures(placings))
    placed = [one for placing in placings for one in placing.placed]
    body = [
        section("failures", "Failed", overview.failures(results)),
        section("throughput", "Throughput", _left_out(groups), figures(throughput)),
        section("problems", "Problem by problem", cells_table(cells, settings),
                overview.gaps(results.rows)),
        section("ladder", "The ladder", _left_out(results.ladders), figures(ladders),
                *map(kernels.ladder_table, results.ladders)),
        section("space", "The config space", kernels.search_summary(results.rows),
                _left_out(heat_maps), figures(space)),
        section("roofline", "The roofline", _left_out(placings), figures(roofline),
                kernels.placed_table(placed), _without_roofline(results)),
        section("profiler", "The profiler", kernels.profile_table(results.profiles)),
        section("environment", "Environment", overview.environments(results)),
        section("files", "Files", overview.sources(results)),
    ]  # fmt: skip
    shown = [part for part in body if part.shown]
    text = _document(title, results, overview.key_figures(results, cells), shown)
    return Page(text, (*throughput, *ladders, *space, *roofline))


def _left_out(charts: Sequence[object]) -> Html:
    more = len(charts) - pictures.MOST_CHARTS
    return note(f"{more:,} more charts are left out.") if more > 0 else Html("")


def _settings(rows: Sequence[BenchRow]) -> dict[Setting, str]:
    """A name for each setting, '' where there is only one."""
    settings = list(dict.fromkeys(map(setting_of, rows)))
    if len(settings) == 1:
        return {settings[0]: ""}
    return {setting: f"{number}: {_name(setting)}" for number, setting in enumerate(settings, 1)}


def _name(setting: Setting) -> str:
    facts = dict(setting.environment)
    known = [str(facts[name]) for name in ("gpu", "revision") if facts[name]]
    return ", ".join(filter(None, [*known, setting.protocol])) or "unnamed"


def _without_roofline(results: Results) -> Html:
    known = {roofline.gpu for roofline in results.rooflines}
    missing = sorted({row.gpu for row in results.rows if row.gpu} - known)
    if not missing:
        return Html("")
    return note(
        f"No ceilings were measured for {', '.join(missing)}; 'flashsmith roofline' does that."
    )


def _document(title: str, results: Results, keys: Html, body: Sequence[Section]) -> str:
    gpus = list(dict.fromkeys(row.gpu for row in results.rows if row.gpu))
    times = sorted(row.time for row in results.rows if row.time)
    where = ", ".join(gpus) or "no GPU named"
    when = f", measured {times[0][:10]}" if times else ""
    if times and times[0][:10] != times[-1][:10]:
        when += f" to {times[-1][:10]}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        Html('<link rel="icon" href="data:,">'),
        element("style", Html(style_sheet())),
    )
    top = element(
        "header",
        element("h1", title),
        element("p", where + when, class_="sub"),
        keys,
        _navigation(body),
    )
    end = element("footer", f"Written by flashsmith {flashsmith.__version__}.")
    script = element("script", Html(SCRIPT))
    main = element("main", *(part.html for part in body))
    page = element("html", head, element("body", top, main, end, script), lang="en")
    return f"<!doctype html>\n{page}\n"


def _navigation(body: Sequence[Section]) -> Html:
    links = (element("li", part.link) for part in body)
    return element("nav", element("ul", *links), aria_label="Sections")


def write_page(page: Page, out: Path) -> list[Path]:
    """Writes the page and, in the folder '<name>-charts' beside it, its charts in place of those
    of an earlier page; returns all paths.

    Raises ArgumentError when a file cannot be written.
    """
    folder = out.with_name(f"{out.stem}-charts")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page.html, encoding="utf-8")
        written = [out]
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link, which is not followed", str(folder))
        for old in folder.glob("[0-9][0-9]-*.png"):
            old.unlink()
        for number, picture in enumerate(page.pictures, 1):
            folder.mkdir(exist_ok=True)
            path = folder / f"{number:02}-{picture.slug}.png"
            with open(path, "wb", opener=no_follow) as file:
                file.write(picture.light)
            written.append(path)
    except OSError as error:
        raise ArgumentError(f"out={str(out)!r}: cannot be written: {error}") from error
    return written
