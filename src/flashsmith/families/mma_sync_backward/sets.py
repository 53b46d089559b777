"""The config set of the mma_sync_backward family, and its candidates if nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.device import DEFAULT_DEVICE, DeviceSpec
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync_backward.config import DqMode, FlashBackwardKernelConfig
from flashsmith.semantics.dtype import DType

# (B_r, B_c, n_warps, column_warps, stages) by d_head, in order of preference. The last tile of each
# d_head fits in 101,376 bytes of shared memory with either way to sum dq. For d 64 and 128 the
# tiles were the fastest of 57 and of 51 configs on an H200. On an A100 the first tile of d 128 fits
# with one stage only. The tiles of 32 and 96 are derived from these, and the tiles of 192 and 256
# were not compared.
_TILES: dict[int, tuple[tuple[int, int, int, int, int], ...]] = {
    32: ((32, 128, 4, 1, 2), (64, 64, 4, 2, 2)),
    64: ((32, 128, 4, 1, 2), (64, 64, 4, 2, 2)),
    96: ((64, 128, 8, 2, 2), (64, 64, 4, 2, 2)),
    128: ((64, 128, 8, 2, 2), (64, 128, 8, 2, 1), (64, 64, 4, 2, 2), (64, 64, 4, 2, 1)),
    192: ((64, 64, 8, 2, 1), (32, 32, 4, 2, 1)),
    256: ((64, 64, 8, 2, 1), (32, 32, 4, 2, 1)),
}


def get_backward_configs(
    dtypes: Sequence[DType] = tuple(DType), device: DeviceSpec = DEFAULT_DEVICE
) -> list[FlashBackwardKernelConfig]:
    """The set 'backward': a few kernels per dtype and d_head, each with atomics and in a
    deterministic version."""
    return [cfg for dtype in dtypes for d in _TILES for cfg in candidates(dtype, d, device)]


def candidates(dtype: DType, d_head: int, device: DeviceSpec) -> list[FlashBackwardKernelConfig]:
    """Kernels for d_head that are legal on a device, in order of preference."""
    made = (
        FlashBackwardKernelConfig(dtype, d_head, B_r, B_c, warps, columns, stages, dq)
        for B_r, B_c, warps, columns, stages in _TILES.get(d_head, ())
        for dq in (DqMode.ATOMICS, DqMode.TWO_KERNELS)
    )
    return [cfg for cfg in made if is_legal(cfg, device)]
