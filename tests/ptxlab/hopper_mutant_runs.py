"""Runs mutants of the Hopper probes and says who noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from hopper_probes import Probe, ptx_of, run_emulated
from mutants import Mutant, mutants_by
from mutants_hopper import hopper_operators

from ptxlab.checks import all_checks
from ptxlab.errors import EmulatorError
from ptxlab.interface import Observer

_BOUND = 1e-3


@dataclass(frozen=True)
class Noticed:
    """What gave a mutant away: kinds of findings, an error, wrong numbers."""

    kinds: frozenset[str]
    error: str
    wrong: bool

    @property
    def caught(self) -> bool:
        return bool(self.kinds or self.error or self.wrong)


def places(mutants: Iterable[Mutant]) -> dict[str, int]:
    """Number of each mutant among those of its operator, in text order."""
    seen: Counter[str] = Counter()
    found = {}
    for mutant in mutants:
        found[mutant.id] = seen[mutant.operator]
        seen[mutant.operator] += 1
    return found


@dataclass(frozen=True)
class HopperVictim:
    """A probe whose mutants are run."""

    probe: Probe

    @cached_property
    def mutants(self) -> tuple[Mutant, ...]:
        return tuple(mutants_by(hopper_operators(), ptx_of(self.probe), self.probe.entry))

    def run(self, mutant: Mutant | None, seed: int | None = None) -> Noticed:
        """One run of the probe, or of a mutant of it, with all checks."""
        ptx = ptx_of(self.probe)
        observers: list[Observer] = all_checks()
        error, wrong = "", False
        try:
            text = mutant.apply(ptx) if mutant else ptx
            run = run_emulated(self.probe, text, observers=observers, seed=seed)
            with np.errstate(all="ignore"):
                wrong = not self.probe.error(run.output, run.inputs) <= _BOUND
        except EmulatorError as stopped:
            error = str(stopped)
        kinds = frozenset(f.kind for observer in observers for f in observer.findings)
        return Noticed(kinds, error, wrong)
