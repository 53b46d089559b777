"""The charts: what is drawn, that labels keep apart and inside, that colours can be seen."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest

from flashsmith.benchmark.report.page import page_templates
from flashsmith.benchmark.report.results import FLASHSMITH
from flashsmith.benchmark.report.svg_charts import (
    DRAM_READ,
    WIDTH,
    Chart,
    Curve,
    Series,
    Strip,
    lines_by_length,
    places_of,
    ratio_strips,
    robust_range,
    roofline,
    spread_out,
)

PLACES = places_of(["fa2", "cudnn", "flex", "mem_efficient"])
LENGTHS = ((1024, 16), (4096, 16), (16384, 4))
SERIES = [
    Series("flashsmith", (340.0, 360.0, 367.0), strong=True),
    Series("best of 80", (341.0, 361.0, 369.0), strong=True, dashed=True),
    Series("fa2", (321.0, 342.0, 346.0)),
    Series("cudnn", (551.0, 572.0, 594.0)),
    Series("flex", (None, 348.0, None)),
    Series("mem_efficient", (None, None, None)),
]
TRACES = [
    Curve("full", ((512.0, 340.0, "first"), (2048.0, 360.0, "second"))),
    Curve("causal", ((256.0, 338.0, "third"),)),
]
CEILINGS = {"mma registers": 617.0, "mma shared": 610.0}


def lines(series=SERIES, lengths=LENGTHS) -> Chart:
    return lines_by_length("d 128", lengths, series, "", {}, PLACES)


def of_class(chart: Chart, name: str) -> list:
    return [one for one in chart.shapes if name in one.attributes["class"].split()]


def points(shape) -> list[tuple[float, ...]]:
    return [tuple(map(float, pair.split(","))) for pair in shape.attributes["points"].split()]


def labels(chart: Chart) -> list[str]:
    return [shape.text for shape in of_class(chart, "label") if shape.tag == "text"]


def check_layout(chart: Chart) -> None:
    """No text covers another or leaves the chart; a character is taken as 6 wide and 12 high."""
    boxes = []
    for shape in chart.shapes:
        if shape.tag == "text":
            x, y = (float(shape.attributes[name]) for name in "xy")
            width = 6.0 * len(shape.text)
            x -= {"start": 0, "middle": width / 2, "end": width}[shape.attributes["text-anchor"]]
            boxes.append((x, y - 9, x + width, y + 3, shape.text))
    for x0, y0, x1, y1, text in boxes:
        assert x0 >= 0, text
        assert y0 >= 0, text
        assert x1 <= WIDTH, text
        assert y1 <= chart.height, text
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)


@pytest.mark.parametrize(
    ("wanted", "spread"),
    [
        ([], []),
        ([5.0], [5.0]),
        ([0.0, 10.0], [0.0, 10.0]),
        ([5.0, 5.0], [4.5, 5.5]),
        ([5.2, 5.0], [5.6, 4.6]),
        ([1.0, 1.0, 1.0], [0.0, 1.0, 2.0]),
        # Two that push each other push a third.
        ([0.0, 0.5, 1.4], [-0.3666, 0.6333, 1.6333]),
    ],
)
def test_labels_move_apart_no_farther_than_they_must(wanted, spread) -> None:
    assert spread_out(wanted, gap=1.0) == pytest.approx(spread, abs=1e-3)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3.0, 3.0)),
        ([1.0, 2.0, 3.0, 4.0, 5.0], (1.0, 5.0)),
        # The outlier goes, and the range ends 1.5 times the middle half's width beyond it.
        ([1.0, 2.0, 3.0, 4.0, 5000.0], (1.0, 7.0)),
        ([-900.0, 2.0, 2.0, 2.0, 2.0], (2.0, 2.0)),
    ],
)
def test_one_outlier_does_not_stretch_a_range(values, expected) -> None:
    assert robust_range(values) == expected


# --- throughput ----------------------------------------------------------------------------------


def test_lines_are_labelled_at_their_ends_and_apart() -> None:
    chart = lines()
    assert labels(chart) == [
        "367 flashsmith", "369 best of 80", "346 fa2", "594 cudnn", "348 flex at 4096",
    ]  # fmt: skip
    check_layout(chart)
    drawn = of_class(chart, "line")
    # The lonely point of flex is there too: a mark.
    assert [len(points(line)) for line in drawn] == [3, 3, 3, 3, 1]
    assert len(of_class(chart, "mark")) == 13
    assert "strong" in drawn[0].attributes["class"]
    assert "dashed" in drawn[1].attributes["class"]


def test_higher_rates_are_drawn_higher_and_in_proportion() -> None:
    flashsmith, _, fa2, cudnn, _ = (points(line) for line in of_class(lines(), "line"))
    assert cudnn[0][1] < flashsmith[0][1] < fa2[0][1]
    (rate_axis,) = {
        round((fa2[n][1] - cudnn[n][1]) / (SERIES[3].rates[n] - SERIES[2].rates[n]), 2)
        for n in range(3)
    }
    assert rate_axis > 0


def test_every_length_can_be_read_by_pointing_at_it() -> None:
    tips = [shape.tip for shape in of_class(lines(), "hit")]
    assert len(tips) == len(LENGTHS)
    assert tips[1].split("\n") == [
        "length 4096, batch 16", "572  cudnn", "361  best of 80", "360  flashsmith", "348  flex",
        "342  fa2",
    ]  # fmt: skip


def test_an_implementation_has_its_colour_in_every_chart() -> None:
    def colour(series, name):
        place = [one.name for one in series].index(name)
        return of_class(lines(series), "line")[place].attributes["class"].split()[1]

    assert colour(SERIES[:4], "cudnn") == colour(SERIES[3:4], "cudnn")
    assert len({colour(SERIES[:4], one.name) for one in SERIES[1:4]}) == 3


KNOWN = (
    "fa2", "cudnn", "mem_efficient", "flex", "flash_attn_2", "flash_attn_3", "flash_attn_4",
    "flashinfer",
)  # fmt: skip


def test_peers_have_places_of_their_own_whichever_a_page_shows() -> None:
    everything = places_of([*KNOWN, "mine"])
    assert len(set(everything.values())) == len(everything)
    for name in KNOWN:
        assert places_of([name]) == {name: everything[name]}
        assert places_of(["other", name])[name] == everything[name]
    # Of names that are not known here only what others leave free is taken.
    few = places_of(["one", "two", "fa2"])
    assert (
        len({*few.values(), Series(FLASHSMITH, ()).place(few), Series(DRAM_READ, ()).place(few)})
        == 5
    )


def test_a_peer_has_one_colour_in_charts_of_every_kind() -> None:
    places = places_of(["flashinfer", "stranger"])
    for name in places:
        line = of_class(
            lines_by_length("", LENGTHS[:1], [Series(name, (1.0,))], "", {}, places), "line"
        )
        point = of_class(ratio_strips("", [Strip("d", [(1.1, name, "")])], "", places), "point")
        colours = {shape.attributes["class"].split()[1] for shape in (*line, *point)}
        assert colours == {f"c{places[name]}"}


@pytest.mark.parametrize("name", KNOWN)
def test_no_peers_name_is_cut(name: str) -> None:
    """Neither where its line ends early, nor in the legend of ratios."""
    places = places_of([*KNOWN])
    chart = lines([Series("fa2", (1.0, 2.0, 3.0)), Series(name, (None, 12345.0, None))])
    assert f"12345 {name} at 4096" in labels(chart)
    check_layout(chart)
    ratios = [(1.0 + n / 10, peer, "") for n, peer in enumerate(KNOWN)]
    strips = [Strip("d 128, causal, packed, uneven, and what else a mask may be called", ratios)]
    chart = ratio_strips("Ratios", strips, "", places)
    assert f"over {name}" in labels(chart)
    assert strips[0].name in " ".join(labels(chart))
    check_layout(chart)


def test_a_single_length_is_drawn_as_points_that_say_what_they_are() -> None:
    chart = lines([replace(one, rates=one.rates[:1]) for one in SERIES], LENGTHS[:1])
    assert labels(chart) == ["340 flashsmith", "341 best of 80", "321 fa2", "551 cudnn"]
    assert len({points(line)[0][0] for line in of_class(chart, "line")}) == 1
    (hit,) = of_class(chart, "hit")
    assert hit.tip.startswith("length 1024, batch 16\n551  cudnn")
    check_layout(chart)


def test_many_lines_of_one_rate_stay_inside() -> None:
    for rate in (1.0, 500.0):
        check_layout(lines([Series(f"peer {n}", (rate, rate, 500.0 - rate)) for n in range(14)]))


def test_many_lengths_have_room_for_their_labels() -> None:
    lengths = [(1024 * n, 16) for n in range(1, 60)]
    check_layout(lines([Series("fa2", [300.0] * 59)], lengths))


# --- ratios --------------------------------------------------------------------------------------


def test_ratios_lie_on_both_sides_of_one() -> None:
    strips = [
        Strip("d 64, full", [(0.8, "fa2", "slow"), (1.3, "cudnn", "fast")]),
        Strip("d 128, causal", [(1.0, "fa2", "level")]),
    ]
    chart = ratio_strips("Ratios", strips, "", PLACES)
    check_layout(chart)
    one = points(of_class(chart, "one")[0])[0][0]
    placed = {
        shape.tip: float(re.findall(r"[\d.]+", shape.attributes["transform"])[0])
        for shape in of_class(chart, "point")
    }
    assert placed["slow"] < one == placed["level"] < placed["fast"]


def test_a_ratio_far_beyond_the_others_is_at_the_edge_and_marked() -> None:
    ratios = [(1 + n / 100, "fa2", str(n)) for n in range(20)]
    chart = ratio_strips("Ratios", [Strip("d 64", [*ratios, (1e9, "fa2", "far")])], "", PLACES)
    (beyond,) = of_class(chart, "beyond")
    assert beyond.tip == "far"
    assert len(of_class(chart, "point")) == 20
    check_layout(chart)


# --- the roofline --------------------------------------------------------------------------------


@pytest.mark.parametrize("dram", [4.5, None])
def test_kernels_lie_below_named_ceilings(dram) -> None:
    chart = roofline("H200", dram, CEILINGS, TRACES, "", {})
    assert labels(chart) == [
        "617 mma registers", "610 mma shared", "360", "338", "360 full", "338 causal",
    ]  # fmt: skip
    assert ("DRAM 4.50 TB/s" in [shape.text for shape in chart.shapes]) == bool(dram)
    # Those of the legend say nothing when they are pointed at.
    assert [shape.tip for shape in of_class(chart, "mark") if shape.tip] == [
        "first", "second", "third",
    ]  # fmt: skip
    check_layout(chart)


def test_all_kernels_of_a_roofline_have_flashsmiths_colour() -> None:
    """Another colour would be a peer's."""
    traces = [replace(TRACES[0], name=f"kind {n}") for n in range(10)]
    chart = roofline("H200", None, {}, traces, "", {})
    assert {shape.attributes["class"] for shape in of_class(chart, "line")} == {"line c0"}
    assert len({shape.attributes["d"] for shape in of_class(chart, "mark")}) == 10


