"""Mutants of the Hopper kernels: all must be caught, but for those that provably change nothing.

The default run takes every mutant of what synchronises and a few of each other operator;
``-m full`` takes all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hopper_mutant_runs import HopperVictim, places
from hopper_probes import probes
from mutants import Mutant
from mutants_hopper import hopper_operators

VICTIMS = {
    probe.name: HopperVictim(probe)
    for probe in probes()
    if probe.name
    in (
        "fragments_0",
        "fragments_64",
        "ring_5",
        "multicast",
        "drained",
        "turns",
        "sums",
        "box_sums",
    )
}
SYNCHRONISING = frozenset(
    ("drop fence", "drop commit", "drop wait", "weaken wait", "flip parity", "do not wait")
) | frozenset(
    (
        "wait for reads",
        "drop arrival",
        "expect less",
        "expect more",
        "drop barrier",
        "load for one CTA",
    )
)
SAMPLED_PER_OPERATOR = 1


@dataclass(frozen=True)
class Equivalent:
    """Mutants that compute the same in every execution, and why."""

    operator: str
    where: Callable[[HopperVictim, Mutant, int], bool]
    proof: str


def _count(victim: HopperVictim, mutant: Mutant) -> int:
    """Mutants of the same operator."""
    return sum(other.operator == mutant.operator for other in victim.mutants)


def _first_step(victim: HopperVictim, place: int) -> bool:
    """Whether a wgmma's number among those of its kernel is a first step of k."""
    return place % 4 == 0


EQUIVALENT = (
    Equivalent(
        "drop commit",
        lambda victim, mutant, place: (
            victim.probe.name in ("sums", "box_sums") and place < _count(victim, mutant) - 1
        ),
        "What it would have committed belongs to the next group, and the wait is for all of them.",
    ),
    Equivalent(
        "always accumulate",
        lambda victim, mutant, place: not _first_step(victim, place),
        "Only the first of four steps of k begins with new accumulators; the others add already.",
    ),
    Equivalent(
        "never accumulate",
        lambda victim, mutant, place: (
            _first_step(victim, place)
            and victim.probe.name not in ("ring_5", "multicast")
            and not (victim.probe.name == "turns" and place == 4)
        ),
        "The first step does not add; in a ring, and in the second product of those that take "
        "turns, it does from the second round on.",
    ),
    Equivalent(
        "another barrier",
        lambda victim, mutant, place: victim.probe.name != "turns" or place in (0, 3),
        "All threads of that barrier use the other number, and no other thread does.",
    ),
    Equivalent(
        "B's base offset",
        lambda victim, mutant, place: victim.probe.name == "fragments_0",
        "Without a swizzle there is no pattern to shift.",
    ),
    Equivalent(
        "drop fence",
        lambda victim, mutant, place: (
            victim.probe.name == "turns" and mutant.mnemonic.startswith("wgmma") and place == 3
        ),
        "Between the fence before and this one no thread touches a register of the product behind "
        "it: its accumulators belong to wgmma alone, its operands lie in shared memory.",
    ),
)


def equivalents(victim: HopperVictim) -> set[str]:
    number = places(victim.mutants)
    return {
        mutant.id
        for mutant in victim.mutants
        for known in EQUIVALENT
        if known.operator == mutant.operator and known.where(victim, mutant, number[mutant.id])
    }


def sample(victim: HopperVictim) -> list[Mutant]:
    """All of what synchronises, some of the rest, none of those that change nothing."""
    groups: dict[str, list[Mutant]] = defaultdict(list)
    same = equivalents(victim)
    for mutant in victim.mutants:
        if mutant.id not in same:
            groups[mutant.operator].append(mutant)
    chosen: list[Mutant] = []
    for operator, group in groups.items():
        count = len(group) if operator in SYNCHRONISING else SAMPLED_PER_OPERATOR
        chosen += group[-count:]
    return chosen


def survivors(victim: HopperVictim, chosen: list[Mutant]) -> set[str]:
    return {mutant.id for mutant in chosen if not victim.run(mutant).caught}


@pytest.mark.parametrize("name", VICTIMS)
def test_mutants_are_caught(name: str) -> None:
    assert survivors(VICTIMS[name], sample(VICTIMS[name])) == set()


@pytest.mark.full
@pytest.mark.parametrize("name", VICTIMS)
def test_all_mutants_are_caught(name: str) -> None:
    victim = VICTIMS[name]
    assert survivors(victim, list(victim.mutants)) == equivalents(victim)


def test_there_are_enough_of_every_kind() -> None:
    sampled = [mutant for victim in VICTIMS.values() for mutant in sample(victim)]
    assert len(sampled) >= 150
    assert {mutant.operator for mutant in sampled} == {op.name for op in hopper_operators()}


def only(name: str, operator: str, place: int = 0) -> Mutant:
    return [m for m in VICTIMS[name].mutants if m.operator == operator][place]


def test_what_gives_them_away() -> None:
    """The kind of report is part of the promise: one mutant each of the classic mistakes."""
    ring, drained, multicast = (VICTIMS[n] for n in ("ring_5", "drained", "multicast"))
    assert ring.run(only("ring_5", "drop fence", -1)).kinds == {"wgmma-fence"}
    assert "wgmma-in-flight" in ring.run(only("ring_5", "drop wait", -1)).kinds
    assert "wgmma-in-flight" in ring.run(only("ring_5", "drop commit", -1)).kinds
    stuck = ring.run(only("ring_5", "drop arrival")).error
    assert "deadlock" in stuck
    assert "to end a phase of parity" in stuck
    assert "16 bytes to come" in ring.run(only("ring_5", "expect more")).error
    assert "mbarrier-bytes" in ring.run(only("ring_5", "expect less")).kinds
    assert "setmaxnreg" in ring.run(only("ring_5", "take more registers")).kinds
    fences = [m for m in drained.mutants if m.mnemonic.startswith("fence.proxy.async")]
    assert drained.run(fences[0]).kinds == {"proxy-fence"}
    ends = [m for m in drained.mutants if m.operator == "drop wait" and "bulk" in m.mnemonic]
    assert "race-war" in drained.run(ends[0]).kinds
    assert drained.run(ends[-1]).kinds == {"bulk-unfinished"}
    assert VICTIMS["sums"].run(only("sums", "wait for reads")).kinds == {"race-raw"}
    meetings = [m for m in multicast.mutants if m.mnemonic.startswith("barrier.cluster.wait")]
    assert "race-mbarrier" in multicast.run(meetings[0]).kinds
    assert multicast.run(meetings[-1]).kinds == {"cluster-exit"}
