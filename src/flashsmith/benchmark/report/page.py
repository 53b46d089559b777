"""The report's page: prepares data for the templates, and writes one HTML file and a folder of SVG
charts."""

from __future__ import annotations

import errno
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flashsmith
from flashsmith.benchmark import progression
from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.report import comparison, config_space, results
from flashsmith.benchmark.report.comparison import Point, Summary
from flashsmith.benchmark.report.comparison_charts import (
    MOST_PEERS,
    ratio_chart,
    throughput_charts,
)
from flashsmith.benchmark.report.results import Results
from flashsmith.benchmark.report.roofline_points import roofline_points
from flashsmith.benchmark.report.svg_charts import WIDTH, Chart, lines_of, places_of
from flashsmith.builder.safe_files import no_follow
from flashsmith.errors import ArgumentError, DependencyError, install_extra
from flashsmith.pluralize import pluralize
from flashsmith.printable import printable

if TYPE_CHECKING:
    from jinja2 import Environment

# A page shows at most this many items of each kind, and says how many are left out.
LIMITS = {
    "charts": 100,
    "table_rows": 1500,
    "peers": MOST_PEERS,
    "heat_maps": config_space.MOST_MAPS,
    "named": 10,
}
# The overview compares flashsmith with at most this many peers.
_COMPARED_PEERS = 3
# The name of a chart's file has at most this many characters, without the suffix.
_MOST_CHARACTERS = 100


@dataclass(frozen=True)
class Overview:
    """The overview of one operation on one GPU: its points, the peers, and the chart of ratios."""

    summary: Summary
    compared: Sequence[str]
    chart: Chart | None


@dataclass(frozen=True)
class Page:
    """The HTML of the page, and for each chart, the name and the content of its SVG file."""

    html: str
    charts: dict[str, str]


def make_page(found: Results, title: str = "flashsmith report") -> Page:
    """Makes the page that shows the results.

    Raises DependencyError if Jinja2 is not installed.
    """
    templates = page_templates()
    points = [point for point in comparison.make_points(found.compared) if point.shown]
    points = [point for some in comparison.by_gpu(points).values() for point in some]
    groups = [
        group
        for some in comparison.by_gpu(points).values()
        for group in comparison.make_groups(some)
    ]
    peers = comparison.peer_order(name for point in points for name in point.peers)
    places = places_of(peers)
    last = comparison.last_measured(points)
    overviews = [_overview(one, peers, places) for one in comparison.summaries(last)]
    ratio_charts = [one.chart for one in overviews if one.chart]
    throughput = list(throughput_charts(groups, found.rooflines, places))
    rooflines, placed = roofline_points(comparison.make_groups(last), found.rooflines)
    searched = config_space.make_searched(found.rows)
    context = {
        "title": title,
        "results": found,
        "points": points,
        "problem_tables": _problem_tables(points),
        "dram": {one.gpu: one.rate("dram_read") for one in found.rooflines},
        "peers": peers,
        "overviews": overviews,
        "by_version": _by_version(points),
        "version_peers": _compared(points, peers),
        "throughput": throughput,
        "settings": comparison.setting_words([results.setting_of(p.row) for p in points]),
        "failed": [row for row in found.compared if row.verdict in _FAILED],
        "wrong_steps": [(a, step) for a in found.ablations for step in a.steps if not step.ok],
        "absent": _absent_peers(found.rows),
        "searched": searched,
        "search_rows": [row for row in found.rows if results.of_search(row)],
        "rooflines": rooflines,
        "placed": placed,
        "unknown_gpus": sorted({row.gpu for row in found.rows if row.gpu}
                               - {one.gpu for one in found.rooflines}),
    }  # fmt: skip
    most = LIMITS["charts"]
    drawn = [*ratio_charts, *throughput[:most], *rooflines[:most]]
    svg = templates.get_template("chart.svg")
    charts = {
        f"{number:03}-{_slug(chart.title)}.svg": svg.render(chart=chart)
        for number, chart in enumerate(drawn, 1)
    }
    return Page(templates.get_template("page.html").render(context), charts)


_FAILED = ("fail", "error")


def _overview(summary: Summary, peers: Sequence[str], places: Mapping[str, int]) -> Overview:
    compared = _compared(summary.points, peers)
    return Overview(summary, compared, ratio_chart(summary, compared, places))


