"""The shape of a wave of CTAs, and the special registers that depend on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.interface import Clusters

WARP = 32
WARPGROUP = 4 * WARP
u4 = np.uint32

#: In an address of another CTA's shared memory in the cluster, the bits from this one upwards hold
#: the rank of that CTA plus 1.
RANK_SHIFT = 24


@dataclass(eq=False)
class Geometry:
    """The shape of a wave: its CTAs and the sizes of their memories."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    first_cta: int
    ctas: int
    dynamic_shared: int
    #: The distance in bytes between the shared memories of consecutive CTAs, and between the local
    #: memories of consecutive threads. The wave sets both.
    shared_pitch: int = 0
    local_pitch: int = 0
    threads_per_cta: int = field(init=False)
    threads: int = field(init=False)
    padded_threads: int = field(init=False)
    first_thread: int = field(init=False)
    clusters: Clusters = field(init=False)

    def __post_init__(self) -> None:
        x, y, z = self.block
        self.threads_per_cta = x * y * z
        self.threads = self.threads_per_cta * self.ctas
        self.padded_threads = self.threads + WARP
        self.first_thread = self.first_cta * self.threads_per_cta
        self.clusters = Clusters(self.grid, self.cluster)

    def warp(self, index: np.ndarray) -> np.ndarray:
        """Returns the warp of each thread; both are numbered within the wave."""
        if self.threads_per_cta % WARP == 0:
            return index // WARP
        per_cta = -(-self.threads_per_cta // WARP)
        cta, tid = np.divmod(index, self.threads_per_cta)
        return cta * per_cta + tid // WARP

    def existing_lanes(self, index: np.ndarray) -> np.ndarray:
        """Returns, for each thread, the mask of the lanes that exist in its warp.

        Only the last warp of a CTA may be partial.
        """
        tid = index % self.threads_per_cta
        count = np.minimum(self.threads_per_cta - tid // WARP * WARP, WARP)
        return ((np.int64(1) << count) - 1).astype(u4)

    def owners(self, ctas: np.ndarray, address: int) -> tuple[int, np.ndarray]:
        """Resolves an address in the shared::cluster window, used by threads of the CTAs ``ctas``
        of the wave.

        Returns the address within the memory of the owning CTA, and for each thread the owning CTA
        within the wave.
        """
        rank = (address >> RANK_SHIFT) - 1
        if rank < 0:
            return address, ctas
        if rank >= self.clusters.size:
            raise EmulatorError(
                f"shared address {address:#x} is of no CTA of a cluster of {self.clusters.size}"
            )
        peers = self.clusters.peer(ctas + self.first_cta, rank) - self.first_cta
        return address & ((1 << RANK_SHIFT) - 1), peers

    def special(self, name: str, index: np.ndarray) -> Any:
        """Returns the value of a special register for wave threads ``index``."""
        base, _, axis = name[1:].partition(".")
        number = "xyz".find(axis) if axis else -1
        if base in _SHAPES:
            return u4(_SHAPES[base](self)[number])
        if base == "tid":
            return _coordinate(index % self.threads_per_cta, self.block, number)
        cta = index // self.threads_per_cta + self.first_cta
        if base == "ctaid":
            return _coordinate(cta, self.grid, number)
        if base in ("clusterid", "cluster_ctaid"):
            place = _coordinate(cta, self.grid, number)
            size = u4(self.cluster[number])
            return place // size if base == "clusterid" else place % size
        if base == "cluster_ctarank":
            return u4(0) if self.clusters.size == 1 else self.clusters.rank(cta).astype(u4)
        if base in _SCALARS:
            return _SCALARS[base](self)
        lane = (index % self.threads_per_cta) % WARP
        if base == "laneid":
            return lane.astype(u4)
        if base == "warpid":
            return ((index % self.threads_per_cta) // WARP).astype(u4)
        if base == "smid":
            return cta.astype(u4)
        if base.startswith("lanemask_"):
            return _LANE_MASKS[base[-2:]](lane).astype(u4)
        raise EmulatorError(f"special register {name} is not supported")


_SHAPES: dict[str, Callable[[Geometry], tuple[int, int, int]]] = {
    "ntid": lambda g: g.block,
    "nctaid": lambda g: g.grid,
    "cluster_nctaid": lambda g: g.cluster,
    "nclusterid": lambda g: (
        g.grid[0] // g.cluster[0],
        g.grid[1] // g.cluster[1],
        g.grid[2] // g.cluster[2],
    ),
}
_SCALARS: dict[str, Callable[[Geometry], Any]] = {
    "cluster_nctarank": lambda g: u4(g.cluster[0] * g.cluster[1] * g.cluster[2]),
    "is_explicit_cluster": lambda g: np.bool_(g.cluster != (1, 1, 1)),
    "nwarpid": lambda g: u4(-(-g.threads_per_cta // WARP)),
    "nsmid": lambda g: u4(g.grid[0] * g.grid[1] * g.grid[2]),
    "gridid": lambda g: np.uint64(0),
    "dynamic_smem_size": lambda g: u4(g.dynamic_shared),
    "total_smem_size": lambda g: u4(g.shared_pitch),
    # Clocks always read 0, because a kernel must not depend on them.
    "clock": lambda g: u4(0),
    "clock64": lambda g: np.uint64(0),
    "globaltimer": lambda g: np.uint64(0),
}
_ONE = np.int64(1)
_ALL = np.int64(0xFFFFFFFF)
_LANE_MASKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "eq": lambda lane: _ONE << lane,
    "lt": lambda lane: (_ONE << lane) - 1,
    "le": lambda lane: (_ONE << (lane + 1)) - 1,
    "gt": lambda lane: _ALL & ~((_ONE << (lane + 1)) - 1),
    "ge": lambda lane: _ALL & ~((_ONE << lane) - 1),
}


def _coordinate(flat: np.ndarray, shape: tuple[int, int, int], axis: int) -> Any:
    if shape[axis] == 1:
        return u4(0)
    before = 1
    for extent in shape[:axis]:
        before *= extent
    value = (flat // before) % shape[axis]
    if value[0] == value[-1] and (value == value[0]).all():
        return u4(value[0])
    return value.astype(u4)
