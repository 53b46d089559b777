"""An illegal wgmma config is answered with the nearest legal ones of its family."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from hopper_samples import SHIPPED, family_config
from hypothesis import given, settings

from flashsmith.errors import IllegalConfigError
from flashsmith.families import (
    HOPPER_KNOB_VALUES,
    HOPPER_RULES,
    WgmmaForwardKernelConfig,
    broken_rules,
    check_legal,
    device_spec,
    is_legal,
    nearest_legal,
    parse_kernel_name_into_config,
)

H200 = device_spec("H200")
READ = {knob for rule in HOPPER_RULES for knob in rule.knobs}
TWO = "regs_24_240"


def changed_knobs(cfg: WgmmaForwardKernelConfig, other: WgmmaForwardKernelConfig) -> list[str]:
    return [knob for knob in HOPPER_KNOB_VALUES if getattr(cfg, knob) != getattr(other, knob)]


@settings(max_examples=40, deadline=None)
@given(family_config)
def test_nearest_configs_are_legal_and_change_nothing_in_vain(
    cfg: WgmmaForwardKernelConfig,
) -> None:
    nearest = nearest_legal(cfg, H200)
    assert nearest
    assert len(set(nearest)) == len(nearest) <= 3
    for found in nearest:
        assert is_legal(found, H200)
        changed = changed_knobs(cfg, found)
        assert set(changed) <= READ - {"d_head"}
        for count in range(1, len(changed) + 1):
            for undone in combinations(changed, count):
                part = replace(found, **{knob: getattr(cfg, knob) for knob in undone})
                assert not is_legal(part, H200)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        (
            f"(FP16, 128, 128, 176, 2wg): tma+stages_2+q_buffers_2+{TWO}",
            [
                f"(FP16, 128, 128, 160, 2wg): tma+stages_2+q_buffers_2+{TWO}",
                f"(FP16, 128, 128, 176, 2wg): tma+stages_1+q_buffers_2+{TWO}",
                f"(FP16, 128, 128, 176, 2wg): tma+stages_2+q_buffers_1+{TWO}",
            ],
        ),
        (
            f"(BF16, 128, 128, 160, 2wg): tma+stages_2+q_buffers_2+{TWO}+separate_O",
            [
                f"(BF16, 128, 128, 128, 2wg): tma+stages_2+q_buffers_2+{TWO}+separate_O",
                f"(BF16, 128, 128, 160, 2wg): tma+stages_1+q_buffers_2+{TWO}+separate_O",
                f"(BF16, 128, 128, 160, 2wg): tma+stages_2+q_buffers_1+{TWO}+separate_O",
            ],
        ),
        (
            f"(FP16, 256, 128, 96, 2wg): tma+stages_2+q_buffers_1+{TWO}",
            [
                f"(FP16, 256, 128, 80, 2wg): tma+stages_2+q_buffers_1+{TWO}",
                f"(FP16, 256, 128, 96, 2wg): tma+stages_1+q_buffers_1+{TWO}",
                f"(FP16, 256, 128, 64, 2wg): tma+stages_2+q_buffers_1+{TWO}",
            ],
        ),
    ],
)
def test_one_of_each_way_out_comes_before_a_second_of_the_same(
    text: str, nearest: list[str]
) -> None:
    cfg = parse_kernel_name_into_config(text)
    assert list(map(str, nearest_legal(cfg, H200))) == nearest


@pytest.mark.parametrize(
    "text",
    [
        f"(FP16, 128, 192, 128, 2wg): tma+{TWO}",
        "(FP16, 128, 192, 128, 3wg): tma+regs_40_160",
        "(FP16, 64, 64, 64, 1wg): tma+regs_248_248",
        f"(FP16, 64, 64, 64, 1wg): tma+{TWO}+pingpong_gemm",
    ],
)
def test_no_legal_config_is_fewer_changes_away(text: str) -> None:
    cfg = parse_kernel_name_into_config(text)
    fewest = len(changed_knobs(cfg, nearest_legal(cfg, H200)[0]))
    assert fewest <= 2
    for knobs in combinations(READ - {"d_head"}, fewest - 1):
        for values in product(*(HOPPER_KNOB_VALUES[knob] for knob in knobs)):
            assert not is_legal(replace(cfg, **dict(zip(knobs, values, strict=True))), H200)


def test_a_config_that_everything_is_wrong_with_is_answered_too() -> None:
    worst = parse_kernel_name_into_config(
        "(FP16, 1, 1, 1, 9wg): tma+stages_99+q_buffers_5+regs_1_999+overlap+cluster_9+rescale_77"
    )
    assert all(is_legal(found, H200) for found in nearest_legal(worst, H200))
    assert len(nearest_legal(worst, H200)) == 3


def test_a_legal_config_is_its_own_nearest() -> None:
    assert nearest_legal(SHIPPED, H200) == nearest_legal(SHIPPED) == [SHIPPED]


def test_the_message_has_every_broken_rule_and_the_nearest_configs() -> None:
    check_legal(SHIPPED, H200)
    cfg = replace(SHIPPED, B_r=128, q_buffers=3, consumer_registers=168)
    with pytest.raises(IllegalConfigError) as caught:
        check_legal(cfg, H200)
    message = str(caught.value)
    assert f"config {cfg} is illegal:" in message
    assert len(broken_rules(cfg, H200)) == 3
    assert all(rule.message in message for rule in broken_rules(cfg, H200))
    assert "(here B_r=128, n_warpgroups=3) [B_r_is_warpgroups]" in message
    assert "nearest legal configs:\n  (FP16, 128, " in message
    assert all(str(found) in message for found in nearest_legal(cfg, H200))


def test_on_another_gpu_no_change_helps() -> None:
    with pytest.raises(IllegalConfigError, match="no change of its knobs makes it legal on A100"):
        check_legal(SHIPPED, device_spec("A100"))
    tiny = replace(H200, name="a tiny GPU", max_smem_per_block=2048)
    with pytest.raises(IllegalConfigError, match="no change of its knobs makes it legal on a tiny"):
        check_legal(SHIPPED, tiny)
