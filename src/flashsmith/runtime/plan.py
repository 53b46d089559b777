"""LaunchPlan: all that a launch consists of, the same for the GPU and the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashsmith.families import DType

Extent = tuple[int, int, int]


@dataclass(frozen=True)
class TensorMapSpec:
    """How a TMA tensor map is to be encoded, and where in the arguments it belongs (bytes)."""

    argument_offset: int
    address: int
    element_type: DType
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass(frozen=True)
class LaunchPlan:
    """One launch. ``kernel`` is its entry in the library's PTX; sizes are bytes.

    ``workspace_bytes`` is device memory the launch needs beside its tensors, ``workspace_zeroed``
    whether it must be zero at the start, ``workspace_offset`` where in the arguments its address
    belongs; ``tensor_maps`` is empty for kernels without TMA.
    """

    kernel: str
    grid: Extent
    cluster: Extent
    block: Extent
    smem_bytes: int
    workspace_bytes: int
    workspace_zeroed: bool
    argument_bytes: bytes
    tensor_maps: tuple[TensorMapSpec, ...]
    workspace_offset: int = 0


def plan_from_library(kernel: str, described: Any) -> LaunchPlan:
    """The plan that a library's ``plan`` function described, for PTX entry ``kernel``."""
    _, grid, cluster, block, smem, workspace, zeroed, arguments, maps, offset = described
    return LaunchPlan(
        kernel=kernel,
        grid=_extent(grid),
        cluster=_extent(cluster),
        block=_extent(block),
        smem_bytes=int(smem),
        workspace_bytes=int(workspace),
        workspace_zeroed=bool(zeroed),
        argument_bytes=bytes(arguments),
        tensor_maps=tuple(_tensor_map(*spec) for spec in maps),
        workspace_offset=int(offset),
    )


def _extent(values: Any) -> Extent:
    x, y, z = (int(value) for value in values)
    return x, y, z


def _tensor_map(
    offset: Any, address: Any, element_type: Any, sizes: Any, strides: Any, box: Any, swizzle: Any
) -> TensorMapSpec:
    return TensorMapSpec(
        argument_offset=int(offset),
        address=int(address),
        element_type=DType(int(element_type)),
        sizes=tuple(map(int, sizes)),
        strides_bytes=tuple(map(int, strides)),
        box=tuple(map(int, box)),
        swizzle_bytes=int(swizzle),
    )
