"""The charts: what is drawn, that labels keep apart and inside, and the heat map's choice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text
from sample_rows import row, search_rows

from flashsmith.benchmark.charts import DARK, LIGHT
from flashsmith.benchmark.charts.heat_map import HeatMap, draw_heat_map
from flashsmith.benchmark.charts.labels import spread_out
from flashsmith.benchmark.charts.roofline import Trace, draw_roofline
from flashsmith.benchmark.charts.throughput import Line, draw_throughput
from flashsmith.benchmark.report.space import MOST_ROWS, make_heat_maps

LENGTHS = ("1024\nb 16", "4096\nb 16", "16384\nb 4")
LINES = [
    Line("ours", (340.0, 360.0, 367.0), ours=True),
    Line("best of 80", (341.0, 361.0, 369.0), ours=True, dashed=True),
    Line("fa2", (321.0, 342.0, 346.0)),
    Line("cudnn", (551.0, 572.0, 594.0)),
    Line("flex", (None, 348.0, None)),
    Line("mem_efficient", (None, None, None)),
]
TRACES = [Trace("full", ((512.0, 340.0), (2048.0, 360.0))), Trace("causal", ((256.0, 338.0),))]
CEILINGS = [("mma registers", 617.0), ("mma shared", 610.0), ("exp2", 2000.0)]


def words(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def check_layout(figure) -> None:
    """No text covers another or leaves the picture."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text for axes in figure.axes for text in axes.texts]
    # Not an annotation's own extent, which takes in the line to what it annotates.
    boxes = [Text.get_window_extent(text, renderer) for text in texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    for box in boxes:
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0
        assert box.y1 <= figure.bbox.y1


# --- labels --------------------------------------------------------------------------------------


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


# --- throughput ----------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_lines_are_labelled_at_their_ends_and_apart(theme) -> None:
    figure = draw_throughput("d 128", LENGTHS, LINES, theme)
    assert words(figure) == [
        "ours 367", "best of 80 369", "fa2 346", "cudnn 594", "flex 348 at 4096",
    ]  # fmt: skip
    check_layout(figure)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == list(LENGTHS)
    assert axes.get_ylim()[0] == 0
    # The lonely point of flex is there too: a marker.
    assert [len(line.get_xdata()) for line in axes.lines] == [3, 3, 3, 3, 1]


def test_a_contender_has_its_colour_in_every_chart() -> None:
    def colour(lines, name):
        figure = draw_throughput("x", LENGTHS, lines, LIGHT)
        place = [line.name for line in lines].index(name)
        return to_hex(figure.axes[0].lines[place].get_color())

    assert colour(LINES[:4], "cudnn") == colour(LINES[3:4], "cudnn")
    assert len({colour(LINES[:4], line.name) for line in LINES[1:4]}) == 3


def test_a_single_length_is_drawn_as_bars() -> None:
    lines = [replace(line, rates=line.rates[:1]) for line in LINES]
    figure = draw_throughput("d 128", LENGTHS[:1], lines, LIGHT)
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "d 128, length 1024, b 16"
    assert [bar.get_width() for bar in axes.patches] == [340, 341, 321, 551]
    check_layout(figure)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_stand_out_from_the_page(theme) -> None:
    def luminance(colour: str) -> float:
        parts = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(colour: str) -> float:
        light, dark = sorted((luminance(colour), luminance(theme.surface)), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    assert min(map(contrast, theme.hues)) >= 3  # for graphics
    assert min(map(contrast, (theme.ink, theme.muted, theme.bad))) >= 4.5  # for text


# --- the heat map --------------------------------------------------------------------------------


def test_the_best_cell_is_framed_and_a_wrong_one_named() -> None:
    heat = HeatMap(
        "h", ("a", "b"), ("x", "y"), {("a", "x"): 100.0, ("b", "y"): 200.0}, frozenset({("a", "y")})
    )
    figure = draw_heat_map(heat, LIGHT)
    assert words(figure) == ["100", "wrong", "·", "200"]
    (axes,) = figure.axes
    (frame,) = axes.patches
    assert (round(frame.get_x()), round(frame.get_y())) == (1, 1)
    check_layout(figure)


def test_a_map_of_one_rate_is_drawn() -> None:
    assert words(draw_heat_map(HeatMap("h", ("a",), ("x",), {("a", "x"): 5.0}), DARK)) == ["5"]


def test_a_searchs_configs_become_tiles_and_knobs() -> None:
    ((heat, caption),) = make_heat_maps(search_rows())
    assert heat.columns == ("64, 32, 4", "64, 64, 4", "128, 32, 4", "128, 64, 4", "128, 128, 4")
    assert heat.rows == ("load_2_2_0_tiles+buffer", "load_2_2_2_tiles")
    # The finals count, not the rungs before.
    assert heat.rates["load_2_2_2_tiles", "128, 64, 4"] == pytest.approx(200 + 128 + 6.4)
    assert heat.failed == {("load_2_2_2_tiles", "128, 128, 4")}
    assert "8 kernels" in caption
    assert "async+eager+swizzled" in caption


def test_the_last_rung_counts_where_there_was_no_final() -> None:
    rows = [one for one in search_rows() if one.protocol == "rung 1"]
    rows += [replace(one, protocol="rung 2", tflops=one.tflops + 7) for one in rows[:1]]
    ((heat, _),) = make_heat_maps(rows)
    assert heat.rates["load_2_2_2_tiles", "64, 32, 4"] == rows[-1].tflops


def test_of_several_lengths_the_one_with_most_configs_is_drawn() -> None:
    rows = search_rows()
    few = [replace(one, seq_q=8192, seq_k=8192) for one in rows[:10]]
    as_many = [replace(one, seq_q=2048, seq_k=2048) for one in rows]
    ((heat, _),) = make_heat_maps([*rows, *few, *as_many])
    assert "length 4096" in heat.heading


def test_a_handful_of_configs_and_attention_make_no_map() -> None:
    assert make_heat_maps(search_rows()[:6]) == []
    assert make_heat_maps([row("ours", seq) for seq in range(64, 640, 64)]) == []


def test_a_long_map_keeps_its_best_rows_and_says_so() -> None:
    rows = [
        row(f"(FP16, 128, 64, 64, 4): async+stages_{number}", 4096, 100.0 + number)
        for number in range(MOST_ROWS + 5)
    ]
    ((heat, caption),) = make_heat_maps(rows)
    assert len(heat.rows) == MOST_ROWS
    assert heat.rows[0] == f"stages_{MOST_ROWS + 4}"
    assert "5 slower rows are left out" in caption
    draw_heat_map(heat, LIGHT)


# --- the roofline --------------------------------------------------------------------------------


@pytest.mark.parametrize("dram", [4.5, None])
def test_kernels_lie_below_named_ceilings(dram) -> None:
    figure = draw_roofline("H200", dram, CEILINGS[:2], TRACES, LIGHT)
    assert set(words(figure)) == {
        "mma registers 617", "mma shared 610", "full 360", "causal 338",
        *(["DRAM 4.50 TB/s"] if dram else []),
    }  # fmt: skip
    check_layout(figure)


def test_a_ceiling_begins_where_bandwidth_reaches_it() -> None:
    figure = draw_roofline("H200", 4.0, [("mma", 600.0)], TRACES, LIGHT)
    level = figure.axes[0].lines[0]
    assert level.get_xdata()[0] == 150
    assert set(level.get_ydata()) == {600}
