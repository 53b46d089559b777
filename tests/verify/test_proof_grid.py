"""The grid holds what it promises, and its cover every pair of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
from grids.proof_grid import (
    BATCHES,
    COVER_LENGTHS,
    EXTREME_INPUTS,
    HEADS,
    LENGTHS,
    LONG,
    PACKED_LENGTHS,
    SOFTCAPS,
    WINDOWS,
    Case,
    D,
    case_pairs,
    covering_cases,
    proof_grid,
)

from flashsmith.families import (
    SUPPORTED_D_HEADS,
    DType,
    WgmmaForwardKernelConfig,
    check_legal,
    compiled_d_head,
    family_named,
)
from flashsmith.families.wgmma.config import PingPong, Schedule, TileOrder

MMA_SYNC, WGMMA = "mma_sync", "wgmma"

FACTORS = {
    "dtype": tuple(DType),
    "d": D,
    "lengths": COVER_LENGTHS,
    "causal": (False, True),
    "window": WINDOWS,
    "heads": tuple(HEADS),
    "softcap": SOFTCAPS,
    "batch": BATCHES,
    "sinks": (False, True),
}


@cache
def whole_grid(family: str = MMA_SYNC) -> tuple[Case, ...]:
    return tuple(proof_grid(family))


def grid(family: str = MMA_SYNC) -> tuple[Case, ...]:
    """The cases with random inputs, which come first."""
    whole = (case for case in whole_grid(family) if not case.partial)
    return tuple(case for case in whole if case.inputs == "random")


@cache
def cover(family: str = MMA_SYNC) -> tuple[Case, ...]:
    return tuple(covering_cases(family))


def test_the_grid_is_a_full_product() -> None:
    dense = [case for case in grid() if case.batch == "dense"]
    factors = product(DType, D, LENGTHS, (False, True), WINDOWS, HEADS, SOFTCAPS)
    assert {
        (c.dtype, c.d, c.lengths, c.causal, c.window, c.heads, c.softcap) for c in dense
    } == set(factors)
    assert len(dense) == 2 * 9 * 15 * 2 * 4 * 3 * 2
    packed = 2 * 9 * len(PACKED_LENGTHS) * 3 * 2 * 4 * 3 * 2
    assert len(grid()) - len(dense) == packed
    assert len({str(case) for case in grid()}) == len(grid())
    assert 0.45 < sum(case.sinks for case in grid()) / len(grid()) < 0.55


def test_equal_cases_are_equal_problems() -> None:
    again = tuple(proof_grid())
    assert whole_grid() == again
    for ours, theirs in zip(again[::97], whole_grid()[::97], strict=True):
        assert ours.keywords() == theirs.keywords()
        assert (ours.config, ours.semantics) == (theirs.config, theirs.semantics)


@pytest.mark.parametrize("family", [MMA_SYNC, WGMMA])
def test_parts_come_after_all_with_every_mask(family: str) -> None:
    parts = [case for case in whole_grid(family) if case.partial]
    assert list(whole_grid(family)[-len(parts) :]) == parts
    assert {(c.dtype, c.d, c.batch, c.heads, c.causal, c.window) for c in parts} == set(
        product(DType, D, BATCHES, HEADS, (False, True), WINDOWS)
    )
    assert all(case.semantics.partial and case.keywords()["partial"] for case in parts)
    for seen in (lambda c: c.inputs, lambda c: c.softcap, lambda c: c.lengths):
        assert len({seen(case) for case in parts}) > 1


@pytest.mark.parametrize("family", [MMA_SYNC, WGMMA])
def test_extreme_inputs_come_last_with_every_mask(family: str) -> None:
    """Behind the others, whose problems stay what they were."""
    extreme = [case for case in whole_grid(family)[len(grid(family)) :] if not case.partial]
    assert grid(family) == whole_grid(family)[: len(grid(family))]
    assert {(c.dtype, c.d, c.batch, c.inputs, c.causal, c.window) for c in extreme} == set(
        product(DType, D, BATCHES, EXTREME_INPUTS, (False, True), WINDOWS)
    )
    assert len({str(case) for case in whole_grid(family)}) == len(whole_grid(family))
    assert {case.inputs for case in extreme} == {case.keywords()["inputs"] for case in extreme}
    for seen in (lambda c: c.heads, lambda c: c.softcap, lambda c: c.sinks):
        assert len({seen(case) for case in extreme}) > 1


def test_every_schedule_is_legal_and_used() -> None:
    used = {case.config for case in grid()}
    offered = {
        config
        for dtype, d_head in product(DType, SUPPORTED_D_HEADS)
        if d_head not in (72, 80)  # they have a test of their own: test_vision_widths.py
        for config in family_named(MMA_SYNC).proof_configs(dtype, d_head)
    }
    assert used == offered
    for config in offered:
        check_legal(config)
    for case in grid()[::101]:
        assert case.config.d_head == compiled_d_head(case.d)
        assert case.config.dtype is case.dtype


def test_the_wgmma_family_has_the_same_grid() -> None:
    ours, theirs = grid(), grid(WGMMA)
    assert [replace(case, family=MMA_SYNC, sinks=False) for case in theirs] == [
        replace(case, sinks=False) for case in ours
    ]
    assert not {str(case) for case in ours} & {str(case) for case in theirs}
    assert {case.config for case in theirs} == {
        config
        for dtype, d in product(DType, D)
        for config in family_named(WGMMA).proof_configs(dtype, d)
    }
    assert {case.keywords()["sm_count"] for case in theirs[::11]} == {1, 3, None}
    for case in theirs[::101]:
        assert isinstance(case.config, WgmmaForwardKernelConfig)
        assert case.d <= case.config.d_head


def test_every_wgmma_schedule_is_legal_and_they_show_every_knob() -> None:
    configs = [
        config
        for dtype, d in product(DType, D)
        for config in family_named(WGMMA).proof_configs(dtype, d)
    ]
    for config in configs:
        check_legal(config)
    shown = {
        "d_head": {32, 64, 96, 128, 192, 256},
        "n_warpgroups": {1, 2, 3, 4},
        "q_buffers": {1, 2},
        "overlap": {False, True},
        "pingpong": set(PingPong),
        "schedule": set(Schedule),
        "tile_order": set(TileOrder),
        "separate_O": {False, True},
        "kv_stages": {1, 2, 3, 4},
    }
    for knob, values in shown.items():
        assert {getattr(config, knob) for config in configs} == values


def test_kinds_mean_what_they_say() -> None:
    for case in grid()[::7]:
        call = case.keywords()
        left, right = call["window"]
        shape = (left is None, right is None)
        assert shape in {
            "none": [(True, True)],
            "one-sided": [(True, False), (False, True)],
        }.get(case.window, [(False, False)])
        if case.window == "wider":
            assert min(left, right) >= max(case.lengths)
        heads, heads_k = call["heads"], call["heads_k"]
        group = {"mha": heads == heads_k, "gqa": heads > heads_k > 1, "mqa": heads_k == 1}
        assert group[case.heads]
        if case.batch == "dense":
            assert (call["seq"], call["seq_k"]) == case.lengths
            continue
        for lens, longest in zip((call["lens_q"], call["lens_k"]), case.lengths, strict=True):
            assert max(lens) == longest
            assert (0 in lens) is (case.batch == "zero lengths")
            assert (len(set(lens)) == 1) is (case.batch == "full lengths")


def test_the_cover_holds_every_pair() -> None:
    held = {pair for case in cover() for pair in case_pairs(case)}
    for first, second in combinations(FACTORS, 2):
        for pair in product(FACTORS[first], FACTORS[second]):
            values = dict(zip((first, second), pair, strict=True))
            if is_long(values.get("lengths", (0, 0))) and not is_light(values):
                continue
            assert tuple(values.items()) in held, values


def is_long(lengths: tuple[int, int]) -> bool:
    return min(lengths) >= LONG


def is_light(values: dict) -> bool:
    """What a cover pairs with long sequences: one dense head of few columns."""
    return (
        values.get("batch", "dense") == "dense"
        and values.get("heads", "mha") == "mha"
        and values.get("d", 32) <= 96
    )


def test_the_cover_meets_every_semantics_under_every_schedule() -> None:
    met = {(case.schedule, case.semantics) for case in cover()}
    semantics = {semantics for _, semantics in met}
    assert len(semantics) == 18
    assert met == set(product(range(4), semantics))


def test_the_cover_of_wgmma_meets_every_semantics() -> None:
    """Under every schedule where lengths are any; whole key tiles have few of the sizes."""
    met = {(case.schedule, case.semantics) for case in cover(WGMMA)}
    semantics = {semantics for _, semantics in met}
    assert len(semantics) == 18
    assert met >= set(product(range(4), {kind for kind in semantics if kind.uneven}))


def test_the_cover_stays_small_and_the_same() -> None:
    assert len(cover()) < 150
    assert len({(case.config, case.semantics) for case in cover()}) < 90
    assert cover() == tuple(covering_cases())


@pytest.mark.parametrize("batch", BATCHES)
def test_long_sequences_stay_single(batch: str) -> None:
    for case in cover():
        if case.batch == batch and is_long(case.lengths):
            assert is_light({"batch": batch, "heads": case.heads, "d": case.d})
