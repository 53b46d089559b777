"""The config set of the mma_sync_backward family, and the candidate configs to use when there are
no measurements."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.device import DEFAULT_DEVICE, DeviceSpec
from flashsmith.families.head_dims import HeadDims, HeadPair, is_whole
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync_backward.config import DqMode, FlashBackwardKernelConfig
from flashsmith.semantics.dtype import DType

# For each d_head, its tiles (B_r, B_c, n_warps, column_warps, stages) in order of preference. For
# each d_head up to 256, the last tile fits in 101,376 bytes of shared memory with both ways of
# summing dq. On an H200, the tiles for d 64 were the fastest of 57 configs, and the tiles for d 128
# were the fastest of 51. On an A100, the first tile for d 128 fits only with one stage. The tiles
# for 32, 72, 80 and 96 are derived from these; the tiles for 192, 256 and 512 were not compared
# with others.
_TILES: dict[HeadDims, tuple[tuple[int, int, int, int, int], ...]] = {
    32: ((32, 128, 4, 1, 2), (64, 64, 4, 2, 2)),
    64: ((32, 128, 4, 1, 2), (64, 64, 4, 2, 2)),
    72: ((64, 128, 8, 2, 2), (64, 64, 4, 2, 2)),
    80: ((64, 128, 8, 2, 2), (64, 64, 4, 2, 2)),
    96: ((64, 128, 8, 2, 2), (64, 64, 4, 2, 2)),
    128: ((64, 128, 8, 2, 2), (64, 128, 8, 2, 1), (64, 64, 4, 2, 2), (64, 64, 4, 2, 1)),
    192: ((64, 64, 8, 2, 1), (32, 32, 4, 2, 1)),
    256: ((64, 64, 8, 2, 1), (32, 32, 4, 2, 1)),
    # Four warps share the columns of 16 keys. This tile needs a device with 232,448 bytes, and is
    # legal only with atomics, because a warp has no registers for 16 rows of dq.
    512: ((64, 32, 8, 4, 1),),
    # The tiles of a pair are those of its wider width.
    HeadPair(64, 128): ((64, 128, 8, 2, 2), (64, 64, 4, 2, 2), (64, 64, 4, 2, 1)),
    HeadPair(128, 64): ((64, 128, 8, 2, 2), (64, 64, 4, 2, 2), (64, 64, 4, 2, 1)),
    HeadPair(192, 128): ((64, 64, 8, 2, 1), (32, 32, 4, 2, 1)),
    HeadPair(256, 128): ((64, 64, 8, 2, 1), (32, 32, 4, 2, 1)),
    HeadPair(256, 256): ((64, 64, 8, 2, 1), (32, 32, 4, 2, 1)),
}


def get_backward_configs(
    dtypes: Sequence[DType] = tuple(DType), device: DeviceSpec = DEFAULT_DEVICE
) -> list[FlashBackwardKernelConfig]:
    """Returns the set 'backward': for each dtype and each d_head except 72 and 80, a few configs
    with atomics and a few deterministic ones."""
    d_heads = [d for d in _TILES if isinstance(d, int) and is_whole(d)]
    return [cfg for dtype in dtypes for d in d_heads for cfg in candidates(dtype, d, device)]


def candidates(
    dtype: DType, d_head: HeadDims, device: DeviceSpec
) -> list[FlashBackwardKernelConfig]:
    """Returns the legal candidates for d_head on a device, in order of preference."""
    d, d_v = d_head if isinstance(d_head, HeadPair) else (d_head, 0)
    made = (
        FlashBackwardKernelConfig(dtype, d, B_r, B_c, warps, columns, stages, dq, d_v)
        for B_r, B_c, warps, columns, stages in _TILES.get(d_head, ())
        for dq in (DqMode.ATOMICS, DqMode.TWO_KERNELS)
    )
    return [cfg for cfg in made if is_legal(cfg, device)]
