"""The sets of the wgmma_backward family: what is chosen where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from flashsmith.families.device import DeviceSpec, device_spec
from flashsmith.families.legality import is_legal
from flashsmith.families.wgmma_backward.config import (
    D_HEADS,
    WARPGROUP_ROWS,
    WIDEST_WHOLE,
    HopperBackwardKernelConfig,
    StepOrder,
)
from flashsmith.operations.dtype import DType

# (B_r, n_warpgroups, ds_stages, order) by d_head, in order of preference; heads wider than 128 have
# split roles.
_TILES: dict[int, tuple[tuple[int, int, int, StepOrder], ...]] = {
    64: (
        (64, 2, 2, StepOrder.LATE_DQ),
        (128, 2, 2, StepOrder.SCORES_TOGETHER),
        (64, 3, 2, StepOrder.SCORES_TOGETHER),
    ),
    96: ((64, 2, 2, StepOrder.LATE_DQ), (64, 2, 1, StepOrder.DV_FIRST)),
    128: ((64, 2, 2, StepOrder.LATE_DQ), (64, 2, 1, StepOrder.DV_FIRST)),
    192: ((64, 2, 2, StepOrder.DV_FIRST),),
    256: ((64, 2, 2, StepOrder.DV_FIRST),),
}
# Registers of a producer and a consumer thread, by consumer warpgroups.
_REGISTERS = {2: (24, 240), 3: (32, 160)}


def get_hopper_backward_configs(
    dtypes: Sequence[DType] = tuple(DType),
) -> list[HopperBackwardKernelConfig]:
    """The set 'hopper-backward': a few kernels per dtype and d_head."""
    device = device_spec("H200")
    return [cfg for dtype, d in product(dtypes, D_HEADS) for cfg in candidates(dtype, d, device)]


def candidates(dtype: DType, d_head: int, device: DeviceSpec) -> list[HopperBackwardKernelConfig]:
    """Kernels for d_head that are legal on a device, in order of preference."""
    made = (
        HopperBackwardKernelConfig(
            dtype,
            d_head,
            B_r,
            WARPGROUP_ROWS * (warpgroups if d_head <= WIDEST_WHOLE else 1),
            warpgroups,
            ds_stages=ds_stages,
            producer_registers=_REGISTERS[warpgroups][0],
            consumer_registers=_REGISTERS[warpgroups][1],
            order=order,
            split_roles=d_head > WIDEST_WHOLE,
        )
        for B_r, warpgroups, ds_stages, order in _TILES.get(d_head, ())
    )
    return [cfg for cfg in made if is_legal(cfg, device)]
