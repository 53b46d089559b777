"""CTA barriers: whole CTAs, counted named barriers, early exits, deadlocks."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_programs import STORE_R1, program, run, words_of

from ptxlab.errors import EmulatorError
from ptxlab.interface import BarrierEvent, Observer

SHARED = ".shared .align 4 .b8 s[1024];\n"
#: %r10 = shared address of this thread's word, %r11 = of its neighbour's in the other half.
ADDRESSES = """
mov.u32 %r9, s; shl.b32 %r10, %r60, 2; add.u32 %r10, %r10, %r9;
xor.b32 %r11, %r60, 32; shl.b32 %r11, %r11, 2; add.u32 %r11, %r11, %r9;
"""


def test_data_cross_a_barrier() -> None:
    body = ADDRESSES + "st.shared.u32 [%r10], %r60; bar.sync 0; ld.shared.u32 %r1, [%r11];"
    got = words_of(body, threads=64, ctas=3, declarations=SHARED)
    assert got == [t ^ 32 for t in range(64)] * 3


def test_warps_meet_at_different_barrier_instructions() -> None:
    """Warp 0 and warp 1 run different code; the barrier is one all the same."""
    body = (
        ADDRESSES
        + """
    setp.lt.u32 %p1, %r60, 32;
    @%p1 bra LOW;
    st.shared.u32 [%r10], 7; bar.sync 0; ld.shared.u32 %r1, [%r11];
    bra.uni END;
    LOW:
    st.shared.u32 [%r10], 5; bar.sync 0; ld.shared.u32 %r1, [%r11];
    END:
    """
    )
    got = words_of(body, threads=64, ctas=2, declarations=SHARED)
    assert got == ([7] * 32 + [5] * 32) * 2


#: Warp 0 produces into ``s``, warp 1 consumes: full (1) and empty (2) barriers of 64 threads, where
#: each side arrives at one without waiting.
PRODUCER_CONSUMER = (
    ADDRESSES
    + """
