"""Canonical kernels name the rounding of each sum and product of a row: bits must not depend on
what ptxas fuses."""

from __future__ import annotations

import pytest
import shared_kernels
from bit_kernels import Kernels
from plain_run import full_after
from rounding import unrounded, unrounded_of

from flashsmith.families import DType, KernelConfig, Semantics

HOPPER, AMPERE = Kernels(DType.FP16, 64), Kernels(DType.FP16, 64, 80)
CAUSAL, ALL = Semantics("causal", uneven=True), Semantics("window", True, True, True)
KERNELS = (
    (HOPPER.wgmma, 90, ALL),
    (HOPPER.mma_sync_of_groups, 90, ALL),
    (HOPPER.decode, 90, Semantics("window", True)),
    (AMPERE.mma_sync, 80, CAUSAL),
    (AMPERE.decode, 80, Semantics("causal")),
)
# Of each family the plain run has another kernel.
MORE = ((HOPPER.wgmma_in_turns, 90, CAUSAL), (HOPPER.mma_sync, 90, CAUSAL))
PROGRAM = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 to)
{
    .reg .f32 %f<4>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [to];
    mov.f32 %f1, 0f3F800000;
    INSTRUCTION
    st.global.f32 [%rd1], %f2;
    ret;
}
"""

for _cfg, _arch, _semantics in KERNELS:
    shared_kernels.want([_cfg], _semantics, _arch)


@pytest.mark.parametrize(
    ("cfg", "arch", "semantics"),
    full_after(len(KERNELS), [*KERNELS, *MORE]),
    ids=lambda it: str(it) if hasattr(it, "FAMILY") else None,
)
def test_every_sum_and_product_names_its_rounding(
    cfg: KernelConfig, arch: int, semantics: Semantics
) -> None:
    shared_kernels.load([cfg], semantics, arch)
    assert unrounded_of(cfg, arch, semantics) == []


@pytest.mark.parametrize(
    "instruction",
    [
        "mul.f32 %f2, %f1, %f1;",
        "add.ftz.f32 %f2, %f1, %f1;",
        "sub.f32 %f2, %f1, %f1;",
        "div.full.f32 %f2, %f1, %f1;",
    ],
)
def test_what_has_none_is_found(instruction: str) -> None:
    (found,) = unrounded(PROGRAM.replace("INSTRUCTION", instruction), "kernel")
    assert instruction in found
    assert "line 12" in found


@pytest.mark.parametrize(
    "instruction",
    [
        "mul.rn.f32 %f2, %f1, %f1;",
        "fma.rn.ftz.f32 %f2, %f1, %f1, %f1;",
        "add.s32 %r1, %r2, 1; mov.f32 %f2, %f1;",
        "max.f32 %f2, %f1, %f1;",
        "ex2.approx.ftz.f32 %f2, %f1;",
    ],
)
def test_what_has_one_or_needs_none_is_not(instruction: str) -> None:
    assert list(unrounded(PROGRAM.replace("INSTRUCTION", instruction), "kernel")) == []
