"""What is run of the mutants of an operation's kernels, and which of them need not be noticed; and
the tests that do it.

A file of tests makes a MutantSuite with the name SUITE, and imports those tests from here that it
wants to have; conftest.py gives them their parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from _pytest.mark import ParameterSet
from mutants import Mutant, Operator
from operation_victims import (
    ChangedPlan,
    OperationVictim,
    SourcePatch,
    patched_modules,
    void_mistakes,
    wrong_plans,
)

#: Operators of which every mutant is run: what synchronises.
SYNCHRONISING = frozenset(
    ("drop barrier", "drop wait", "weaken wait", "drop commit", "shuffle nothing")
) | frozenset(("drop fence", "drop arrival", "do not wait"))
MISTAKES_A_TEST = 8


@dataclass(frozen=True)
class Equivalent:
    """Mutants that compute the same in every execution: of operators, at lines of our sources
    without their comments, as OperationVictim.said() has them."""

    operators: tuple[str, ...]
    victims: tuple[str, ...]
    role: str
    source: str
    proof: str
    #: Of the operator's mutants in the kernel only that of a number, in text order (negative: from
    #: the last one on).
    place: int | None = None


@dataclass(frozen=True)
class MutantSuite:
    """Victims by name; their kernels by role, and into how many tests the mutants of each are cut;
    mistakes in their sources, since each of them has some of the code alone."""

    victims: Mapping[str, OperationVictim]
    parts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    mistakes: Mapping[str, tuple[SourcePatch, ...]] = field(default_factory=dict)
    equivalent: tuple[Equivalent, ...] = ()
    #: Of a victim's kernel in a role.
    operators: Callable[[str, str], tuple[Operator, ...]] = lambda name, role: ()
    #: How many of each operator that does not synchronise, by victim.
    sampled: Mapping[str, int] = field(default_factory=dict)
    #: Mistakes that need not be noticed, and why.
    harmless: Mapping[str, str] = field(default_factory=dict)
    #: Wrong plans that need not be noticed, and why; those of single victims by their names.
    harmless_plans: Mapping[str, str] = field(default_factory=dict)
    harmless_plans_of: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    # --- PTX -------------------------------------------------------------------------------------

    def mutants(self, name: str, role: str) -> tuple[Mutant, ...]:
        """All of a kernel, in text order."""
        return self.victims[name].mutants(self.operators(name, role), role)

    def sample(self, name: str, role: str) -> list[Mutant]:
        """Every one of what synchronises, and of each other operator a few, spread out."""
        groups: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in self.mutants(name, role):
            groups[mutant.operator].append(mutant)
        chosen = []
        for operator, group in groups.items():
            most = len(group) if operator in SYNCHRONISING else self.sampled[name]
            count = min(most, len(group))
            chosen += [group[i * len(group) // count] for i in range(count)]
        return chosen

    def part(self, name: str, role: str, part: int) -> list[Mutant]:
        """Those of one test."""
        return self.sample(name, role)[part :: self.parts[name][role]]

    def whole_sample(self) -> list[Mutant]:
        """Those of all tests."""
        kernels = [(name, role) for name, roles in self.parts.items() for role in roles]
        return [mutant for name, role in kernels for mutant in self.sample(name, role)]

    def survivors(self, name: str, role: str, chosen: Iterable[Mutant]) -> set[str]:
        victim = self.victims[name]
        return {mutant.id for mutant in chosen if not victim.run_mutant(role, mutant).caught}

    def uncaught(self, name: str, role: str, chosen: Iterable[Mutant]) -> set[str]:
        """What need not be noticed."""
        return {
            mutant.id
            for mutant in chosen
            if any(self.names(known, name, role, mutant) for known in self.equivalent)
        }

    def names(self, known: Equivalent, name: str, role: str, mutant: Mutant) -> bool:
        if (
            mutant.operator not in known.operators
            or name not in known.victims
            or role != known.role
            or known.source not in self.victims[name].said(role, mutant)
        ):
            return False
        if known.place is None:
            return True
        alike = [one for one in self.mutants(name, role) if one.operator == mutant.operator]
        return mutant.id == alike[known.place].id

    def void_exceptions(self) -> list[tuple[str, Equivalent]]:
        """Those that name no mutant of one of their victims."""
        return [
            (name, known)
            for known in self.equivalent
            for name in known.victims
            if not any(
                self.names(known, name, known.role, mutant)
                for mutant in self.mutants(name, known.role)
            )
        ]

    # --- sources and plans -----------------------------------------------------------------------

    def unnoticed_mistakes(self, name: str, chosen: slice) -> set[str]:
        victim = self.victims[name]
        return {
            str(mistake)
            for mistake in self.mistakes[name][chosen]
            if not victim.run(patched_modules(victim, mistake)).caught
        }

    def void_mistakes(self) -> list[str]:
        """Those that are none of today's sources."""
        return void_mistakes(mistake for group in self.mistakes.values() for mistake in group)

    def void_harmless(self) -> set[str]:
        """Names of mistakes that need not be noticed, and that nobody makes."""
        every = {str(mistake) for group in self.mistakes.values() for mistake in group}
        return set(self.harmless) - every

    def plans(self, name: str) -> dict[str, ChangedPlan]:
        """Wrong ones, by what is wrong."""
        victim = self.victims[name]
        return dict(wrong_plans(victim, victim.plan()))

    def unnoticed_plans(self, name: str, chosen: Mapping[str, ChangedPlan]) -> set[str]:
        victim = self.victims[name]
        return {change for change, plan in chosen.items() if not victim.run(plan=plan).caught}

    # --- parameters of tests ---------------------------------------------------------------------

    def part_params(self) -> list[ParameterSet]:
        """Names, roles and parts."""
        return [
            pytest.param(name, role, part, id=f"{name} {role} {part + 1} of {count}")
            for name, roles in self.parts.items()
            for role, count in roles.items()
            for part in range(count)
        ]

    def mistake_params(self) -> list[ParameterSet]:
        """Names, and which of the mistakes."""
        return [
            pytest.param(name, slice(first, first + MISTAKES_A_TEST), id=f"{name} {first}-")
            for name, group in self.mistakes.items()
            for first in range(0, len(group), MISTAKES_A_TEST)
        ]

    def parameters_of(self, test: str) -> tuple[tuple[str, ...], list[ParameterSet]] | None:
        """The parameters of one of the tests below, with their names; None if it has none."""
        if test == "test_mutants_are_caught":
            return ("name", "role", "part"), self.part_params()
        if test == "test_mistakes_are_caught":
            return ("name", "chosen"), self.mistake_params()
        if test in ("test_the_kernels_themselves_are_right", "test_wrong_plans_are_caught"):
            return ("name",), [pytest.param(name) for name in self.victims]
        return None


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_kernels_themselves_are_right(suite: MutantSuite, name: str) -> None:
    """Their every problem: else all mutants and mistakes were caught."""
    assert not suite.victims[name].run().caught


@pytest.mark.full
def test_wrong_plans_are_caught(suite: MutantSuite, name: str) -> None:
    harmless = {*suite.harmless_plans, *suite.harmless_plans_of.get(name, ())}
    assert suite.unnoticed_plans(name, suite.plans(name)) <= harmless


@pytest.mark.full
def test_mutants_are_caught(suite: MutantSuite, name: str, role: str, part: int) -> None:
    chosen = suite.part(name, role, part)
    assert chosen
    assert suite.survivors(name, role, chosen) <= suite.uncaught(name, role, chosen)


@pytest.mark.full
def test_exceptions_name_mutants(suite: MutantSuite) -> None:
    """A change of the kernels' source has not made them void."""
    assert suite.void_exceptions() == []
    assert suite.void_harmless() == set()


def test_mistakes_are_in_the_sources(suite: MutantSuite) -> None:
    """Each once: a mistake that is nowhere would be one that is never made."""
    assert suite.mistakes
    assert suite.void_mistakes() == []


@pytest.mark.full
def test_mistakes_are_caught(suite: MutantSuite, name: str, chosen: slice) -> None:
    assert suite.unnoticed_mistakes(name, chosen) <= set(suite.harmless)
