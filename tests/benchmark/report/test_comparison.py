"""What is compared with what: problems, repeats, settings, batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_rows import CONFIG, bench_rows, cache_rows, elsewhere, row, search_rows

from flashsmith.benchmark.report.comparison import (
    describe,
    last_measured,
    make_groups,
    make_points,
    peer_order,
    ratios,
    split_semantics,
    summaries,
    titles,
)
from flashsmith.benchmark.report.results import Results, rate_of, unit_of

OTHER = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles"


def only(rows):
    (point,) = make_points(rows)
    return point


def test_a_point_holds_flashsmith_and_the_peers_and_their_ratios() -> None:
    point = only([row("ours", tflops=330.0), row("fa2", tflops=300.0), row("cudnn", tflops=600.0)])
    assert point.flashsmith.config == CONFIG
    assert point.ratio("fa2") == pytest.approx(1.1)
    assert point.ratio("cudnn") == pytest.approx(0.55)
    assert point.best_peer.implementation == "cudnn"
    assert point.ratio_to_best == pytest.approx(0.55)
    assert point.ratio("flex") is None


def test_without_attention_the_fastest_config_is_flashsmiths() -> None:
    point = only([row(CONFIG, tflops=300.0), row(OTHER, tflops=310.0)])
    assert point.flashsmith.config == OTHER
    assert set(point.kernels) == {CONFIG, OTHER}


def test_attention_is_flashsmiths_even_where_a_config_is_faster() -> None:
    point = only([row("ours", tflops=300.0), row(OTHER, tflops=310.0)])
    assert point.flashsmith.implementation == "ours"
    assert point.best_kernel.config == OTHER


def test_of_repeats_the_one_in_the_middle_counts() -> None:
    rates = (300.0, 100.0, 310.0)
    assert only([row("ours", tflops=rate) for rate in rates]).flashsmith.tflops == 300.0
    # Of an even number the slower of the two in the middle.
    assert only([row("fa2", tflops=rate) for rate in rates[:2]]).peers["fa2"].tflops == 100.0


def test_a_wrong_kernel_counts_for_nothing() -> None:
    fast_and_wrong = replace(row("ours", tflops=900.0), verdict="fail")
    point = only([fast_and_wrong, row("fa2")])
    assert point.flashsmith is None
    assert point.ratio("fa2") is None
    assert point.wrong == (fast_and_wrong,)


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
    points = make_points([row("ours"), replace(row("fa2"), **other)])
    assert len(points) == 2
    assert [point.ratio("fa2") for point in points] == [None, None]


# --- groups --------------------------------------------------------------------------------------


def lengths(*sizes: tuple[int, int]):
    groups = make_groups(make_points([row(seq=seq, batch=batch) for seq, batch in sizes]))
    return [[(point.row.seq_k, point.row.batch) for point in group.points] for group in groups]


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
    square, short = make_groups(make_points(rows))
    assert [point.row.seq_k for point in square.points] == [1024]
    assert [point.row.seq_k for point in short.points] == [2048, 4096]
    assert describe(short.first) == "d 128, fp16, full, 16 heads, 1 query"


def test_plain_problems_at_128_come_first() -> None:
    rows = [
        row(d=64),
        row(semantics="causal+packed+uneven"),
        row(heads_k=4),
        row(dtype="bf16"),
        row(),
        row(semantics="causal"),
    ]
    assert [describe(group.first) for group in make_groups(make_points(rows))] == [
        "d 128, fp16, full, 16 heads",
        "d 128, bf16, full, 16 heads",
        "d 128, fp16, causal, 16 heads",
        "d 128, fp16, causal, packed, uneven, 16 heads",
        "d 128, fp16, full, 16:4 heads",
        "d 64, fp16, full, 16 heads",
    ]


def test_the_baselines_stand_before_other_peers() -> None:
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


# --- words and means ------------------------------------------------------------------------------


def test_titles_tell_groups_apart_by_what_differs() -> None:
    other = {"revision": "v2", "driver": "1", "protocol": "one_by_one"}
    rows = [row(), row(batch=1), row(**other), row(d=64), row(d=64, **other), row(d=96)]
    assert titles(rows) == [
        "d 128, fp16, full, 16 heads, batch 16, v0.1-2-gabc",
        "d 128, fp16, full, 16 heads, batch 1, v0.1-2-gabc",
        "d 128, fp16, full, 16 heads, batch 16, v2",
        "d 64, fp16, full, 16 heads, v0.1-2-gabc",
        "d 64, fp16, full, 16 heads, v2",
        "d 96, fp16, full, 16 heads",
    ]


def test_settings_that_one_fact_does_not_tell_apart_are_named_by_several() -> None:
    rows = [row(), row(gpu="H100"), row(gpu="H100", torch="2.12"), row(gpu="", revision="")]
    assert [title.removeprefix("d 128, fp16, full, 16 heads, ") for title in titles(rows)] == [
        "NVIDIA H200",
        "H100, PyTorch 2.11.0+cu130",
        "H100, PyTorch 2.12",
        "an unnamed GPU",
    ]


def test_ratios_are_of_the_problems_that_have_both() -> None:
    rows = [row(seq=seq) for seq in (512, 1024, 2048)]
    rows += [row("fa2", 512, 100.0), row("fa2", 1024, 400.0), row("cudnn", 2048)]
    assert ratios(make_points(rows), "fa2") == pytest.approx([3.0, 0.75])
    assert ratios(make_points(rows), "flex") == []


def test_problems_are_of_a_kind_by_head_dimension_and_mask() -> None:
    rows = [*bench_rows(), row(d=64), row("fa2", d=32)]
    (forward,) = summaries(make_points(rows))
    assert {kind: len(points) for kind, points in forward.kinds.items()} == {
        (64, "full"): 1, (128, "causal"): 3, (128, "full"): 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("semantics", "parts"),
    [
        ("plain", ("forward", "full")),
        ("causal+packed+uneven", ("forward", "causal, packed, uneven")),
        ("backward+causal+only_dq", ("backward, only dq", "causal")),
        ("decode+page16", ("decode", "page16")),
        ("of_another_package", ("of_another_package", "full")),
    ],
)
def test_a_rows_operation_and_its_mask(semantics: str, parts: tuple[str, str]) -> None:
    assert split_semantics(row(semantics=semantics)) == parts


def test_gpus_operations_and_units_are_summed_up_apart() -> None:
    """A mean over two GPUs, or a headline below a higher figure of the table, says nothing."""
    rows = [
        *bench_rows(),
        row(semantics="backward", tflops=660.0),
        row(semantics="backward+only_dq", tflops=700.0),
        *cache_rows(),
        row(gpu="H100", tflops=900.0),
    ]
    found = summaries(last_measured(make_points(rows)))
    assert [one.title for one in found] == [
        "forward on NVIDIA H200",
        "backward on NVIDIA H200",
        "backward, only dq on NVIDIA H200",
        "decode on NVIDIA H200",
        "forward on H100",
    ]
    for one in found:
        assert len({point.row.gpu for point in one.points}) == 1
        assert len({unit_of(point.row) for point in one.points}) == 1
        # The headline is the most that the table shows.
        rates = [rate_of(point.flashsmith) for points in one.kinds.values() for point in points]
        assert rate_of(one.fastest) == max(rates)
    assert [round(rate_of(one.fastest)) for one in found] == [360, 660, 700, 3, 900]


def test_of_several_versions_of_a_problem_the_last_counts() -> None:
    rows = [row(tflops=10.0), row(tflops=20.0, revision="v2", time="2027-01-01"), row(seq=512)]
    last = last_measured(make_points(rows))
    assert [point.flashsmith.tflops for point in last] == [300.0, 20.0]
    elsewhere = row(tflops=30.0, gpu="H100", time="2028-01-01")
    last = last_measured(make_points([*rows, elsewhere]))
    assert sorted(point.flashsmith.tflops for point in last) == [20.0, 30.0, 300.0]


def test_points_name_their_failures() -> None:
    bad = replace(row("fa2"), verdict="error", note="no")
    (point,) = make_points([bad, replace(row(), verdict="fail")])
    assert point.failure("fa2") == bad
    assert point.failure("cudnn") is None
    assert point.failure().verdict == "fail"


def test_caches_of_any_size_are_one_chart_from_small_to_large() -> None:
    """However they were measured; pages are another chart."""
    groups = make_groups(make_points(cache_rows()))
    assert [group.first.semantics for group in groups] == ["decode", "decode+page16"]
    for group in groups:
        sizes = [(point.row.batch, point.row.seq_k) for point in group.points]
        assert sizes == [(1, 1024), (8, 1024), (8, 8192)]


def test_a_free_split_is_no_kernel_by_name() -> None:
    point = make_points(cache_rows()[:3])[0]
    assert point.flashsmith is point.chosen
    assert point.kernels == {}
    assert (point.free and point.free.implementation) == "ours_free"
    assert [unit_of(one) for one in (point.row, row())] == ["TB/s", "TFLOP/s"]
    assert rate_of(point.chosen) == pytest.approx(4.21 / 8, rel=1e-3)
    assert rate_of(None) is None
    # An operation that is not known here has no bytes.
    assert unit_of(row(semantics="of_another_package")) == "TFLOP/s"
