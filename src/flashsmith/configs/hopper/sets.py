"""The set 'hopper': the wgmma configs that the package ships."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.configs.dtype import DType
from flashsmith.configs.hopper.config import (
    HopperForwardKernelConfig,
    PingPong,
    Schedule,
    TileOrder,
)


def get_hopper_configs(
    dtypes: Sequence[DType] = (DType.FP16, DType.BF16),
) -> list[HopperForwardKernelConfig]:
    """The set 'hopper': by head dimension what is for full attention, and what for causal."""
    by_head, longest_first = TileOrder.BY_HEAD, TileOrder.LONGEST_FIRST
    return [
        cfg
        for dtype in dtypes
        for cfg in (
            # The SFU is as busy as the tensor cores: the next product runs under the softmax.
            _three_warpgroups(dtype, 64, 128, by_head, overlap=True),
            _three_warpgroups(dtype, 64, 128, longest_first, overlap=True),
            _three_warpgroups(dtype, 64, 128, by_head, exp2_fma_share=10),
            _three_warpgroups(dtype, 96, 144, by_head),
            _three_warpgroups(dtype, 96, 128, longest_first),
            _three_warpgroups(dtype, 128, 128, by_head),
            _three_warpgroups(dtype, 128, 128, longest_first),
            # Long sequences, which power limits: two CTAs read K and V once.
            _three_warpgroups(dtype, 128, 128, by_head, cluster_size=2),
            # Short causal sequences, where the diagonal wastes less of 128 rows.
            _two_warpgroups(dtype, 128, 128, longest_first, q_buffers=2),
            _two_warpgroups(dtype, 192, 112, by_head, q_buffers=1),
            _two_warpgroups(dtype, 192, 96, longest_first, q_buffers=1),
            _two_warpgroups(dtype, 256, 80, by_head, q_buffers=1),
            _two_warpgroups(dtype, 256, 80, longest_first, q_buffers=1),
        )
    ]


def _three_warpgroups(
    dtype: DType,
    d_head: int,
    B_c: int,
    tile_order: TileOrder,
    *,
    overlap: bool = False,
    cluster_size: int = 1,
    exp2_fma_share: int = 0,
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
        pingpong=PingPong.GEMM,
        cluster_size=cluster_size,
        schedule=Schedule.DYNAMIC,
        tile_order=tile_order,
        rescale_threshold=8,
        exp2_fma_share=exp2_fma_share,
    )


def _two_warpgroups(
    dtype: DType, d_head: int, B_c: int, tile_order: TileOrder, *, q_buffers: int
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
        pingpong=PingPong.GEMM,
        schedule=Schedule.DYNAMIC,
        tile_order=tile_order,
        rescale_threshold=8,
    )
