"""Which kernel serves a problem on a device, and building it ahead of its first use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from flashsmith.builder import KernelLibrary, Progress, library_for
from flashsmith.configs import (
    DeviceSpec,
    DType,
    FlashForwardKernelConfig,
    Problem,
    compiled_d_head,
    device_spec,
    is_legal,
)
from flashsmith.errors import ArgumentError

_LARGE_ROWS, _SMALL_ROWS = 128, 64
_KEYS, _FEW_KEYS = 64, 32


@lru_cache(maxsize=1024)
def choose_config(problem: Problem, device: DeviceSpec) -> FlashForwardKernelConfig:
    """A kernel for ``problem`` on ``device``: the first in order of preference that fits there.

    Large blocks of rows reuse each K and V tile more often, but only where there are enough of them
    to give every SM one. The order and the knobs are those that did best on an H200.

    Raises ArgumentError when no kernel is made for the problem's d.
    """
    try:
        d_head = compiled_d_head(problem.d)
    except ArgumentError as error:
        raise ArgumentError(f"q: {error}") from None
    for config in _candidates(problem, d_head, device):
        if is_legal(config, device):
            return config
    raise ArgumentError(
        f"device: {device.name} allows a CTA {device.max_smem_per_block} bytes of shared memory, "
        f"too few for every kernel of d_head {d_head}"
    )


def build_for(
    problem: Problem,
    *,
    arch: int = 80,
    device: DeviceSpec | None = None,
    progress: Progress | None = None,
) -> list[KernelLibrary]:
    """The libraries with the kernels that attention() uses for ``problem`` on ``device``, or the
    first known GPU of ``arch`` (80 is sm_80), built unless they are cached.

    Raises what ``choose_config`` and ``flashsmith.builder.build`` raise.
    """
    device = device or device_spec(arch)
    config = choose_config(problem, device)
    semantics = problem.required_semantics(config)
    return [library_for([config], arch=device.arch, semantics=semantics, progress=progress)]


def _candidates(
    problem: Problem, d_head: int, device: DeviceSpec
) -> Iterator[FlashForwardKernelConfig]:
    keys = _FEW_KEYS if problem.seq_k <= _FEW_KEYS else _KEYS
    large_blocks = problem.batch * problem.heads_q * -(-problem.seq_q // _LARGE_ROWS)
    if large_blocks >= device.sm_count and problem.seq_q > _SMALL_ROWS:
        # Above 128 columns, O of 32 rows a warp would take all registers there are.
        yield _config(problem.dtype, d_head, _LARGE_ROWS, keys, 8 if d_head > 128 else 4)
    yield _config(problem.dtype, d_head, _SMALL_ROWS, keys, 4)
    yield _config(problem.dtype, d_head, _SMALL_ROWS, _FEW_KEYS, 4)


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
