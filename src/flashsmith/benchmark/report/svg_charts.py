"""The page's charts: lines by length, a roofline, ratios in strips; as shapes of an SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flashsmith.benchmark.report.results import FLASHSMITH

# Narrow enough for a phone without shrinking its text; wider screens show several in a row.
WIDTH = 420.0
_LEFT, _TOP, _BOTTOM = 40.0, 12.0, 226.0
_LINE_HEIGHT = 13.5
_LONGEST = 18  # characters of a label
# An implementation keeps its colour and its mark in every chart.
_PLACES = (
    FLASHSMITH, "fa2", "cudnn", "flash_attn_3", "flash_attn_4", "flex", "mem_efficient",
    "flash_attn_2",
)  # fmt: skip
# Distinguished by shape too, for readers who cannot distinguish the colours: circle, square,
# diamond, triangles, cross, star, hexagon.
_MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M-3.5 -3.5h7v7h-7z", "M0 -5l5 5l-5 5l-5 -5z",
    "M0 -4.5l4.5 8h-9z", "M0 4.5l4.5 -8h-9z", "M-1.5 -4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "M0 -5l1.6 3.4l3.4 1.6l-3.4 1.6l-1.6 3.4l-1.6 -3.4l-3.4 -1.6l3.4 -1.6z",
    "M-4.5 0l2.2 -4h4.6l2.2 4l-2.2 4h-4.6z",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """An element of a chart; `tip` is shown when the pointer is on it."""

    tag: str
    attributes: Mapping[str, str]
    text: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Chart:
    """An SVG: shapes in a box of WIDTH by `height`, which grows with the page's width.

    `alt` describes it for screen readers, `caption` is shown below it. `facets` are the values that
    the page's filters use.
    """

    title: str
    alt: str
    caption: str
    height: float
    shapes: Sequence[Shape]
    facets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """One implementation's rates, in the order of the x values; None where it has none."""

    name: str
    rates: Sequence[float | None]
    strong: bool = False
    dashed: bool = False

    def place(self, position: int) -> int:
        """Its index among colours and marks; that of an unknown one is `position`."""
        name = FLASHSMITH if self.strong else self.name
        return _PLACES.index(name) if name in _PLACES else position % len(_PLACES)


@dataclass(frozen=True)
class Trace:
    """Kernels of one kind below a roofline: (FLOP per byte, TFLOP/s, what a point is)."""

    name: str
    points: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Strip:
    """A row of a chart of ratios: its name, and (ratio, peer, what a point is) for each point."""

    name: str
    points: Sequence[tuple[float, str, str]]


