"""Mutants of kernels of the wgmma family: all must be caught, but for those that provably change
nothing.

The default run takes one or two of every operator, on the smallest tiles; ``-m full`` takes all,
those of the shipped kernels too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from wgmma_victims import KernelVictim, shipped, small

from flashsmith.emulator.mutants import Mutant, Operator, mutants_by
from flashsmith.emulator.mutants_hopper import hopper_operators

SYNCHRONISING = (
    "drop fence", "drop commit", "drop wait", "weaken wait", "flip parity", "load elsewhere",
    "arrive at the next barrier", "drop load", "drop store",
    "do not wait", "drop arrival", "arrive twice", "drop expect", "expect less", "expect more",
    "drop barrier", "count one less", "count one more", "keep registers", "drop mbarrier",
    "load for the next barrier", "wait for the next barrier",
)  # fmt: skip
Where = Callable[[KernelVictim, Mutant, int], bool]


@dataclass(frozen=True)
class Equivalent:
    """Mutants that compute the same in every execution, and why."""

    operators: tuple[str, ...]
    where: Where
    proof: str


def _says(text: str) -> Where:
    return lambda victim, mutant, place: text in victim.said(mutant)


def _passing(which: int) -> Where:
    """K's (0) or V's (1) wait of a warpgroup that passes a block by."""

    def where(victim: KernelVictim, mutant: Mutant, place: int) -> bool:
        return mutant.ptx_line in victim.passing_waits[which::2]

    return where


def _step(kinds: str, first: bool) -> Where:
    def where(victim: KernelVictim, mutant: Mutant, place: int) -> bool:
        kind, step = victim.step(mutant)
        return kind in kinds and (step == 0) is first

    return where


EQUIVALENT = (
    Equivalent(
        ("always accumulate",),
        _step("QK PV", first=False),
        "Only the first step of a product may begin with new accumulators; the others add already.",
    ),
    Equivalent(
        ("never accumulate",),
        _step("QK", first=True),
        "The first step of Q K^T does not add.",
    ),
    Equivalent(
        ("B's leading offset",),
        lambda victim, mutant, place: victim.config.d_head == 64,
        "It leads from one panel of 64 columns to the next, and here is but one.",
    ),
    Equivalent(
        ("another barrier",),
        _says("__syncthreads();"),
        "All threads meet at the other number, and nobody has used it before.",
    ),
    Equivalent(
        ("another barrier",),
        lambda victim, mutant, place: (
            "named_barrier_arrive(1" in victim.said(mutant)
            or "named_barrier_wait(1 + warpgroup," in victim.said(mutant)
        ),
        "Turns are an order for speed's sake: kernels without any are right. Who takes them at "
        "other barriers hangs, or comes in another order.",
    ),
    Equivalent(
        ("drop barrier",),
        _says("named_barrier_wait(1 + warpgroup,"),
        "The same: who does not wait for a turn hangs another, or comes before it.",
    ),
    Equivalent(
        ("drop barrier", "another barrier"),
        _says("named_barrier_wait(1 + kWarpgroups + warpgroup, kWarpgroupThreads);"),
        "A product is its whole warpgroup's: a warp that has waited for Q K^T knows that all of Q "
        "was read, and writes rows of O that no other warp writes. At the other numbers, which are "
        "this barrier's too, one warpgroup's warps meet all the same.",
    ),
    Equivalent(
        ("drop fence",),
        lambda victim, mutant, place: place == 3,
        "The second fence of the loop's two products. Between the first and it no thread touches a "
        "register of the product behind it: scores became probabilities before both.",
    ),
    Equivalent(
        ("do not wait",),
        _passing(0),
        "Who passes by reads nothing, and may release a tile before it is there if its copy has "
        "begun: releases then count for the right round. K of a block is asked for before V of the "
        "block before it, or before Q, which this warpgroup has waited for.",
    ),
)
# Wrong, but only where one warpgroup stalls while others get a whole tile ahead, which no schedule
# of the emulator comes to.
UNREACHED = (
    Equivalent(
        ("do not wait", "flip parity"),
        _passing(1),
        "Who passes by without waiting for V may release it in the round before, in place of one "
        "that still uses it. In turns nobody gets so far ahead but from tile to tile.",
    ),
)


def places(victim: KernelVictim) -> dict[str, int]:
    """Number of each mutant among those of its operator, in text order."""
    seen: Counter[str] = Counter()
    found = {}
    for mutant in victim.mutants:
        found[mutant.id] = seen[mutant.operator]
        seen[mutant.operator] += 1
    return found


def uncaught(victim: KernelVictim) -> set[str]:
    """What need not be noticed."""
    number = places(victim)
    return {
        mutant.id
        for mutant in victim.mutants
        for known in (*EQUIVALENT, *UNREACHED)
        if mutant.operator in known.operators and known.where(victim, mutant, number[mutant.id])
    }


def sample() -> list[tuple[str, Mutant]]:
    """One of every operator, two of what synchronises; from one small kernel after the other."""
    victims = small()
    groups: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for name, victim in victims.items():
        same = uncaught(victim)
        for mutant in victim.mutants:
            if mutant.id not in same:
                groups[mutant.operator][name].append(mutant)
    chosen = []
    for turn, (operator, by_victim) in enumerate(groups.items()):
        names = sorted(by_victim)
        for extra in range(1 + (operator in SYNCHRONISING)):
            name = names[(turn + extra) % len(names)]
            group = by_victim[name]
            chosen.append((name, group[(turn + extra) * 5 % len(group)]))
    return chosen


def survivors(victim: KernelVictim, chosen: list[Mutant]) -> set[str]:
    return {mutant.id for mutant in chosen if not victim.run(mutant).caught}


@pytest.mark.parametrize("name", small())
def test_kernels_are_right_and_have_no_findings(name: str) -> None:
    assert not small()[name].run(None).caught


@pytest.mark.parametrize("name", small())
def test_mutants_are_caught(name: str) -> None:
    chosen = [mutant for victim, mutant in sample() if victim == name]
    assert survivors(small()[name], chosen) == set()


def test_the_sample_has_every_kind() -> None:
    sampled = [mutant for _, mutant in sample()]
    assert len(sampled) >= 60
    of_clusters = {"load for one CTA", "arrive at the own CTA"}
    # Of these all change nothing here; there are others among the shipped kernels' mutants.
    absent = of_clusters | {"another barrier", "B's leading offset"}
    assert {mutant.operator for mutant in sampled} == {
        operator.name for operator in hopper_operators()
    } - absent


def test_a_counter_that_is_not_reset() -> None:
    """Results are right, and the next launch's would not be."""
    victim = small()["small three"]
    kernel = victim.kernel
    drop_reset = Operator("drop reset", ("atom.global.exch",), lambda site: "")
    (mutant,) = mutants_by((drop_reset,), kernel.ptx, kernel.entry.ptx_entry)
    assert "its workspace must be zero at the end" in victim.run(mutant).error


@pytest.mark.full
@pytest.mark.parametrize("name", [*small(), *shipped()])
def test_all_mutants_are_caught(name: str) -> None:
    victim = (small() | shipped())[name]
    assert survivors(victim, list(victim.mutants)) <= uncaught(victim)
