"""Divergence: parts of a group that run separately, and how they reconverge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.machine.group import Group
from ptxlab.machine.warpgroup_mma import InFlight


class Undefined:
    """Content of a register that nothing has written."""

    def __repr__(self) -> str:
        return "undefined"


UNDEFINED = Undefined()


Values = tuple[Any, ...]


@dataclass(eq=False)
class Part:
    """Threads of a forked group: ``positions`` are theirs within it.

    ``values`` are live registers: where the part starts while it runs, where all join once it is
    ``finished``. A part that never ``runs`` has no work until the join: it is finished from the
    start, and its values are the registers from before the fork.
    """

    group: Group
    positions: np.ndarray
    start: int
    values: Values | None
    runs: bool = True
    finished: bool = False


@dataclass(eq=False)
class Fork:
    """A group taken apart; its parts meet where node ``stop`` begins."""

    group: Group
    stop: int
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
        """One part, with the whole group's registers that are live where it starts."""
        positions = np.flatnonzero(mask)
        sliced = slice_values(values, positions) if runs else None
        self.parts.append(Part(part, positions, start, sliced, runs, finished=not runs))

    def join(self, register_positions: Sequence[int], current: Values) -> Values:
        """Merge registers, given by position in the join's live-in order; ``current``: old ones."""
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
                    "threads meet whose wgmma in flight are different ones; wait_group before"
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

    # Giving up the join for some

    def free(self) -> np.ndarray:
        """Threads that stand at the join and share no warp with any that do not."""
        at_join = np.zeros(self.group.n, np.bool_)
        for part in self.parts:
            at_join[part.positions] = part.finished
        return at_join & ~np.isin(self.group.warp, self.group.warp[~at_join])

    def release(self, mask: np.ndarray, current: Values) -> tuple[Group, Values, Fork]:
        """Let the threads in ``mask`` (all at the join) go: (group, registers, the fork left over).

        ``current`` are the registers live at the join as they were before the fork.
        """
        go_group, rest_group = self.group.split(mask)
        go, rest = Fork(go_group, self.stop), Fork(rest_group, self.stop)
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
    """A group that a wait splits permanently: some threads go on, the others keep waiting.

    Each side is (node, registers live there for the whole group); ``wait`` is what the others wait
    for before they start, None when their node waits by itself.
    """

    group: Group
    passed: np.ndarray
    go: tuple[int, Values]
    stay: tuple[int, Values]
    wait: Any = None


def slice_values(values: tuple[Any, ...], positions: np.ndarray) -> tuple[Any, ...]:
    """Registers of the threads at ``positions``; uniform ones stay scalars."""
    return tuple(v[positions] if isinstance(v, np.ndarray) else v for v in values)