def cut(text: str, most: int = _LONGEST) -> str:
    """A text, shortened for a label."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def robust_range(values: Sequence[float], reach: float = 1.5) -> tuple[float, float]:
    """From the least to the greatest value, without those that lie farther from the middle half
    than `reach` times its width."""
    if len(values) < 4:
        return min(values), max(values)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    margin = reach * (third - first)
    return max(min(values), first - margin), min(max(values), third + margin)


def spread_out(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions near the wanted ones, in their order, at least `gap` apart.

    Labels that would overlap move apart as a block around the mean of where they belong.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[tuple[float, int]] = []  # (middle, labels)
    for index in order:
        blocks.append((wanted[index], 1))
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < (
            gap * (blocks[-2][1] + blocks[-1][1]) / 2
        ):
            (upper, n_upper), (lower, n_lower) = blocks.pop(), blocks.pop()
            count = n_upper + n_lower
            blocks.append(((upper * n_upper + lower * n_lower) / count, count))
    positions = [
        middle + (place - (count - 1) / 2) * gap
        for middle, count in blocks
        for place in range(count)
    ]
    spread = [0.0] * len(wanted)
    for index, position in zip(order, positions, strict=True):
        spread[index] = position
    return spread


@dataclass
class _Drawing:
    """Shapes; of charts with axes, `right` is where these end and what lines are begins."""

    right: float = WIDTH
    shapes: list[Shape] = field(default_factory=list)

    def add(self, tag: str, kind: str, text: str = "", tip: str = "", **numbers: object) -> None:
        attributes = {"class": kind} | {
            name.replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else str(value)
            for name, value in numbers.items()
        }
        self.shapes.append(Shape(tag, attributes, text, tip))

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.add("text", kind, text, x=x, y=y, text_anchor=anchor)

    def line(self, kind: str, *points: tuple[float, float]) -> None:
        self.add("polyline", kind, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def mark(self, place: int, x: float, y: float, tip: str = "", kind: str = "") -> None:
        self.add("path", f"mark c{place} {kind}".strip(), tip=tip,
                 d=_MARKS[place], transform=f"translate({x:.1f} {y:.1f})")  # fmt: skip

    def rates_axis(self, top: float) -> Callable[[float], float]:
        """Level lines with their figures; where a rate lies."""
        for tick in _ticks(top):
            y = _between(tick, 0.0, top, _BOTTOM, _TOP)
            self.line("grid", (_LEFT, y), (self.right, y))
            self.text(_LEFT - 5, y + 4, f"{tick:g}", "", "end")
        return lambda rate: _between(rate, 0.0, top, _BOTTOM, _TOP)

    def end_labels(self, labels: Sequence[tuple[str, str, float, float]]) -> None:
        """(text, class, x, y): what a line is, to the right of the axes, none on another."""
        heights = spread_out([y for *_, y in labels], _LINE_HEIGHT)
        # Labels beyond an edge are moved back, and the others with them.
        lift = max([0.0, *(height - _BOTTOM - 26 for height in heights)])
        lift = min([lift, *(height - 6 for height in heights)])
        for (text, kind, x, y), height in zip(labels, heights, strict=True):
            self.line("lead", (x + 5, y), (self.right + 6, height - lift))
            self.text(self.right + 9, height - lift + 4, text, kind)


def _between(value: float, low: float, high: float, start: float, end: float) -> float:
    """Where `value` lies between `start` and `end`, as it lies between `low` and `high`."""
    share = (value - low) / (high - low) if high > low else 0.5
    return start + min(1.0, max(0.0, share)) * (end - start)


def _ticks(top: float, most: int = 5) -> list[float]:
    """Round numbers from 0 to `top`."""
    magnitude = 10.0 ** math.floor(math.log10(top / most))
    step = next(magnitude * f for f in (1, 2, 5, 10, 20) if top / (magnitude * f) <= most)
    return [step * count for count in range(math.floor(top / step + 1e-9) + 1)]


def lines_by_length(
    title: str,
    lengths: Sequence[tuple[int, int]],
    series: Sequence[Series],
    caption: str,
    facets: Mapping[str, str],
    unit: str = "TFLOP/s",
    digits: int = 0,
) -> Chart:
    """Rates in ``unit``, shown with so many ``digits``, by (length, batch), evenly spaced."""
    shown = [one for one in series if any(one.rates)]
    alt = ", ".join(f"{_last(one)[1]:.{digits}f} {one.name}" for one in shown)
    alt = f"{unit} by length, {title}: {alt}"
    labels = [_label(one, lengths, digits) for one in shown]
    drawing = _Drawing(_right_of_axes(labels))
    top = 1.06 * max(rate for one in shown for rate in one.rates if rate)
    y_of = drawing.rates_axis(top)
    xs = [
        _between(n, 0, len(lengths) - 1, _LEFT + 12, drawing.right - 8) for n in range(len(lengths))
    ]
    every = math.ceil(len(lengths) / 9)
    for x, (length, batch) in list(zip(xs, lengths, strict=True))[::-every]:
        short = f"{length // 1024}K" if length % 1024 == 0 else str(length)
        drawing.text(x, _BOTTOM + 16, short, "", "middle")
        drawing.text(x, _BOTTOM + 30, f"b {batch}", "", "middle")
    ends = []
    for position, one in enumerate(shown):
        place = one.place(position)
        points = [(x, y_of(rate)) for x, rate in zip(xs, one.rates, strict=True) if rate]
        kinds = ("line", f"c{place}", "strong" * one.strong, "dashed" * one.dashed)
        drawing.line(" ".join(filter(None, kinds)), *points)
        for x, y in points:
            drawing.mark(place, x, y)
        ends.append((labels[position], f"label c{place}", *points[-1]))
    drawing.end_labels(ends)
    half = (drawing.right - _LEFT) / 2 if len(xs) == 1 else (xs[1] - xs[0]) / 2
    for number, (x, (length, batch)) in enumerate(zip(xs, lengths, strict=True)):
        rates = [(one.name, one.rates[number]) for one in shown]
        known = sorted(((rate, name) for name, rate in rates if rate), reverse=True)
        tip = [
            f"length {length}, batch {batch}",
            *(f"{rate:,.{digits}f}  {name}" for rate, name in known),
        ]
        begin, end = max(0.0, x - half), min(x + half, WIDTH)
        drawing.add("rect", "hit", tip="\n".join(tip), x=begin, y=_TOP, width=end - begin,
                    height=_BOTTOM - _TOP + 24)  # fmt: skip
    return Chart(title, alt, caption, _BOTTOM + 38, drawing.shapes, facets)


def _right_of_axes(labels: Sequence[str]) -> float:
    """Where axes end that leave room for these labels."""
    return WIDTH - 14 - 6.4 * max(map(len, labels))


def _label(series: Series, lengths: Sequence[tuple[int, int]], digits: int) -> str:
    """A line's last rate and its name; with the length where it ends before the others."""
    at, rate = _last(series)
    if at < len(lengths) - 1:
        return f"{rate:.{digits}f} {cut(series.name, 8)} at {lengths[at][0]}"
    return f"{rate:.{digits}f} {cut(series.name, 13)}"


def _last(series: Series) -> tuple[int, float]:
    """The last length's place, and the rate there."""
    return [(place, rate) for place, rate in enumerate(series.rates) if rate][-1]


