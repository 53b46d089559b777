"""Charts as SVG shapes: lines by length, rooflines, and strips of ratios."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flashsmith.benchmark.report.results import FLASHSMITH

# The width of a chart. It fits a phone at full text size; wide screens show several charts side by
# side.
WIDTH = 420.0
_LEFT, _TOP, _BOTTOM = 40.0, 12.0, 226.0
_LINE_HEIGHT = 13.5
# A label has at most this many characters. All known names are shorter, but a file may contain any
# name.
_LONGEST = 24
_WIDE, _NARROW = "mwMW@%…", "iljtfrI.,:;'|()[] "
DRAM_READ = "DRAM read"
# The colours. An implementation has the same colour and mark in all charts.
_PLACES = (
    FLASHSMITH, "fa2", "cudnn", "flash_attn_3", "flash_attn_4", "flex", "mem_efficient",
    "flash_attn_2", "flashinfer", DRAM_READ,
)  # fmt: skip
# The marks also have different shapes, for readers who cannot distinguish the colours: circle,
# square, diamond, triangles, cross, star, hexagon, bars, triangles that point sideways.
_MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M-3.5 -3.5h7v7h-7z", "M0 -5l5 5l-5 5l-5 -5z",
    "M0 -4.5l4.5 8h-9z", "M0 4.5l4.5 -8h-9z", "M-1.5 -4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "M0 -5l1.6 3.4l3.4 1.6l-3.4 1.6l-1.6 3.4l-1.6 -3.4l-3.4 -1.6l3.4 -1.6z",
    "M-4.5 0l2.2 -4h4.6l2.2 4l-2.2 4h-4.6z", "M-1.5 -5h3v10h-3z", "M-5 -1.5h10v3h-10z",
    "M-4 -4.5l8 4.5l-8 4.5z", "M4 -4.5l-8 4.5l8 4.5z",
)  # fmt: skip


@dataclass(frozen=True)
class ChartShape:
    """One element of a chart; `tip` is shown when the pointer is over it."""

    tag: str
    attributes: Mapping[str, str]
    text: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Chart:
    """An SVG picture whose shapes are in a box of WIDTH by `height`. The picture scales with the
    width of the page.

    `alt` describes the chart for screen readers; `caption` is shown below the chart. `facets` are
    the values that the filters of the page use.
    """

    title: str
    alt: str
    caption: str
    height: float
    shapes: Sequence[ChartShape]
    facets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """The rates of one implementation, one for each x value; a missing rate is None."""

    name: str
    rates: Sequence[float | None]
    strong: bool = False
    dashed: bool = False

    def place(self, places: Mapping[str, int]) -> int:
        """The index of the implementation's colour and mark."""
        name = FLASHSMITH if self.strong else self.name
        return _PLACES.index(name) if name in _PLACES else places.get(name, len(_MARKS) - 1)


@dataclass(frozen=True)
class Curve:
    """The kernels of one kind in a roofline, as points (FLOP per byte, TFLOP/s, tip)."""

    name: str
    points: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Strip:
    """A row of a ratio chart: its name, and its points (ratio, peer, tip)."""

    name: str
    points: Sequence[tuple[float, str, str]]


def places_of(peers: Sequence[str]) -> dict[str, int]:
    """For each peer on a page, the index of its colour and mark.

    Known peers have the same index on every page; other peers get the indices that are free.
    """
    taken = {_PLACES.index(name) for name in (FLASHSMITH, DRAM_READ)}
    taken |= {_PLACES.index(name) for name in peers if name in _PLACES}
    free = [place for place in reversed(range(len(_MARKS))) if place not in taken]
    unknown = [name for name in peers if name not in _PLACES]
    return {name: free[number % len(free)] for number, name in enumerate(unknown)} | {
        name: _PLACES.index(name) for name in peers if name in _PLACES
    }


def lines_of(text: str, most: int) -> list[str]:
    """Wraps a string into lines of at most `most` characters."""
    return textwrap.wrap(text, most) or [""]


