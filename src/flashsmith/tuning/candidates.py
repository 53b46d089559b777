"""What the cost model chooses among where nothing was measured: few configs, each a sound one."""

from __future__ import annotations

from functools import lru_cache

from flashsmith.configs import DeviceSpec, DType, FlashForwardKernelConfig, is_legal

# B_r, B_c, n_warps. An earlier one is preferred, so that a small gain on paper does not make
# another kernel, which may have to be built first.
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


@lru_cache(maxsize=256)
def candidates(
    dtype: DType, d_head: int, device: DeviceSpec
) -> tuple[FlashForwardKernelConfig, ...]:
    """The configs worth weighing for a head dimension on a device, in order of preference."""
    configs = (_config(dtype, d_head, *shape) for shape in SHAPES)
    return tuple(config for config in configs if is_legal(config, device))


def _config(
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
