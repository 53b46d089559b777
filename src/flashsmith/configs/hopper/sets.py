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
    """The set 'hopper'."""
    return [cfg for dtype in dtypes for cfg in (*_three_warpgroups(dtype), *_two_warpgroups(dtype))]


def _three_warpgroups(dtype: DType) -> list[HopperForwardKernelConfig]:
    """192 rows a CTA, each warpgroup's steps one after the other; the tile orders of full and
    causal attention."""
    return [
        HopperForwardKernelConfig(
            dtype,
            d_head=128,
            B_r=192,
            B_c=128,
            n_warpgroups=3,
            q_buffers=2,
            producer_registers=32,
            consumer_registers=160,
            pingpong=PingPong.GEMM,
            schedule=Schedule.DYNAMIC,
            tile_order=order,
            rescale_threshold=8,
        )
        for order in TileOrder
    ]


def _two_warpgroups(dtype: DType) -> list[HopperForwardKernelConfig]:
    """128 rows a CTA, for short causal sequences: the diagonal wastes less."""
    return [
        HopperForwardKernelConfig(
            dtype,
            d_head=128,
            B_r=128,
            B_c=128,
            n_warpgroups=2,
            q_buffers=2,
            overlap=True,
            pingpong=PingPong.GEMM,
            schedule=Schedule.DYNAMIC,
            tile_order=TileOrder.LONGEST_FIRST,
            rescale_threshold=8,
        )
    ]