def test_no_label_of_a_roofline_is_cut() -> None:
    name = (
        "causal, packed, uneven, page16, 128:16 heads, 4 queries, and what else a kernel computes"
    )
    chart = roofline(
        "H200", 4.5, {"mma shared 16 rows": 600.0}, [replace(TRACES[0], name=name)], "", {}
    )
    assert f"360 {name}" in " ".join(labels(chart))
    assert "600 mma shared 16 rows" in labels(chart)
    check_layout(chart)


def test_a_ceiling_begins_where_bandwidth_reaches_it() -> None:
    chart = roofline("H200", 4.0, {"mma": 600.0}, TRACES, "", {})
    level, slope = (points(shape) for shape in of_class(chart, "ceiling"))
    full = points(of_class(chart, "line")[0])
    # 600 / 4 = 150 FLOP per byte; the axis is of powers of two, 512 and 2048 are two apart.
    doubling = (full[1][0] - full[0][0]) / 2
    assert (full[0][0] - level[0][0]) / doubling == pytest.approx(math.log2(512 / 150), abs=0.02)
    assert level[0][1] == level[1][1]
    assert slope[-1][0] == pytest.approx(level[0][0], abs=5)


# --- colours -------------------------------------------------------------------------------------


def colours(dark: bool) -> dict[str, str]:
    """The style sheet's colours by name."""
    css = page_templates().get_template("chart.css").render()
    light, _, rest = css.partition("@media")
    return dict(re.findall(r"--(\w+): (#\w{6});", rest if dark else light))


@pytest.mark.parametrize("dark", [False, True])
def test_colours_stand_out_from_the_page(dark: bool) -> None:
    known = colours(dark)

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(name: str) -> float:
        low, high = sorted((luminance(known[name]), luminance(known["surface"])))
        return (high + 0.05) / (low + 0.05)

    assert min(contrast(f"c{place}") for place in range(12)) >= 3  # for graphics
    assert min(map(contrast, ("ink", "muted", "bad"))) >= 4.5  # for text
