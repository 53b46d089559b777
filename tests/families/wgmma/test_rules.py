"""Legality of wgmma configs: every rule alone, its words, and what shared memory decides."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hopper_samples import SHIPPED, any_config, family_config, is_number, lowest
from hypothesis import given
from hypothesis import strategies as st

from flashsmith.families import (
    HOPPER_KNOB_VALUES,
    HOPPER_RULES,
    WgmmaForwardKernelConfig,
    broken_rules,
    device_spec,
    get_hopper_configs,
    is_legal,
    legal_completions,
    parse_kernel_name_into_config,
    rule_bitmask,
)
from flashsmith.families.wgmma.config import BARRIER_PAGE

H200 = device_spec("H200")
TWO, THREE = "regs_24_240", "regs_32_160"

# Each line: a config, and all the rules it breaks on an H200.
BROKEN = [
    (f"(FP16, 48, 128, 128, 2wg): tma+{TWO}", {"d_head_supported"}),
    (f"(FP16, 112, 128, 128, 2wg): tma+{TWO}", {"d_head_supported"}),
    ("(FP16, 64, 320, 32, 5wg): tma+regs_24_80", {"n_warpgroups_supported"}),
    (f"(FP16, 128, 192, 128, 2wg): tma+{TWO}", {"B_r_is_warpgroups"}),
    (f"(FP16, 128, 128, 16, 2wg): tma+{TWO}", {"B_c_supported"}),
    (f"(FP16, 128, 128, 120, 2wg): tma+{TWO}", {"B_c_supported"}),
    (f"(FP16, 64, 128, 272, 2wg): tma+{TWO}", {"B_c_supported"}),
    (f"(FP16, 64, 64, 32, 1wg): tma+stages_9+{TWO}", {"kv_stages_supported"}),
    (f"(FP16, 64, 64, 32, 1wg): tma+q_buffers_3+{TWO}", {"q_buffers_supported"}),
    (f"(FP16, 128, 128, 176, 2wg): tma+q_buffers_2+{TWO}", {"smem_within_limit"}),
    (f"(FP16, 256, 128, 96, 2wg): tma+{TWO}", {"smem_within_limit"}),
    ("(FP16, 64, 64, 64, 1wg): tma+regs_16_240", {"producer_registers_supported"}),
    ("(FP16, 64, 64, 64, 1wg): tma+regs_28_240", {"producer_registers_supported"}),
    (
        "(FP16, 64, 64, 64, 1wg): tma+regs_24_248",
        {"consumer_registers_supported"},
    ),
    ("(FP16, 128, 192, 128, 3wg): tma+regs_32_168", {"registers_within_file"}),
    ("(FP16, 128, 128, 128, 2wg): tma+regs_32_240", {"registers_within_file"}),
    ("(FP16, 256, 128, 80, 2wg): tma+regs_24_184", {"tiles_fit_registers"}),
    # O 64, S 64 and P 32, with 24 for the rest: 184 of 160.
    (f"(FP16, 128, 192, 128, 3wg): tma+{THREE}+overlap", {"tiles_fit_registers"}),
    (f"(FP16, 64, 192, 208, 3wg): tma+{THREE}", {"product_fits_registers"}),
    ("(FP16, 64, 64, 128, 1wg): tma+stages_1+regs_24_136+ctas_3", {"product_fits_registers"}),
    (f"(FP16, 64, 64, 64, 1wg): tma+{TWO}+pingpong_exp", {"pingpong_needs_two"}),
    (f"(FP16, 128, 128, 64, 2wg): tma+{TWO}+cluster_4", {"cluster_size_supported"}),
    (f"(FP16, 128, 128, 64, 2wg): tma+{TWO}+rescale_9", {"rescale_threshold_supported"}),
    (
        f"(FP16, 128, 128, 64, 2wg): tma+{TWO}+longest_first+section_3",
        {"section_mib_supported"},
    ),
    (f"(FP16, 128, 128, 64, 2wg): tma+{TWO}+section_8", {"section_needs_longest_first"}),
    (
        "(FP16, 64, 64, 32, 1wg): tma+regs_24_80+ctas_5",
        {"ctas_per_sm_supported", "registers_within_file", "product_fits_registers"},
    ),
    ("(FP16, 128, 64, 128, 1wg): tma+regs_24_160+ctas_2", {"ctas_fit_shared_memory"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+exp2_fma_51", {"exp2_fma_share_supported"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+early_exp", {"early_exp_needs_overlap"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+stale_max", {"stale_max_needs_rescale"}),
    (
        f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+rescale_8+exp2_fma_10+stale_max",
        {"stale_max_needs_sfu"},
    ),
    (
        f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+cluster_2+rescale_8+stale_max",
        {"stale_max_needs_no_cluster"},
    ),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+separate_O+direct_O", {"direct_O_is_not_separate"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+short_24", {"short_block_supported"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+short_64", {"short_block_within_block"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+register_Q_2", {"register_Q_supported"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+register_Q_8", {"register_Q_divides_steps"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+split_3", {"split_keys_supported"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+cluster_2+split_2", {"split_keys_needs_no_cluster"}),
    (f"(FP16, 64, 128, 128, 2wg): tma+{TWO}+dynamic+canonical_2", {"canonical_supported"}),
    (f"(FP16, 64, 128, 64, 2wg): tma+{TWO}+dynamic+canonical_1", {"canonical_tile"}),
    (
        f"(FP16, 64, 128, 128, 2wg): tma+{TWO}+dynamic+rescale_8+canonical_1",
        {"canonical_rescale_threshold"},
    ),
    (
        f"(FP16, 64, 128, 128, 2wg): tma+{TWO}+dynamic+exp2_fma_10+canonical_1",
        {"canonical_exp2_fma_share"},
    ),
    (
        f"(FP16, 64, 128, 128, 2wg): tma+{TWO}+dynamic+short_32+canonical_1",
        {"canonical_short_block"},
    ),
    (
        f"(FP16, 64, 128, 128, 2wg): tma+{TWO}+dynamic+split_2+canonical_1",
        {"canonical_split_keys"},
    ),
    (f"(FP16, 64, 128, 128, 2wg): tma+{TWO}+canonical_1", {"canonical_schedule"}),
    (
        "(FP16, 512, 128, 32, 2wg): tma+stages_1+regs_24_168+direct_O",
        {"n_warpgroups_with_partners", "registers_within_file", "product_fits_registers"},
    ),
    (f"(FP16, 512, 64, 32, 1wg): tma+stages_1+{TWO}", {"direct_O_with_partners"}),
    (
        f"(FP16, 512, 64, 32, 1wg): tma+stages_1+{TWO}+direct_O+short_16",
        {"short_block_with_partners"},
    ),
    (
        f"(FP16, 512, 64, 64, 1wg): tma+stages_1+{TWO}+dynamic+direct_O+canonical_1",
        {"canonical_tile"},
    ),
    (f"(FP16, 192:96, 128, 64, 2wg): tma+{TWO}", {"d_v_supported"}),
    (f"(FP16, 64:128, 128, 64, 2wg): tma+{TWO}", {"wide_O_needs_a_place"}),
    (f"(FP16, 128:64, 128, 64, 2wg): tma+{TWO}+dynamic+canonical_1", {"canonical_tile"}),
]


@pytest.mark.parametrize(("text", "names"), BROKEN)
def test_a_config_breaks_just_these_rules(text: str, names: set[str]) -> None:
    cfg = parse_kernel_name_into_config(text)
    assert {rule.name for rule in broken_rules(cfg, H200)} == names
    assert not is_legal(cfg, H200)
    bits = {bit for bit, rule in enumerate(HOPPER_RULES) if rule.name in names}
    assert rule_bitmask(cfg, H200) == sum(1 << bit for bit in bits)


def test_every_device_but_hoppers_is_refused() -> None:
    for device, found in (("A100", 80), ("RTX 4090", 89), ("B200", 100), ("RTX 5090", 120)):
        messages = {rule.name: rule.message for rule in broken_rules(SHIPPED, device_spec(device))}
        assert "needs a GPU of compute capability 9.0" in messages["arch_is_hopper"]
        assert f"(here {device} is sm_{found})" in messages["arch_is_hopper"]
    assert is_legal(SHIPPED, device_spec("H100"))
    assert is_legal(SHIPPED), "without a device, its family's first"


def test_every_rule_is_broken_above() -> None:
    assert set().union(*(names for _, names in BROKEN)) | {"arch_is_hopper"} >= {
        rule.name for rule in HOPPER_RULES
    }


def test_rules_have_different_names_and_reasons() -> None:
    names, reasons = ({getattr(rule, what) for rule in HOPPER_RULES} for what in ("name", "reason"))
    assert len(names) == len(reasons) == len(HOPPER_RULES)


@pytest.mark.parametrize("cfg", get_hopper_configs(), ids=str)
def test_shipped_configs_are_legal(cfg: WgmmaForwardKernelConfig) -> None:
    assert not broken_rules(cfg, H200)


class _Watched(WgmmaForwardKernelConfig):
    """A config that notes which of its knobs are read."""

    knobs = frozenset(knob.name for knob in fields(WgmmaForwardKernelConfig))

    def __getattribute__(self, name: str) -> object:
        if name in _Watched.knobs:
            object.__getattribute__(self, "__dict__").setdefault("read", set()).add(name)
        return object.__getattribute__(self, name)


@given(any_config)
def test_a_predicate_reads_only_the_knobs_it_names(cfg: WgmmaForwardKernelConfig) -> None:
    for rule in HOPPER_RULES:
        watched = _Watched(*cfg.to_ints())
        watched.__dict__["read"] = set()
        rule.predicate(watched, H200)
        assert watched.__dict__["read"] <= set(rule.knobs), rule.name


@given(st.one_of(any_config, family_config))
def test_the_three_answers_agree(cfg: WgmmaForwardKernelConfig) -> None:
    names = [rule.name for rule in broken_rules(cfg, H200)]
    mask = rule_bitmask(cfg, H200)
    assert names == [rule.name for bit, rule in enumerate(HOPPER_RULES) if mask >> bit & 1]
    assert is_legal(cfg, H200) == (not names)


# --- what shared memory decides ------------------------------------------------------------------


def sized(
    d_head: int, B_c: int, q_buffers: int = 1, separate_O: bool = False
) -> WgmmaForwardKernelConfig:
    """128 rows a CTA, two stages."""
    return replace(
        SHIPPED,
        d_head=d_head,
        B_r=128,
        B_c=B_c,
        n_warpgroups=2,
        q_buffers=q_buffers,
        producer_registers=24,
        consumer_registers=240,
        separate_O=separate_O,
    )


@pytest.mark.parametrize(
    ("cfg", "tiles", "fits"),
    [
        (sized(128, 176), 212_992, True),
        (sized(128, 176, 2), 245_760, False),
        (sized(128, 176, 1, True), 245_760, False),
        (sized(128, 160, 2), 229_376, True),
        (sized(128, 160, 1, True), 229_376, True),
        (sized(128, 160, 2, True), 262_144, False),
        (sized(128, 144, 2, True), 245_760, False),
        (sized(128, 128, 2, True), 229_376, True),
        (sized(256, 80), 229_376, True),
        (sized(256, 80, 2), 294_912, False),
        (sized(256, 80, 1, True), 294_912, False),
        (sized(256, 96), 262_144, False),
    ],
    ids=str,
)
def test_a_second_q_and_an_o_of_its_own_cost_keys(
    cfg: WgmmaForwardKernelConfig, tiles: int, fits: bool
) -> None:
    """The H200 gives a CTA 232,448 bytes: two stages of 176 keys leave no room beside one Q, of 160
    for one more tile, of 128 for two; at 256 columns 80 keys fill it."""
    assert H200.max_smem_per_block == 232_448
    assert cfg.tile_bytes() == tiles
    assert cfg.smem_bytes() == tiles + BARRIER_PAGE
    broken = [rule for rule in broken_rules(cfg, H200) if rule.name == "smem_within_limit"]
    assert (not broken) == fits
    if broken:
        assert f"{tiles + BARRIER_PAGE} of 232448 bytes on H200" in broken[0].message
        for figure in (f"B_c={cfg.B_c}", f"q_buffers={cfg.q_buffers}", f"d_head={cfg.d_head}"):
            assert figure in broken[0].message


@pytest.mark.parametrize(
    ("q_buffers", "separate_O", "most"),
    [(1, False, 192), (2, False, 160), (1, True, 160), (2, True, 128)],
)
def test_how_many_keys_two_stages_hold_beside(q_buffers: int, separate_O: bool, most: int) -> None:
    legal = [
        B_c
        for B_c in HOPPER_KNOB_VALUES["B_c"]
        if is_legal(sized(128, B_c, q_buffers, separate_O), H200)  # type: ignore[arg-type]
    ]
    assert max(legal) == most  # type: ignore[type-var]


# --- residency -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "registers", "ctas"),
    [
        # 512 threads with 128 registers: all of the register file.
        (str(SHIPPED), 128, 1),
        (str(SHIPPED), 136, 0),
        ("(FP16, 128, 128, 128, 2wg): tma+regs_24_240", 168, 1),
        ("(FP16, 128, 128, 128, 2wg): tma+regs_24_240", 176, 0),
        # 64 x 64 and two stages of 64 keys: 41,984 bytes, and 1,024 of the system's.
        ("(FP16, 64, 64, 64, 1wg): tma+stages_2+regs_24_96", 80, 3),
        ("(FP16, 64, 64, 64, 1wg): tma+stages_2+regs_24_96", 64, 4),
        ("(FP16, 64, 64, 64, 1wg): tma+stages_2+regs_24_96", None, 5),
    ],
)
def test_ctas_per_sm(text: str, registers: int | None, ctas: int) -> None:
    cfg = parse_kernel_name_into_config(text)
    assert cfg.num_ctas_per_sm(H200.max_smem_per_sm, registers) == ctas


def test_a_cta_has_a_warpgroup_more_than_it_computes_with() -> None:
    assert (SHIPPED.n_warpgroups, SHIPPED.n_threads, SHIPPED.n_warps) == (3, 512, 16)
    assert SHIPPED.rows_per_warp == 16


# --- the space -----------------------------------------------------------------------------------


@pytest.mark.parametrize("knob", [knob for knob in HOPPER_KNOB_VALUES if is_number(knob)])
def test_knob_values_leave_no_legal_value_out(knob: str) -> None:
    known = [value for value in HOPPER_KNOB_VALUES[knob] if isinstance(value, int)]
    beside = {value + step for value in (known[0], known[-1]) for step in (-16, -8, -1, 1, 8, 16)}
    tried = sorted({lowest(knob), *known, *(value for value in beside if value >= lowest(knob))})
    legal = [
        value
        for value in tried
        if next(legal_completions(replace(SHIPPED, **{knob: value}), (knob,), H200), None)  # type: ignore[arg-type]
    ]
    assert legal == known