def cut(text: str, most: int = _LONGEST) -> str:
    """Shortens a string for use as a label."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def text_width(text: str) -> float:
    """The approximate width of a label, in the widest font of the style sheet."""
    return sum(10.8 if char in _WIDE else 4.2 if char in _NARROW else 7.1 for char in text)


def robust_range(values: Sequence[float], reach: float = 1.5) -> tuple[float, float]:
    """The smallest and the largest value, without outliers.

    An outlier is farther from the range between the quartiles than `reach` times the width of this
    range.
    """
    if len(values) < 4:
        return min(values), max(values)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    margin = reach * (third - first)
    return max(min(values), first - margin), min(max(values), third + margin)


def spread_out(wanted: Sequence[float], gap: float) -> list[float]:
    """Moves positions apart until their distances are at least `gap`.

    The positions keep their order and stay close to the wanted ones.

    Labels that overlap form a block around the mean of their wanted positions.
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
    """The shapes of a chart. The axes end at `right`, where the labels of the lines begin."""

    right: float = WIDTH
    shapes: list[ChartShape] = field(default_factory=list)

    def add(self, tag: str, kind: str, text: str = "", tip: str = "", **numbers: object) -> None:
        attributes = {"class": kind} | {
            name.replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else str(value)
            for name, value in numbers.items()
        }
        self.shapes.append(ChartShape(tag, attributes, text, tip))

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.add("text", kind, text, x=x, y=y, text_anchor=anchor)

    def line(self, kind: str, *points: tuple[float, float]) -> None:
        self.add("polyline", kind, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def mark(
        self,
        place: int,
        x: float,
        y: float,
        tip: str = "",
        kind: str = "",
        shape: int | None = None,
    ) -> None:
        """Draws the mark of index `place`.

        If `shape` is given, it selects the shape, and `place` only the colour.
        """
        mark = _MARKS[(place if shape is None else shape) % len(_MARKS)]
        self.add("path", f"mark c{place} {kind}".strip(), tip=tip,
                 d=mark, transform=f"translate({x:.1f} {y:.1f})")  # fmt: skip

    def legend(self, entries: Sequence[tuple[int, str]], y: float) -> float:
        """Draws marks with their meanings, on as many lines as needed.

        Returns the y of the last line.
        """
        x = 12.0
        for place, words in entries:
            width = 16 + text_width(words) + 10
            if x > 12 and x + width > WIDTH:
                x, y = 12.0, y + _LINE_HEIGHT + 1.5
            self.mark(place, x, y)
            self.text(x + 8, y + 4, words, f"label c{place}")
            x += width
        return y

    def rates_axis(self, top: float) -> Callable[[float], float]:
        """Draws horizontal grid lines with their values.

        Returns a function that maps a rate to its y.
        """
        for tick in _ticks(top):
            y = _between(tick, 0.0, top, _BOTTOM, _TOP)
            self.line("grid", (_LEFT, y), (self.right, y))
            self.text(_LEFT - 5, y + 4, f"{tick:g}", "", "end")
        return lambda rate: _between(rate, 0.0, top, _BOTTOM, _TOP)

    def end_labels(self, labels: Sequence[tuple[str, str, float, float]]) -> None:
        """Draws labels to the right of the axes so that they do not overlap; each is given as
        (text, class, x, y)."""
        heights = spread_out([y for *_, y in labels], _LINE_HEIGHT)
        # Labels that would leave the chart are moved inside, and all others are moved by the same
        # amount.
        lift = max([0.0, *(height - _BOTTOM - 26 for height in heights)])
        lift = min([lift, *(height - 6 for height in heights)])
        for (text, kind, x, y), height in zip(labels, heights, strict=True):
            self.line("lead", (x + 5, y), (self.right + 6, height - lift))
            self.text(self.right + 9, height - lift + 4, text, kind)


def _between(value: float, low: float, high: float, start: float, end: float) -> float:
    """Maps `value` linearly from [low, high] to [start, end]; values outside are clamped."""
    share = (value - low) / (high - low) if high > low else 0.5
    return start + min(1.0, max(0.0, share)) * (end - start)


def _ticks(top: float) -> list[float]:
    """At most six round numbers from 0 to `top`, for an axis."""
    magnitude = 10.0 ** math.floor(math.log10(top / 5))
    step = next(magnitude * f for f in (1, 2, 5, 10, 20) if top / (magnitude * f) <= 5)
    return [step * count for count in range(math.floor(top / step + 1e-9) + 1)]


def lines_by_length(
    title: str,
    lengths: Sequence[tuple[int, int]],
    series: Sequence[Series],
    caption: str,
    facets: Mapping[str, str],
    places: Mapping[str, int],
    unit: str = "TFLOP/s",
    digits: int = 0,
) -> Chart:
    """A chart of rates in ``unit``, with (length, batch) evenly spaced on the x axis.

    Rates have ``digits`` decimals.
    """
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
        place = one.place(places)
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
    """The x at which the axes end; the labels take the remaining width."""
    return WIDTH - 14 - max(map(text_width, labels))


def _label(series: Series, lengths: Sequence[tuple[int, int]], digits: int) -> str:
    """The label of a line: its last rate and name, and the length if it ends before the others."""
    at, rate = _last(series)
    if at < len(lengths) - 1:
        return f"{rate:.{digits}f} {cut(series.name)} at {lengths[at][0]}"
    return f"{rate:.{digits}f} {cut(series.name)}"


def _last(series: Series) -> tuple[int, float]:
    """The index of the last length that has a rate, and the rate."""
    return [(place, rate) for place, rate in enumerate(series.rates) if rate][-1]


def roofline(
    title: str,
    dram_tb_per_s: float | None,
    ceilings: Mapping[str, float],
    traces: Sequence[Curve],
    caption: str,
    facets: Mapping[str, str],
) -> Chart:
    """A chart of TFLOP/s by FLOP per byte (a logarithmic axis), with the limits of arithmetic and
    bandwidth."""
    points = [point for trace in traces for point in trace.points]
    left = math.log2(min(x for x, *_ in points)) - 3
    right = math.log2(max(x for x, *_ in points)) + 0.5
    levels = [f"{rate:.0f} {cut(name)}" for name, rate in ceilings.items()]
    rates = [f"{trace.points[-1][1]:.0f}" for trace in traces]
    drawing = _Drawing(_right_of_axes(levels + rates))
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
        # The line of a ceiling begins where the bandwidth line meets it.
        begin = x_of(rate / dram_tb_per_s) if dram_tb_per_s else _LEFT
        drawing.line("ceiling", (begin, y_of(rate)), (drawing.right, y_of(rate)))
        ends.append((words, "label muted", drawing.right - 5, y_of(rate)))
    if dram_tb_per_s:
        limit = max(ceilings.values(), default=top)
        steps = [2.0 ** (left + (right - left) * part / 60) for part in range(61)]
        slope = [(x_of(x), y_of(dram_tb_per_s * x)) for x in steps if dram_tb_per_s * x < limit]
        if slope:
            drawing.line("ceiling", *slope)
            y = max(_TOP + 4, slope[0][1] - 8)
            drawing.text(slope[0][0] + 14, y, f"DRAM {dram_tb_per_s:.2f} TB/s")
    # All kernels here are flashsmith's and have its colour; other colours stand for peers.
    own = _PLACES.index(FLASHSMITH)
    for number, (words, trace) in enumerate(zip(rates, traces, strict=True)):
        path = [(x_of(x), y_of(y)) for x, y, _ in trace.points]
        drawing.line(f"line c{own}", *path)
        for at, (_, _, tip) in zip(path, trace.points, strict=True):
            drawing.mark(own, *at, tip, shape=number)
        ends.append((words, f"label c{own}", *path[-1]))
    drawing.end_labels(ends)
    y = _BOTTOM + 50
    for number, (words, trace) in enumerate(zip(rates, traces, strict=True)):
        lines = lines_of(f"{words} {cut(trace.name, 120)}", 60)
        drawing.mark(own, 12, y, shape=number)
        for line in lines:
            drawing.text(22, y + 4, line, f"label c{own}")
            y += _LINE_HEIGHT + 1.5
    alt = f"{title}: kernels below the GPU's measured ceilings"
    return Chart(title, alt, caption, y, drawing.shapes, facets)


# A line of a strip's name has at most this many characters.
_STRIP_NAME = 30
# The ratios at which an axis may have a label.
_NAMED_RATIOS = (0.01, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 10, 100)


def ratio_strips(
    title: str, strips: Sequence[Strip], caption: str, places: Mapping[str, int]
) -> Chart:
    """A chart with one row of points per strip; the x axis is the ratio to the peers,
    logarithmic."""
    drawing = _Drawing()
    peers = list(dict.fromkeys(peer for strip in strips for _, peer, _ in strip.points))
    entries = [(Series(peer, ()).place(places), f"over {cut(peer)}") for peer in peers]
    top = drawing.legend(entries, 9.0) + 12
    ratios = [math.log(ratio) for strip in strips for ratio, *_ in strip.points]
    low, high = robust_range(ratios, reach=3.0)
    low, high = min(low, 0.0) - 0.04, max(high, 0.0) + 0.04
    names = [lines_of(cut(strip.name, 3 * _STRIP_NAME), _STRIP_NAME) for strip in strips]
    left, right = 20 + max(text_width(line) for lines in names for line in lines), WIDTH - 14
    heights = [max(22.0, _LINE_HEIGHT * len(lines) + 6) for lines in names]
    bottom = top + 8 + sum(heights)

    def x_of(ratio: float) -> float:
        return _between(math.log(ratio), low, high, left, right)

    named: list[float] = []
    for ratio in sorted(_NAMED_RATIOS, key=lambda ratio: abs(math.log(ratio))):
        x = x_of(ratio)
        if low <= math.log(ratio) <= high and all(abs(x - other) > 30 for other in named):
            named.append(x)
            drawing.line("one" if ratio == 1 else "grid", (x, top), (x, bottom))
            drawing.text(x, bottom + 14, f"{ratio:g}", "", "middle")
    begin = top + 8
    for lines, height, strip in zip(names, heights, strips, strict=True):
        y = begin + height / 2
        begin += height
        first = y + 4 - _LINE_HEIGHT * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            drawing.text(left - 8, first + _LINE_HEIGHT * number, line, "label ink", "end")
        for ratio, peer, tip in strip.points:
            beyond = not low <= math.log(ratio) <= high
            place = Series(peer, ()).place(places)
            drawing.mark(place, x_of(ratio), y, tip, "beyond" if beyond else "point")
    alt = f"{title}: {len(ratios)} ratios in {len(strips)} rows"
    return Chart(title, alt, caption, bottom + 22, drawing.shapes)