def roofline(
    title: str,
    dram_tb_per_s: float | None,
    ceilings: Mapping[str, float],
    traces: Sequence[Trace],
    caption: str,
    facets: Mapping[str, str],
) -> Chart:
    """TFLOP/s by FLOP per byte (by powers of two), below what arithmetic and bandwidth allow."""
    points = [point for trace in traces for point in trace.points]
    left = math.log2(min(x for x, *_ in points)) - 3
    right = math.log2(max(x for x, *_ in points)) + 0.5
    levels = [f"{rate:.0f} {cut(name)}" for name, rate in ceilings.items()]
    lines = [f"{trace.points[-1][1]:.0f} {cut(trace.name)}" for trace in traces]
    drawing = _Drawing(_right_of_axes(levels + lines))
    top = 1.08 * max([*ceilings.values(), *(y for _, y, _ in points)])
    y_of = drawing.rates_axis(top)

    def x_of(flop_per_byte: float) -> float:
        return _between(math.log2(flop_per_byte), left, right, _LEFT, drawing.right)

    whole = range(math.ceil(left), math.floor(right) + 1)
    for power in whole[:: math.ceil(len(whole) / 7)]:
        drawing.text(x_of(2.0**power), _BOTTOM + 16, f"{2.0**power:g}", "", "middle")
    drawing.text(
        (_LEFT + drawing.right) / 2, _BOTTOM + 31, "FLOP per byte of q, k, v and o", "", "middle"
    )
    ends = []
    for words, rate in zip(levels, ceilings.values(), strict=True):
        # A ceiling begins where the bandwidth reaches it.
        begin = x_of(rate / dram_tb_per_s) if dram_tb_per_s else _LEFT
        drawing.line("ceiling", (begin, y_of(rate)), (drawing.right, y_of(rate)))
        ends.append((words, "label muted", drawing.right - 5, y_of(rate)))
    if dram_tb_per_s:
        limit = max(ceilings.values(), default=top)
        steps = [2.0 ** (left + (right - left) * part / 60) for part in range(61)]
        slope = [(x_of(x), y_of(dram_tb_per_s * x)) for x in steps if dram_tb_per_s * x < limit]
        if slope:
            drawing.line("ceiling", *slope)
            drawing.text(slope[0][0] + 14, slope[0][1] - 8, f"DRAM {dram_tb_per_s:.2f} TB/s")
    for number, (words, trace) in enumerate(zip(lines, traces, strict=True)):
        place = number % len(_PLACES)
        path = [(x_of(x), y_of(y)) for x, y, _ in trace.points]
        drawing.line(f"line c{place}", *path)
        for at, (_, _, tip) in zip(path, trace.points, strict=True):
            drawing.mark(place, *at, tip)
        ends.append((words, f"label c{place}", *path[-1]))
    drawing.end_labels(ends)
    alt = f"{title}: kernels below the GPU's measured ceilings"
    return Chart(title, alt, caption, _BOTTOM + 38, drawing.shapes, facets)


# Ratios that an axis names.
_NAMED_RATIOS = (0.01, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 10, 100)


def ratio_strips(title: str, strips: Sequence[Strip], caption: str) -> Chart:
    """A row of points for each strip, by their ratios to the peers, on a logarithmic axis."""
    drawing = _Drawing()
    ratios = [math.log(ratio) for strip in strips for ratio, *_ in strip.points]
    low, high = robust_range(ratios, reach=3.0)
    low, high = min(low, 0.0) - 0.04, max(high, 0.0) + 0.04
    names = [cut(strip.name, 30) for strip in strips]
    left, right, step = 20 + 6.2 * max(map(len, names)), WIDTH - 14, 22.0
    bottom = 34 + step * len(strips)

    def x_of(ratio: float) -> float:
        return _between(math.log(ratio), low, high, left, right)

    named: list[float] = []
    for ratio in sorted(_NAMED_RATIOS, key=lambda ratio: abs(math.log(ratio))):
        x = x_of(ratio)
        if low <= math.log(ratio) <= high and all(abs(x - other) > 30 for other in named):
            named.append(x)
            drawing.line("one" if ratio == 1 else "grid", (x, 26), (x, bottom))
            drawing.text(x, bottom + 14, f"{ratio:g}", "", "middle")
    peers = list(dict.fromkeys(peer for strip in strips for _, peer, _ in strip.points))
    places = {peer: Series(peer, ()).place(number) for number, peer in enumerate(peers, 1)}
    for number, peer in enumerate(peers):
        drawing.mark(places[peer], left + 8 + 100 * number, 9)
        drawing.text(
            left + 16 + 100 * number, 13, f"over {cut(peer, 10)}", f"label c{places[peer]}"
        )
    for number, (name, strip) in enumerate(zip(names, strips, strict=True)):
        y = 34 + step * (number + 0.5)
        drawing.text(left - 8, y + 4, name, "label ink", "end")
        for ratio, peer, tip in strip.points:
            beyond = not low <= math.log(ratio) <= high
            drawing.mark(places[peer], x_of(ratio), y, tip, "beyond" if beyond else "point")
    alt = f"{title}: {len(ratios)} ratios in {len(strips)} rows"
    return Chart(title, alt, caption, bottom + 22, drawing.shapes)
