"""Gradients by kernels of d_head 72 and 80, whose tiles have 96 columns of shared memory, with the
emulator's checks.

The default run takes small tiles of each family; ``-m full`` takes all proof configs.
"""

from __future__ import annotations

from typing import Any

import pytest
import shared_kernels

from flashsmith.families import DType, KernelConfig, Problem, Semantics, family_named
from flashsmith.families import parse_kernel_name_into_config as config
from flashsmith.families.wgmma_backward.sets import without_dq
from flashsmith.verify import prove, reference_of

WIDTHS = (72, 80)
FAMILIES = ("mma_sync_backward", "wgmma_backward", "wgmma_dq")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Whole tiles: the kernels know d when they are compiled.
    "plain": ("b1 s256:256 h2", {}),
    # Between the rows of 'nonfinite' inputs there is NaN, in whose place kernels need zeros.
    "packed": (
        "b3 s130:90 h4:2 causal packed",
        {"lens_q": (70, 130, 0), "lens_k": (90, 64, 40), "inputs": "nonfinite"},
    ),
    "fp32 gradients": ("b1 s75:140 h2:1", {"grad_dtype": "float32", "dlse": True, "sinks": True}),
    "narrower": ("b1 s100:70 h2 causal", {"inputs": "nonfinite", "d": 56}),
}
# As few whole tiles as show a loop's turns.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {"small": ("b1 s128:128 h2", {})}
_STAGES = "q_stages_1+do_stages_1+ds_stages_1+regs_24_240"
# Two warpgroups divide the columns of dQ; the counters of its parts follow the sums.
_ORDERED = "q_stages_1+do_stages_1+ds_stages_1+regs_40_232+ordered_dq"
QUICK = (
    (config(f"(FP16, 72, 64, 64, 1): tma_backward+{_STAGES}+wide_stores"), "small"),
    (config(f"(BF16, 80, 64, 128, 2): tma_backward+{_ORDERED}"), "packed"),
    (config("(FP16, 72, 64, 64, 1): tma_dq+k_stages_1+v_stages_1+regs_24_240"), "small"),
    (config("(FP16, 72, 64, 64, 4): backward+columns_2+stages_2+dq_atomics"), "small"),
    (config("(BF16, 80, 64, 64, 4): backward+columns_2+stages_2+dq_atomics"), "packed"),
    # Without columns_2, a warp has nine tiles of 8 columns.
    (config("(FP16, 72, 32, 64, 4): backward"), "small"),
)
PACKED = Semantics("causal", packed=True, uneven=True)
for _cfg, _case in QUICK:
    shared_kernels.want([_cfg], PACKED if _case == "packed" else Semantics())


def prove_case(cfg: KernelConfig, case: str) -> None:
    sizes, options = (CASES | SMALL)[case]
    how = dict(options)
    words = f"d{how.pop('d', cfg.d_head)} {cfg.dtype.name.lower()} backward"
    problem = Problem.parse(f"{sizes} {words} {cfg.family.gradients_of(cfg)}")
    inputs = how.pop("inputs", "random")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    options = reference_of(problem.computed).options(problem, **how)
    # Two SMs, so that persistent CTAs have several blocks of keys.
    verdict = prove(cfg, problem, options=options, inputs=inputs, sm_count=2, checks=True)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(("cfg", "case"), QUICK, ids=str)
def test_some_kernels(cfg: KernelConfig, case: str) -> None:
    prove_case(cfg, case)


def proof_configs() -> list[KernelConfig]:
    found = [
        cfg
        for family in map(family_named, FAMILIES)
        for dtype in DType
        for width in WIDTHS
        for cfg in family.proof_configs(dtype, width)
    ]
    frozen = [without_dq(cfg) for cfg in found if cfg.FAMILY == "wgmma_backward"]
    return [*found, *dict.fromkeys(frozen)]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cfg", proof_configs(), ids=str)
def test_every_proof_config(cfg: KernelConfig, case: str) -> None:
    prove_case(cfg, case)


def test_they_are_kernels_of_their_own() -> None:
    """No kernel of d_head 96 is chosen for these widths."""
    for name in FAMILIES:
        for width in WIDTHS:
            its = family_named(name).proof_configs(DType.BF16, width)
            assert its
            assert {cfg.d_head for cfg in its} == {width}
