"""Mutants of real kernels: nearly all must be detected; the others have a proof that they change
nothing.

A mutant is detected if a check has a finding, if the outputs break the tolerance rule, or if the
emulator stops with an error. The default run has every mutant of synchronisation and a few of every
other operator, in one kernel; ``-m full`` has all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import shared_kernels
from mutant_runs import Victim
from mutants import Mutant, operators
from plain_run import full_after

from flashsmith.families import FlashForwardKernelConfig, parse_kernel_name_into_config

# Small tiles, so that all sites can be tried; between them every knob has both its values.
CONFIGS = tuple(
    parse_kernel_name_into_config(text)
    for text in (
        "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax",
        "(BF16, 64, 64, 32, 4): async+eager+load_0_0_0_tiles",
        "(FP16, 64, 64, 32, 4): swizzled+load_0_2_2_tiles",
    )
)
SYNCHRONISING = ("drop barrier", "drop wait", "weaken wait", "drop commit", "shuffle nothing")
SAMPLED_PER_OPERATOR = 2
# All mutants of a config take a minute: several workers can share them.
PARTS = 4


@dataclass(frozen=True)
class Equivalent:
    """Mutants that compute the same in every execution: site number ``place`` of an operator."""

    operator: str
    mnemonic: str
    place: int
    where: Callable[[FlashForwardKernelConfig], bool]
    proof: str


EQUIVALENT = (
    Equivalent(
        "drop commit",
        "cp.async.commit_group",
        0,
        lambda cfg: cfg.async_copy and cfg.eager_load_blocks and cfg.Q_mma_load_K_tiles > 0,
        "Q's commit is followed by K's before anything waits, and the first wait allows no group "
        "to be pending. Without it Q's copies belong to K's group, which that same wait completes.",
    ),
)


shared_kernels.want(CONFIGS)


@pytest.fixture(scope="session")
def victims() -> dict[FlashForwardKernelConfig, Victim]:
    return {cfg: Victim(cfg) for cfg in CONFIGS}


def by_operator(victim: Victim) -> dict[str, list[Mutant]]:
    groups: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in victim.mutants:
        groups[mutant.operator].append(mutant)
    return groups


def sample(victim: Victim) -> list[Mutant]:
    """All of what synchronises, evenly spaced ones of the rest."""
    chosen: list[Mutant] = []
    for operator, group in by_operator(victim).items():
        count = len(group) if operator in SYNCHRONISING else min(SAMPLED_PER_OPERATOR, len(group))
        chosen += [group[i * len(group) // count] for i in range(count)]
    return chosen


def equivalents(victim: Victim) -> Iterator[Mutant]:
    groups = by_operator(victim)
    for known in EQUIVALENT:
        if known.where(victim.config):
            matching = [m for m in groups[known.operator] if m.mnemonic == known.mnemonic]
            yield matching[known.place]


def survivors(victim: Victim, chosen: Sequence[Mutant]) -> set[str]:
    return {mutant.id for mutant in chosen if not victim.run_mutant(mutant).caught}


def check_survivors(victim: Victim, chosen: Sequence[Mutant]) -> None:
    proven = {mutant.id for mutant in equivalents(victim)}
    assert survivors(victim, chosen) == proven & {mutant.id for mutant in chosen}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_kernel_itself_is_right(
    victims: dict[FlashForwardKernelConfig, Victim], config: FlashForwardKernelConfig
) -> None:
    outcome = victims[config].run(victims[config].ptx)
    assert not outcome.caught, outcome


@pytest.mark.parametrize("config", full_after(1, CONFIGS), ids=str)
def test_mutants_are_caught(
    victims: dict[FlashForwardKernelConfig, Victim], config: FlashForwardKernelConfig
) -> None:
    check_survivors(victims[config], sample(victims[config]))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_few_are_equivalent(
    victims: dict[FlashForwardKernelConfig, Victim], config: FlashForwardKernelConfig
) -> None:
    """And nothing else survives: that is what the tests beside this one find."""
    victim = victims[config]
    proven = {mutant.id for mutant in equivalents(victim)}
    for chosen in (victim.mutants, sample(victim)):
        assert len(proven & {mutant.id for mutant in chosen}) <= 0.05 * len(chosen)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_all_mutants_are_caught(
    victims: dict[FlashForwardKernelConfig, Victim], config: FlashForwardKernelConfig, part: int
) -> None:
    check_survivors(victims[config], victims[config].mutants[part::PARTS])


def test_there_are_enough_of_every_kind(
    victims: dict[FlashForwardKernelConfig, Victim],
) -> None:
    sampled = [mutant for victim in victims.values() for mutant in sample(victim)]
    assert len(sampled) >= 100
    assert {mutant.operator for mutant in sampled} == {operator.name for operator in operators(1)}


def test_only_the_checks_see_a_dropped_barrier(
    victims: dict[FlashForwardKernelConfig, Victim],
) -> None:
    """The emulator runs warps one after another, so missing barriers leave its numbers right."""
    victim = victims[CONFIGS[0]]
    dropped = [m for m in by_operator(victim)["drop barrier"] if m.mnemonic == "bar.sync"]
    assert len(dropped) == 4
    for mutant in dropped:
        outcome = victim.run_mutant(mutant)
        assert outcome.numbers == ()
        assert {finding.kind for finding in outcome.findings} <= {"race-raw", "race-war"}
        assert outcome.findings