def _compared(points: Sequence[Point], peers: Sequence[str]) -> list[str]:
    """The first few of the peers that were measured on the same problems as flashsmith."""
    return [peer for peer in peers if comparison.ratios(points, peer)][:_COMPARED_PEERS]


def _problem_tables(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points for each table of problems; the keys are titles.

    A table has the points of one GPU and one unit.
    """
    of_gpus = comparison.by_gpu(points)
    tables: dict[str, list[Point]] = {}
    for gpu, on_gpu in of_gpus.items():
        where = f", on {comparison.gpu_words(gpu)}" if len(of_gpus) > 1 else ""
        for point in on_gpu:
            bound = point.row.is_memory_bound
            what = "TB/s of every problem over a KV cache" if bound else "TFLOP/s of every problem"
            tables.setdefault(what + where, []).append(point)
    return tables


def _by_version(points: Sequence[Point]) -> list[tuple[str, str, str, list[Point]]]:
    """The points as (revision, GPU, operation, points), the most recently measured first."""
    found: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        row = point.row
        key = (row.revision, row.gpu, comparison.split_semantics(row)[0])
        found.setdefault(key, []).append(point)
    last = {key: max(point.row.time for point in own) for key, own in found.items()}
    return [(*key, found[key]) for key in sorted(found, key=lambda key: last[key], reverse=True)]


def _absent_peers(rows: Sequence[Measurement]) -> dict[tuple[str, str], int]:
    """How often each peer was absent: (peer, reason) -> number of problems."""
    gaps: dict[tuple[str, str], int] = {}
    for row in rows:
        if not results.is_flashsmith(row) and row.verdict == "absent":
            key = (row.implementation, row.note or "no reason given")
            gaps[key] = gaps.get(key, 0) + 1
    return gaps


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_MOST_CHARACTERS]


@lru_cache(maxsize=1)
def page_templates() -> Environment:
    """The Jinja2 templates in the folder of this file; all values are escaped.

    Raises DependencyError, which names the extra, if Jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise DependencyError(
            f"the report needs Jinja2, not installed here; {install_extra('cli')}"
        ) from error
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # Control characters are also removed, because HTML does not allow them.
        finalize=lambda value: printable(value, lines=True) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["figure"] = lambda value, digits=0: f"{value:,.{digits}f}"
    made.filters["pluralize"] = pluralize
    made.filters["geometric_mean"] = statistics.geometric_mean
    made.filters["number"] = lambda number: f"{number:.6g}"
    made.globals |= {
        "limits": LIMITS,
        "version": flashsmith.__version__,
        "chart_width": WIDTH,
        "lines_of": lines_of,
        "environment": results.ENVIRONMENT,
        "environment_names": results.ENVIRONMENT_NAMES,
        "flashsmith": results.FLASHSMITH,
        **{name: getattr(module, name) for module, names in _FUNCTIONS.items() for name in names},
    }
    return made


# The functions that templates may call.
_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    comparison: ("describe", "facets", "gpu_words", "mask_of", "problem_words", "ratios"),
    config_space: ("distribution", "listed_configs", "make_heat_map", "widest"),
    results: ("digits_of", "name_of", "rate_of", "setting_of", "unit_of"),
    progression: ("change_between", "change_words", "conflict_words", "step_names"),
}


def write_page(page: Page, out: Path) -> list[Path]:
    """Writes the page, and its charts to the folder '<name>-charts' next to it.

    Charts of an earlier page with this name are removed. Returns the paths of all files.

    Raises ArgumentError if a file cannot be written.
    """
    folder = out.with_name(f"{out.stem}-charts")
    try:
        out.write_text(page.html, encoding="utf-8")
        written = [out]
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link, which is not followed", str(folder))
        for old in folder.glob("[0-9][0-9][0-9]-*.svg"):
            old.unlink()
        for name, text in page.charts.items():
            folder.mkdir(exist_ok=True)
            with open(folder / name, "w", encoding="utf-8", opener=no_follow) as file:
                file.write(text)
            written.append(folder / name)
    except OSError as error:
        raise ArgumentError(f"out={str(out)!r}: cannot be written: {error}") from error
    return written
