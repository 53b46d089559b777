"""What the cost model chooses among where nothing was measured: few configs, each a sound one."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flashsmith.configs import (
    DeviceSpec,
    DType,
    FlashForwardKernelConfig,
    HopperForwardKernelConfig,
    KernelConfig,
    is_legal,
)
from flashsmith.configs.hopper import PingPong, Schedule, TileOrder

# Per family, an earlier shape is preferred, so that a small gain on paper does not make another
# kernel, which may have to be built first. Of mma.sync: B_r, B_c, n_warps.
SHAPES = (
    (128, 64, 4),
    (128, 64, 8),
    (64, 64, 4),
    (128, 32, 4),
    (64, 32, 4),
    (128, 32, 8),
    (128, 128, 8),
    (64, 128, 4),
)


class _Wgmma(NamedTuple):
    """A wgmma kernel's tiles, and what hides its copies and its softmax."""

    n_warpgroups: int
    B_c: int
    overlap: bool
    q_buffers: int = 2


# Per d_head. Only those of 128 were measured; the others are what fits beside each other.
_WGMMA: dict[int, tuple[_Wgmma, ...]] = {
    64: (_Wgmma(3, 128, False), _Wgmma(2, 128, True), _Wgmma(1, 128, True)),
    96: (_Wgmma(3, 128, False), _Wgmma(2, 128, True), _Wgmma(1, 128, True)),
    128: (_Wgmma(3, 128, False), _Wgmma(2, 128, True), _Wgmma(1, 128, True)),
    192: (_Wgmma(2, 112, True, 1), _Wgmma(1, 96, True)),
    256: (_Wgmma(2, 80, True, 1), _Wgmma(1, 80, True)),
}


@lru_cache(maxsize=512)
def candidates(
    dtype: DType, d_head: int, device: DeviceSpec, masked: bool = False
) -> tuple[KernelConfig, ...]:
    """The configs of all families worth weighing for a head dimension on a device, in order of
    preference. ``masked``: whether some rows see fewer keys than others."""
    wgmma = wgmma_candidates(dtype, d_head, device, masked)
    return (*wgmma, *mma_sync_candidates(dtype, d_head, device))


@lru_cache(maxsize=256)
def mma_sync_candidates(
    dtype: DType, d_head: int, device: DeviceSpec
) -> tuple[FlashForwardKernelConfig, ...]:
    """Those of the mma.sync family."""
    configs = (_mma_sync(dtype, d_head, *shape) for shape in SHAPES)
    return tuple(config for config in configs if is_legal(config, device))


def wgmma_candidates(
    dtype: DType, d_head: int, device: DeviceSpec, masked: bool
) -> tuple[HopperForwardKernelConfig, ...]:
    """Those of the wgmma family; none on a device or for a d_head that it does not serve."""
    configs = (_wgmma(dtype, d_head, shape, masked) for shape in _WGMMA.get(d_head, ()))
    return tuple(config for config in configs if is_legal(config, device))


def _mma_sync(
    dtype: DType, d_head: int, rows: int, keys: int, n_warps: int
) -> FlashForwardKernelConfig:
    """The kernel of this shape with the optimisations that paid on an H200.

    Q stays in registers where that leaves enough of them: 4-7% at d 64, a loss beyond. Where O
    takes half of all registers, the peeled first tile of optimized_softmax costs more spills than
    it saves (causal, d 128: 325 against 338 TFLOP/s).
    """
    of_a_warp = rows // n_warps * d_head
    q_loads = 0 if of_a_warp <= 32 * 64 else 2
    peeled = of_a_warp < 32 * 128
    return FlashForwardKernelConfig(
        dtype, d_head, rows, keys, n_warps, True, True, True, q_loads, 2, 2, True, peeled
    )


def _wgmma(dtype: DType, d_head: int, shape: _Wgmma, masked: bool) -> HopperForwardKernelConfig:
    """The kernel of this shape as it did best on an H200 at d 128: with turns at the products
    where they are as short as a softmax, and under a mask the longest tiles first (607 against 585
    TFLOP/s causal, 637 against 687 without a mask)."""
    turns = shape.n_warpgroups > 1 and d_head <= 128
    producer, consumer = (32, 160) if shape.n_warpgroups == 3 else (24, 240)
    return HopperForwardKernelConfig(
        dtype,
        d_head,
        64 * shape.n_warpgroups,
        shape.B_c,
        shape.n_warpgroups,
        q_buffers=shape.q_buffers,
        producer_registers=producer,
        consumer_registers=consumer,
        overlap=shape.overlap,
        pingpong=PingPong.GEMM if turns else PingPong.NONE,
        schedule=Schedule.DYNAMIC,
        tile_order=TileOrder.LONGEST_FIRST if masked else TileOrder.BY_HEAD,
        rescale_threshold=8,
    )
