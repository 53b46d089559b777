"""LaunchPlan: the launches of a call; the GPU and the emulator use the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from flashsmith.families import DType

Extent = tuple[int, int, int]


@dataclass(frozen=True)
class TensorMapSpec:
    """How to encode a TMA tensor map, and its byte offset in the kernel's arguments.

    ``address`` is the address of a tensor. If ``workspace``, an index into the plan's workspaces,
    is given, ``address`` is an offset into that workspace instead.
    """

    argument_offset: int
    address: int
    element_type: DType
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int
    workspace: int | None = None


class InitialContents(IntEnum):
    """The contents of a workspace when the first launch of a call begins (csrc/host/plan.h)."""

    UNDEFINED = 0
    ZEROED = 1  # at every call
    KEPT_ZERO = 2  # earlier launches have left it zeroed


class Workspace(NamedTuple):
    """Memory that a call needs in addition to its tensors, aligned to 256 bytes."""

    name: str
    nbytes: int
    contents: InitialContents


class WorkspaceAddress(NamedTuple):
    """Where to write a workspace's address in a kernel's arguments; offsets are in bytes.

    ``workspace`` is an index into the plan's workspaces.
    """

    argument_offset: int
    workspace: int
    byte_offset: int


@dataclass(frozen=True)
class Launch:
    """One launch of a plan. ``kernel`` is its entry in the library's PTX; sizes are in bytes.

    ``argument_bytes`` contain the tensors' addresses; the workspaces' addresses are written at the
    launch. ``is_main`` marks the config's main kernel. A launch with an empty grid is skipped. A
    ``programmatic`` launch may begin before the previous launch has finished.
    """

    kernel: str
    is_main: bool
    grid: Extent
    cluster: Extent
    block: Extent
    smem_bytes: int
    argument_bytes: bytes
    workspace_addresses: tuple[WorkspaceAddress, ...] = ()
    tensor_maps: tuple[TensorMapSpec, ...] = ()
    programmatic: bool = False


@dataclass(frozen=True)
class LaunchPlan:
    """The launches of a call, in order, and the workspaces that they share.

    The plan's own attributes (kernel, grid and so on) are those of the main kernel's launch or, if
    there is no main kernel, of the first launch.
    """

    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()

    @property
    def main(self) -> Launch:
        """The launch of the config's main kernel."""
        return next((one for one in self.launches if one.is_main), self.launches[0])

    @property
    def launched(self) -> tuple[Launch, ...]:
        """The launches whose grid is not empty."""
        return tuple(one for one in self.launches if one.grid[0])

    @property
    def kernel(self) -> str:
        """The main kernel's entry in the library's PTX."""
        return self.main.kernel

    @property
    def grid(self) -> Extent:
        """The main launch's grid, in CTAs."""
        return self.main.grid

    @property
    def cluster(self) -> Extent:
        """The main launch's cluster, in CTAs."""
        return self.main.cluster

    @property
    def block(self) -> Extent:
        """The main launch's block, in threads."""
        return self.main.block

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA of the main launch."""
        return self.main.smem_bytes

    @property
    def argument_bytes(self) -> bytes:
        """The main kernel's arguments, still without the workspaces' addresses."""
        return self.main.argument_bytes

    @property
    def tensor_maps(self) -> tuple[TensorMapSpec, ...]:
        """The main launch's tensor maps; empty for kernels without TMA."""
        return self.main.tensor_maps

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the call needs in addition to its tensors."""
        return sum(workspace.nbytes for workspace in self.workspaces)

    @property
    def workspace_zeroed(self) -> bool:
        """Whether a workspace must be zero at the start."""
        return any(workspace.contents != InitialContents.UNDEFINED for workspace in self.workspaces)

    @property
    def workspace_offset(self) -> int:
        """The offset of the first workspace's address in the main kernel's arguments; 0 if these
        have no workspace's address."""
        addresses = self.main.workspace_addresses
        return addresses[0].argument_offset if addresses else 0


def plan_from_library(kernels: Sequence[str], described: Any) -> LaunchPlan:
    """Returns the LaunchPlan for the description that a library's ``plan`` function returned;
    ``kernels`` are the PTX entries of the config's kernels, the main kernel's first."""
    launches, workspaces = described
    return LaunchPlan(
        launches=tuple(_launch(kernels, *launch) for launch in launches),
        workspaces=tuple(
            Workspace(str(name), int(nbytes), InitialContents(int(contents)))
            for name, nbytes, contents in workspaces
        ),
    )


def _launch(
    kernels: Sequence[str],
    kernel: Any,
    grid: Any,
    cluster: Any,
    block: Any,
    smem_bytes: Any,
    arguments: Any,
    addresses: Any,
    tensor_maps: Any,
    programmatic: Any,
) -> Launch:
    return Launch(
        kernel=kernels[int(kernel)],
        is_main=int(kernel) == 0,
        grid=_extent(grid),
        cluster=_extent(cluster),
        block=_extent(block),
        smem_bytes=int(smem_bytes),
        argument_bytes=bytes(arguments),
        workspace_addresses=tuple(WorkspaceAddress(*map(int, one)) for one in addresses),
        tensor_maps=tuple(_tensor_map(*spec) for spec in tensor_maps),
        programmatic=bool(programmatic),
    )


def _extent(values: Any) -> Extent:
    x, y, z = (int(value) for value in values)
    return x, y, z


def _tensor_map(
    offset: Any,
    address: Any,
    element_type: Any,
    sizes: Any,
    strides: Any,
    box: Any,
    swizzle: Any,
    workspace: Any,
) -> TensorMapSpec:
    return TensorMapSpec(
        argument_offset=int(offset),
        address=int(address),
        element_type=DType(int(element_type)),
        sizes=tuple(map(int, sizes)),
        strides_bytes=tuple(map(int, strides)),
        box=tuple(map(int, box)),
        swizzle_bytes=int(swizzle),
        workspace=None if int(workspace) < 0 else int(workspace),
    )
