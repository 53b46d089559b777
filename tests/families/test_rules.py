"""Legality: every rule alone, its words, and the nearest legal configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
from config_samples import LADDER_TOP, any_config, family_config
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsmith.errors import ArgumentError, IllegalConfigError
from flashsmith.families import (
    DEFAULT_DEVICE,
    KNOB_VALUES,
    KNOWN_DEVICES,
    RULES,
    SUPPORTED_D_HEADS,
    DType,
    Family,
    FlashForwardKernelConfig,
    broken_rules,
    check_legal,
    compiled_d_head,
    device_spec,
    families,
    family_named,
    is_legal,
    legal_completions,
    nearest_legal,
    parse_kernel_name_into_config,
    rule_bitmask,
)
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.operations import OPERATIONS

H200 = device_spec("H200")
SMALL_DEVICE = replace(DEFAULT_DEVICE, name="a small GPU", max_smem_per_block=65536)

AHEAD = "async+eager+load_2_2_2_tiles"

# Each line: a config, and all the rules it breaks.
BROKEN = [
    ("(FP16, 16, 64, 64, 4): load_0_0_0_tiles", {"d_head_supported"}),
    ("(FP16, 160, 64, 64, 4): load_0_0_0_tiles", {"d_head_supported"}),
    ("(FP16, 84, 64, 64, 4): load_0_0_0_tiles", {"d_head_supported", "d_head_in_mma_steps"}),
    ("(FP16, 128, 320, 64, 4): load_0_0_0_tiles", {"B_r_supported"}),
    ("(FP16, 128, 64, 16, 4): load_0_0_0_tiles", {"B_c_supported"}),
    ("(FP16, 128, 64, 24, 4): load_0_0_0_tiles", {"B_c_supported", "B_c_in_mma_steps"}),
    ("(FP16, 128, 64, 64, 1): load_0_0_0_tiles", {"n_warps_supported"}),
    ("(FP16, 128, 64, 64, 8): load_0_0_0_tiles", {"warp_rows_in_mma_steps"}),
    (
        "(FP16, 128, 128, 64, 33): load_0_0_0_tiles",
        {"n_warps_supported", "warp_rows_in_mma_steps", "threads_within_limit"},
    ),
    ("(FP16, 128, 64, 64, 4): load_0_1_0_tiles", {"K_load_count"}),
    ("(FP16, 128, 64, 64, 4): load_0_6_0_tiles", {"K_load_count"}),
    ("(FP16, 64, 64, 64, 4): load_16_16_0_tiles", {"Q_load_count", "K_load_count"}),
    ("(FP16, 128, 64, 32, 4): load_0_0_8_tiles", {"V_load_count"}),
    ("(FP16, 128, 64, 64, 4): load_0_16_0_tiles+buffer", {"K_buffered_load_count"}),
    (
        "(FP16, 128, 64, 64, 4): load_16_16_0_tiles+buffer",
        {"Q_buffered_load_count", "K_buffered_load_count"},
    ),
    ("(FP16, 128, 64, 32, 4): load_0_0_4_tiles+buffer", {"V_buffered_load_count"}),
    ("(FP16, 128, 64, 64, 4): load_2_4_0_tiles", {"Q_and_K_load_counts_agree"}),
    ("(FP16, 128, 64, 64, 4): load_2_0_0_tiles", {"Q_and_K_load_counts_agree"}),
    ("(FP16, 256, 64, 64, 4): load_0_32_0_tiles", {"K_load_count"}),
    ("(FP16, 96, 64, 64, 4): load_0_8_0_tiles", {"K_load_count"}),
    ("(FP16, 192, 128, 64, 4): load_0_0_0_tiles", {"O_fits_registers"}),
    ("(FP16, 256, 128, 32, 4): load_2_2_2_tiles", {"O_fits_registers"}),
    ("(FP16, 64, 64, 64, 4): async+eager+load_2_2_2_tiles+stages_1", {"kv_stages_supported"}),
    ("(FP16, 64, 64, 64, 4): async+load_2_2_2_tiles+stages_2", {"kv_stages_copy_ahead"}),
    ("(FP16, 64, 64, 64, 4): eager+load_2_2_2_tiles+stages_2", {"kv_stages_copy_ahead"}),
    (
        "(FP16, 64, 128, 64, 8): async+eager+load_2_2_2_tiles+stages_2+ping_pong",
        {"ping_pong_stages"},
    ),
    ("(FP16, 64, 128, 64, 8): async+eager+load_2_2_2_tiles+ping_pong", {"ping_pong_stages"}),
    (
        "(FP16, 64, 64, 64, 4): async+eager+load_2_2_2_tiles+stages_3+ping_pong",
        {"ping_pong_warps"},
    ),
    ("(FP16, 64, 64, 64, 4): load_2_2_2_tiles+ctas_1", {"min_ctas_supported"}),
    # 168 registers a thread, of which O takes 128; 127 the rule would not allow.
    ("(FP16, 128, 128, 32, 4): load_2_2_2_tiles+ctas_3", {"min_ctas_fit_registers"}),
    ("(FP16, 128, 128, 128, 8): load_2_2_2_tiles+ctas_2", {"min_ctas_fit_smem"}),
    ("(FP16, 64, 64, 64, 4): load_2_2_2_tiles+l2_24", {"l2_group_supported"}),
    ("(FP16, 64, 64, 64, 4): load_2_2_2_tiles+split_3", {"split_keys_supported"}),
    (f"(FP16, 128, 64, 64, 4): {AHEAD}+opt_softmax+canonical_2", {"canonical_supported"}),
    (f"(FP16, 128, 64, 32, 4): {AHEAD}+opt_softmax+canonical_1", {"canonical_tile"}),
    (f"(FP16, 128, 64, 64, 4): {AHEAD}+canonical_1", {"canonical_optimized_softmax"}),
    (
        f"(FP16, 128, 64, 64, 4): {AHEAD}+opt_softmax+lazy_rescale+canonical_1",
        {"canonical_lazy_rescale"},
    ),
    (
        f"(FP16, 64, 128, 64, 8): {AHEAD}+opt_softmax+stages_3+ping_pong+canonical_1",
        {"canonical_ping_pong"},
    ),
    (
        f"(FP16, 128, 64, 64, 4): {AHEAD}+opt_softmax+split_2+canonical_1",
        {"canonical_split_keys"},
    ),
    ("(FP16, 128:96, 64, 64, 4): load_2_2_2_tiles", {"d_v_supported"}),
    ("(FP16, 128:128, 64, 64, 4): load_2_2_2_tiles", {"d_v_supported"}),
    (f"(FP16, 128:64, 64, 32, 4): {AHEAD}+opt_softmax+canonical_1", {"canonical_tile"}),
]


@pytest.mark.parametrize(("text", "names"), BROKEN)
def test_a_config_breaks_just_these_rules(text: str, names: set[str]) -> None:
    cfg = parse_kernel_name_into_config(text)
    assert {rule.name for rule in broken_rules(cfg)} == names
    assert not is_legal(cfg)
    bits = {bit for bit, rule in enumerate(RULES) if rule.name in names}
    assert rule_bitmask(cfg) == sum(1 << bit for bit in bits)


def test_shared_memory_is_the_devices() -> None:
    cfg = parse_kernel_name_into_config("(FP16, 128, 128, 128, 4): load_0_0_0_tiles")
    assert all(is_legal(cfg, device) for device in KNOWN_DEVICES)
    (rule,) = broken_rules(cfg, SMALL_DEVICE)
    assert rule.name == "smem_within_limit"
    assert "98304 of 65536 bytes on a small GPU" in rule.message
    exact = replace(SMALL_DEVICE, max_smem_per_block=98304)
    assert is_legal(cfg, exact)
    assert not is_legal(cfg, replace(exact, max_smem_per_block=98303))


@pytest.mark.parametrize("d_head", SUPPORTED_D_HEADS)
def test_every_d_head_has_legal_configs(d_head: int) -> None:
    warps = 4 if d_head <= 128 else 8
    assert is_legal(FlashForwardKernelConfig(DType.FP16, d_head, 64, 64, 4))
    assert is_legal(FlashForwardKernelConfig(DType.FP16, d_head, 128, 32, warps))


@pytest.mark.parametrize(
    ("d", "d_head"),
    [
        (8, 32),
        (32, 32),
        (40, 64),
        (64, 64),
        (72, 72),
        (80, 80),
        (88, 96),
        (96, 96),
        (128, 128),
        (136, 192),
        (256, 256),
        (264, 512),
    ],
)
def test_the_smallest_d_head_that_holds_d(d: int, d_head: int) -> None:
    assert compiled_d_head(d) == d_head


@pytest.mark.parametrize("d", [0, -8, 4, 59, 111, 520, 1024])
def test_a_d_without_kernels_is_refused(d: int) -> None:
    with pytest.raises(ArgumentError, match=f"^d={d}: kernels exist for multiples of 8 from 8 to"):
        compiled_d_head(d)


def test_every_rule_is_broken_above() -> None:
    seen = set().union(*(names for _, names in BROKEN)) | {"smem_within_limit"}
    assert seen == {rule.name for rule in RULES}


def test_rules_have_different_names_and_reasons() -> None:
    assert len({rule.name for rule in RULES}) == len({rule.reason for rule in RULES}) == len(RULES)


def test_async_off_with_eager_is_legal() -> None:
    assert is_legal(parse_kernel_name_into_config("(FP16, 128, 64, 64, 4): eager+load_0_0_0_tiles"))


class _Watched(FlashForwardKernelConfig):
    """Notes which fields are read."""

    knobs = frozenset(knob.name for knob in fields(FlashForwardKernelConfig))

    def __getattribute__(self, name: str) -> object:
        if name in _Watched.knobs:
            object.__getattribute__(self, "__dict__").setdefault("read", set()).add(name)
        return object.__getattribute__(self, name)


@given(any_config)
def test_a_predicate_reads_only_the_knobs_it_names(cfg: FlashForwardKernelConfig) -> None:
    for rule in RULES:
        watched = _Watched(*cfg.to_ints())
        watched.__dict__["read"] = set()
        rule.predicate(watched, DEFAULT_DEVICE)
        assert watched.__dict__["read"] <= set(rule.knobs)


@given(st.one_of(any_config, family_config), st.sampled_from([*KNOWN_DEVICES, SMALL_DEVICE]))
def test_the_three_answers_agree(cfg: FlashForwardKernelConfig, device: object) -> None:
    names = [rule.name for rule in broken_rules(cfg, device)]  # type: ignore[arg-type]
    mask = rule_bitmask(cfg, device)  # type: ignore[arg-type]
    assert names == [rule.name for bit, rule in enumerate(RULES) if mask >> bit & 1]
    assert is_legal(cfg, device) == (not names)  # type: ignore[arg-type]


NUMBERS = [knob for knob, values in KNOB_VALUES.items() if type(values[0]) is int]


# How many tiles V loads ahead is settled last: all others are gone through for each of its values.
SLOW = ("V_mma_load_K_tiles",)


@pytest.mark.parametrize(
    "knob", [pytest.param(knob, marks=[pytest.mark.full] * (knob in SLOW)) for knob in NUMBERS]
)
def test_knob_values_leave_no_legal_value_out(knob: str) -> None:
    lowest = 0 if 0 in KNOB_VALUES[knob] else 1
    legal = [
        value
        for value in range(lowest, 513)
        if next(
            legal_completions(replace(LADDER_TOP, **{knob: value}), (knob,), DEFAULT_DEVICE), None
        )
    ]
    assert legal == list(KNOB_VALUES[knob])


# --- nearest legal -------------------------------------------------------------------------------

FIXED = ("dtype", "swizzled", "optimized_softmax", "lazy_rescale", "trim_masks")


def changed_knobs(cfg: FlashForwardKernelConfig, other: FlashForwardKernelConfig) -> list[str]:
    return [knob for knob in KNOB_VALUES if getattr(cfg, knob) != getattr(other, knob)]


@settings(max_examples=40, deadline=None)
@given(st.one_of(family_config, any_config))
def test_nearest_configs_are_legal_and_change_nothing_in_vain(
    cfg: FlashForwardKernelConfig,
) -> None:
    nearest = nearest_legal(cfg)
    assert nearest
    assert len(set(nearest)) == len(nearest) <= 3
    for found in nearest:
        assert is_legal(found)
        changed = changed_knobs(cfg, found)
        # The canonical order itself needs some values of these.
        assert cfg.canonical or not set(changed) & set(FIXED)
        if cfg.d_head in KNOB_VALUES["d_head"]:
            assert "d_head" not in changed
        for count in range(1, len(changed) + 1):
            for undone in combinations(changed, count):
                part = replace(found, **{knob: getattr(cfg, knob) for knob in undone})
                assert not is_legal(part)


def test_nearest_of_a_legal_config_is_itself() -> None:
    assert nearest_legal(LADDER_TOP) == [LADDER_TOP]


@pytest.mark.parametrize("text", [text for text, _ in BROKEN])
def test_no_legal_config_is_fewer_changes_away(text: str) -> None:
    cfg = parse_kernel_name_into_config(text)
    fewest = len(changed_knobs(cfg, nearest_legal(cfg)[0]))
    free = [knob for knob in KNOB_VALUES if knob not in FIXED]
    if cfg.d_head in KNOB_VALUES["d_head"]:
        free.remove("d_head")
    for knobs in combinations(free, fewest - 1):
        for values in product(*(KNOB_VALUES[knob] for knob in knobs)):
            assert not is_legal(replace(cfg, **dict(zip(knobs, values, strict=True))))


def test_nearest_takes_the_smallest_steps_first() -> None:
    cfg = parse_kernel_name_into_config("(FP16, 128, 64, 64, 8): load_4_4_16_tiles")
    assert [str(found) for found in nearest_legal(cfg)] == [
        "(FP16, 128, 64, 64, 4): load_4_4_8_tiles",
        "(FP16, 128, 64, 128, 4): load_4_4_16_tiles",
        "(FP16, 128, 128, 64, 8): load_4_4_8_tiles",
    ]
    assert len(nearest_legal(cfg, count=5)) == 5


def test_check_legal_lists_every_broken_rule_and_the_nearest_configs() -> None:
    check_legal(LADDER_TOP)
    cfg = parse_kernel_name_into_config("(FP16, 128, 64, 64, 8): load_2_4_0_tiles")
    with pytest.raises(IllegalConfigError) as caught:
        check_legal(cfg)
    message = str(caught.value)
    assert str(cfg) in message
    assert all(rule.message in message for rule in broken_rules(cfg))
    assert "(here B_r=64, n_warps=8) [warp_rows_in_mma_steps]" in message
    assert all(str(found) in message for found in nearest_legal(cfg))


def test_check_legal_reports_a_device_that_holds_no_config_at_all() -> None:
    tiny = replace(DEFAULT_DEVICE, name="a tiny GPU", max_smem_per_block=1024)
    with pytest.raises(IllegalConfigError, match="no change of its knobs makes it legal on a tiny"):
        check_legal(LADDER_TOP, tiny)


def other_config(config: Any, draw: Random, knobs: Sequence[str]) -> Any:
    """The config with other values of some knobs, or itself if it cannot have them."""
    values = config.family.legal_space.values
    try:
        return replace(config, **{knob: draw.choice(list(values[knob])) for knob in knobs})
    except ArgumentError:
        return config


def unnamed_knobs(family: Family) -> set[tuple[str, str]]:
    """Rules of a family whose answers change with a knob that they do not name, and these knobs."""
    space, draw, found = family.legal_space, Random(5), set()
    widths, knobs = space.values["d_head"], list(space.values)
    heads: list[HeadDims] = [HeadPair(576, 512)] if family.name.endswith("mla") else [*widths]
    configs = [it for d in heads for it in family.proof_configs(DType.BF16, d)]
    for _ in range(4000):
        start = draw.sample(knobs, draw.randint(0, min(3, len(knobs))))
        config = other_config(draw.choice(configs), draw, start)
        knob = draw.choice(knobs)
        changed = other_config(config, draw, [knob])
        found |= {
            (rule.name, knob)
            for rule in space.rules
            if knob not in rule.knobs
            and rule.predicate(config, H200) != rule.predicate(changed, H200)
        }
    return found


@pytest.mark.parametrize(
    "family", [it for name in OPERATIONS for it in families(name)], ids=lambda it: it.name
)
def test_a_rule_names_every_knob_that_it_reads(family: Family) -> None:
    """Only the rules that name a knob are evaluated again when nearest_legal() changes it."""
    assert unnamed_knobs(family) == set()


def test_the_nearest_configs_of_a_width_without_enough_warpgroups_are_legal() -> None:
    text = "(BF16, 96, 64, 64, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240"
    config = parse_kernel_name_into_config(f"{text}+wide_stores")
    assert not is_legal(config, H200)
    found = nearest_legal(config, H200)
    assert found
    assert all(is_legal(it, H200) for it in found)


def test_chunks_of_less_than_a_tile_of_rows_are_illegal() -> None:
    (config, *_) = family_named("mma_sync_decode").proof_configs(DType.BF16, 128)
    names = [rule.name for rule in broken_rules(replace(config, chunk_rows=7), H200)]
    assert names == ["chunk_rows_supported"]
