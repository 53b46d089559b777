"""The set 'space': what a tuner searches. Legal, and each for a reason worth a measurement.

Shapes are tried under every schedule that suits them; what is known to lose is left out, so that a
head dimension and dtype has tens of configs and not the hundred thousands that are legal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flashsmith.configs.config import FlashForwardKernelConfig
from flashsmith.configs.device_spec import DEFAULT_DEVICE, DeviceSpec
from flashsmith.configs.dtype import DType
from flashsmith.configs.rules import SUPPORTED_D_HEADS, is_legal


@dataclass(frozen=True)
class _Shape:
    """Tile sizes, and for how many CTAs per SM the registers are worth capping."""

    B_r: int
    B_c: int
    n_warps: int
    ctas: tuple[int, ...] = (0,)


# 32 rows a warp read shared memory half as often as 16 and are the choice wherever O and S leave
# registers for it; with two such warps a scheduler the register file is full.
_SHAPES: dict[int, tuple[_Shape, ...]] = {
    64: (
        _Shape(128, 64, 4, (0, 3)),
        _Shape(128, 32, 4, (0, 3, 4)),
        _Shape(128, 128, 4),
        _Shape(64, 64, 4, (0, 4)),
        _Shape(64, 64, 2),
        _Shape(256, 64, 8),
        _Shape(192, 64, 6, (0, 2)),
    ),
    128: (
        _Shape(128, 64, 4),
        _Shape(128, 32, 4),
        _Shape(64, 64, 4, (0, 3)),
        _Shape(64, 64, 2),
        _Shape(64, 32, 4, (0, 4)),
        _Shape(128, 64, 8, (0, 2)),
        _Shape(256, 64, 8),
        _Shape(256, 32, 8),
        _Shape(192, 64, 6),
    ),
    256: (
        _Shape(64, 32, 4),
        _Shape(64, 64, 4),
        _Shape(128, 32, 8),
        _Shape(128, 64, 8),
        _Shape(192, 32, 12),
    ),
}

# Schedules and softmaxes, apart from tiles: kv_stages, ping_pong, lazy_rescale, optimized_softmax,
# mma_double_buffer_loads.
_SCHEDULES = (
    (0, False, False, False, True),
    (0, False, False, True, True),
    (0, False, True, True, True),
    (2, False, True, True, True),
    (2, False, True, True, False),
    (3, False, True, True, True),
    (3, True, True, True, False),
    (3, True, True, True, True),
)


def get_search_space_configs(
    d_head: int | None = None,
    dtypes: Sequence[DType] = (DType.FP16, DType.BF16),
    device: DeviceSpec | None = None,
) -> list[FlashForwardKernelConfig]:
    """The configs worth timing on `device` (None: the A100), sorted.

    Args:
        d_head: of the configs; None means every supported one.
        dtypes: element types, each with the same configs.
    """
    device = device or DEFAULT_DEVICE
    d_heads = SUPPORTED_D_HEADS if d_head is None else (d_head,)
    return sorted(
        {
            replace(cfg, dtype=dtype)
            for each in d_heads
            for cfg in _candidates(each)
            if is_legal(cfg, device)
            for dtype in dtypes
        }
    )


def _candidates(d_head: int) -> Iterator[FlashForwardKernelConfig]:
    shapes = _SHAPES[min((known for known in _SHAPES if known >= d_head), default=256)]
    for shape in shapes:
        # Q stays in registers where they have room for it beside O and S.
        keep_q = shape.B_r * d_head <= 16 * 128 * shape.n_warps
        for stages, ping_pong, lazy, folded, buffered in _SCHEDULES:
            for ctas in shape.ctas:
                yield FlashForwardKernelConfig(
                    dtype=DType.FP16,
                    d_head=d_head,
                    B_r=shape.B_r,
                    B_c=shape.B_c,
                    n_warps=shape.n_warps,
                    async_copy=True,
                    eager_load_blocks=True,
                    swizzled=True,
                    Q_mma_load_K_tiles=0 if keep_q else 2,
                    K_mma_load_K_tiles=2,
                    V_mma_load_K_tiles=2,
                    mma_double_buffer_loads=buffered,
                    optimized_softmax=folded,
                    kv_stages=stages,
                    lazy_rescale=lazy,
                    ping_pong=ping_pong,
                    min_ctas_per_sm=ctas,
                    trim_masks=lazy,
                )
