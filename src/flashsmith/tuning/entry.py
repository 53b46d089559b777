"""Who enters a race: the configs of a space, except what cannot be tried on the device."""

from __future__ import annotations

from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.tuning.candidate import Candidate
from flashsmith.tuning.cull import cull_unbuilt
from flashsmith.tuning.halving import DEFAULT_HALVING, Halving
from flashsmith.tuning.race import Race
from flashsmith.tuning.runner import Build
from flashsmith.tuning.space import search_space


def make_race(
    problem: Problem,
    device: DeviceSpec,
    key: str | None = None,
    halving: Halving = DEFAULT_HALVING,
    mentor: Race | None = None,
    refinements: int = 0,
) -> Race:
    """The race between the configs of a space (see search_space) for a problem; those that cannot
    be tried on the device are culled. `mentor` is the race for a shorter problem like it, if there
    is one, and `refinements` how many times neighbours of the best join.

    Raises what ``search_space`` raises.
    """
    configs = search_space(problem, device, key)
    candidates = [new_candidate(problem, cfg, device) for cfg in configs]
    return Race(problem, candidates, halving, mentor, refinements)


def new_candidate(problem: Problem, cfg: KernelConfig, device: DeviceSpec) -> Candidate:
    """A candidate, culled if it need not be compiled."""
    candidate = Candidate(Build.of(problem, cfg))
    reason = cull_unbuilt(cfg, device)
    if reason is not None:
        candidate.drop("culled", reason)
    return candidate
