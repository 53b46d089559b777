"""The kernels of the wgmma_dq family in the emulator: the gradient of q alone, right, without a
finding, and with the same bits under every schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DType,
    Problem,
    Semantics,
    WgmmaDqKernelConfig,
    device_spec,
    get_kernel_configs,
    parse_kernel_name_into_config,
)
from flashsmith.runtime import run_operation
from flashsmith.verify import Verdict, reference_of
from flashsmith.verify import prove as prove_problem


def config(text: str) -> WgmmaDqKernelConfig:
    found = parse_kernel_name_into_config(text)
    assert isinstance(found, WgmmaDqKernelConfig)
    return found


LATE = config("(BF16, 64, 128, 64, 2): tma_dq+k_stages_2+v_stages_1+regs_24_240+late_dq+pingpong")
ALONE = config("(BF16, 64, 64, 64, 1): tma_dq+k_stages_1+v_stages_1+regs_24_240")
THREE = config("(FP16, 96, 192, 64, 3): tma_dq+k_stages_2+v_stages_2+regs_32_160+pingpong")
SHIPPED = [cfg for cfg in get_kernel_configs("hopper-dq") if cfg.dtype == DType.BF16]
CAUSAL = Semantics("causal", uneven=True)
shared_kernels.want([LATE, ALONE], CAUSAL)


def prove(cfg: WgmmaDqKernelConfig, text: str, **how: Any) -> Verdict:
    """The verdict on a problem; ``how`` are the reference's options or prove()'s."""
    d = "" if " d" in text else f" d{cfg.d_head}"
    problem = Problem.parse(f"{text}{d} {cfg.dtype.name.lower()} backward only_dq")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    passed = {
        name: how.pop(name) for name in ("inputs", "seed", "schedule_seed", "checks") if name in how
    }
    options = reference_of(problem.computed).options(problem, **how)
    return prove_problem(cfg, problem, options=options, **passed)


def full(cfg: WgmmaDqKernelConfig, *rest: Any) -> Any:
    return pytest.param(cfg, *rest, marks=pytest.mark.full)


@pytest.mark.full
@pytest.mark.parametrize("cfg", [LATE, ALONE, THREE, *SHIPPED], ids=str)
@pytest.mark.parametrize("schedule_seed", [None, 3])
def test_whole_tiles(cfg: WgmmaDqKernelConfig, schedule_seed: int | None) -> None:
    text = f"b1 s{2 * cfg.B_r}:{3 * cfg.B_c} h2:1"
    verdict = prove(cfg, text, checks=True, schedule_seed=schedule_seed)
    assert verdict.ok, str(verdict)


UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "longer keys": ("b1 s75:140 h2:1", {}),
    "rows without keys": ("b2 s140:70 h1", {"dlse": True, "sinks": True}),
    "one row": ("b1 s1:70 h2", {"dlse": True}),
    "one key": ("b1 s70:1 h2", {"sinks": True}),
    "no key": ("b1 s70:0 h2", {}),
    "merged statistics": ("b1 s100:75 h2", {"sinks": True, "dlse": True, "more_keys": 9}),
    "fp32 gradients": ("b1 s75:140 h2:1 d40", {"grad_dtype": "float32"}),
}


@pytest.mark.parametrize(
    ("cfg", "case"),
    [
        *((LATE, case) for case in UNEVEN),
        *(full(cfg, case) for cfg in (ALONE, THREE, *SHIPPED) for case in UNEVEN),
    ],
    ids=str,
)
def test_causal_and_uneven(cfg: WgmmaDqKernelConfig, case: str) -> None:
    sizes, options = UNEVEN[case]
    verdict = prove(cfg, f"{sizes} causal", checks=True, **options)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("cfg", [LATE, *map(full, [ALONE, *SHIPPED])], ids=str)
@pytest.mark.parametrize("inputs", ["nonfinite", "neighbours", "far_scores"])
def test_hard_inputs(cfg: WgmmaDqKernelConfig, inputs: str) -> None:
    for text in ("b2 s100:75 h2:1 causal", "b1 s70:150 h2 causal"):
        verdict = prove(cfg, text, inputs=inputs, checks=True)
        assert verdict.ok, str(verdict)


PACKED = {"lens_q": (70, 0, 13, 20), "lens_k": (30, 12, 0, 140), "spare": 6}


@pytest.mark.full
@pytest.mark.parametrize("cfg", [LATE, ALONE, *SHIPPED], ids=str)
@pytest.mark.parametrize(
    ("inputs", "limits"), [("random", (13, 5)), ("random", (None, 4)), ("neighbours", (9, 9))]
)
def test_packed_windows_with_a_softcap(
    cfg: WgmmaDqKernelConfig, inputs: str, limits: tuple[int | None, int | None]
) -> None:
    """Rows of no sequence hold NaN, and have gradients of 0."""
    verdict = prove(
        cfg,
        "b4 s70:140 h2:1 window softcap packed",
        inputs=inputs,
        checks=True,
        left=limits[0],
        right=limits[1],
        dlse=True,
        sinks=True,
        **PACKED,
    )
    assert verdict.ok, str(verdict)


def dq_of(cfg: WgmmaDqKernelConfig, text: str, schedule_seed: int | None, sm_count: int) -> bytes:
    """The bits of an fp32 dq, the same inputs each time."""
    problem = Problem.parse(f"{text} d{cfg.d_head} {cfg.dtype.name.lower()} backward only_dq")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    reference = reference_of(problem.computed)
    options = reference.options(problem, grad_dtype="float32")
    case = reference.case(cfg, problem, kind="random", seed=1, options=options)
    device = replace(device_spec("H200"), sm_count=sm_count)
    result = reference.run(
        cfg, case, lambda array: array, emulate=True, arch=device, schedule_seed=schedule_seed
    )
    assert set(result.outputs) == {"dq"}
    return np.asarray(result.outputs["dq"]).tobytes()


def test_the_same_bits_under_every_schedule() -> None:
    assert LATE.family.is_deterministic(LATE)
    runs = [(None, 1), (4, 132), (5, 3)]
    assert len({dq_of(LATE, "b1 s150:300 h2:1 causal", *run) for run in runs}) == 1


def test_both_orders_of_products_have_the_same_bits() -> None:
    """A row's dq is summed over the keys in their order, whatever tiles have them."""
    text = "b1 s130:190 h1 causal"
    assert dq_of(LATE, text, None, 132) == dq_of(ALONE, text, None, 132)


def test_it_computes_no_other_gradient() -> None:
    problem = Problem.parse("b1 s128:64 h1 d64 bf16 backward")
    with pytest.raises(ArgumentError, match="'only_dq' problems only"):
        run_operation(LATE, problem, {}, emulate=True)
