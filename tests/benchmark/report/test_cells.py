"""What is compared with what: problems, repeats, settings, batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_rows import CONFIG, bench_rows, elsewhere, row, search_rows

from flashsmith.benchmark.report.cells import describe, make_cells, make_groups, peer_order
from flashsmith.benchmark.report.results import Results, absent_peers

OTHER = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles"


def only(rows):
    (cell,) = make_cells(rows)
    return cell


def test_a_cell_holds_ours_and_the_peers_and_their_ratios() -> None:
    cell = only([row("ours", tflops=330.0), row("fa2", tflops=300.0), row("cudnn", tflops=600.0)])
    assert cell.ours.config == CONFIG
    assert cell.ratio("fa2") == pytest.approx(1.1)
    assert cell.ratio("cudnn") == pytest.approx(0.55)
    assert cell.best_peer.contender == "cudnn"
    assert cell.ratio_to_best == pytest.approx(0.55)
    assert cell.ratio("flex") is None


def test_without_attention_the_fastest_config_is_ours() -> None:
    cell = only([row(CONFIG, tflops=300.0), row(OTHER, tflops=310.0)])
    assert cell.ours.config == OTHER
    assert set(cell.kernels) == {CONFIG, OTHER}


def test_attention_is_ours_even_where_a_config_is_faster() -> None:
    cell = only([row("ours", tflops=300.0), row(OTHER, tflops=310.0)])
    assert cell.ours.contender == "ours"
    assert cell.best_kernel.config == OTHER


def test_of_repeats_the_one_in_the_middle_counts() -> None:
    rates = (300.0, 100.0, 310.0)
    assert only([row("ours", tflops=rate) for rate in rates]).ours.tflops == 300.0
    # Of an even number the slower of the two in the middle.
    assert only([row("fa2", tflops=rate) for rate in rates[:2]]).peers["fa2"].tflops == 100.0


def test_a_wrong_kernel_counts_for_nothing() -> None:
    fast_and_wrong = replace(row("ours", tflops=900.0), verdict="fail")
    cell = only([fast_and_wrong, row("fa2")])
    assert cell.ours is None
    assert cell.ratio("fa2") is None
    assert cell.wrong == (fast_and_wrong,)


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA H100"},
        {"driver": "1"},
        {"torch": "2.12"},
        {"revision": "v0.2"},
        {"protocol": "one_by_one"},
        {"semantics": "causal"},
        {"dtype": "bf16"},
        {"heads_k": 4},
        {"batch": 1},
    ],
)
def test_only_the_same_problem_and_setting_compare(other) -> None:
    cells = make_cells([row("ours"), replace(row("fa2"), **other)])
    assert len(cells) == 2
    assert [cell.ratio("fa2") for cell in cells] == [None, None]


# --- groups --------------------------------------------------------------------------------------


def lengths(*sizes: tuple[int, int]):
    groups = make_groups(make_cells([row(seq=seq, batch=batch) for seq, batch in sizes]))
    return [[(cell.row.seq_k, cell.row.batch) for cell in group.cells] for group in groups]


def test_lengths_of_a_shrinking_batch_are_one_chart() -> None:
    default = [(512, 16), (1024, 16), (4096, 16), (8192, 8), (16384, 4)]
    assert lengths(*reversed(default)) == [default]


def test_odd_lengths_among_the_default_ones_are_in_their_chart() -> None:
    """10000 has batch 4: fewer tokens than 8192 with 8."""
    sizes = [(512, 16), (1536, 16), (3000, 16), (4096, 16), (8192, 8), (10000, 4), (16384, 4)]
    small = [(4096, 1), (16384, 1)]
    assert lengths(*sizes, *small) == [sizes, small]


def test_a_small_batch_beside_a_large_one_is_a_chart_of_its_own() -> None:
    large, small = [(1024, 16), (4096, 16), (16384, 4)], [(1536, 1), (4096, 1), (10000, 1)]
    assert lengths(*large, *small) == [large, small]
    assert lengths((1024, 2), (1024, 1), (2048, 1), (2048, 2)) == [
        [(1024, 2), (2048, 2)],
        [(1024, 1), (2048, 1)],
    ]


def test_queries_apart_from_the_keys_are_not_mixed_with_square_problems() -> None:
    rows = [row(seq=1024), replace(row(seq=2048), seq_q=1), replace(row(seq=4096), seq_q=1)]
    square, short = make_groups(make_cells(rows))
    assert [cell.row.seq_k for cell in square.cells] == [1024]
    assert [cell.row.seq_k for cell in short.cells] == [2048, 4096]
    assert describe(short.first) == "d 128, fp16, full, 16 heads, 1 queries"


def test_plain_problems_at_128_come_first() -> None:
    rows = [
        row(d=64),
        row(semantics="causal+packed+uneven"),
        row(heads_k=4),
        row(dtype="bf16"),
        row(),
        row(semantics="causal"),
    ]
    assert [describe(group.first) for group in make_groups(make_cells(rows))] == [
        "d 128, fp16, full, 16 heads",
        "d 128, bf16, full, 16 heads",
        "d 128, fp16, causal, 16 heads",
        "d 128, fp16, causal, packed, uneven, 16 heads",
        "d 128, fp16, full, 16:4 heads",
        "d 64, fp16, full, 16 heads",
    ]


def test_the_yardsticks_stand_before_other_peers() -> None:
    assert peer_order(["flex", "cudnn", "flex", "fa2"]) == ["fa2", "cudnn", "flex"]


# --- all results together ------------------------------------------------------------------------


def test_the_same_environment_everywhere_differs_in_nothing() -> None:
    results = Results(rows=tuple(bench_rows()))
    assert len(results.environments) == 1
    assert results.differing == ()


def test_other_environments_are_named_by_what_differs() -> None:
    results = Results(rows=(*bench_rows(), *elsewhere(bench_rows())))
    assert len(results.environments) == 2
    assert results.differing == ("gpu", "driver")


def test_a_searchs_rows_are_not_compared() -> None:
    results = Results(rows=(*bench_rows(), *search_rows()))
    assert results.compared == tuple(bench_rows())


def test_absent_peers_are_counted_with_their_reason() -> None:
    assert absent_peers(bench_rows()) == {("flash_attn_3", "not installed"): 6}
