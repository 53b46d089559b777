"""Divergent branches in generated code, and the registers that pass between its coroutines.

The code of one fork and one join serves all branches of an entry: it hands all registers that pass
between coroutines to the objects here, which know those of each branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from ptxlab.interface import Site
from ptxlab.machine.divergence import UNDEFINED, Fork, Values
from ptxlab.machine.group import Group
from ptxlab.machine.wave import Wave

Pick = Callable[[Values], Values]


class CarriedRegisters:
    """The registers that are live at the beginning of some node, in one order. Generated code
    passes the values of all of them; those that it never wrote are undefined."""

    def __init__(self, registers: Iterable[str]) -> None:
        self.order = tuple(sorted(set(registers)))
        self._place_of = {register: place for place, register in enumerate(self.order)}
        self._places: dict[tuple[str, ...], tuple[int, ...]] = {}

    def places(self, registers: tuple[str, ...]) -> tuple[int, ...]:
        """Returns where in the order these registers are."""
        found = self._places.get(registers)
        if found is None:
            found = self._places[registers] = tuple(map(self._place_of.__getitem__, registers))
        return found

    def pick(self, registers: tuple[str, ...]) -> Pick:
        """Returns a function that takes the values of all and returns those of ``registers``."""
        places = self.places(registers)
        if len(places) > 1:
            return itemgetter(*places)
        return lambda carried: tuple(carried[place] for place in places)

    def undefined(self, registers: tuple[str, ...]) -> Pick:
        """Returns a function like that of pick(), for which no register has a value."""
        nothing = (UNDEFINED,) * len(registers)
        return lambda carried: nothing

    def spread(self, registers: tuple[str, ...]) -> Callable[[Values], list[Any]]:
        """Returns the reverse of pick(): from the values of ``registers`` to those of all, where
        the others are undefined."""
        places, count = self.places(registers), len(self.order)

        def all_of(values: Values) -> list[Any]:
            carried: list[Any] = [UNDEFINED] * count
            for place, value in zip(places, values, strict=True):
                carried[place] = value
            return carried

        return all_of


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch at which a group may fork: its two successors with the registers that are live
    there, none at the join, and the join ``merge``."""

    site: Site | None
    target: int
    of_target: Pick
    following: int
    of_following: Pick
    merge: int
    #: The registers that are live at the join, from before the fork.
    before: Pick
    #: The registers that the fork's parts write, as positions among those that are live at the
    #: join, whose places in the order of all are ``places``.
    written: tuple[int, ...]
    places: tuple[int, ...]
    #: The node at which the code goes on after the join.
    then: int

    def fork(self, wave: Wave, group: Group, taken: np.ndarray, carried: Values) -> Fork:
        """Forks a group: the threads in ``taken`` go to ``target``, the others to ``following``."""
        to_target, to_following = self.of_target(carried), self.of_following(carried)
        ends = self.target, to_target, self.following, to_following
        return wave.fork(group, self.site, taken, *ends, self.merge)

    def join(self, fork: Fork, carried: Values) -> list[Any]:
        """Returns the values of all registers after the join."""
        before = self.before(carried)
        merged = fork.join(self.written, tuple(before[position] for position in self.written))
        after = list(carried)
        for position, value in zip(self.written, merged, strict=True):
            after[self.places[position]] = value
        return after
