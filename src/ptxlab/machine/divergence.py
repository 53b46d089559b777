"""Divergence: the parts of a group that run separately and later join again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.interface import Site
from ptxlab.machine.group import Group
from ptxlab.machine.warpgroup_mma import InFlight


class Undefined:
    """The value of a register that was never written."""

    def __repr__(self) -> str:
        return "undefined"


UNDEFINED = Undefined()


Values = tuple[Any, ...]


@dataclass(eq=False)
class Part:
    """Some of the threads of a forked group; ``positions`` are their indices in the group.

    Until the part has run, ``values`` has the registers that are live at the part's start. When the
    part is ``finished``, ``values`` has the registers that are live at the join. If ``runs`` is
    false, the part has nothing to execute before the join: it is finished from the start, with its
    values from before the fork.
    """

    group: Group
    positions: np.ndarray
    start: int
    values: Values | None
    runs: bool = True
    finished: bool = False


@dataclass(eq=False)
class Fork:
    """A group that is split into parts, which join again at the beginning of node ``stop``.

    ``site`` is the branch that split it.
    """

    group: Group
    stop: int
    site: Site | None
    parts: list[Part] = field(default_factory=list)

    def add(
        self,
        part: Group,
        mask: np.ndarray,
        start: int,
        values: Values,
        *,
        runs: bool = True,
    ) -> None:
        """Adds a part to the fork.

        ``values`` are the registers of the whole group that are live at the part's start.
        """
        positions = np.flatnonzero(mask)
        sliced = slice_values(values, positions) if runs else None
        self.parts.append(Part(part, positions, start, sliced, runs, finished=not runs))

    def join(self, register_positions: Sequence[int], current: Values) -> Values:
        """Merges the registers of the parts.

        ``register_positions`` are their indices in the order of the join's live registers.

        ``current`` are their values before the fork.
        """
        self.group.absorb([part.group for part in self.parts])
        merged = []
        for position, old in zip(register_positions, current, strict=True):
            pieces = [
                slice_values((old,), part.positions)[0]
                if part.values is None
                else part.values[position]
                for part in self.parts
            ]
            merged.append(self._merge(pieces))
        return tuple(merged)

    def _merge(self, pieces: list[Any]) -> Any:
        defined = [piece for piece in pieces if piece is not UNDEFINED]
        if not defined:
            return UNDEFINED
        first = defined[0]
        if isinstance(first, InFlight):
            if all(p is first for p in defined):
                return first
            if all(isinstance(p, InFlight) for p in defined):
                raise EmulatorError(
                    f"threads that parted at {self.site} join with different wgmma in flight; use "
                    "wait_group before they join"
                )
        complete = len(defined) == len(pieces)
        if complete and all(p.ndim == 0 and p.tobytes() == first.tobytes() for p in pieces):
            return first
        merged = np.empty(self.group.n, first.dtype)
        if not complete:
            merged.view(np.uint8)[:] = 0xFF if first.dtype != np.bool_ else 0
        for part, piece in zip(self.parts, pieces, strict=True):
            if piece is not UNDEFINED:
                merged[part.positions] = piece
        return merged

    # Release of threads from the join

    def free(self) -> np.ndarray:
        """Returns the mask of the threads at the join whose whole warp has reached the join."""
        at_join = np.zeros(self.group.n, np.bool_)
        for part in self.parts:
            at_join[part.positions] = part.finished
        return at_join & ~np.isin(self.group.warp, self.group.warp[~at_join])

    def release(self, mask: np.ndarray, current: Values) -> tuple[Group, Values, Fork]:
        """Releases the threads in ``mask``, all of which are at the join.

        Returns (their group, their registers, the remaining fork). ``current`` are the registers
        that are live at the join, with their values from before the fork.
        """
        go_group, rest_group = self.group.split(mask)
        go = Fork(go_group, self.stop, self.site)
        rest = Fork(rest_group, self.stop, self.site)
        go_place, rest_position = np.cumsum(mask) - 1, np.cumsum(~mask) - 1
        for part in self.parts:
            leaves = mask[part.positions]
            if not leaves.any():
                part.positions = rest_position[part.positions]
                rest.parts.append(part)
                continue
            values = part.values
            if values is None:
                values = slice_values(current, part.positions)
            both = zip((go, rest), (leaves, ~leaves), part.group.split(leaves), strict=True)
            for fork, chosen, group in both:
                if group.n:
                    numbers = go_place if fork is go else rest_position
                    sliced = slice_values(values, np.flatnonzero(chosen))
                    positions = numbers[part.positions[chosen]]
                    fork.parts.append(Part(group, positions, part.start, sliced, finished=True))
        return go_group, go.join(range(len(current)), (UNDEFINED,) * len(current)), rest


@dataclass(eq=False)
class Split:
    """A group that is split permanently because of a wait: some threads continue, and the others
    keep waiting.

    ``go`` and ``stay`` are pairs of a node and the registers of the whole group that are live
    there. ``wait`` is the wait of the other threads before they run their node; None if the node
    itself waits.
    """

    group: Group
    passed: np.ndarray
    go: tuple[int, Values]
    stay: tuple[int, Values]
    wait: Any = None


def slice_values(values: tuple[Any, ...], positions: np.ndarray) -> tuple[Any, ...]:
    """Returns the registers of the threads at ``positions``. Uniform registers stay scalars."""
    return tuple([v[positions] if isinstance(v, np.ndarray) else v for v in values])
