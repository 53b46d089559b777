"""The config space: which configs are ranked, how they are distributed, what a heat map shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_rows import row, search_rows

from flashsmith.benchmark.report.config_space import (
    MOST_ROWS,
    distribution,
    listed_configs,
    make_heat_map,
    make_searched,
    widest,
)


def only(rows):
    (one,) = make_searched(rows)
    return one


def heat_map(rows):
    (one,) = widest(make_searched(rows))
    return make_heat_map(one)


def figures(heat) -> dict[tuple[str, str], str]:
    """The text of every cell that has one, by knobs and tile."""
    return {
        (knobs, tile): text
        for knobs, cells in heat.rows
        for tile, (text, _) in zip(heat.columns, cells, strict=True)
        if text
    }


def kinds(heat) -> dict[str, str]:
    return {text: kind for _, cells in heat.rows for text, kind in cells if text}


def test_a_searchs_configs_are_ranked_by_their_last_measurement() -> None:
    one = only(search_rows())
    # The finals count, not the rungs before.
    assert [row.protocol for row in one.ranked] == ["final"] * 8
    rates = [row.tflops for row in one.ranked]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(200 + 128 + 1 + 6.4)
    assert [row.note for row in one.wrong] == ["wrong: o[0]"]
    assert one.dropped == 1


def test_the_last_rung_counts_where_there_was_no_final() -> None:
    rows = [one for one in search_rows() if one.protocol == "rung 1"]
    rows += [replace(one, protocol="rung 2", tflops=one.tflops + 7) for one in rows[:1]]
    assert rows[-1] in only(rows).ranked
    assert rows[0] not in only(rows).ranked


def test_a_handful_of_configs_and_attention_are_no_space() -> None:
    assert make_searched(search_rows()[:6]) == []
    assert make_searched([row("ours", seq) for seq in range(64, 640, 64)]) == []


def test_how_many_configs_come_how_near_to_the_best() -> None:
    rates = [100.0, 99.0, 98.0, 81.0, 20.0, 10.0]
    rows = [row(f"(FP16, 128, 64, {n}, 4): async", 4096, rate) for n, rate in enumerate(rates)]
    bars, said = distribution(only(rows))
    assert bars == "▆▁▁▁▁▁▄▁▁█"
    assert said.startswith("below 55%: 2; 55% to 60%: 0;")
    assert said.endswith("95% to 100%: 3")


def test_a_page_lists_fewer_configs_of_each_of_many_problems() -> None:
    (one,) = make_searched(search_rows())
    assert listed_configs([one]) == 600
    assert listed_configs([one] * 60) == 10
    assert listed_configs([one] * 6000) == 3


# --- heat maps -----------------------------------------------------------------------------------


def test_a_searchs_configs_become_tiles_and_knobs_the_best_first() -> None:
    heat = heat_map(search_rows())
    assert heat.columns == ["128, 64, 4", "128, 32, 4", "64, 64, 4", "64, 32, 4", "128, 128, 4"]
    assert [knobs for knobs, _ in heat.rows] == ["load_2_2_0_tiles+buffer", "load_2_2_2_tiles"]
    assert heat.common == ["async", "eager", "swizzled"]
    assert figures(heat)["load_2_2_2_tiles", "128, 64, 4"] == "334"
    assert figures(heat)["load_2_2_2_tiles", "128, 128, 4"] == "wrong"
    assert kinds(heat)["335"] == "h9 best"
    assert kinds(heat)["wrong"] == "bad"
    assert (heat.beyond, heat.rows_left_out, heat.columns_left_out) == (0, 0, 0)


def test_of_several_lengths_the_one_with_most_configs_is_shown() -> None:
    rows = search_rows()
    few = [replace(one, seq_q=8192, seq_k=8192) for one in rows[:10]]
    as_many = [replace(one, seq_q=2048, seq_k=2048) for one in rows]
    (one,) = widest(make_searched([*rows, *few, *as_many]))
    assert one.row.seq_k == 4096


def test_an_outlier_does_not_take_the_colours_of_the_others() -> None:
    rates = [300.0, 310.0, 320.0, 330.0, 340.0, 350.0, 2.0]
    rows = [row(f"(FP16, 128, 64, {n}, 4): async", 4096, rate) for n, rate in enumerate(rates)]
    heat = heat_map(rows)
    assert kinds(heat)["2▾"] == "h0"
    assert heat.beyond == 1
    assert (heat.low, heat.high) == (pytest.approx(260, abs=1), 350)
    assert len({kinds(heat)[f"{rate:.0f}"] for rate in rates[:6]}) == 6


def test_one_rate_is_a_heat_map() -> None:
    rows = [row(f"(FP16, 128, 64, {n}, 4): async", 4096, 5.0) for n in range(4)]
    kinds_of_cells = [kind for _, cells in heat_map(rows).rows for _, kind in cells]
    assert kinds_of_cells == ["h5 best", "h5", "h5", "h5"]


def test_a_long_map_keeps_its_best_rows_and_counts_the_others() -> None:
    rows = [
        row(f"(FP16, 128, 64, 64, 4): async+stages_{number}", 4096, 100.0 + number)
        for number in range(MOST_ROWS + 5)
    ]
    heat = heat_map(rows)
    assert len(heat.rows) == MOST_ROWS
    assert heat.rows[0][0] == f"stages_{MOST_ROWS + 4}"
    assert heat.rows_left_out == 5
