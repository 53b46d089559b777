"""Rooflines: kernels below the ceilings of their GPU, with a chart for each dtype, head dimension
and operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.report.comparison import (
    ProblemGroup,
    describe,
    facets,
    problem_words,
    split_semantics,
)
from flashsmith.benchmark.report.svg_charts import Chart, Curve, roofline
from flashsmith.benchmark.roofline import Bound, Roofline, bounds, intensity
from flashsmith.benchmark.roofline.roofline_table import describe as ceiling_words
from flashsmith.errors import ArgumentError, ConfigParseError
from flashsmith.families import parse_kernel_name_into_config

# A chart has at most this many lines.
_MOST_TRACES = 10
# A ceiling higher than this multiple of the highest rate is left out, since it would compress the
# rest of the chart.
_IN_SIGHT = 2.0


@dataclass(frozen=True)
class RooflinePoint:
    """One kernel on one problem: its FLOP per byte, and the highest rate that each ceiling allows
    it."""

    row: Measurement
    rate: float
    flop_per_byte: float
    bounds: tuple[Bound, ...]

    @property
    def tightest(self) -> Bound | None:
        """The ceiling with the lowest limit on the kernel's rate."""
        return self.bounds[0] if self.bounds else None

    @property
    def reached(self) -> float | None:
        """The kernel's rate divided by the rate that the tightest ceiling allows."""
        return self.rate / self.tightest.tflops if self.tightest else None

    @property
    def ceiling(self) -> str:
        """The tightest ceiling in words."""
        return ceiling_words(self.tightest.ceiling) if self.tightest else ""


def roofline_points(
    groups: Iterable[ProblemGroup], rooflines: Iterable[Roofline]
) -> tuple[list[Chart], list[RooflinePoint]]:
    """The charts, and every kernel in them.

    A kernel is in a chart if its config is known and its GPU has a roofline.
    """
    by_gpu = {one.gpu: one for one in rooflines}
    by_chart: dict[tuple[str, str, int, str], list[list[RooflinePoint]]] = {}
    for group in groups:
        row = group.first
        points = _points(group, by_gpu[row.gpu]) if row.gpu in by_gpu else []
        if points:
            key = (row.gpu, row.dtype, row.d, split_semantics(row)[0])
            by_chart.setdefault(key, []).append(points)
    several = len({gpu for gpu, *_ in by_chart}) > 1
    charts = [
        _chart(by_gpu[gpu], [f"d {d}", dtype, operation, *([gpu] if several else [])], traces)
        for (gpu, dtype, d, operation), traces in by_chart.items()
    ]
    return charts, [one for traces in by_chart.values() for points in traces for one in points]


def _points(group: ProblemGroup, measured: Roofline) -> list[RooflinePoint]:
    points = []
    for row in (point.flashsmith for point in group.points):
        if row is None or not row.config or row.tflops is None:
            continue
        try:
            cfg, problem = parse_kernel_name_into_config(row.config), row.problem
        except (ConfigParseError, ArgumentError):
            # A config of another version may be unknown; its measurement stays on the page, but
            # without ceilings.
            continue
        if problem.attn_flop():
            dram = intensity(problem, cfg).dram
            points.append(RooflinePoint(row, row.tflops, dram, bounds(measured, problem, cfg)))
    return points


def _chart(
    measured: Roofline, title: Sequence[str], traces: Sequence[Sequence[RooflinePoint]]
) -> Chart:
    everything = [one for points in traces for one in points]
    highest = max(one.rate for one in everything)
    level = {
        # The dtype is left out of the label, because the title contains it.
        bound.ceiling.removesuffix("_fp16").removesuffix("_bf16").replace("_", " "): bound.tflops
        for one in everything
        for bound in one.bounds
        # The bound by the L2 depends on the tile, so only the table shows it.
        if bound.ceiling not in ("dram_read", "l2_read") and bound.tflops < _IN_SIGHT * highest
    }
    about = ", ".join(title[:2]) + ", "
    lines = [
        Curve(
            describe(points[0].row).removeprefix(about),
            [(one.flop_per_byte, one.rate, _tip(one)) for one in points],
        )
        for points in traces[:_MOST_TRACES]
    ]
    caption = "Each point is one length; every byte of q, k, v and o is counted once."
    if len(traces) > _MOST_TRACES:
        caption += f" {len(traces) - _MOST_TRACES} more lines are only in the table."
    dram = measured.rate("dram_read")
    known = facets(everything[0].row, without="mask")
    return roofline(", ".join(title), dram, level, lines, caption, known)


def _tip(one: RooflinePoint) -> str:
    lines = [problem_words(one.row), f"{one.rate:,.0f} TFLOP/s, {one.flop_per_byte:,.0f} FLOP/byte"]
    if one.tightest:
        lines.append(f"{one.reached:.0%} of {one.ceiling}, {one.tightest.tflops:,.0f}")
    return "\n".join(lines)
