"""Mutants of kernels of the wgmma family: all must be caught, but for those that provably change
nothing.

The default run takes one mutant of each of a third of the operators, on the smallest tiles;
``-m full`` takes all, those of the shipped kernels and of kernels with Q in registers too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from _pytest.mark import ParameterSet
from hopper_mutant_runs import places
from mutants import Mutant, Operator, mutants_by
from mutants_hopper import REGISTER_A_OPERATORS, hopper_operators
from plain_run import full_after
from wgmma_victims import SCHEDULES, KernelVictim, rare, shipped, small, with_register_Q

from flashsmith.families.wgmma.config import PingPong

Where = Callable[[KernelVictim, Mutant, int], bool]


@dataclass(frozen=True)
class Equivalent:
    """Mutants that compute the same in every execution, and why."""

    operators: tuple[str, ...]
    where: Where
    proof: str


def _says(text: str) -> Where:
    return lambda victim, mutant, place: text in victim.said(mutant)


def _passing(tile: str, where: Callable[[KernelVictim], bool]) -> Where:
    """The wait for K or V of a warpgroup that passes a block by, in some kernels; it is compiled
    twice where warpgroups may pass blocks by before and after those that they use."""
    return lambda victim, mutant, place: (
        mutant.ptx_line in victim.passing_waits(tile) and where(victim)
    )


def _one_stage(victim: KernelVictim) -> bool:
    return victim.config.kv_stages == 1


def _all_or_nothing(victim: KernelVictim) -> bool:
    """Warpgroups use all of a tile's blocks or none, and all tiles have as many."""
    return victim.semantics.mask == "none" and not victim.semantics.packed


def _all_or_nothing_in_turns(victim: KernelVictim) -> bool:
    return _all_or_nothing(victim) and victim.config.pingpong is PingPong.GEMM


def _all_or_nothing_with_one_Q(victim: KernelVictim) -> bool:
    return _all_or_nothing(victim) and victim.config.q_buffers == 1


def _last_have_no_rows(victim: KernelVictim) -> bool:
    """In turns for products with Q and V, V first: warpgroups that use none of a tile's blocks come
    after those that use all of them."""
    ordered = victim.config.pingpong is PingPong.GEMM and not victim.config.overlap
    return _all_or_nothing(victim) and ordered


def _last_rows_first(victim: KernelVictim) -> bool:
    """In turns for products, of which the first warpgroup takes part in all that others do not."""
    masked = victim.semantics.mask != "none"
    return masked and victim.config.d_head < 128 and victim.config.pingpong is PingPong.GEMM


BEFORE, AFTER = 0, -1


