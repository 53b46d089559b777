"""The table of winners: adding, merging, finding, and what JSON makes of it."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from winner_samples import BIG, H200, MIDDLE, SMALL, TUNED, WGMMA, add, ranked, tuned_table

from flashsmith.chooser.winners import RankedConfig, WinnersTable
from flashsmith.errors import ArgumentError, TableError
from flashsmith.families import (
    DeviceSpec,
    Problem,
    device_spec,
    get_kernel_configs,
    parse_kernel_name_into_config,
)

# --- adding --------------------------------------------------------------------------------------


def test_a_ranking_is_sorted_and_each_config_once() -> None:
    table = WinnersTable()
    figures = [ranked(SMALL, 6.7), ranked(BIG, 5.7), ranked(SMALL, 6.6)]
    entry = table.add(Problem.parse(TUNED), H200, figures)
    assert [(one.config, one.ms) for one in entry.ranked] == [(BIG, 5.7), (SMALL, 6.6)]
    assert list(table) == [entry]


def test_of_a_long_ranking_the_best_of_every_shape_is_kept() -> None:
    configs = [cfg for cfg in get_kernel_configs("tune") if cfg.dtype.name == "FP16"]
    large = [str(cfg) for cfg in configs if cfg.B_r == 128]
    small = [str(cfg) for cfg in configs if cfg.B_r == 64]
    table = WinnersTable()
    times = {text: 5.0 + rank for rank, text in enumerate([*large, *small])}
    entry = add(table, TUNED, times)
    assert [one.config for one in entry.ranked] == [*large[:8], small[0]]


def test_of_a_long_ranking_the_best_deterministic_kernels_are_kept() -> None:
    """However many others are faster; of each tile shape one."""
    configs = [cfg for cfg in get_kernel_configs("backward") if cfg.d_head == 128]
    text = "(FP16, 128, 64, 128, 8): backward+columns_2"
    free = [f"{text}+stages_{n}+dq_atomics" for n in (1, 2)]
    free += [str(cfg) for cfg in configs if "atomics" in str(cfg)]
    others = [
        replace(parse_kernel_name_into_config(one), B_r=rows) for one in free for rows in (32, 64)
    ]
    fast = list(dict.fromkeys(map(str, others)))
    slow = [f"{text}+stages_2", text, "(FP16, 128, 64, 64, 4): backward"]
    assert len(fast) > 8
    times = {name: 5.0 + rank for rank, name in enumerate([*fast, *slow])}
    entry = add(WinnersTable(), f"{TUNED} backward", times)
    kept = [one.config for one in entry.ranked]
    assert kept[:8] == fast[:8]
    assert [name for name in slow if name in kept] == [slow[0], slow[2]]


def test_two_problems_of_a_bucket_stand_side_by_side() -> None:
    table = tuned_table()
    other = add(table, "b16 s3000 h16 d128 fp16", {BIG: 3.4})
    assert len(table) == 2
    assert len({entry.key for entry in table}) == 1
    for seq, nearest in ((4096, TUNED), (4200, TUNED), (3100, str(other.problem))):
        found = table.lookup(Problem.parse(f"b16 s{seq} h16 d128 fp16"), H200)
        assert str(found[0].entry.problem) == nearest
        assert found[0].exact


def test_measured_again_it_is_replaced() -> None:
    table = tuned_table()
    add(table, TUNED, {BIG: 5.9})
    assert [one.ms for entry in table for one in entry.ranked] == [5.9]


def test_what_one_family_measures_leaves_the_others_figures() -> None:
    table = tuned_table()
    wgmma = ranked(WGMMA, 3.4, family="wgmma")
    entry = table.add(Problem.parse(TUNED), H200, [wgmma])
    assert [(one.config, one.ms) for one in entry.ranked] == [
        (WGMMA, 3.4), (BIG, 5.7), (MIDDLE, 6.3), (SMALL, 6.7)
    ]  # fmt: skip
    entry = table.add(Problem.parse(TUNED), H200, [ranked(BIG, 5.6)])
    assert [(one.config, one.ms) for one in entry.ranked] == [(WGMMA, 3.4), (BIG, 5.6)]
    assert table.validate() == []


@pytest.mark.parametrize("prefer", ["newer", "faster"])
def test_a_merge_keeps_the_family_that_the_winner_lacks(prefer: str) -> None:
    fast, slow = WinnersTable(), measured(19, 5.0)
    figures = [ranked(WGMMA, 3.4, family="wgmma", time="2026-11-22")]
    fast.add(Problem.parse(TUNED), H200, figures)
    for mine, other in ((fast, slow), (slow, fast)):
        assert mine.merge(other, prefer) == 1
        assert [one.config for entry in mine for one in entry.ranked] == [WGMMA, BIG]
        assert mine.merge(other, prefer) == 0


def test_an_empty_ranking() -> None:
    with pytest.raises(ArgumentError, match=r"ranked=\[\]"):
        WinnersTable().add(Problem.parse(TUNED), H200, [])


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf, "5", True])
def test_a_time_is_a_finite_number_above_0(ms: Any) -> None:
    with pytest.raises(ValueError, match="ms"):
        RankedConfig("mma_sync", BIG, ms, 1.0)


# --- merging -------------------------------------------------------------------------------------


def measured(day: int, ms: float) -> WinnersTable:
    table = WinnersTable()
    add(table, TUNED, {BIG: ms}, time=f"2026-11-{day:02}")
    return table


@pytest.mark.parametrize(
    ("prefer", "other_day", "other_ms", "taken"),
    [
        ("newer", 21, 6.0, True),
        ("newer", 19, 5.0, False),
        ("newer", 20, 5.5, True),
        ("faster", 19, 5.0, True),
        ("faster", 21, 6.0, False),
    ],
)
def test_who_wins_a_merge(prefer: str, other_day: int, other_ms: float, taken: bool) -> None:
    mine, other = measured(20, 5.7), measured(other_day, other_ms)
    assert mine.merge(other, prefer) == int(taken)
    assert [entry.best.ms for entry in mine] == [other_ms if taken else 5.7]


def test_a_merge_takes_what_is_new_and_changes_nothing_the_second_time() -> None:
    mine, other = tuned_table(), tuned_table()
    add(other, "b1 s512 h8 d64 bf16 causal", {MIDDLE: 0.02})
    assert mine.merge(other) == 1
    assert mine.merge(other) == 0
    assert len(mine) == 2


def test_an_unknown_preference() -> None:
    with pytest.raises(ArgumentError, match="prefer='older': allowed are newer, faster"):
        tuned_table().merge(tuned_table(), "older")


# --- finding -------------------------------------------------------------------------------------


def order(table: WinnersTable, problem: str, device: Any = H200) -> list[str]:
    return [str(found.entry.problem) for found in table.lookup(Problem.parse(problem), device)]


def test_the_nearest_sizes_come_first() -> None:
    table = WinnersTable()
    for seq in (512, 1024, 4096, 16384):
        add(table, f"b16 s{seq} h16 d128 fp16", {BIG: 1.0})
    assert order(table, "b16 s1500 h16 d128 fp16")[:2] == [
        "b16 s1024 h16 d128 fp16",
        "b16 s4096 h16 d128 fp16",
    ]
    (nearest, *_) = table.lookup(Problem.parse("b4 s2048:1024 h16 d128 fp16"), H200)
    # seq_q is one octave away, batch x heads two, which count half.
    assert (nearest.distance, nearest.exact, nearest.relation) == (2.0, False, "")


def test_relatives_come_after_the_problems_own_class() -> None:
    table = WinnersTable()
    related = {
        "b1 s512 h16 d128 bf16 causal": "measured with fp16",
        "b1 s512 h16 d128 fp16 causal packed": "not packed",
        "b1 s512 h16 d128 fp16 causal softcap": "without softcap",
        "b1 s512 h16 d128 fp16 window": "with a causal mask",
        "b1 s512 h16 d128 fp16": "with a causal mask",
    }
    add(table, "b1 s512 h16 d128 fp16 causal", {BIG: 1.0})
    distances = []
    for problem, relation in related.items():
        (found,) = table.lookup(Problem.parse(problem), H200)
        assert found.relation == relation
        assert not found.exact
        distances.append(found.distance)
    assert distances == [4, 6, 8, 5, 10]
    add(table, "b16 s512 h16 d128 fp16", {BIG: 1.0})
    assert order(table, "b1 s512 h16 d128 fp16")[0] == "b16 s512 h16 d128 fp16"


def test_windows_of_other_sizes_are_relatives_and_any_window_is_each() -> None:
    table = WinnersTable()
    for problem in ("window_4096", "window", "window_1024"):
        add(table, f"b1 s512 h16 d128 fp16 {problem}", {BIG: 1.0})
    asked = Problem.parse("b1 s512 h16 d128 fp16 window_1024")
    found = [(one.entry.problem.window_keys, one) for one in table.lookup(asked, H200)]
    assert [keys for keys, _ in found] == [1024, 0, 4096]
    assert [(one.exact, one.distance, one.relation) for _, one in found] == [
        (True, 0.0, ""),
        (True, 0.0, ""),
        (False, 1.0, "with windows of 4096 keys"),
    ]
    assert order(table, "b1 s512 h16 d128 fp16 window")[0].endswith(" window")
    # One size is a guess where the problem does not state its window.
    assert [
        one.distance for one in table.lookup(Problem.parse("b1 s512 h16 d128 fp16 window"), H200)
    ] == [0.0, 2.0, 2.0]
    # Of a problem whose class was not measured, any window comes before another class.
    assert order(table, "b1 s512 h16 d128 fp16 window_8192")[0].endswith(" window")


def test_another_gpu_of_the_architecture_is_a_relative_and_another_architecture_is_none() -> None:
    table = tuned_table()
    (found,) = table.lookup(Problem.parse(TUNED), device_spec("H100"))
    assert found.relation == "measured on H200"
    assert not found.exact
    assert table.lookup(Problem.parse(TUNED), device_spec("A100")) == []
    (own,) = table.lookup(Problem.parse(TUNED), replace(H200, name="NVIDIA H200"))
    assert own.exact


def gpus(table: WinnersTable, device: DeviceSpec, problem: str = TUNED) -> list[str]:
    """Whose entries a lookup finds, nearest first."""
    return [found.entry.key.gpu for found in table.lookup(Problem.parse(problem), device)]


def test_the_most_similar_gpu_comes_first() -> None:
    h100 = device_spec("H100")
    table = tuned_table()
    add(table, TUNED, {BIG: 6.0}, h100)
    assert gpus(table, h100) == ["H100", "H200"]
    assert gpus(table, replace(h100, name="NVIDIA H100 PCIe", sm_count=114)) == ["H100", "H200"]
    assert gpus(table, device_spec("GH200")) == gpus(table, device_spec("H20")) == ["H200", "H100"]


def test_a_table_of_few_problems_does_not_hide_that_of_a_sister() -> None:
    h100 = device_spec("H100")
    table = tuned_table()
    add(table, TUNED.replace("4096", "16384"), {BIG: 6.0}, h100)
    add(table, TUNED.replace("fp16", "bf16"), {BIG: 6.0}, h100)
    assert gpus(table, h100)[0] == "H200"  # before those two octaves away, and of the other dtype
    assert gpus(table, h100, TUNED.replace("4096", "8192"))[0] == "H100"
    # Half of the SMs make another GPU of it.
    half = replace(h100, name="H100 MIG 3g", sm_count=66)
    add(table, TUNED.replace("4096", "16384"), {BIG: 12.0}, half)
    assert gpus(table, half)[0] == "H100 MIG 3g"


def test_another_d_head_says_nothing() -> None:
    assert order(tuned_table(), "b16 s4096 h16 d64 fp16") == []
    assert order(tuned_table(), "b16 s4096 h16 d104 fp16") == [TUNED]


def test_selecting() -> None:
    table = tuned_table()
    add(table, "b1 s512 h8 d64 bf16", {MIDDLE: 0.02}, device_spec("A100"))
    assert len(table.select()) == 2
    assert [entry.key.gpu for entry in table.select(gpu="NVIDIA h200")] == ["H200"]
    assert [entry.key.gpu for entry in table.select(dtype="BF16")] == ["A100"]
    assert len(table.select(gpu="H200", d_head=64)) == 0
    with pytest.raises(ArgumentError, match="dtype='fp8': allowed are FP16"):
        table.select(gpu="H200", dtype="fp8")


# --- JSON ----------------------------------------------------------------------------------------


def test_json_and_back() -> None:
    table = tuned_table()
    add(table, "b2 s100:9000 h32:8 d72 bf16 causal softcap packed", {MIDDLE: 0.5})
    data = json.loads(json.dumps(table.to_json()))
    again = WinnersTable.from_json(data)
    assert again.notes == []
    assert again.to_json() == data
    assert [entry.key for entry in again] == [entry.key for entry in table]
    assert [entry.best.environment for entry in again] == [e.best.environment for e in table]


@pytest.mark.parametrize("data", [[], {}, {"schema": 1}, {"entries": []}, "text", None])
def test_other_json_is_no_table(data: Any) -> None:
    with pytest.raises(TableError, match=r"^x: no table of winners"):
        WinnersTable.from_json(data, "x")


@pytest.mark.parametrize("schema", [0, 2, "1"])
def test_another_schema_is_refused_whole(schema: Any) -> None:
    with pytest.raises(TableError, match=r"^x: schema .*; this version reads 1"):
        WinnersTable.from_json({**tuned_table().to_json(), "schema": schema}, "x")


def _set(*path: Any, to: Any) -> Any:
    def change(entry: dict[str, Any]) -> None:
        place: Any = entry
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.pop("gpu"),
        lambda entry: entry["ranked"][0].pop("ms"),
        _set("seq_q", to=3000),
        _set("arch", to="90"),
        _set("dtype", to="fp8"),
        _set("semantics", to="diagonal"),
        _set("problem", to="b1"),
        _set("ranked", to=[]),
        _set("ranked", to=None),
        _set("ranked", 0, "ms", to=-1),
        _set("ranked", 0, "ms", to="fast"),
        _set("ranked", 0, "environment", to="unknown"),
    ],
)
def test_a_damaged_entry_is_left_out_with_a_note(damage: Any) -> None:
    table = tuned_table()
    add(table, "b1 s512 h8 d128 fp16", {MIDDLE: 0.02})
    data = copy.deepcopy(table.to_json())
    damage(data["entries"][1])
    read = WinnersTable.from_json(data, "mine.json")
    assert len(read) == 1
    (note,) = read.notes
    assert note.startswith("mine.json: entry 1 is ignored: ")
    assert read.validate() == [note]


# --- validation ----------------------------------------------------------------------------------


def test_a_sound_table_has_nothing_to_say() -> None:
    assert tuned_table().validate() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("ranked", 0, "ms", to=7.0), "not sorted"),
        (_set("ranked", 0, "tflops", to=100.0), r"TFLOP/s, not 100"),
        (_set("ranked", 0, "ms", to=1e-6), "no GPU reaches"),
        (_set("ranked", 1, "config", to=BIG), "ranked twice"),
        (_set("ranked", 0, "config", to="(FP16, 128, 128): fast"), "cannot parse"),
        (_set("ranked", 0, "config", to=BIG.replace("128, 64, 4)", "96, 64, 4)")), "is illegal"),
        (_set("ranked", 0, "config", to=BIG.replace("FP16", "BF16")), "another dtype or d_head"),
        (_set("ranked", 0, "family", to="wgmma"), "of the family mma_sync, not wgmma"),
        (_set("seq_q", to=2048), "belongs under H200 sm_90 fp16 d128 plain s4096 bh256"),
        (_set("arch", to=80), "H200 is sm_90"),
    ],
)
def test_what_validation_finds(change: Any, words: str) -> None:
    data = copy.deepcopy(tuned_table().to_json())
    change(data["entries"][0])
    problems = WinnersTable.from_json(data).validate()
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize("family", ["wgmma_backward", "wgmma_dq"])
def test_what_is_first_for_gradients_is_in_the_grid_of_proofs(family: str) -> None:
    shipped = [parse_kernel_name_into_config(entry.best.config) for entry in WinnersTable.shipped()]
    first = {cfg for cfg in shipped if family == cfg.FAMILY}
    proven = {cfg for it in first for cfg in it.family.proof_configs(it.dtype, it.head_dims)}
    assert first, family
    assert {str(cfg) for cfg in first - proven} == set()
