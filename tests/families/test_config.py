"""The config class: its fields, names and arithmetic."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from config_samples import LADDER_TOP, LaterConfig, any_config
from hypothesis import given

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, FlashForwardKernelConfig, get_autotuning_kernel_configs

PLAIN = FlashForwardKernelConfig(DType.BF16, 64, 128, 32, 8)


@pytest.mark.parametrize("text", ["fp16", "FP16", " Fp16 ", "5", 5, DType.FP16])
def test_dtype_is_parsed_from_name_or_number(text: object) -> None:
    assert DType.parse(text) is DType.FP16


def test_dtype_facts() -> None:
    assert [(d.name, int(d), d.numpy_name, d.element_size) for d in DType] == [
        ("FP16", 5, "float16", 2),
        ("BF16", 15, "bfloat16", 2),
    ]
    assert DType.parse("bf16") is DType.BF16
    assert DType.parse(np.int64(15)) is DType.BF16


@pytest.mark.parametrize("value", ["fp32", "", 6, True, None, 5.0])
def test_dtype_refuses_with_the_allowed_ones(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"dtype=.*FP16 \(5\), BF16 \(15\)"):
        DType.parse(value)


def test_the_thirteen_first_fields_are_frozen_and_later_ones_follow() -> None:
    names = [knob.name for knob in fields(FlashForwardKernelConfig)]
    assert names[:13] == [
        "dtype",
        "d_head",
        "B_r",
        "B_c",
        "n_warps",
        "async_copy",
        "eager_load_blocks",
        "swizzled",
        "Q_mma_load_K_tiles",
        "K_mma_load_K_tiles",
        "V_mma_load_K_tiles",
        "mma_double_buffer_loads",
        "optimized_softmax",
    ]
    assert names[13:] == [
        "kv_stages",
        "lazy_rescale",
        "ping_pong",
        "min_ctas_per_sm",
        "trim_masks",
        "l2_group_mib",
        "split_keys",
        "pack_gqa",
        "canonical",
        "d_v",
    ]
    later = fields(FlashForwardKernelConfig)[13:]
    assert all(knob.default == 0 for knob in later)
    assert all(knob.metadata["meaning"] for knob in fields(FlashForwardKernelConfig))


def test_configs_are_frozen_hashable_and_ordered_by_field() -> None:
    with pytest.raises(FrozenInstanceError):
        LADDER_TOP.B_r = 128  # type: ignore[misc]
    assert {LADDER_TOP: 1}[replace(LADDER_TOP)] == 1
    assert replace(LADDER_TOP, dtype=DType.BF16) > LADDER_TOP
    assert replace(LADDER_TOP, B_c=128) < replace(LADDER_TOP, B_r=128)
    assert replace(LADDER_TOP, swizzled=False) < LADDER_TOP


def test_fields_take_numpy_ints_and_zero_one_flags() -> None:
    cfg = FlashForwardKernelConfig("bf16", np.int64(64), 128, np.int32(32), 8, 0, np.uint8(0))
    assert cfg == PLAIN
    assert type(cfg.d_head) is int
    assert cfg.async_copy is False


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("dtype", "fp8"),
        ("d_head", 0),
        ("d_head", 128.0),
        ("B_r", -64),
        ("B_c", 2**31),
        ("n_warps", True),
        ("n_warps", "4"),
        ("Q_mma_load_K_tiles", -1),
        ("V_mma_load_K_tiles", None),
        ("async_copy", 2),
        ("swizzled", "yes"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(knob: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{knob}={value!r}: "):
        replace(LADDER_TOP, **{knob: value})  # type: ignore[arg-type]


def test_short_form() -> None:
    features = "async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
    assert LADDER_TOP.short_form() == str(LADDER_TOP) == f"(FP16, 128, 64, 64, 4): {features}"
    assert LADDER_TOP.short_form(include_d_head=False) == f"(FP16, 64, 64, 4): {features}"
    assert LADDER_TOP.short_form(include_tup=False) == features
    assert str(replace(LADDER_TOP, mma_double_buffer_loads=True)) == (
        "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
    )


def test_a_config_without_features_still_shows_its_load_counts() -> None:
    assert str(PLAIN) == "(BF16, 64, 128, 32, 8): load_0_0_0_tiles"


def test_an_appended_knob_shows_only_when_it_is_set() -> None:
    today = LaterConfig(*LADDER_TOP.to_ints())
    assert str(today) == str(LADDER_TOP)
    assert str(replace(today, tiles_ahead=3, fast=True)) == f"{LADDER_TOP}+tiles_3+fast"


def test_the_later_knobs_in_the_short_form() -> None:
    cfg = replace(
        LADDER_TOP,
        kv_stages=3,
        lazy_rescale=True,
        ping_pong=True,
        min_ctas_per_sm=2,
        trim_masks=True,
        l2_group_mib=16,
        split_keys=4,
        pack_gqa=True,
    )
    later = "stages_3+lazy_rescale+ping_pong+ctas_2+trim+l2_16+split_4+pack_gqa"
    assert str(cfg) == f"{LADDER_TOP}+{later}"


def test_kernel_name_is_a_c_identifier_and_unique() -> None:
    assert LADDER_TOP.kernel_name() == (
        "fp16_128_64_64_4_async_eager_swizzled_load_0_2_2_tiles_opt_softmax"
    )
    configs = get_autotuning_kernel_configs()
    assert len({cfg.kernel_name() for cfg in configs}) == len(configs)


@given(any_config)
def test_kernel_name_of_any_config_is_an_identifier(cfg: FlashForwardKernelConfig) -> None:
    assert cfg.kernel_name().isidentifier()


def test_cpp_struct_has_a_designated_initialiser_per_field() -> None:
    assert LADDER_TOP.to_cpp_struct() == (
        "FlashForwardKernelConfig{.dtype = DType::FP16, .d_head = 128, .B_r = 64, .B_c = 64, "
        ".n_warps = 4, .async_copy = true, .eager_load_blocks = true, .swizzled = true, "
        ".Q_mma_load_K_tiles = 0, .K_mma_load_K_tiles = 2, .V_mma_load_K_tiles = 2, "
        ".mma_double_buffer_loads = false, .optimized_softmax = true, "
        ".kv_stages = 0, .lazy_rescale = false, .ping_pong = false, .min_ctas_per_sm = 0, "
        ".trim_masks = false, .l2_group_mib = 0, .split_keys = 0, .pack_gqa = false, "
        ".canonical = 0, .d_v = 0}"
    )


@given(any_config)
def test_ints_give_the_config_back(cfg: FlashForwardKernelConfig) -> None:
    assert FlashForwardKernelConfig(*cfg.to_ints()) == cfg


def test_shapes_and_shared_memory() -> None:
    assert (LADDER_TOP.n_threads, LADDER_TOP.rows_per_warp) == (128, 16)
    assert LADDER_TOP.smem_bytes() == 3 * 64 * 128 * 2
    assert PLAIN.smem_bytes(elem_size=4) == (128 + 2 * 32) * 64 * 4


def test_a_ring_takes_its_tiles_of_shared_memory() -> None:
    ring = replace(LADDER_TOP, kv_stages=3)
    assert (LADDER_TOP.kv_tiles, ring.kv_tiles) == (1, 3)
    assert ring.smem_bytes() == (64 + 2 * 3 * 64) * 128 * 2
    # 167936 / (114688 + 1024): one CTA where the single tiles left room for three.
    assert ring.num_ctas_per_sm(167936) == 1


@pytest.mark.parametrize(
    ("max_smem", "registers", "ctas", "limit"),
    [
        (167936, None, 3, "shared memory"),  # 167936 / (49152 + 1024)
        (167936, 168, 3, "shared memory"),
        (167936, 169, 2, "registers"),  # 176 a thread: 11 warps
        (167936, 255, 2, "registers"),
        (49152, None, 0, "shared memory"),  # the reserved 1024 bytes do not fit
        (10**9, None, 16, "threads"),
        (10**9, 32, 16, "threads"),
    ],
)
def test_ctas_per_sm(max_smem: int, registers: int | None, ctas: int, limit: str) -> None:
    assert LADDER_TOP.num_ctas_per_sm(max_smem, registers) == ctas
    limits = LADDER_TOP.cta_limits(max_smem, registers)
    assert min(limits, key=limits.__getitem__) == limit


def test_no_sm_holds_more_than_32_ctas() -> None:
    assert replace(PLAIN, n_warps=1).num_ctas_per_sm(10**9, 8) == 32
