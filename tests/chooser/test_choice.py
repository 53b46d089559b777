"""choose() and choose_config(): legal everywhere, by the best evidence there is, and quick."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from plain_run import full_except
from winner_samples import BIG, H200, MIDDLE, SMALL, TUNED, WGMMA, add, ranked, tuned_table

import flashsmith
from flashsmith.builder import find_library
from flashsmith.builder.sources import source_hash
from flashsmith.chooser import build_for, choice, choose, choose_config, forget_choices
from flashsmith.chooser.winners import WinnersTable, record_winners, staleness, storage
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    KNOWN_DEVICES,
    SUPPORTED_D_HEADS,
    DeviceSpec,
    DType,
    Problem,
    Semantics,
    compiled_d_head,
    device_spec,
    is_legal,
)
from flashsmith.families.canonical import version_of

A100 = device_spec("A100")
EMPTY = WinnersTable()


def problem(seq_q: int, seq_k: int, d: int = 128, heads: int = 8) -> Problem:
    return Problem(4, seq_q, seq_k, heads, heads, d, DType.BF16)


def test_figures_of_sources_with_the_same_kernels_are_as_good_as_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = source_hash("wgmma")
    known = {"0123456789ab" + 20 * "0": {"wgmma": here, "mma_sync": here}}
    monkeypatch.setattr(staleness, "equivalent_sources", lambda: known)
    monkeypatch.setattr(staleness, "_as_good_as", staleness._as_good_as.__wrapped__)
    older = {"csrc": "0123456789ab"}
    assert not staleness.is_of_other_sources(older, "wgmma")
    assert staleness.is_of_other_sources(older, "mma_sync"), "of that family's sources it is not"
    assert staleness.is_of_other_sources({"csrc": "ba9876543210"}, "wgmma")


@pytest.mark.parametrize(
    ("environment", "noted"),
    [
        ({"revision": "csrc 0123456789ab"}, True),
        ({"revision": "v1-dirty", "csrc": "0123456789ab"}, True),
        ({"revision": "v1-dirty", "csrc": staleness.sources_here("mma_sync")}, False),
        ({"revision": "v1-dirty"}, False),
    ],
)
def test_figures_of_other_sources_serve_with_a_note(
    environment: dict[str, str], noted: bool, own_table: Path
) -> None:
    figure = replace(ranked(BIG, 5.7), environment=environment)
    record_winners(Problem.parse(TUNED), H200, [figure])
    table = WinnersTable.load(own_table)
    answer = choose(TUNED, H200, table=table)
    assert (answer.evidence, str(answer.config)) == ("table", BIG)
    assert any("with other CUDA sources (csrc 0123" in note for note in answer.notes) is noted
    assert (len(table.remarks()), table.validate()) == (int(noted), [])
    with warnings.catch_warnings():  # attention() does not speak of it
        warnings.simplefilter("error")
        choose_config(Problem.parse(TUNED), H200)


# --- on every device -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "device"),
    [
        # What a d is rounded to depends on families, and these on an architecture alone.
        *itertools.product(range(8, 264, 8), (device_spec(80), H200)),
        *itertools.product(SUPPORTED_D_HEADS, KNOWN_DEVICES),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_d_has_a_kernel_on_every_device(d: int, device: DeviceSpec) -> None:
    for lengths in ((0, 0), (1, 1), (1, 8192), (100, 20), (8192, 8192), (8192, 1)):
        config = choose_config(problem(*lengths, d), device)
        assert is_legal(config, device)
        assert config.d_head == compiled_d_head(d) in SUPPORTED_D_HEADS
        assert config.dtype is DType.BF16


@pytest.mark.parametrize("arch", full_except([80, 86, 89, 90, 100, 120], 86, 90))
@pytest.mark.parametrize("d_head", SUPPORTED_D_HEADS)
def test_every_architecture_mask_and_dtype_gets_what_its_sms_hold(arch: int, d_head: int) -> None:
    device = device_spec(arch)
    masks = ("none", "causal", "window")
    for dtype, mask, packed in itertools.product(DType, masks, (False, True)):
        semantics = Semantics(mask, packed=packed, uneven=packed)
        wanted = Problem(4, 2048, 2048, 16, 4, d_head, dtype, semantics)
        answer = choose(wanted, device)
        assert is_legal(answer.config, device)
        assert answer.config.smem_bytes() <= device.max_smem_per_block
        assert answer.config.num_ctas_per_sm(device.max_smem_per_sm) >= 1
        assert (answer.config.dtype, answer.config.d_head) == (dtype, d_head)
        assert answer.config == choose_config(wanted, device)


@pytest.mark.parametrize("d", [264, 384, 512])
def test_a_wide_d_has_kernels_for_one_architecture(d: int) -> None:
    for dtype, mask in itertools.product(DType, ("none", "causal", "window+softcap+packed")):
        wanted = replace(problem(300, 2000, d), dtype=dtype, semantics=Semantics.parse(mask))
        config = choose_config(wanted, H200)
        assert is_legal(config, H200)
        assert (config.dtype, config.d_head, config.n_threads) == (dtype, 512, 384)
    with pytest.raises(ArgumentError, match=r"d_head 512 is offered for A100 .* those for sm_90"):
        choose_config(problem(128, 128, d), A100)
    canonical = choose_config(replace(problem(300, 2000, d), bits="canonical"), H200)
    assert (canonical.d_head, canonical.B_c, version_of(canonical)) == (512, 32, 1)


@pytest.mark.parametrize("d", [520, 1024])
def test_a_d_beyond_all_kernels(d: int) -> None:
    with pytest.raises(ArgumentError, match=f"^q: d={d}: kernels exist for multiples of 8 from 8"):
        choose_config(problem(128, 128, d), A100)
    with pytest.raises(ArgumentError, match=f"^problem: d={d}: kernels exist"):
        choose(problem(128, 128, d), A100)


def test_a_device_with_less_shared_memory_gets_smaller_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = replace(A100, max_smem_per_block=65536, max_smem_per_sm=66560)
    monkeypatch.setattr(choice, "_warn", lambda *_: None)
    assert choose_config(problem(512, 512, 192), A100).smem_bytes() > 65536
    config = choose_config(problem(512, 512, 192), small)
    assert (config.B_r, config.B_c) == (64, 32)
    with pytest.raises(ArgumentError, match="device: A100 allows a CTA 1024 bytes"):
        choose_config(problem(512, 512, 192), replace(A100, max_smem_per_block=1024))


# --- without a table -----------------------------------------------------------------------------


def test_large_tiles_only_where_there_are_enough_of_them() -> None:
    assert choose_config(problem(4096, 4096), A100).B_r == 128
    assert choose_config(problem(128, 256, heads=2), A100).B_r == 64


def test_few_keys_take_a_short_tile() -> None:
    assert [choose_config(problem(512, keys), A100).B_c for keys in (1, 32)] == [32, 32]


def test_sizes_share_few_kernels() -> None:
    """Each is compiled on its first use: what is little faster on paper is not worth that."""
    sizes = itertools.product((1, 2, 16), (64, 200, 512, 1536, 3000, 8192, 10000))
    chosen = {
        choose(Problem(b, s, s, 16, 16, 128, DType.FP16), H200, table=EMPTY).config
        for b, s in sizes
    }
    assert len(chosen) <= 5


def test_what_is_chosen_is_never_far_behind_on_paper() -> None:
    for seq in (64, 512, 3000, 8192):
        answer = choose(problem(seq, seq), H200, table=EMPTY)
        assert answer.evidence == "cost model"
        assert all(answer.ms <= 1.03 * other.ms for other in answer.runners_up)
        assert "no table for H200: chosen by the cost model" in answer.notes


# --- with a table --------------------------------------------------------------------------------


def ask(text: str, table: WinnersTable, device: DeviceSpec = H200) -> flashsmith.chooser.Choice:
    return choose(text, device, table=table)


def test_the_very_problem_gets_the_measured_winner_and_its_time() -> None:
    answer = ask(TUNED, tuned_table())
    assert (str(answer.config), answer.ms, answer.evidence) == (BIG, 5.7, "table")
    assert answer.why == "the fastest of 3 measured on H200, 2026-11-21, for these sizes"
    others = [(str(other.config), other.ms) for other in answer.runners_up]
    assert others == [(MIDDLE, 6.3), (SMALL, 6.7)]
    assert answer.tflops == pytest.approx(385.7, abs=0.1)
    assert answer.notes == ()


def test_heads_and_batch_count_as_one() -> None:
    answer = ask("b8 s4096 h32:8 d128 fp16", tuned_table())
    assert (answer.ms, answer.evidence) == (5.7, "table")


def test_a_measured_winner_counts_though_the_model_thinks_otherwise() -> None:
    table = WinnersTable()
    add(table, TUNED, {SMALL: 3.0, BIG: 5.7})
    assert str(ask(TUNED, table).config) == SMALL


def test_another_size_of_the_bucket_gets_times_carried_over() -> None:
    answer = ask("b16 s4224 h16 d128 fp16", tuned_table())
    assert (str(answer.config), answer.evidence) == (BIG, "table")
    assert answer.ms == pytest.approx(5.7 * (4224 / 4096) ** 2, rel=0.03)
    assert answer.why.endswith("for b16 s4096 h16 d128 fp16, of the same bucket")


def test_another_bucket_is_the_nearest() -> None:
    answer = ask("b16 s16384 h16 d128 fp16", tuned_table())
    assert (str(answer.config), answer.evidence) == (BIG, "nearest")
    assert answer.ms == pytest.approx(16 * 5.7, rel=0.03)
    assert "4.0 octaves away" in answer.why


def test_few_ctas_turn_the_ranking_round() -> None:
    """64 CTAs of 128 rows leave half of the SMs idle; twice as many of 64 rows do not."""
    answer = ask("b1 s512 h16 d128 fp16", tuned_table())
    assert (str(answer.config), answer.evidence) == (SMALL, "nearest")
    assert f"{BIG} won there, but would take" in answer.why
    assert any("128 CTAs for 132 SMs: 4 of them idle" in note for note in answer.notes)


def test_a_gain_within_the_models_error_changes_nothing() -> None:
    table = WinnersTable()
    add(table, TUNED, {BIG: 5.7, MIDDLE: 5.75})
    for seq in range(2048, 8192, 128):
        answer = ask(f"b16 s{seq} h16 d128 fp16", table)
        behind = answer.ms / min(other.ms for other in answer.runners_up) - 1
        assert (str(answer.config) == BIG) == (
            behind <= 0.02 or answer.runners_up[0].ms > answer.ms
        )


def test_a_dtype_twin_lends_its_config() -> None:
    answer = ask(TUNED.replace("fp16", "bf16"), tuned_table())
    assert str(answer.config) == BIG.replace("FP16", "BF16")
    assert answer.evidence == "related"
    assert "the nearest relative (measured with fp16)" in answer.why
    assert answer.ms == pytest.approx(5.7)


def test_another_mask_is_weighed_with_its_own_work() -> None:
    answer = ask(TUNED + " causal", tuned_table())
    assert answer.evidence == "related"
    assert answer.ms == pytest.approx(5.7 / 2, rel=0.1)


def test_a_sister_gpu_lends_its_ranking() -> None:
    answer = ask(TUNED, tuned_table(), device_spec("H100"))
    assert (str(answer.config), answer.evidence) == (BIG, "related")
    half = replace(H200, name="H200 MIG 3g", sm_count=66)
    assert ask(TUNED, tuned_table(), half).ms == pytest.approx(2 * 5.7, rel=0.02)


def test_another_architecture_gets_the_cost_model() -> None:
    answer = ask(TUNED, tuned_table(), A100)
    assert answer.evidence == "cost model"
    assert "no table for A100: chosen by the cost model" in answer.notes
    heads = ask("b16 s4096 h16 d64 fp16", tuned_table())
    assert "no measured kernels of d_head 64 for H200: chosen by the cost model" in heads.notes


@pytest.mark.parametrize(
    ("config", "family", "reason"),
    [
        (BIG.replace("128, 128, 64", "128, 96, 64"), "mma_sync", "B_r must be"),
        (BIG + "+telepathy", "mma_sync", "unknown feature 'telepathy'"),
        (BIG, "wgmma", "it is of the family mma_sync, not wgmma"),
        (BIG.replace("FP16, 128", "FP16, 64"), "mma_sync", "it is for d_head 64"),
    ],
)
def test_an_unusable_config_is_passed_over_with_a_note(
    config: str, family: str, reason: str
) -> None:
    table = WinnersTable()
    figures = [ranked(config, 1.0, family=family), ranked(SMALL, 6.7)]
    table.add(Problem.parse(TUNED), H200, figures)
    answer = ask(TUNED, table)
    assert str(answer.config) == SMALL
    (note,) = answer.notes
    assert note.startswith(f"{config} of the entry H200 sm_90")
    assert reason in note


def test_an_entry_without_a_usable_config_gives_way_to_the_next() -> None:
    table = tuned_table()
    add(table, "b16 s8192 h16 d128 fp16", {BIG + "+telepathy": 20.0})
    answer = ask("b16 s8192 h16 d128 fp16", table)
    assert (str(answer.config), answer.evidence) == (BIG, "nearest")


def test_what_does_not_fit_on_the_device_is_passed_over() -> None:
    narrow = replace(H200, max_smem_per_block=51200)
    answer = ask(TUNED, tuned_table(), narrow)
    assert str(answer.config) == MIDDLE
    assert "65536 of 51200 bytes" in answer.notes[0]


# --- which family ---------------------------------------------------------------------------------


def test_without_a_table_hopper_takes_the_wgmma_family() -> None:
    for d in (32, 64, 120, 192):
        answer = choose(problem(4096, 4096, d), H200, table=EMPTY)
        assert answer.family == "wgmma"
        assert set(answer.passed_over) == {"mma_sync"}
    answer = choose(problem(4096, 4096), A100, table=EMPTY)
    assert answer.passed_over == {
        "wgmma": "does not serve this: its instructions are of sm_90, and A100 is sm_80"
    }


def test_a_family_that_was_not_measured_gives_way_and_that_is_said() -> None:
    answer = ask(TUNED, tuned_table())
    assert (str(answer.config), answer.family) == (BIG, "mma_sync")
    said = answer.passed_over["wgmma"]
    assert said.startswith("not measured here, and measured configs take precedence")
    assert "3wg): tma" in said
    assert "should take 3.4" in said
    assert said in str(answer)
    assert answer.to_json()["passed_over"] == {"wgmma": said}


def test_of_one_family_where_the_tensors_ask_for_it(own_table: Path) -> None:
    wanted = Problem.parse(TUNED)
    record_winners(wanted, H200, [ranked(WGMMA, 3.4, family="wgmma"), ranked(SMALL, 6.0)])
    forget_choices()
    assert str(choose_config(wanted, H200)) == WGMMA
    assert str(choose_config(wanted, H200, "mma_sync")) == SMALL
    unmeasured = replace(wanted, d=192, d_v=192)
    assert choose_config(unmeasured, H200).FAMILY == "wgmma"
    assert choose_config(unmeasured, H200, "mma_sync").FAMILY == "mma_sync"


def test_the_table_says_which_family() -> None:
    table = tuned_table()
    table.add(Problem.parse(TUNED), H200, [ranked(WGMMA, 3.4, family="wgmma")])
    answer = ask(TUNED, table)
    assert (str(answer.config), answer.ms) == (WGMMA, 3.4)
    assert answer.passed_over == {"mma_sync": f"its best, {BIG}, takes 5.7 ms (+68%)"}
    few = ask("b1 s512 h16 d128 fp16", table)
    assert few.family == "wgmma"
    table.add(Problem.parse(TUNED), H200, [ranked(WGMMA, 9.0, family="wgmma")])
    assert ask(TUNED, table).family == "mma_sync"


# --- few tiles -----------------------------------------------------------------------------------


def test_few_tiles_of_many_keys_are_computed_in_parts_by_shapes_alone() -> None:
    few = ask("b1 s128:8192 h32 d128 fp16", tuned_table())
    assert few.config.split_keys > 0
    assert "tiles would leave rows or SMs idle" in few.why
    whole = replace(few.config, split_keys=0)
    assert whole in [one.config for one in few.runners_up]
    # A second launch is worth nothing to some microseconds of work, nor where tiles are many.
    for text in ("b1 s128:256 h32 d128 fp16", "b8 s512:8192 h32:8 d128 fp16", TUNED):
        assert ask(text, tuned_table()).config.split_keys == 0


def test_few_queries_of_a_group_are_rows_of_one_tile_by_shapes_alone() -> None:
    table = tuned_table()
    table.add(Problem.parse(TUNED), H200, [ranked(WGMMA, 3.4, family="wgmma")])
    few = ask("b8 s16:4096 h32:8 d128 fp16", table)
    assert few.config.pack_gqa
    assert "tiles would leave rows or SMs idle" in few.why
    # Heads that share no keys, tiles that many queries fill, and groups that no box has.
    for text in ("b8 s16:4096 h32 d128 fp16", "b8 s512:4096 h32:8 d128 fp16"):
        assert not ask(text, table).config.pack_gqa
    assert not any(
        one.config.pack_gqa
        for one in ask("b8 s16:4096 h48:8 d128 fp16", table).runners_up
        if one.family == "wgmma"
    )
    alone = ask("b8 s16:4096 h48:8 d128 fp16", tuned_table())
    assert alone.family == "mma_sync"
    assert alone.config.pack_gqa


def test_a_measured_config_that_packs_groups_serves_others_without() -> None:
    packed = f"{WGMMA}+pack_gqa"
    text, table = "b8 s16:4096 h32:8 d128 fp16", tuned_table()
    table.add(Problem.parse(text), H200, [ranked(packed, 0.05, family="wgmma")])
    assert str(ask(text, table).config) == packed
    for heads in ("h32", "h32:1"):
        other = ask(text.replace("h32:8", heads), table)
        assert str(other.config) == (WGMMA if heads == "h32" else packed)
        # Of the same sizes, but not the same tiles.
        assert (other.ms > 0.05) == (heads == "h32")


def test_what_was_measured_for_the_very_sizes_stands() -> None:
    text, table = "b1 s128:8192 h32:8 d128 fp16", tuned_table()
    table.add(Problem.parse(text), H200, [ranked(WGMMA, 0.05, family="wgmma")])
    assert str(ask(text, table).config) == WGMMA


# --- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b1 s1:65536 h32:8 d128 bf16", "seq_q = 1 of 4 heads fills"),
        ("b1 s128 h2 d64 fp16", "of them idle"),
        ("b8 s4096 h16 d104 fp16", "d = 104 runs on d_head 128: 19% of both GEMMs"),
        ("b8 s1024 h16 d64 fp16 window", "the time is for a window of 512 keys"),
        ("b8 s1024 h16 d64 fp16 packed", "as long as the longest"),
        ("b0 s64 h1 d64 fp16", "nothing is launched"),
        ("b1 s34048 h1 d128 fp16", "of the slots stay empty"),
    ],
)
def test_what_is_bad_about_a_problem_is_said(text: str, words: str) -> None:
    assert any(words in note for note in ask(text, tuned_table()).notes)


def test_a_problem_that_suits_the_kernels_gets_no_lecture() -> None:
    assert ask("b16 s8192 h16 d128 fp16 causal", tuned_table()).notes == ()


def test_str_and_json_say_the_same() -> None:
    answer = ask("b1 s512 h16 d128 fp16", tuned_table())
    text, facts = str(answer), json.loads(json.dumps(answer.to_json()))
    for value in (facts["problem"], facts["config"], facts["why"], *facts["notes"]):
        assert value in text
    assert [one["config"] for one in facts["runners_up"]] == [BIG, MIDDLE]
    assert facts["evidence"] == "nearest"
    assert facts["tflops"] == pytest.approx(answer.tflops)


def test_devices_by_name_arch_and_default() -> None:
    assert choose(TUNED, "h200").device == H200
    assert choose(TUNED, 86).device.name == "A10"
    assert flashsmith.choose is choose
    with pytest.raises(ArgumentError, match="device='abacus'"):
        choose(TUNED, "abacus")
    with pytest.raises(ArgumentError, match="problem='b1'"):
        choose("b1")


def test_one_that_was_not_among_the_fastest_may_fit_better(own_table: Path) -> None:
    """192 rows a tile are 192 tiles for 132 SMs here, and 128 rows 256."""
    won = ranked(WGMMA, 0.235, family="wgmma")
    record_winners(Problem.parse("b16 s1024 h16 d128 fp16"), H200, [won])
    forget_choices()
    answer = choose("b1 s1024 h32 d128 fp16", H200)
    assert (answer.config.FAMILY, answer.config.B_r, answer.evidence) == ("wgmma", 128, "nearest")
    assert f"{WGMMA} won there, but would take" in answer.why
    # Here it promises too little for that.
    assert str(choose("b16 s1100 h16 d128 fp16", H200).config) == WGMMA


# --- attention()'s chooser -----------------------------------------------------------------------


def test_asked_again_nothing_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose_config(Problem.parse(TUNED), H200)
    monkeypatch.setattr(choice, "gather", None)
    assert choose_config(Problem.parse(TUNED), H200) is first


def test_the_users_table_decides(
    own_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is shipped of the other family would stand beside what the user measured of this one.
    monkeypatch.setattr(storage, "SHIPPED_FOLDER", tmp_path / "nothing")
    record_winners(Problem.parse(TUNED), H200, [ranked(SMALL, 5.0)])
    forget_choices()
    assert str(choose_config(Problem.parse(TUNED), H200)) == SMALL
    record_winners(Problem.parse(TUNED), H200, [ranked(MIDDLE, 4.0)])
    assert str(choose_config(Problem.parse(TUNED), H200)) == SMALL
    forget_choices()
    assert str(choose_config(Problem.parse(TUNED), H200)) == MIDDLE


def test_the_fallback_is_said_once_and_for_real_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_said", set())
    unknown = replace(A100, name="NVIDIA Abacus")
    with pytest.warns(UserWarning, match="no table for Abacus: chosen by the cost model"):
        choose_config(problem(512, 512), unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_config(problem(513, 512), unknown)
        choose_config(problem(512, 512), A100)


def test_a_damaged_table_is_warned_of_and_does_not_stop_anything(
    own_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_said", set())
    own_table.parent.mkdir()
    own_table.write_text("{")
    forget_choices()
    with pytest.warns(UserWarning, match="no readable table of winners"):
        choose_config(problem(512, 512), A100)
    assert any(str(own_table) in note for note in choose(problem(512, 512), A100).notes)


def test_what_is_built_ahead_is_what_is_chosen() -> None:
    wanted = Problem(2, 100, 100, 4, 4, 64, DType.FP16, Semantics("causal"))
    (library,) = build_for(wanted)
    config = choose_config(wanted, A100)
    assert config in library
    assert library.manifest.semantics == Semantics("causal", uneven=True)
    found = find_library(config, semantics=library.manifest.semantics)
    assert found is not None
    assert build_for(wanted)[0].path == found.path
