"""Configs and calls that the tests of the wgmma family's host code share."""

from __future__ import annotations

from dataclasses import replace

from forward_calls import ForwardCall, unplaced_call
from pretended_library import H200

from flashsmith.families import (
    DType,
    Problem,
    Schedule,
    Semantics,
    TileOrder,
    WgmmaForwardKernelConfig,
    parse_kernel_name_into_config,
)


def wgmma_config(text: str) -> WgmmaForwardKernelConfig:
    """The config of a short form of the wgmma family."""
    cfg = parse_kernel_name_into_config(text)
    assert isinstance(cfg, WgmmaForwardKernelConfig)
    return cfg


DYNAMIC = wgmma_config(
    "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
)
LONGEST_FIRST = replace(DYNAMIC, tile_order=TileOrder.LONGEST_FIRST)
PERSISTENT = replace(DYNAMIC, schedule=Schedule.STATIC_PERSISTENT)
ONE_TILE = replace(DYNAMIC, schedule=Schedule.ONE_TILE)
CLUSTERS = replace(DYNAMIC, cluster_size=2)
BF16 = replace(DYNAMIC, dtype=DType.BF16)
# Two warpgroups of every other head dimension, of as many keys as two stages have room for.
OF_D_HEAD = {
    d_head: WgmmaForwardKernelConfig(DType.FP16, d_head, 128, B_c, 2)
    for d_head, B_c in ((64, 128), (96, 128), (192, 96), (256, 80))
}
OF_D_HEAD[128] = DYNAMIC
MMA_SYNC = parse_kernel_name_into_config("(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles")
GROUPED = parse_kernel_name_into_config("(FP16, 128, 64, 64, 4): async+load_2_2_2_tiles+l2_16")
CONFIGS = (
    *(DYNAMIC, LONGEST_FIRST, PERSISTENT, ONE_TILE, CLUSTERS, BF16, MMA_SYNC, GROUPED),
    *(cfg for d_head, cfg in OF_D_HEAD.items() if d_head != 128),
)

# Addresses of tensors that are nowhere, far enough apart.
Q, K, V, O = (place << 40 for place in (1, 2, 3, 4))  # noqa: E741


def problem(text: str) -> Problem:
    """'b2 s1000 h16:4 d128 fp16 causal'"""
    return Problem.parse(text)


def call(text: str = "b2 s1536 h16 d128 fp16") -> ForwardCall:
    """A call on dense tensors at Q, K, V and O."""
    unplaced = unplaced_call(problem(text), 0.125, H200)
    placed = zip((Q, K, V, O), unplaced.tensors, strict=True)
    return unplaced._replace(tensors=tuple((at, *ints[1:]) for at, ints in placed))  # type: ignore[arg-type]


def semantics_of(a_call: ForwardCall, cfg: WgmmaForwardKernelConfig) -> Semantics:
    """What a kernel for the call is compiled for."""
    return a_call.problem.required_semantics(cfg)
