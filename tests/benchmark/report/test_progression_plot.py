"""An ablation's picture: what is written in it, where, and that it is drawn the same again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ablations import ABLATION, PLAIN, SWIZZLED, TIMED, timed_step
from matplotlib.colors import to_hex

from flashsmith.benchmark.progression_plot import (
    BAD,
    check_picture_path,
    draw_ablation,
    save_picture,
)
from flashsmith.errors import ArgumentError


def words(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_without_times_only_instructions_are_drawn() -> None:
    figure = draw_ablation(ABLATION)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "(FP16, 128, 64, 64, 4):\nasync+load_0_0_0_tiles",
        "+ swizzled",
    ]
    assert words(figure) == [
        "7,540, 170 registers\nconflicts: ldmatrix x8",
        "7,720, 174 registers",
    ]


def test_the_stacked_bars_add_up_to_all_instructions() -> None:
    (axes,) = draw_ablation(ABLATION).axes
    for place, step in enumerate((PLAIN, SWIZZLED)):
        widths = [bars[place].get_width() for bars in axes.containers]
        assert sum(widths) == step.total_instructions


def test_with_times_each_bar_says_its_rate_and_share() -> None:
    figure = draw_ablation(TIMED)
    times, _ = figure.axes
    assert [bar.get_width() for bar in times.patches] == pytest.approx([2000 / 39, 250])
    assert words(figure)[:3] == ["51  (15%)", "250  (75%)", "FA2: 333 "]


def test_a_wrong_kernel_and_one_without_a_time_say_so() -> None:
    wrong = replace(timed_step(SWIZZLED, 8.0), problems=("NaN",))
    times, _ = draw_ablation(replace(TIMED, steps=(PLAIN, wrong))).axes
    assert [text.get_text() for text in times.texts][:2] == ["not timed", "250  (75%)  WRONG"]
    assert to_hex(times.patches[1].get_facecolor()) == BAD


def test_no_text_covers_another() -> None:
    figure = draw_ablation(TIMED)
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in axes.texts]
        for number, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[number + 1 :])


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_written_the_same_every_time(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        save_picture(draw_ablation(TIMED), tmp_path / f"{name}{suffix}")
    first = (tmp_path / f"a{suffix}").read_bytes()
    assert first == (tmp_path / f"b{suffix}").read_bytes()
    assert first.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


@pytest.mark.parametrize("name", ["ablation.jpg", "ablation", "ablation.pdf"])
def test_another_kind_of_picture_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"\.png or \.svg"):
        check_picture_path(Path(name))
