"""Mutants of the kernels of attention over a cache: of their PTX, of their sources, and of their
plans. All must be caught, but for those that provably change nothing.

The default run takes wrong plans and a few mutants of what synchronises; ``-m full`` takes all that
are sampled: every mutant of what synchronises, some of each other operator, every mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import shared_kernels
from _pytest.mark import ParameterSet
from backward_mistakes import wrong_plans
from backward_victims import BackwardVictim, ChangedPlan, patched_modules
from decode_mistakes import MISTAKES, AskedDecode
from mutants import Mutant, operators

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config


def _turned(pairs: int, d: int, dtype: str | None = None, page: int = 7) -> AskedDecode:
    """A few keys, and rows whose loops over pairs and elements run all that is unrolled."""
    return AskedDecode(
        f"b2 s3:20 h4:2 d{d} window softcap packed page{page}",
        options={
            "append": True,
            "rotary": "halves" if dtype else "interleaved",
            "rotary_half": pairs,
            "rotary_dtype": dtype,
            "window": (9, 0),
            "lens_q": (3, 2),
            "lens_k": (20, 11),
        },
    )


VICTIMS = {
    "dense": BackwardVictim(
        config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4"),
        Semantics("causal", uneven=True),
        (
            AskedDecode(
                "b3 s2:460 h24:4 d40 causal", options={"sinks": True, "lens_k": (65, 460, 0)}
            ),
            AskedDecode("b2 s9:330 h12:4 d56 causal", options={"capacity": 60}),
            AskedDecode("b3 s2:400 h24:4 d40 causal", "nonfinite"),
            AskedDecode("b3 s1:40 h36:4 d40 causal", options={"lens_k": (40, 0, 3)}),
            # More sequences than a warp looks through at once.
            AskedDecode("b35 s9:70 h4:2 d40 causal"),
            # Runs of two parts, and of all four with states in shared and in global memory.
            AskedDecode("b4 s1:460 h24:4 d40 causal", options={"lens_k": (460,) * 4}),
            AskedDecode("b12 s1:460 h24:4 d40 causal", options={"lens_k": (460,) * 12}),
            AskedDecode("b12 s1:460 h8:4 d40 causal", options={"lens_k": (460,) * 12}),
        ),
        sm_count=5,
    ),
    "parts": BackwardVictim(
        config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4"),
        Semantics("causal", uneven=True),
        (
            AskedDecode("b1 s1:2600 h80:2 d56 causal", options={"sinks": True}),
            # Weights beside a wrong maximum are infinite.
            AskedDecode("b1 s1:2600 h80:2 d56 causal", "far_scores"),
            AskedDecode("b1 s1:2600 h80:2 d56 causal", "large_scores"),
        ),
        sm_count=75,
    ),
    "paged": BackwardVictim(
        config("(BF16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4"),
        Semantics("window", softcap=True, packed=True, uneven=True),
        (
            AskedDecode(
                "b4 s3:520 h24:8 d40 window softcap packed page24",
                options={
                    "append": True,
                    "rotary": "halves",
                    "rotary_half": 16,
                    "rotary_dtype": "float32",
                    "window": (450, 0),
                    "sinks": True,
                    "lens_q": (3, 1, 2, 3),
                    "lens_k": (520, 64, 2, 131),
                },
                seed=3,
            ),
            AskedDecode(
                "b3 s5:260 h16:8 d64 window softcap packed page7",
                options={
                    "append": True,
                    "rotary": "interleaved",
                    "window": (150, 1),
                    "lens_q": (5, 2, 4),
                    "lens_k": (260, 129, 4),
                    "layout": "heads first",
                },
                seed=6,
            ),
            AskedDecode(
                "b35 s9:70 h4:2 d40 window softcap packed page7", options={"window": (55, 0)}
            ),
        ),
        sm_count=5,
    ),
    "append": BackwardVictim(
        config("(BF16, 256, 16, 32, 2): decode+stages_2+least_64+parts_4"),
        Semantics("window", softcap=True, packed=True, uneven=True),
        (
            _turned(96, 256, "float32"),
            _turned(128, 256),
            _turned(128, 256, "float32"),
            _turned(96, 256),
            _turned(8, 248),
        ),
        sm_count=5,
    ),
}
shared_kernels.want([VICTIMS["dense"].config], VICTIMS["dense"].semantics)

OPERATORS = tuple(operators(128))
SYNCHRONISING = frozenset(
    ("drop barrier", "drop wait", "weaken wait", "drop commit", "shuffle nothing")
)
#: Of each other operator.
SAMPLED = 3
#: Kernels of each victim, and into how many tests their mutants are cut.
PARTS = {
    "dense": {"main": 4},
    "parts": {"merge": 2},
    "paged": {"paged": 4},
    "append": {"append": 2},
}
MISTAKES_A_TEST = 8
#: Plans that change nothing, and why.
HARMLESS_PLANS = {
    "half of main": "The CTAs that there are take all parts, one after another.",
    "half of paged": "The CTAs that there are take all parts, one after another.",
    "append first": "It is first.",
    "main first": "It is first.",
}


@dataclass(frozen=True)
class Equivalent:
    """Mutants that compute the same in every execution: of operators, at a line of our sources."""

    operators: tuple[str, ...]
    victim: str
    role: str
    source: str
    proof: str

    def names(self, name: str, role: str, mutant: Mutant) -> bool:
        if (name, role) != (self.victim, self.role) or mutant.operator not in self.operators:
            return False
        return self.source in VICTIMS[name].said(role, mutant)


EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        ("shuffle nothing",),
        "dense",
        "main",
        "DecodeSequence& s = item.sequence;\n"
        "s.first_query = __shfl_sync(kWholeWarp, own.first_query, i);",
        "It is 0 of every sequence whose queries are not packed.",
    ),
    Equivalent(
        ("shuffle nothing",),
        "dense",
        "main",
        "s.keys = __shfl_sync(kWholeWarp, own.keys, i);\n"
        "s.begin = __shfl_sync(kWholeWarp, own.begin, i);\n"
        "s.chunk",
        "Without a window every sequence's first part begins at 0.",
    ),
)
#: Mistakes that change nothing, and why.
HARMLESS: dict[str, str] = {}


def uncaught(name: str, role: str, chosen: list[Mutant]) -> set[str]:
    """What need not be noticed."""
    return {
        mutant.id
        for mutant in chosen
        if any(known.names(name, role, mutant) for known in EQUIVALENT)
    }


def sample(name: str, role: str) -> list[Mutant]:
    return VICTIMS[name].sample(OPERATORS, role, SYNCHRONISING, SAMPLED)


def survivors(name: str, role: str, chosen: list[Mutant]) -> set[str]:
    victim = VICTIMS[name]
    return {mutant.id for mutant in chosen if not victim.run_mutant(role, mutant).caught}


@pytest.mark.full
@pytest.mark.parametrize("name", VICTIMS)
def test_the_kernels_themselves_are_right(name: str) -> None:
    """Their every problem: else all mutants were caught."""
    assert not VICTIMS[name].run().caught


def plans(name: str) -> dict[str, ChangedPlan]:
    victim = VICTIMS[name]
    return dict(wrong_plans(victim, victim.plan()))


def test_a_merge_that_is_not_there_or_too_early_is_missed() -> None:
    victim, changed = VICTIMS["dense"], plans("dense")
    for change in ("without merge", "merge first"):
        assert victim.run(plan=changed[change]).caught


@pytest.mark.full
@pytest.mark.parametrize("name", VICTIMS)
def test_wrong_plans_are_caught(name: str) -> None:
    alive = {change for change, it in plans(name).items() if not VICTIMS[name].run(plan=it).caught}
    assert alive <= set(HARMLESS_PLANS)


def parts() -> Iterator[ParameterSet]:
    for name, roles in PARTS.items():
        for role, count in roles.items():
            for part in range(count):
                yield pytest.param(name, role, part, id=f"{name} {role} {part + 1} of {count}")


@pytest.mark.full
@pytest.mark.parametrize(("name", "role", "part"), list(parts()))
def test_mutants_are_caught(name: str, role: str, part: int) -> None:
    chosen = sample(name, role)[part :: PARTS[name][role]]
    assert chosen
    assert survivors(name, role, chosen) <= uncaught(name, role, chosen)


@pytest.mark.full
def test_there_are_enough() -> None:
    sampled = [
        mutant for name, roles in PARTS.items() for role in roles for mutant in sample(name, role)
    ]
    assert len(sampled) >= 200
    assert sum(map(len, MISTAKES.values())) >= 70
    assert set(MISTAKES) <= set(VICTIMS)


def mistakes() -> Iterator[ParameterSet]:
    for name, group in MISTAKES.items():
        for first in range(0, len(group), MISTAKES_A_TEST):
            chosen = slice(first, first + MISTAKES_A_TEST)
            yield pytest.param(name, chosen, id=f"{name} {first}-")


@pytest.mark.full
@pytest.mark.parametrize(("name", "chosen"), list(mistakes()))
def test_mistakes_are_caught(name: str, chosen: slice) -> None:
    victim = VICTIMS[name]
    alive = {
        str(mistake)
        for mistake in MISTAKES[name][chosen]
        if not victim.run(patched_modules(victim, mistake)).caught
    }
    assert alive <= set(HARMLESS)
