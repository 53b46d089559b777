"""The built-in sets and the KERNELS key."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from config_samples import LADDER_TOP

from flashsmith.errors import ConfigParseError, SelectionError
from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    WgmmaForwardKernelConfig,
    device_spec,
    get_autotuning_kernel_configs,
    get_cover_configs,
    get_kernel_configs,
    get_kernel_progression_configs,
    get_kernels_to_build,
    get_search_space_configs,
    is_legal,
    should_autotune_config,
)
from flashsmith.families.mma_sync.search_space import MOVES
from flashsmith.families.wgmma import search_space as hopper


def test_tune_has_forty_configs_per_dtype() -> None:
    configs = get_autotuning_kernel_configs()
    assert len(set(configs)) == len(configs) == 80
    assert Counter((cfg.B_r, cfg.B_c) for cfg in configs) == {
        (64, 32): 16,
        (64, 64): 32,
        (128, 32): 16,
        (128, 64): 16,
    }
    assert all(map(is_legal, configs))
    bf16 = get_autotuning_kernel_configs([DType.BF16])
    assert bf16 == [cfg for cfg in configs if cfg.dtype is DType.BF16]
    assert len(bf16) == 40


@pytest.mark.parametrize(
    ("changes", "worth_it"),
    [
        ({}, True),
        ({"async_copy": False}, False),
        ({"async_copy": False, "eager_load_blocks": False}, True),
        ({"Q_mma_load_K_tiles": 2}, False),  # B_r=64, B_c=64 keeps Q in registers
        ({"Q_mma_load_K_tiles": 2, "B_c": 32}, True),
        ({"Q_mma_load_K_tiles": 2, "K_mma_load_K_tiles": 0, "B_c": 32}, False),
        ({"B_c": 32}, False),
        ({"B_c": 128}, True),
        ({"Q_mma_load_K_tiles": 2, "B_c": 128}, True),
        ({"n_warps": 8}, False),
        ({"B_r": 128}, False),
        ({"B_r": 128, "Q_mma_load_K_tiles": 2}, True),
        ({"B_r": 128, "Q_mma_load_K_tiles": 2, "n_warps": 8}, True),
    ],
)
def test_the_autotune_filter(changes: dict[str, object], worth_it: bool) -> None:
    assert should_autotune_config(replace(LADDER_TOP, **changes)) == worth_it  # type: ignore[arg-type]


def test_prog_has_seven_steps() -> None:
    assert [str(cfg) for cfg in get_kernel_progression_configs()] == [
        f"(FP16, 128, 64, 64, 4): {step}"
        for step in (
            "async+load_0_0_0_tiles",
            "async+swizzled+load_0_0_0_tiles",
            "async+eager+swizzled+load_0_0_0_tiles",
            "async+eager+swizzled+load_2_2_2_tiles",
            "async+eager+swizzled+load_2_2_2_tiles+buffer",
            "async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax",
            "async+eager+swizzled+load_0_2_2_tiles+opt_softmax",
        )
    ]


def test_prog_all_is_each_step_at_eight_block_sizes() -> None:
    configs = get_kernel_progression_configs(all_block_sizes=True)
    assert len(set(configs)) == len(configs) == 56
    assert {(cfg.B_r, cfg.B_c, cfg.n_warps) for cfg in configs} == {
        (128, 128, 4),
        (128, 128, 8),
        (128, 64, 4),
        (128, 64, 8),
        (128, 32, 4),
        (128, 32, 8),
        (64, 64, 4),
        (64, 32, 4),
    }
    assert all(map(is_legal, configs))
    assert set(get_kernel_progression_configs()) <= set(configs)


def test_space_is_legal_where_there_is_room_and_leads_to_tune() -> None:
    configs = get_search_space_configs()
    assert len(set(configs)) == len(configs)
    assert all(is_legal(cfg, device_spec("H200")) for cfg in configs)
    # Not tune itself, whose kernels always rescale: a move away from one of the space's.
    (best_of_tune,) = get_kernel_configs(
        "(FP16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax"
    )
    assert any(best_of_tune in cfg.family.neighbours(cfg) for cfg in configs)
    assert {cfg.d_head for cfg in configs} == {64, 96, 128, 256}
    wide = get_search_space_configs([DType.BF16], [192])
    assert {(cfg.dtype, cfg.d_head) for cfg in wide} == {(DType.BF16, 192)}


@pytest.mark.parametrize("cfg", get_search_space_configs()[::97], ids=str)
def test_neighbours_are_one_move_away(cfg: FlashForwardKernelConfig) -> None:
    found = cfg.family.neighbours(cfg)
    assert len(set(found)) == len(found) > 3
    for other in found:
        assert other != cfg
        assert is_legal(other, device_spec("H200"))
        moved = {knob for knob in vars(cfg) if getattr(cfg, knob) != getattr(other, knob)}
        assert any(moved <= set(knobs) for knobs in MOVES)


HOPPER = [
    cfg
    for masked in (False, True)
    for cfg in hopper.get_hopper_space_configs(list(DType), list(hopper.SHAPES), masked)
]


def test_the_wgmma_space_is_legal_small_and_holds_the_shipped_set() -> None:
    assert all(is_legal(cfg, device_spec("H200")) and hopper.worth_searching(cfg) for cfg in HOPPER)
    assert set(get_kernel_configs("hopper")) <= set(HOPPER)
    per_problem = Counter((cfg.dtype, cfg.head_dims) for cfg in set(HOPPER))
    assert set(per_problem) == set(product(DType, hopper.SHAPES))
    assert max(per_problem.values()) <= 24


@pytest.mark.parametrize("cfg", HOPPER[::13], ids=str)
def test_wgmma_neighbours_are_one_move_away(cfg: WgmmaForwardKernelConfig) -> None:
    found = cfg.family.neighbours(cfg)
    assert 5 < len(set(found)) == len(found) <= 26
    for other in found:
        assert other != cfg
        assert is_legal(other, device_spec("H200"))
        moved = {knob for knob in vars(cfg) if getattr(cfg, knob) != getattr(other, knob)}
        assert moved == {"B_c"} or any(moved <= set(knobs) for knobs in hopper.MOVES)


def test_what_is_built_is_tune_sorted() -> None:
    assert get_kernels_to_build() == sorted(get_autotuning_kernel_configs())


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("prog", get_kernel_progression_configs()),
        ("prog-all", get_kernel_progression_configs(all_block_sizes=True)),
        ("tune", get_autotuning_kernel_configs()),
        ("cover", get_cover_configs()),
        ("all", get_kernels_to_build()),
        (" tune ", get_autotuning_kernel_configs()),
        (str(LADDER_TOP), [LADDER_TOP]),
        (
            f"{replace(LADDER_TOP, B_c=32)}; {LADDER_TOP};{LADDER_TOP};",
            [replace(LADDER_TOP, B_c=32), LADDER_TOP],
        ),
    ],
)
def test_a_key_selects(key: str, expected: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_kernel_configs(key) == expected
    monkeypatch.setenv("KERNELS", key)
    assert get_kernel_configs() == expected


@pytest.mark.parametrize(("key", "count"), [("64,32", 16), ("64, 64", 32), ("128,32", 16)])
def test_block_sizes_select_from_tune(key: str, count: int) -> None:
    configs = get_kernel_configs(key)
    assert len(configs) == count
    assert {(cfg.B_r, cfg.B_c) for cfg in configs} == {tuple(map(int, key.split(",")))}


def test_the_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELS", "tune")
    assert len(get_kernel_configs("prog")) == 7


VALID_KEYS = (
    f"prog (7), prog-all (56), tune (80), space ({len(get_search_space_configs())}), "
    f"cover ({len(get_cover_configs())}), backward (52), decode (28), latent-mma (10), "
    "hopper (46), hopper-backward (34), hopper-dq (14), latent (4), all (80), '64,32' (16), "
    "'64,64' (32), '128,32' (16), '128,64' (16)"
)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "kernels is unset or empty"),
        ("  ", "kernels is unset or empty"),
        ("progg", "kernels='progg' is not a known key; did you mean 'prog'?"),
        ("hoper", "kernels='hoper' is not a known key; did you mean 'hopper'?"),
        ("nonsense", "kernels='nonsense' is not a known key; valid keys"),
        ("/no/such/file.txt", "is not a known key"),
        ("64,128", "kernels='64,128' selects no config"),
        ("64,32,16", "is not a known key"),
        (";", "is not a known key"),
    ],
)
def test_a_key_that_selects_nothing_lists_the_keys_with_sizes(key: str, problem: str) -> None:
    with pytest.raises(SelectionError, match=re.escape(problem)) as caught:
        get_kernel_configs(key)
    assert VALID_KEYS in str(caught.value)


@pytest.mark.parametrize("value", [None, ""])
def test_unset_kernels_is_named_in_the_error(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KERNELS", raising=False)
    if value is not None:
        monkeypatch.setenv("KERNELS", value)
    with pytest.raises(SelectionError, match=r"^KERNELS is unset or empty") as caught:
        get_kernel_configs()
    assert VALID_KEYS in str(caught.value)


def test_a_short_form_that_does_not_parse_is_a_parse_error() -> None:
    with pytest.raises(ConfigParseError, match="unknown feature 'fast'"):
        get_kernel_configs(f"{LADDER_TOP}; (FP16, 128, 64, 64, 4): fast+load_0_0_0_tiles")
