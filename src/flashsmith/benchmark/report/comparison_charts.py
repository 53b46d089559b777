"""Charts that compare flashsmith with its peers: throughput by length, and ratios of throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flashsmith.benchmark.report.comparison import (
    Point,
    ProblemGroup,
    Summary,
    facets,
    peer_order,
    problem_words,
    titles,
)
from flashsmith.benchmark.report.results import (
    FLASHSMITH,
    FREE_SPLIT,
    digits_of,
    rate_of,
    unit_of,
)
from flashsmith.benchmark.report.svg_charts import (
    DRAM_READ,
    Chart,
    Series,
    Strip,
    lines_by_length,
    ratio_strips,
)
from flashsmith.benchmark.roofline import Roofline

# At most this many peers are in a chart and in the table of problems.
MOST_PEERS = 12
_MOST_STRIPS = 30


def throughput_charts(
    groups: Sequence[ProblemGroup], rooflines: Sequence[Roofline], places: Mapping[str, int]
) -> Iterator[Chart]:
    """Yields a chart for each group that has a rate: TFLOP/s by length.

    Problems over a cache have TB/s instead, and a line for the measured DRAM bandwidth.

    `places` gives each peer the same colour and mark in all charts.
    """
    dram = {one.gpu: one.rate("dram_read") for one in rooflines}
    for group, title in zip(groups, titles([group.first for group in groups]), strict=True):
        series = _series(group.points)
        # A chart of a single point would show no more than the table.
        if not series or len(series) == len(group.points) == 1:
            continue
        lengths = [(point.row.seq_k, point.row.batch) for point in group.points]
        unit = unit_of(group.first)
        caption = f"{unit} by length and batch (b)."
        if group.first.is_memory_bound and (roof := dram.get(group.first.gpu)):
            series.append(Series(DRAM_READ, [roof] * len(lengths), dashed=True))
            caption += " Rates above 'DRAM read' come from data in the L2."
        more = len({name for point in group.points for name in point.peers}) - MOST_PEERS
        if more > 0:
            caption += f" {more} more peers are left out."
        yield lines_by_length(
            title,
            lengths,
            series,
            caption,
            facets(group.first),
            places,
            unit=unit,
            digits=digits_of(group.first),
        )


def _series(points: Sequence[Point]) -> list[Series]:
    series = []
    if any(point.chosen for point in points):
        series.append(Series(FLASHSMITH, [rate_of(point.chosen) for point in points], strong=True))
    kernels = max(len(point.kernels) for point in points)
    if kernels:
        name = FLASHSMITH if kernels == 1 and not series else f"best of {kernels}"
        rates = [rate_of(point.best_kernel) for point in points]
        series.append(Series(name, rates, strong=True, dashed=bool(series)))
    if any(point.free for point in points):
        rates = [rate_of(point.free) for point in points]
        series.append(Series(FREE_SPLIT, rates, strong=True, dashed=True))
    for peer in peer_order(name for point in points for name in point.peers)[:MOST_PEERS]:
        series.append(Series(peer, [rate_of(point.peers.get(peer)) for point in points]))
    return [one for one in series if any(one.rates)]


def ratio_chart(summary: Summary, peers: Sequence[str], places: Mapping[str, int]) -> Chart | None:
    """A chart with a point for each problem and peer, and a row for each head dimension and
    mask."""
    strips = [
        Strip(f"d {d}, {mask}", [one for point in points for one in _ratios(point, peers)])
        for (d, mask), points in summary.kinds.items()
    ]
    strips = [strip for strip in strips if strip.points]
    if not strips:
        return None
    caption = "A point is a problem; right of 1 flashsmith is faster."
    if len(strips) > _MOST_STRIPS:
        caption += f" {len(strips) - _MOST_STRIPS} more rows are in the table."
    title = f"Throughput of {FLASHSMITH} over that of its peers, {summary.title}"
    return ratio_strips(title, strips[:_MOST_STRIPS], caption, places)


def _ratios(point: Point, peers: Sequence[str]) -> Iterator[tuple[float, str, str]]:
    for peer in peers:
        ratio, row = point.ratio(peer), point.flashsmith
        if ratio and row:
            shown = f",.{digits_of(row)}f"
            rates = " over ".join(
                format(rate_of(one) or 0.0, shown) for one in (row, point.peers[peer])
            )
            rates += f" {unit_of(row)}"
            yield ratio, peer, f"{ratio:.3f} / {peer}\n{problem_words(row)}\n{rates}"
