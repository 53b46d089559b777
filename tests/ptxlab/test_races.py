"""The race check on hand-written traces, and against an exhaustive happens-before search."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Trace

from ptxlab.checks import Races
from ptxlab.interface import MemoryRange

WARP = range(32)
CTA = range(64)


def trace(**shape: object) -> Trace:
    return Trace(Races(), **shape)  # type: ignore[arg-type]


def words(threads: range) -> list[int]:
    return [4 * t for t in threads]


def test_a_read_of_another_threads_write_needs_a_barrier() -> None:
    t = trace()
    t.write(CTA, words(CTA))
    t.read(CTA, words(CTA)[::-1])
    assert t.kinds() == ["race-raw"]
    (finding,) = t.observers[0].findings
    assert finding.count == 64
    assert finding.source == "kernel.cuh:102"
    assert "CTA 0 thread 0 (warp 0, lane 0) reads shared address 252" in finding.message
    assert "written by CTA 0 thread 63 (warp 1, lane 31) (kernel.cuh:101" in finding.message


def test_a_barrier_orders_everything_before_it() -> None:
    t = trace()
    t.write(CTA, words(CTA))
    t.barrier()
    t.read(CTA, words(CTA)[::-1])
    t.barrier()
    t.write(CTA, words(CTA))
    assert t.kinds() == []


def test_own_data_need_no_barrier() -> None:
    t = trace()
    for _ in range(2):
        t.write(CTA, words(CTA))
        t.read(CTA, words(CTA))
    assert t.kinds() == []


def test_overwriting_what_another_thread_may_still_read() -> None:
    t = trace()
    t.write(CTA, words(CTA))
    t.barrier()
    t.read(CTA, words(CTA)[::-1])
    t.write(CTA, words(CTA))
    assert t.kinds() == ["race-war"]


def test_two_writers_of_one_word() -> None:
    t = trace()
    t.write([3], [0])
    t.write([40], [0])
    assert t.kinds() == ["race-waw"]
    t = trace()
    t.write([3, 4], [0, 0])
    assert t.kinds() == ["race-waw"], "within one instruction too"


def test_lanes_of_a_warp_are_ordered_by_warp_sync_alone() -> None:
    t = trace()
    t.write(WARP, words(WARP))
    t.read(WARP, words(WARP)[::-1])
    assert t.kinds() == ["race-raw"]
    t = trace()
    t.write(WARP, words(WARP))
    t.warp_sync(WARP)
    t.read(WARP, words(WARP)[::-1])
    assert t.kinds() == []


def test_warp_sync_orders_nothing_across_warps() -> None:
    t = trace()
    t.write(WARP, words(WARP))
    t.warp_sync(WARP)
    t.warp_sync(range(32, 64))
    t.read([40], [0])
    assert t.kinds() == ["race-raw"]


def test_warp_sync_of_some_lanes_orders_only_those() -> None:
    quad = [0, 1, 2, 3]
    t = trace()
    t.write(WARP, words(WARP))
    t.warp_sync(quad)
    t.read(quad, [12, 8, 4, 0])
    t.read([0], [16])
    (finding,) = t.observers[0].findings
    assert (finding.kind, finding.threads, finding.count) == ("race-raw", (0,), 1)


def test_order_passes_through_a_third_thread() -> None:
    t = trace()
    t.write([0], [0])
    t.warp_sync([0, 1])
    t.barrier([1, 40], number=1)
    t.read([40], [0])
    assert t.kinds() == []
    t.read([41], [0])
    assert t.kinds() == ["race-raw"]


def test_a_named_barrier_orders_its_own_threads() -> None:
    half, other = range(64), range(64, 128)
    t = trace(threads=128)
    t.write(half, words(half))
    t.barrier(half, number=1)
    t.barrier(other, number=2)
    t.read(half, words(half)[::-1])
    assert t.kinds() == []
    t.read(other, words(half))
    assert t.kinds() == ["race-raw"]


def test_who_only_arrives_hands_over_and_learns_nothing() -> None:
    producers, consumers = range(32), range(32, 64)
    t = trace()
    t.write(producers, words(producers))
    t.arrive(producers, 1, 64)
    t.barrier(consumers, 1, arrived=producers)
    t.read(consumers, words(producers))
    assert t.kinds() == []
    t.write(producers, words(producers))
    assert t.kinds() == ["race-war"], "the producers have not waited for the reads"


def test_what_comes_after_an_arrival_is_not_handed_over() -> None:
    producers, consumers = range(32), range(32, 64)
    t = trace()
    t.arrive(producers, 1, 64)
    t.write(producers, words(producers))
    t.barrier(consumers, 1, arrived=producers)
    t.read(consumers, words(producers))
    assert t.kinds() == ["race-raw"]


def test_a_ring_of_arrivals_is_in_order() -> None:
    """Full and empty barriers between producers and consumers, round after round."""
    producers, consumers = range(32), range(32, 64)
    t = trace()
    for turn in range(3):
        if turn:
            t.barrier(producers, 2, arrived=consumers)
        t.write(producers, words(producers))
        t.arrive(producers, 1, 64)
        t.barrier(consumers, 1, arrived=producers)
        t.read(consumers, words(producers))
        t.arrive(consumers, 2, 64)
    assert t.kinds() == []


def test_ldmatrix_reads_for_the_whole_warp() -> None:
    rows = [16 * lane for lane in WARP]
    t = trace()
    t.write(WARP, rows, 16)
    # Every lane gave the address of the row that it wrote itself.
    t.ldmatrix(WARP, rows)
    assert t.kinds() == ["race-raw"]
    t = trace()
    t.write(WARP, rows, 16)
    t.warp_sync(WARP)
    t.ldmatrix(WARP, rows)
    t.write(WARP, rows, 16)
    assert t.kinds() == ["race-war"]


def test_a_copy_is_its_threads_write_and_others_need_a_barrier() -> None:
    rows = [16 * i for i in CTA]
    t = trace()
    t.copy(CTA, rows)
    t.wait(CTA)
    t.read(CTA, rows, 16)
    assert t.kinds() == []
    t.read(CTA, rows[::-1], 16)
    assert t.kinds() == ["race-raw"]
    t = trace()
    t.copy(CTA, rows)
    t.wait(CTA)
    t.barrier()
    t.read(CTA, rows[::-1], 16)
    assert t.kinds() == []


def test_a_wait_after_the_barrier_comes_too_late() -> None:
    rows = [16 * i for i in CTA]
    t = trace()
    t.copy(CTA, rows)
    t.barrier()
    t.wait(CTA)
    t.read(CTA, rows[::-1], 16)
    assert t.kinds() == ["race-raw"]


def test_a_copy_may_not_be_issued_into_memory_still_read() -> None:
    rows = [16 * i for i in CTA]
    t = trace()
    t.write(CTA, rows, 16)
    t.barrier()
    t.read(CTA, rows[::-1], 16)
    t.copy(CTA, rows)
    assert t.kinds() == ["race-war"]


def test_halves_of_a_word_are_separate() -> None:
    t = trace()
    t.write(WARP, [2 * lane for lane in WARP], 2)
    t.read(WARP, [2 * lane for lane in WARP], 2)
    assert t.kinds() == []
    t.read([1], [0], 2)
    assert t.kinds() == ["race-raw"]


def test_what_was_known_word_by_word_survives_the_step_to_bytes() -> None:
    t = trace()
    t.write([5], [8])
    t.write([9], [100], 1)
    t.read([6], [10], 1)
    assert t.kinds() == ["race-raw"]


def test_atomics_race_with_ordinary_accesses_only() -> None:
    t = trace()
    t.access("atomic", CTA, [0] * 64)
    t.access("atomic", CTA, [0] * 64)
    assert t.kinds() == []
    t.read([1], [0])
    assert t.kinds() == ["race-raw"]


def test_ctas_are_never_ordered_in_global_memory() -> None:
    output = MemoryRange("o", 4096, 8192, True)
    t = trace(ctas=2, ranges=[output])
    t.access("write", [0], [4096], space="global")
    t.barrier()
    t.access("write", [64], [4096], space="global")
    assert t.kinds() == ["race-waw"]
    t = trace(ctas=2, ranges=[output])
    t.access("read", [0, 64], [4096, 4096], space="global")
    assert t.kinds() == []
    t.barrier()
    t.access("write", [0], [4096], space="global")
    assert t.kinds() == ["race-war"]


def test_readers_of_several_ctas_are_all_remembered() -> None:
    output = MemoryRange("o", 4096, 8192, True)
    for writer in (0, 64, 128):
        t = trace(ctas=3, ranges=[output])
        t.access("read", [0, 64], [4096, 4096], space="global")
        t.access("write", [writer], [4096], space="global")
        assert t.kinds() == ["race-war"]
        assert "read by several CTAs" in t.observers[0].findings[0].message


def test_global_memory_within_a_cta_follows_its_barriers() -> None:
    output = MemoryRange("o", 4096, 8192, True)
    t = trace(ctas=2, ranges=[output])
    t.access("write", CTA, [4096 + 4 * i for i in CTA], space="global")
    t.barrier()
    t.access("read", CTA, [4096 + 252 - 4 * i for i in CTA], space="global")
    t.barrier()
    t.access("write", CTA, [4096 + 4 * i for i in CTA], space="global")
    assert t.kinds() == []


def test_a_wave_begins_with_fresh_shared_memory() -> None:
    t = trace(ctas=2)
    t.write([0], [0])
    for observer in t.observers:
        observer.wave(1, 1)
    t.write([64], [0])
    assert t.kinds() == []


# Against an exhaustive search ----------------------------------------------------------------

_THREADS = 4
_BASES = (0, 1, 32, 33)  # two lanes of two warps
_ACTIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("write"), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("sync"), st.sets(st.integers(0, 3), min_size=2), st.just(0)),
    st.tuples(st.just("arrive"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("meet"), st.sets(st.integers(0, 3), min_size=1), st.just(0)),
)


def exhaustive_race(actions: list[tuple]) -> bool:
    """Whether two conflicting accesses exist with no path of order between them."""
    follows: list[set[int]] = [set() for _ in actions]
    last: dict[int, int] = {}
    arrivals: list[int] = []
    for i, (kind, who, _) in enumerate(actions):
        for thread in sorted(who) if kind in ("sync", "meet") else [who]:
            if thread in last:
                follows[i] |= follows[last[thread]] | {last[thread]}
            last[thread] = i
        if kind == "arrive":
            arrivals.append(i)
        elif kind == "meet":
            for arrival in arrivals:
                follows[i] |= follows[arrival] | {arrival}
            arrivals = []
    accesses = [(i, a) for i, a in enumerate(actions) if a[0] in ("read", "write")]
    return any(
        first[2] == second[2]
        and first[1] != second[1]
        and "write" in (first[0], second[0])
        and i not in follows[j]
        for (i, first), (j, second) in itertools.combinations(accesses, 2)
    )


def play(actions: list[tuple], t: Trace) -> None:
    """Barrier 1 is for all who meet at it; at barrier 2 some have arrived before others wait."""
    arrived: list[int] = []
    for kind, who, word in actions:
        if kind == "sync":
            t.barrier([_BASES[i] for i in sorted(who)], number=1)
        elif kind == "arrive":
            t.arrive([_BASES[who]], 2, 4)
            arrived.append(_BASES[who])
        elif kind == "meet":
            t.barrier([_BASES[i] for i in sorted(who)], number=2, arrived=arrived)
            arrived = []
        else:
            t.access(kind, [_BASES[who]], [4 * word])


def possible(actions: list[tuple]) -> bool:
    """No thread arrives at barrier 2 twice before it opens."""
    arrived: set[int] = set()
    for kind, who, _ in actions:
        if (kind == "arrive" and who in arrived) or (kind == "meet" and who & arrived):
            return False
        if kind == "arrive":
            arrived.add(who)
        elif kind == "meet":
            arrived = set()
    return True


@settings(max_examples=500, deadline=None)
@given(st.lists(_ACTIONS, max_size=14).filter(possible))
def test_a_race_is_found_exactly_when_there_is_one(actions: list[tuple]) -> None:
    t = trace()
    play(actions, t)
    assert bool(t.kinds()) == exhaustive_race(actions)


def test_the_exhaustive_search_sees_an_obvious_race() -> None:
    racy = [("write", 0, 0), ("read", 1, 0)]
    assert exhaustive_race(racy)
    assert not exhaustive_race([racy[0], ("sync", {0, 1}, 0), racy[1]])


def test_clocks_of_large_launches_stay_apart() -> None:
    """Thread numbers of a later wave index the wave, not the launch."""
    t = trace(ctas=3)
    for observer in t.observers:
        observer.wave(2, 1)
    threads = np.arange(128, 192)
    t.write(threads.tolist(), words(CTA))
    t.barrier(threads.tolist())
    t.read(threads.tolist(), words(CTA)[::-1])
    assert t.kinds() == []


def test_a_last_warp_that_is_not_full() -> None:
    """Threads of the next CTA are not taken for its missing lanes."""
    t = trace(ctas=2, threads=48)
    both = range(96)
    t.write(both, [4 * (i % 48) for i in both])
    t.read(both, [4 * ((i % 48) ^ 1) for i in both])
    assert t.kinds() == ["race-raw"]
    t = trace(ctas=2, threads=48)
    t.write(both, [4 * (i % 48) for i in both])
    for first in (0, 48):
        t.warp_sync(range(first, first + 32))
        t.warp_sync(range(first + 32, first + 48))
    t.read(both, [4 * ((i % 48) ^ 1) for i in both])
    t.barrier()
    t.write(both, [4 * (i % 48) for i in both])
    assert t.kinds() == []


def test_a_matrix_read_is_its_warps() -> None:
    rows = [16 * lane for lane in WARP]
    t = trace()
    t.write(WARP, rows, 16)
    t.ldmatrix(WARP, rows)
    (finding,) = t.observers[0].findings
    assert "CTA 0 warp 0 reads shared address 0, written by CTA 0 thread 0" in finding.message
