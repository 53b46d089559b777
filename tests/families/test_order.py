"""Order: which knobs decide how a row is computed, and that canonical configs have one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashsmith.families import DType, device_spec, families, get_kernel_configs
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.families.canonical import VERSION, emulated_arch
from flashsmith.families.order import Order

FORWARD = "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+stages_2"
WGMMA = (
    "(FP16, 64, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
    "+longest_first+rescale_8"
)
DECODE = "(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2"
OF_ROWS = [family for kind in ("forward", "decode") for family in families(kind)]


def order(text: str, **changes: Any) -> Order:
    cfg = replace(parse(text), **changes)
    found = cfg.family.order(cfg, 90)
    assert found is not None
    return found


@pytest.mark.parametrize("device", ["A100", "H200"])
@pytest.mark.parametrize("d_head", [64, 128, 256])
def test_all_canonical_configs_of_a_device_have_one_order(device: str, d_head: int) -> None:
    spec, orders, kept = device_spec(device), set(), 0
    for family in OF_ROWS:
        for cfg in family.candidates(DType.FP16, d_head, spec, False):
            canonical = family.canonical(cfg, spec)
            if canonical is not None:
                orders.add(family.order(canonical, spec.arch))
                kept += 1
            assert family.order(cfg, spec.arch) not in orders
    assert len(orders) == 1 < kept


def test_every_family_that_computes_rows_has_an_order_and_no_other() -> None:
    for cfg in get_kernel_configs("all"):
        has_order = cfg.family.order(cfg, emulated_arch(cfg)) is not None
        assert has_order is (cfg.family in OF_ROWS)


@pytest.mark.parametrize(
    ("text", "changes", "operation"),
    [
        (FORWARD, {"B_c": 32}, "tiles"),
        (FORWARD, {"optimized_softmax": False}, "scale"),
        (FORWARD, {"lazy_rescale": True}, "offset"),
        (FORWARD, {"split_keys": 4}, "chunks"),
        (FORWARD, {"canonical": VERSION}, "direction"),
        (WGMMA, {"B_c": 96}, "tiles"),
        (WGMMA, {"rescale_threshold": 0}, "offset"),
        (WGMMA, {"stale_max": True}, "offset"),
        (WGMMA, {"exp2_fma_share": 20}, "exponentials"),
        (WGMMA, {"split_keys": 8}, "chunks"),
        (WGMMA, {"canonical": VERSION}, "direction"),
        (DECODE, {"B_c": 128}, "tiles"),
        (DECODE, {"n_warps": 2}, "states"),
        (DECODE, {"chunk_rows": 64}, "states"),
        (DECODE, {"own_rows": True}, "states"),
        (DECODE, {"min_keys": 128}, "chunks"),
        (DECODE, {"parts_per_sm": 4}, "chunks"),
        (DECODE, {"B_r": 32}, "chunks"),
        (DECODE, {"canonical": VERSION}, "states"),
    ],
)
def test_the_first_operation_that_a_knob_changes(
    text: str, changes: dict[str, Any], operation: str
) -> None:
    found = order(text).difference(order(text, **changes))
    assert found is not None
    assert found.operation == operation
    assert found.first != found.second


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (FORWARD, {"B_r": 128, "n_warps": 8}),
        (FORWARD, {"kv_stages": 0, "Q_mma_load_K_tiles": 0, "trim_masks": True}),
        (WGMMA, {"n_warpgroups": 2, "B_r": 128, "direct_O": True, "kv_stages": 3}),
        (DECODE, {"stages": 4, "early": True, "cluster": 8}),
    ],
)
def test_knobs_that_leave_the_order_as_it_is(text: str, changes: dict[str, Any]) -> None:
    assert order(text).difference(order(text, **changes)) is None


def test_tensor_cores_are_a_class_of_architectures() -> None:
    cfg = parse(FORWARD)
    a100, a10, h200, b200 = (cfg.family.order(cfg, arch) for arch in (80, 86, 90, 100))
    assert a100 == a10
    assert a100.difference(h200).operation == h200.difference(b200).operation == "tensor cores"
