"""What the cost model chooses among where nothing was measured: few configs, each a sound one."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flashsmith.families import (
    DeviceSpec,
    DType,
    FlashForwardKernelConfig,
    HopperForwardKernelConfig,
    KernelConfig,
    is_legal,
)
from flashsmith.families.wgmma import TileOrder, get_hopper_configs
from flashsmith.families.wgmma.rules import DEFAULT_SECTION_MIB

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
    """Those of the wgmma family that the package ships, none on a device or for a d_head that it
    does not serve; first those of the order that suits, then the shapes of the others in it. Under
    a mask the longest tiles begin: 607 against 585 TFLOP/s causal, and 637 against 687 without a
    mask (d 128 on an H200)."""
    order = TileOrder.LONGEST_FIRST if masked else TileOrder.BY_HEAD
    shipped = [config for config in get_hopper_configs((dtype,)) if config.d_head == d_head]
    ordered = sorted(shipped, key=lambda config: config.tile_order != order)
    found = (
        config
        if config.tile_order == order
        else replace(config, tile_order=order, section_mib=DEFAULT_SECTION_MIB)
        for config in ordered
    )
    return tuple(dict.fromkeys(config for config in found if is_legal(config, device)))


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