def _only(place: int, passing: Where) -> Where:
    """Of such waits the one for blocks BEFORE or AFTER those that the warpgroup uses."""
    return lambda victim, mutant, number: (
        passing(victim, mutant, number)
        and mutant.ptx_line in (victim.passing_waits("K")[place], victim.passing_waits("V")[place])
    )


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
            "named_barrier_arrive(kFirstBarrier" in victim.said(mutant)
            or "named_barrier_wait(kFirstBarrier + warpgroup," in victim.said(mutant)
        ),
        "Turns are an order for speed's sake: kernels without any are right. Who takes them at "
        "other barriers hangs, or comes in another order.",
    ),
    Equivalent(
        ("drop barrier",),
        _says("named_barrier_wait(kFirstBarrier + warpgroup,"),
        "The same: who does not wait for a turn hangs another, or comes before it.",
    ),
    Equivalent(
        ("drop barrier", "another barrier"),
        _says("named_barrier_wait(1 + Kernel::n_warpgroups + this->warpgroup, kWarpgroupThreads);"),
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
        _passing("K", _one_stage),
        "Who passes by reads nothing, and may release a tile before it is there if its copy has "
        "begun: releases then count for the right round. K of a block is asked for before V of the "
        "block before it, or before Q, which this warpgroup has waited for. Its next wait for K is "
        "not fooled by the round that it did not wait for: with one stage K of the next block is "
        "asked for only when this one was there and was released by all, and before what this "
        "warpgroup waits for next, V of this block or the next tile's Q.",
    ),
    Equivalent(
        ("do not wait",),
        _passing("K", _all_or_nothing_in_turns),
        "Releases count for the right round, as above. With two stages the next wait at the same "
        "barrier comes two blocks later. Is that block in the second tile from here, or this one "
        "not a tile's last, then its copy began, so that this K was there, before Q or V that is "
        "waited for in between. Else this block is the last of several: the first warpgroup "
        "multiplies, and took its last turn, before this one's, when it had waited for this K.",
    ),
    Equivalent(
        ("do not wait",),
        _only(BEFORE, _passing("K", _last_rows_first)),
        "Releases count for the right round, as above. The first warpgroup has the last rows, and "
        "uses the blocks that this one passes by. This one waits at the same barrier again two "
        "blocks later, when it has taken its turn after the first warpgroup's that issued the "
        "product with K of the block in between, and so had this K.",
    ),
    Equivalent(
        ("do not wait",),
        _only(AFTER, _passing("K", lambda v: _last_rows_first(v) and v.semantics.mask == "causal")),
        "This warpgroup has no rows, and passes a block by after the turn in which the first one "
        "issued the product with its K. A tile's first block is in nobody's turn: this one meets "
        "the barrier again in a turn that comes after the first one's, which waits for K of all "
        "blocks, or two tiles later, when the first one has freed Q.",
    ),
    Equivalent(
        ("do not wait",),
        _only(BEFORE, _passing("V", _one_stage)),
        "It is not the tile's last block, so that the producer asks for this V after the next "
        "block's K, whose place the others give back when they are done with V of the block "
        "before: a release too early is one of the right number by the time it is looked at. The "
        "next wait at this barrier comes after a turn that the first warpgroup, which uses this "
        "block, takes later than this V.",
    ),
    Equivalent(
        ("do not wait",),
        _passing("V", _last_have_no_rows),
        "Warpgroups without rows come last in each round of turns. When this one releases V of a "
        "block, the others have issued the product with K of the block before, and given back V "
        "of the block before that, which had this place. What they do without a turn, a tile's "
        "last product with V, is done when they take their first turn of the next tile; in tiles "
        "of one block nobody gets the next but one while another's Q is in use.",
    ),
    Equivalent(
        ("do not wait",),
        lambda victim, mutant, place: (
            mutant.ptx_line == victim.next_V_wait and not victim.config.overlap
        ),
        "The producer has just waited for the place of the next block's K, which every warp "
        "releases after the V that had this place: without overlap a product with V is done, or "
        "passed by, before the next one with K begins.",
    ),
)
# Of kernels that the default run leaves out.
EQUIVALENT_WITH_REGISTER_Q = (
    Equivalent(
        ("drop wait", "weaken wait"),
        lambda victim, mutant, place: (
            victim.config.direct_O and "tma_store_wait_read();" in victim.said(mutant)
        ),
        "O leaves from registers: there is no bulk store to wait for.",
    ),
    Equivalent(
        ("do not wait",),
        _passing("K", _all_or_nothing_with_one_Q),
        "With one buffer a tile's Q is asked for after K of its first block, and when the first "
        "warpgroup, which has rows if any has, is done with the Q before, and so with all K of "
        "that tile. Within a tile V of a block is asked for after the next block's K. So releases "
        "count for the right round, and when this warpgroup waits for K again, every K that it "
        "passed by is there.",
    ),
)
# Wrong, but only in few of many hesitant schedules.
RARE = Equivalent(
    ("do not wait",),
    lambda victim, mutant, place: (
        victim.config.d_head == 128
        and not _all_or_nothing(victim)
        and mutant.ptx_line in victim.passing_waits("K") + victim.passing_waits("V")
    ),
    "The wait for K two blocks later takes the round before for its own if this K, not waited for, "
    "is still under way: a copy that later ones overtook. After a warpgroup's own blocks it takes "
    "a short tile in front of a longer one besides. V is released in the round before, in place of "
    "one that still uses it, if that one stalls while this one begins the next tile.",
)
HESITANT_SCHEDULES = range(1, 64, 2)


def named(exceptions: Iterable[Equivalent], victim: KernelVictim) -> set[str]:
    """Mutants that are among these exceptions."""
    number = places(victim.mutants)
    return {
        mutant.id
        for mutant in victim.mutants
        for known in exceptions
        if mutant.operator in known.operators and known.where(victim, mutant, number[mutant.id])
    }


def uncaught(victim: KernelVictim) -> set[str]:
    """What need not be noticed in a few schedules."""
    return named((*EQUIVALENT, *EQUIVALENT_WITH_REGISTER_Q, RARE), victim)


@cache
def sample() -> list[tuple[str, Mutant]]:
    """One of every operator, from one small kernel after the other."""
    victims = small()
    groups: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for name, victim in victims.items():
        same = uncaught(victim)
        for mutant in victim.mutants:
            if mutant.id not in same:
                groups[mutant.operator][name].append(mutant)
    chosen = []
    for turn, by_victim in enumerate(groups.values()):
        name = sorted(by_victim)[turn % len(by_victim)]
        group = by_victim[name]
        chosen.append((name, group[turn * 5 % len(group)]))
    return chosen


def survivors(victim: KernelVictim, chosen: list[Mutant]) -> set[str]:
    return {mutant.id for mutant in chosen if not victim.run(mutant).caught}


@pytest.mark.parametrize(
    ("name", "schedules"),
    # First those whose mutants the plain run makes: who catches a right kernel proves nothing.
    full_after(
        2,
        [
            *((name, range(2)) for name in ("small three", "separate")),
            *((name, SCHEDULES) for name in small()),
        ],
    ),
)
def test_kernels_are_right_and_have_no_findings(name: str, schedules: Sequence[int]) -> None:
    assert not small()[name].run(None, schedules).caught