mov.u32 %r1, 0; mov.u32 %r2, 0;
setp.ge.u32 %p1, %r60, 32;
@%p1 bra CONSUMER;
PRODUCE:
add.s32 %r3, %r60, %r2;
st.shared.u32 [%r10], %r3;
bar.arrive 1, 64;
bar.sync 2, 64;
add.s32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4;
@%p2 bra PRODUCE;
bra.uni END;
CONSUMER:
bar.sync 1, 64;
ld.shared.u32 %r4, [%r11];
add.s32 %r1, %r1, %r4;
bar.arrive 2, 64;
add.s32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4;
@%p2 bra CONSUMER;
END:
"""
)


def test_warp_specialised_producer_and_consumer() -> None:
    got = words_of(PRODUCER_CONSUMER, threads=64, ctas=2, declarations=SHARED)
    assert got == ([0] * 32 + [4 * t + 6 for t in range(32)]) * 2


def test_exited_threads_are_not_waited_for() -> None:
    body = """
    setp.ge.u32 %p1, %r60, 32;
    @%p1 ret;
    bar.sync 0;
    mov.u32 %r1, %r60;
    """
    out = np.zeros(64, np.uint32)
    run(program(body + STORE_R1 + "ret;"), [(out, True)], threads=64)
    assert out.tolist() == [*range(32), *[0] * 32]


def test_threads_that_exit_later_release_the_others() -> None:
    body = (
        ADDRESSES
        + """
    setp.ge.u32 %p1, %r60, 32;
    @%p1 bra LATE;
    bar.sync 0;
    ld.shared.u32 %r1, [%r11];
    """
        + STORE_R1
        + """
    ret;
    LATE:
    mov.u32 %r2, 0;
    LOOP:
    add.s32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 10;
    @%p2 bra LOOP;
    st.shared.u32 [%r10], %r2;
    ret;
    """
    )
    out = np.zeros(64, np.uint32)
    run(program(body, 1, SHARED), [(out, True)], threads=64)
    assert out.tolist() == [10] * 32 + [0] * 32


def test_a_cta_may_go_on_while_another_still_waits() -> None:
    """CTA 1's second warp spins on what CTA 0 writes behind a join and a barrier that CTA 1's
    other warp shares with it: neither may hold CTA 0 back."""
    flag = np.zeros(1, np.uint32)
    out = np.zeros(128, np.uint32)
    body = """
    setp.eq.u32 %p1, %r61, 0;
    setp.lt.u32 %p2, %r60, 32;
    or.pred %p3, %p1, %p2;
    @%p3 bra MEET;
    SPIN:
    ld.volatile.global.u32 %r5, [%rd2];
    setp.eq.u32 %p4, %r5, 0;
    @%p4 bra SPIN;
    MEET:
    bar.sync 0;
    st.volatile.global.u32 [%rd2], 1;
    mov.u32 %r1, %r61;
    """
    text = program(body + STORE_R1 + "ret;", 2)
    run(text, [(out, True), (flag, True)], threads=64, ctas=2, loop_limit=20_000)
    assert out.tolist() == [0] * 64 + [1] * 64


def test_a_join_is_given_up_when_its_other_side_needs_it() -> None:
    """Warp 0 waits inside the branch for what warp 1 does behind the join."""
    body = """
    setp.ge.u32 %p1, %r60, 32; mov.u32 %r3, 5;
    @%p1 bra JOIN;
    bar.sync 1, 64; mov.u32 %r3, 6;
    JOIN:
    setp.lt.u32 %p2, %r60, 32;
    @%p2 bra END;
    bar.arrive 1, 64;
    END:
    add.u32 %r1, %r3, %r60;
    """
    assert words_of(body, threads=64, ctas=2) == [t + 6 - t // 32 for t in range(64)] * 2


def test_a_join_is_not_given_up_within_a_warp() -> None:
    body = """
    setp.ge.u32 %p1, %r60, 16; mov.u32 %r1, 5;
    @%p1 bra JOIN;
    bar.sync 1, 32;
    JOIN:
    bar.arrive 1, 32;
    """
    with pytest.raises(EmulatorError, match="deadlock: CTA 0 threads 0-15"):
        words_of(body)


def test_given_up_joins_nest() -> None:
    """Three warps, each waiting in a deeper branch for the next one, which is at the join."""
    body = """
    mov.u32 %r1, 0;
    setp.ge.u32 %p1, %r60, 64;
    @%p1 bra OUTER;
    setp.ge.u32 %p2, %r60, 32;
    @%p2 bra INNER;
    bar.sync 1, 64;
    add.u32 %r1, %r1, 1;
    INNER:
    setp.lt.u32 %p3, %r60, 32;
    @%p3 bra OUTER;
    bar.sync 2, 64;
    bar.arrive 1, 64;
    add.u32 %r1, %r1, 10;
    OUTER:
    setp.lt.u32 %p4, %r60, 64;
    @%p4 bra END;
    bar.arrive 2, 64;
    add.u32 %r1, %r1, 100;
    END:
    add.u32 %r1, %r1, 1000;
    """
    assert words_of(body, threads=96) == [1001] * 32 + [1010] * 32 + [1100] * 32


def test_deadlock_names_who_waits_for_what() -> None:
    body = """
    mov.u32 %r1, 0; setp.lt.u32 %p1, %r60, 32;
    @%p1 bra LOW;
    .loc 1 20 1
    bar.sync 1, 64;
    bra.uni END;
    LOW:
    .loc 1 30 1
    bar.sync 2, 64;
    END:
    """
    with pytest.raises(EmulatorError) as caught:
        words_of(body, threads=64, ctas=2)
    message = str(caught.value)
    assert "deadlock" in message
    assert "CTA 0 threads 32-63 at program.cu:20" in message
    assert "wait for barrier 1 (32 of 64 threads have arrived)" in message
    assert "CTA 0 threads 0-31 at program.cu:30" in message
    assert "; the same in 1 more CTAs" in message


def test_disagreement_about_the_thread_count() -> None:
    body = """
    mov.u32 %r1, 0; setp.lt.u32 %p1, %r60, 32;
    @%p1 bra LOW;
    bar.sync 1, 96;
    bra.uni END;
    LOW:
    bar.sync 1, 64;
    END:
    """
    with pytest.raises(EmulatorError, match=r"one thread expects .* threads, another"):
        words_of(body, threads=96)


def test_more_threads_than_a_barrier_expects() -> None:
    with pytest.raises(EmulatorError, match="96 threads arrived where 64 were expected"):
        words_of("mov.u32 %r1, 0; bar.sync 1, 64;", threads=96)


class Recorder(Observer):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[BarrierEvent] = []

    def barrier(self, event: BarrierEvent) -> None:
        self.events.append(event)


def test_barrier_events_name_every_thread_once() -> None:
    recorder = Recorder()
    words_of(PRODUCER_CONSUMER, threads=64, declarations=SHARED, observers=[recorder])
    for kind in ("arrive", "release"):
        first = [e for e in recorder.events if e.barrier == 1 and e.kind == kind]
        threads = np.concatenate([e.threads for e in first])
        assert np.array_equal(np.bincount(threads), np.full(64, 4))
        assert {e.expected for e in first} == {64}
    clocks = [e.clock for e in recorder.events]
    assert clocks == sorted(clocks)
    assert len(set(clocks)) == len(clocks)


def test_who_is_at_a_join_goes_on_with_its_registers() -> None:
    """Warp 0 waits, in its branch, for what warp 1 does behind the join of both branches."""
    body = """
    mul.lo.u32 %r5, %r60, 3;
    setp.lt.u32 %p1, %r60, 32;
    @%p1 bra LOW;
    mov.u32 %r6, 1;
    bra.uni JOIN;
    LOW:
    bar.sync 1, 64;
    mov.u32 %r6, 2;
    bra.uni JOIN;
    JOIN:
    add.u32 %r1, %r5, %r6;
    @%p1 bra END;
    bar.arrive 1, 64;
    END:
    """
    for seed in (None, 0, 1):
        got = words_of(body, threads=64, seed=seed)
        assert got == [3 * t + (2 if t < 32 else 1) for t in range(64)]
