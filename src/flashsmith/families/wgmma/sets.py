"""The set 'hopper': the wgmma configs that the package ships."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.wgmma.config import (
    HopperForwardKernelConfig,
    PingPong,
    Schedule,
    TileOrder,
)
from flashsmith.families.wgmma.rules import DEFAULT_SECTION_MIB
from flashsmith.operations.dtype import DType


def get_hopper_configs(
    dtypes: Sequence[DType] = (DType.FP16, DType.BF16),
) -> list[HopperForwardKernelConfig]:
    """The set 'hopper': by head dimension what is for full attention, and what for causal."""
    by_head, longest_first = TileOrder.BY_HEAD, TileOrder.LONGEST_FIRST
    return [
        cfg
        for dtype in dtypes
        for cfg in (
            # Up to some thousand keys four warpgroups hide the most of each other's waits; beyond
            # that longer tiles win, with a product under the softmax or without a maximum in it.
            _four_warpgroups(dtype, 64, 96, by_head),
            _four_warpgroups(dtype, 64, 96, longest_first),
            _three_warpgroups(dtype, 64, 128, by_head, stale_max=True),
            _three_warpgroups(dtype, 64, 128, longest_first, overlap=True),
            _three_warpgroups(dtype, 64, 160, longest_first, stale_max=True),
            _three_warpgroups(dtype, 96, 128, by_head),
            _three_warpgroups(dtype, 96, 128, longest_first),
            _three_warpgroups(dtype, 96, 112, longest_first, overlap=True),
            _three_warpgroups(dtype, 128, 128, by_head),
            _three_warpgroups(dtype, 128, 128, longest_first),
            _three_warpgroups(dtype, 128, 128, longest_first, stale_max=True),
            # Two CTAs read K and V once: within 1% of one alone, with less traffic.
            _three_warpgroups(dtype, 128, 128, by_head, cluster_size=2),
            # Short causal sequences, where the diagonal wastes less of 128 rows.
            _two_warpgroups(dtype, 128, 128, longest_first, pingpong=PingPong.GEMM),
            _two_warpgroups(dtype, 128, 128, longest_first, pingpong=PingPong.GEMM, section_mib=8),
            # Two buffers of Q for fewer than some thousand keys, longer key tiles for more.
            _two_warpgroups(dtype, 192, 80, by_head),
            _two_warpgroups(dtype, 192, 80, longest_first),
            _two_warpgroups(dtype, 192, 112, by_head, q_buffers=1),
            # One buffer of Q is all that fits: O does not wait in it.
            _two_warpgroups(dtype, 256, 80, by_head, q_buffers=1, early_exp=True, direct_O=True),
            _two_warpgroups(dtype, 256, 80, longest_first, q_buffers=1, direct_O=True),
            _two_warpgroups(dtype, 256, 64, longest_first, q_buffers=1, direct_O=True),
        )
    ]


def _three_warpgroups(
    dtype: DType,
    d_head: int,
    B_c: int,
    tile_order: TileOrder,
    *,
    overlap: bool = False,
    pingpong: PingPong = PingPong.GEMM,
    cluster_size: int = 1,
    stale_max: bool = False,
) -> HopperForwardKernelConfig:
    """192 rows a CTA: two warpgroups' softmax hides behind the third's products."""
    return HopperForwardKernelConfig(
        dtype,
        d_head=d_head,
        B_r=192,
        B_c=B_c,
        n_warpgroups=3,
        q_buffers=2,
        producer_registers=32,
        consumer_registers=160,
        overlap=overlap,
        pingpong=pingpong,
        cluster_size=cluster_size,
        schedule=Schedule.DYNAMIC,
        tile_order=tile_order,
        rescale_threshold=8,
        stale_max=stale_max,
    )


def _four_warpgroups(
    dtype: DType, d_head: int, B_c: int, tile_order: TileOrder
) -> HopperForwardKernelConfig:
    """256 rows a CTA, for short heads: what one warpgroup waits for three others fill."""
    return HopperForwardKernelConfig(
        dtype,
        d_head=d_head,
        B_r=256,
        B_c=B_c,
        n_warpgroups=4,
        q_buffers=2,
        producer_registers=32,
        consumer_registers=112,
        pingpong=PingPong.GEMM,
        schedule=Schedule.DYNAMIC,
        tile_order=tile_order,
        rescale_threshold=8,
    )


def _two_warpgroups(
    dtype: DType,
    d_head: int,
    B_c: int,
    tile_order: TileOrder,
    *,
    q_buffers: int = 2,
    pingpong: PingPong = PingPong.NONE,
    section_mib: int = DEFAULT_SECTION_MIB,
    early_exp: bool = False,
    direct_O: bool = False,
) -> HopperForwardKernelConfig:
    """128 rows a CTA: registers for wide heads, or for a product under the softmax."""
    return HopperForwardKernelConfig(
        dtype,
        d_head=d_head,
        B_r=128,
        B_c=B_c,
        n_warpgroups=2,
        q_buffers=q_buffers,
        producer_registers=32,  # 24 spill where sequences are packed
        consumer_registers=232,
        overlap=True,
        pingpong=pingpong,
        schedule=Schedule.DYNAMIC,
        tile_order=tile_order,
        rescale_threshold=8,
        section_mib=section_mib,
        early_exp=early_exp,
        direct_O=direct_O,
    )