@pytest.mark.full
@pytest.mark.parametrize("name", with_register_Q())
def test_kernels_with_Q_in_registers_are_right_and_have_no_findings(name: str) -> None:
    assert not with_register_Q()[name].run(None).caught


@pytest.mark.full
@pytest.mark.parametrize("name", with_register_Q())
def test_Q_in_registers_has_mutants_of_every_kind_and_no_rare_ones(name: str) -> None:
    victim = with_register_Q()[name]
    found = {mutant.operator for mutant in victim.mutants}
    assert found >= {operator.name for operator in REGISTER_A_OPERATORS}
    assert named((RARE,), victim) == set()


@pytest.mark.parametrize("name", full_after(1, small()))
def test_mutants_are_caught(name: str) -> None:
    chosen = [mutant for victim, mutant in sample() if victim == name]
    assert survivors(small()[name], chosen) == set()


def test_what_is_wrong_only_if_a_warpgroup_lags() -> None:
    """Random schedules let the others get a tile ahead."""
    victim = small()["separate"]
    _, after = victim.passing_waits("V")
    chosen = [m for m in victim.mutants if m.operator == "do not wait" and m.ptx_line == after]
    assert len(chosen) == 1
    assert survivors(victim, chosen) == set()


def test_the_sample_has_every_kind() -> None:
    sampled = [mutant for _, mutant in sample()]
    of_clusters = {"load for one CTA", "arrive at the own CTA"}
    # Of these all change nothing here; there are others among the shipped kernels' mutants.
    of_sums = {"drop sum", "sum twice", "sum elsewhere", "sum from elsewhere", "wait for reads"}
    absent = of_clusters | of_sums | {"another barrier", "B's leading offset"}
    assert {mutant.operator for mutant in sampled} == {
        operator.name for operator in hopper_operators()
    } - absent


def test_a_counter_that_is_not_reset() -> None:
    """Results are right, and the next launch's would not be."""
    victim = small()["small three"]
    kernel = victim.kernel
    drop_reset = Operator("drop reset", ("atom.global.exch",), lambda site: "")
    (mutant,) = mutants_by((drop_reset,), kernel.ptx, kernel.entry.ptx_entry)
    assert "its workspace tile_counter must be zero at the end" in victim.run(mutant).error


@pytest.mark.parametrize("known", [*EQUIVALENT, RARE], ids=lambda known: known.proof[:30])
def test_exceptions_name_mutants(known: Equivalent) -> None:
    """A change of the kernels' source has not made them void."""
    assert any(named((known,), victim) for victim in (small() | shipped()).values())


@pytest.mark.full
@pytest.mark.parametrize("known", EQUIVALENT_WITH_REGISTER_Q, ids=lambda known: known.proof[:30])
def test_exceptions_with_Q_in_registers_name_mutants(known: Equivalent) -> None:
    assert any(named((known,), victim) for victim in with_register_Q().values())


@pytest.mark.parametrize(
    ("name", "tile", "place"),
    [
        ("two", "K", BEFORE),
        pytest.param("packed two", "K", AFTER, marks=pytest.mark.full),
        pytest.param("two", "V", BEFORE, marks=pytest.mark.full),
        pytest.param("two", "V", AFTER, marks=pytest.mark.full),
    ],
    ids=["K before", "K after", "V before", "V after"],
)
def test_rare_ones_are_caught(name: str, tile: str, place: int) -> None:
    victim = rare()[name]
    line = victim.passing_waits(tile)[place]
    (mutant,) = (m for m in victim.mutants if m.operator == "do not wait" and m.ptx_line == line)
    assert mutant.id in named((RARE,), victim)
    assert victim.run(mutant, HESITANT_SCHEDULES).caught


def test_there_are_no_other_rare_ones() -> None:
    for victim in (small() | shipped()).values():
        expected = 4 if victim is shipped()["two"] else 0
        assert len(named((RARE,), victim)) == expected


# How many mutants there are is not known before the kernels are compiled: a victim's last chunk has
# all that are left.
CHUNK = 40
FULL_CHUNKS = {
    **{"small three": 8, "small two": 8, "separate": 8, "three": 14, "two": 14},
    **{"half of Q": 10, "all of Q": 9},
}


def chunks() -> Iterator[ParameterSet]:
    """Victims, and which of their mutants."""
    for name, full in FULL_CHUNKS.items():
        for first in range(0, full * CHUNK, CHUNK):
            chunk = slice(first, first + CHUNK)
            yield pytest.param(name, chunk, id=f"{name} {first}-{chunk.stop - 1}")
        yield pytest.param(name, slice(full * CHUNK, None), id=f"{name} {full * CHUNK}-")


@pytest.mark.full
@pytest.mark.parametrize(("name", "chunk"), list(chunks()))
def test_all_mutants_are_caught(name: str, chunk: slice) -> None:
    victim = (small() | shipped() | with_register_Q())[name]
    chosen = list(victim.mutants[chunk])
    assert chosen
    assert survivors(victim, chosen) <= uncaught(victim)
