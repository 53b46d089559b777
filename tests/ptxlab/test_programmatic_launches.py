"""Launches that may begin before the one before is over: what they touch without a wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from ptx_programs import aligned, program, run

from ptxlab.checks import Races
from ptxlab.errors import EmulatorError

THREADS, CTAS = 64, 2
WAIT, BARRIER = "griddepcontrol.wait;", "bar.sync 0;"
ALLOW = "griddepcontrol.launch_dependents;"
ONE_WAITS = "setp.ne.u32 %p1, %r60, 0; @%p1 bra MEET; griddepcontrol.wait; MEET: bar.sync 0;"

#: %rd1 and %rd2 have a word for each thread.
WRITES = "add.s64 %rd4, %rd1, %rd0; st.global.u32 [%rd4], %r0; griddepcontrol.launch_dependents;"
READS = "add.s64 %rd4, %rd1, %rd0; ld.global.u32 %r1, [%rd4];"
COPIES = READS + "add.s64 %rd5, %rd2, %rd0; st.global.u32 [%rd5], %r1;"
HALVES = ".reg .b16 %h1; add.s64 %rd4, %rd1, %rd0; ld.global.u16 %h1, [%rd4+2];"
ELSEWHERE = "add.s64 %rd5, %rd2, %rd0; st.global.u32 [%rd5], %r0;"


def findings(
    *launches: str,
    programmatic: bool = True,
    ctas: int = CTAS,
    orders_sums: bool = False,
    tensors: Sequence[np.ndarray] = (),
    seed: int | None = None,
) -> list[tuple[str, str]]:
    """Kinds and messages of one launch after the other; all but the first may begin early."""
    races = Races(orders_sums)
    tensors = tensors or [np.zeros(THREADS * CTAS, np.uint32) for _ in range(2)]
    for number, body in enumerate(launches):
        run(
            program(body + "ret;", 2),
            [(tensor, True) for tensor in tensors],
            ctas=ctas,
            threads=THREADS,
            observers=[races],
            programmatic=programmatic and number > 0,
            seed=seed,
        )
    return [(finding.kind, finding.message) for finding in races.findings]


@pytest.mark.parametrize("begin", [WAIT, WAIT + BARRIER, ONE_WAITS], ids=["all", "met", "one"])
@pytest.mark.parametrize("body", [COPIES, WRITES, ELSEWHERE], ids=["reads", "writes", "neither"])
def test_who_waits_may_touch_everything(begin: str, body: str) -> None:
    assert not findings(WRITES, begin + body)


@pytest.mark.parametrize("begin", ["", ONE_WAITS.replace("bar.sync 0;", "")], ids=["none", "one"])
def test_what_the_launch_before_wrote_is_read_too_early(begin: str) -> None:
    ((kind, message),) = findings(WRITES, begin + COPIES)
    assert kind == "race-launch"
    assert "written by the launch of main before, with no griddepcontrol.wait between" in message


def test_a_wait_comes_before_and_not_after() -> None:
    assert findings(WRITES, COPIES + WAIT)
    assert findings(WRITES, READS.replace("add.s64 %rd4", WAIT + "add.s64 %rd4") + COPIES) == []


def test_overwriting_what_the_launch_before_reads_or_writes() -> None:
    for first in (COPIES, WRITES):
        (found,) = findings(first, WRITES)
        assert found[0] == "race-launch"
        assert "used by the launch" in found[1]
    assert not findings(COPIES, READS), "both read"
    assert not findings(WRITES, ELSEWHERE), "nothing in common"


def test_bytes_count_by_the_word() -> None:
    assert findings(WRITES, HALVES)
    assert not findings(WRITES, HALVES.replace("add.s64", WAIT + "add.s64"))


def test_a_launch_that_begins_when_all_are_over_needs_no_wait() -> None:
    assert not findings(WRITES, COPIES, programmatic=False)


def test_a_wait_reaches_as_far_back_as_the_launch_between_has_waited() -> None:
    assert not findings(WRITES, WAIT + ELSEWHERE, WAIT + READS)
    ((kind, message),) = findings(WRITES, ELSEWHERE, WAIT + READS)
    assert kind == "race-launch"
    assert "no griddepcontrol.wait in the launch between" in message


@pytest.mark.parametrize(
    "between",
    [
        WAIT + ALLOW + ELSEWHERE,
        WAIT + ELSEWHERE,
        ONE_WAITS + ALLOW + ELSEWHERE,
        # Some threads are over before, and some allow it twice.
        "setp.eq.u32 %p1, %r60, 1; @%p1 bra END;" + WAIT + ALLOW + ALLOW + ELSEWHERE + "END:",
    ],
    ids=["allowed", "at the end", "met", "twice"],
)
@pytest.mark.parametrize("body", [COPIES, WRITES], ids=["reads", "writes"])
def test_what_was_over_when_a_launch_was_allowed_needs_no_wait(between: str, body: str) -> None:
    assert not findings(WRITES, between.replace("%rd2", "%rd1"), WAIT + body)
    copies = READS + "add.s64 %rd5, %rd2, %rd0;" if body == COPIES else WRITES
    assert not findings(WRITES, between, copies)
    assert not findings(WRITES, WAIT + ALLOW, between, copies)


@pytest.mark.parametrize(
    "between",
    [
        ALLOW + WAIT + ELSEWHERE,
        ALLOW + WAIT + ALLOW + ELSEWHERE,
        ELSEWHERE,
        ALLOW + ELSEWHERE,
        # Threads that have not waited allow it, too.
        ONE_WAITS.replace("bar.sync 0;", "") + ALLOW + BARRIER + ELSEWHERE,
        # The second CTA is over, or allows it, before the first launch is.
        "setp.ne.u32 %p1, %r61, 0; @%p1 bra END;" + WAIT + ALLOW + ELSEWHERE + "END:",
        "setp.ne.u32 %p1, %r61, 0; @%p1 bra ALLOW;" + WAIT + "ALLOW:" + ALLOW + ELSEWHERE,
    ],
    ids=["before", "twice", "never", "no wait", "one thread", "one CTA", "one CTA allows"],
)
def test_what_may_be_under_way_when_a_launch_was_allowed_needs_a_wait(between: str) -> None:
    found = findings(WRITES, between, READS)
    assert {kind for kind, _ in found} == {"race-launch"}
    assert "written by the launch of main before" in found[0][1]


def test_a_launch_is_allowed_behind_those_that_a_wait_reaches() -> None:
    """One that has not waited itself lets the launches before it be under way."""
    assert not findings(WRITES, WAIT + ELSEWHERE, WAIT + ALLOW, READS)
    assert findings(WRITES, ELSEWHERE, WAIT + ALLOW, READS)
    ours = "add.s64 %rd4, %rd2, %rd0; ld.global.u32 %r1, [%rd4];"
    assert findings(WRITES, WAIT + ALLOW + ELSEWHERE, ours), "of the launch directly before"


def test_other_ctas_learn_of_a_wait_by_release_and_acquire() -> None:
    """In waves too: each CTA of its own."""
    handed = """
    setp.ne.u32 %p1, %r61, 0; @%p1 bra LATER;
    griddepcontrol.wait; bar.sync 0; setp.ne.u32 %p2, %r60, 0; @%p2 bra WORK;
    st.release.gpu.global.u32 [%rd2], 1; bra WORK;
    LATER: ld.acquire.gpu.global.u32 %r1, [%rd2]; setp.ne.u32 %p3, %r1, 1; @%p3 bra LATER;
    WORK:
    """
    assert not findings(WRITES, handed + READS)
    relaxed = handed.replace("acquire", "relaxed")
    assert {kind for kind, _ in findings(WRITES, relaxed + READS)} == {"race-launch"}


def test_other_forms_are_refused() -> None:
    with pytest.raises(EmulatorError, match="does not exist"):
        findings("griddepcontrol.arrive;")


# Words handed over as they arrive --------------------------------------------------------------

#: Every thread has 16 bytes of the first tensor, at %rd4, and 16 bytes of the second, at %rd5. Four
#: words behind them belong to nobody.
PLACES = "shl.b64 %rd6, %rd0, 2; add.s64 %rd4, %rd1, %rd6; add.s64 %rd5, %rd2, %rd6;"
PUT = "st.relaxed.gpu.global.v4.u32 [%rd4], {%r20, %r21, %r22, %r23};"
PUTS = (
    PLACES
    + "add.u32 %r20, %r0, 1; add.u32 %r21, %r0, 2; add.u32 %r22, %r0, 3; add.u32 %r23, %r0, 4;"
    + PUT
)
TAKE = "ld.relaxed.gpu.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd4];"
LEAST = "min.u32 %r14, %r10, %r11; min.u32 %r15, %r12, %r13; min.u32 %r14, %r14, %r15;"
TAKES = f"{PLACES} TAKE: {TAKE} {LEAST} setp.eq.u32 %p6, %r14, 0; @%p6 bra TAKE;"
CLEAR = "st.relaxed.gpu.global.v4.u32 [%rd4], {%r30, %r30, %r30, %r30};"
CLEARS = f"mov.u32 %r30, 0; mov.u64 %rd8, 0; {CLEAR}"
KEEPS = "st.global.v4.u32 [%rd5], {%r10, %r11, %r12, %r13};"


def vectors() -> list[np.ndarray]:
    """Two tensors of four words for each thread, and four more."""
    return [aligned((4 * THREADS * CTAS + 4,), np.uint32) for _ in range(2)]


def handed_over(*launches: str, orders_sums: bool = False) -> set[str]:
    """The kinds of the findings of launches over vectors."""
    found = findings(*launches, tensors=vectors(), orders_sums=orders_sums)
    return {kind for kind, _ in found}


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_words_that_are_handed_over_may_be_read_and_cleared_before_a_wait(
    seed: int | None,
) -> None:
    words, kept = tensors = vectors()
    assert not findings(PUTS, TAKES + CLEARS + WAIT + KEEPS, tensors=tensors, seed=seed)
    assert not words.any()
    assert kept[:-4].tolist() == [t + k for t in range(THREADS * CTAS) for k in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    "put",
    [
        "st.release.gpu.global.v4.u32 [%rd4], {%r20, %r21, %r22, %r23};",
        "st.volatile.global.v4.b32 [%rd4], {%r20, %r21, %r22, %r23};",
        "st.relaxed.sys.v2.u32 [%rd4], {%r20, %r21};"
        "st.relaxed.gpu.global.f32 [%rd4+8], %f1; red.global.add.u32 [%rd4+12], %r23;",
        "atom.relaxed.sys.global.exch.b32 %r9, [%rd4], %r20; red.release.gpu.add.s32 [%rd4+4], 5;"
        "red.relaxed.gpu.global.add.v2.f32 [%rd4+8], {%f1, %f1};",
    ],
    ids=["release", "volatile", "mixed", "atomics"],
)
def test_every_form_of_a_strong_access_to_words_counts(put: str) -> None:
    puts = PUTS.replace(PUT, "mov.f32 %f1, 0f3F800000;" + put)
    scalars = """
    LATER: ld.acquire.gpu.global.u32 %r10, [%rd4]; ld.volatile.global.v2.u32 {%r12, %r13}, [%rd4+8];
    ld.acquire.sys.f32 %f2, [%rd4+4]; mov.b32 %r11, %f2;
    """
    takes = TAKES.replace(f"TAKE: {TAKE}", scalars).replace("bra TAKE", "bra LATER")
    clears = CLEARS.replace(
        CLEAR,
        "atom.exch.b32 %r9, [%rd4], %r30; red.sys.global.and.b32 [%rd4+4], %r30;"
        "st.volatile.global.v2.u32 [%rd4+8], {%r30, %r30};",
    )
    for take in (TAKES, takes):
        for clear in (CLEARS, clears):
            assert not handed_over(puts, take + clear)


WEAK_PUTS = {
    "weak": PUT.replace("relaxed.gpu.", ""),
    "one_weak_word": PUT + "st.global.u32 [%rd4+12], %r23;",
    "weak_before": "st.global.u32 [%rd4+12], %r22;" + PUT,
    "weak_byte": PUT + "cvt.u16.u32 %h1, %r23; st.global.u8 [%rd4+13], %h1;",
    "relaxed_halves": PUT + "cvt.u16.u32 %h1, %r23; st.relaxed.gpu.global.u16 [%rd4+14], %h1;",
    "cta": PUT.replace("gpu", "cta"),
    "cta_atomic": PUT + "red.relaxed.cta.global.add.u32 [%rd4+4], 1;",
    "wide": "mov.b64 %rd7, {%r20, %r21}; st.relaxed.gpu.global.v2.u64 [%rd4], {%rd7, %rd7};",
    "wide_atomic": PUT + "red.relaxed.gpu.global.add.u64 [%rd4], 0;",
}


@pytest.mark.parametrize("name", WEAK_PUTS)
def test_words_that_were_not_stored_by_strong_accesses_alone_are_not_handed_over(name: str) -> None:
    puts = ".reg .b16 %h1;" + PUTS.replace(PUT, WEAK_PUTS[name])
    assert handed_over(puts, TAKES) == {"race-launch"}
    assert not handed_over(puts, WAIT + TAKES + CLEARS)


@pytest.mark.parametrize("byte", ["", "ld.global.u8 %h1, [%rd1+{spare}];"], ids=["words", "bytes"])
def test_the_word_that_was_stored_weakly_is_named(byte: str) -> None:
    last = THREADS * CTAS - 1
    tensors = vectors()
    weak = f"setp.eq.u32 %p1, %r0, {last}; @%p1 st.global.u32 [%rd4+8], %r22;"
    puts = ".reg .b16 %h1;" + PUTS + byte.format(spare=16 * (last + 1) + 1) + weak
    ((kind, message),) = findings(puts, TAKES, tensors=tensors)
    assert kind == "race-launch"
    address = tensors[0].ctypes.data + 16 * last
    assert f"CTA 1 thread 63 (warp 1, lane 31) reads global address {address:#x}" in message


WEAK_TAKES = {
    "weak": "ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd4];",
    "cta": TAKE.replace("gpu", "cta"),
    "wide": "ld.relaxed.gpu.global.v2.u64 {%rd7, %rd8}, [%rd4];",
    "halves": ".reg .b16 %h<3>; ld.relaxed.gpu.global.v2.u16 {%h1, %h2}, [%rd4];",
}


@pytest.mark.parametrize("name", WEAK_TAKES)
def test_other_reads_of_words_that_are_handed_over_are_too_early(name: str) -> None:
    assert handed_over(PUTS, PLACES + WEAK_TAKES[name]) == {"race-launch"}
    assert not handed_over(PUTS, WAIT + PLACES + WEAK_TAKES[name])
    # A word that has been seen orders nothing: neither itself nor others.
    assert handed_over(PUTS, TAKES + WEAK_TAKES[name]) == {"race-launch"}


WEAK_CLEARS = {
    "weak": CLEAR.replace("relaxed.gpu.", ""),
    "cta": CLEAR.replace("gpu", "cta"),
    "wide": "st.relaxed.gpu.global.v2.u64 [%rd4], {%rd8, %rd8};",
    "one_weak_word": CLEAR + "st.global.u32 [%rd4+8], %r30;",
}


@pytest.mark.parametrize("name", WEAK_CLEARS)
def test_other_writes_to_words_that_are_handed_over_are_too_early(name: str) -> None:
    clears = CLEARS.replace(CLEAR, WEAK_CLEARS[name])
    assert handed_over(PUTS, TAKES + clears) == {"race-launch"}
    assert not handed_over(PUTS, TAKES + WAIT + clears)


def test_words_that_the_launch_before_reads_weakly_may_be_read_and_not_be_cleared() -> None:
    """Whatever it has done to them since, and where other accesses are of bytes."""
    weak_read = "ld.global.u32 %r25, [%rd4+4];"
    byte = f".reg .b16 %h1; ld.global.u8 %h1, [%rd1+{16 * THREADS * CTAS + 1}];"
    for reads in (weak_read, weak_read + byte, byte + weak_read):
        for puts in (PUTS.replace(PUT, reads + PUT), PUTS + reads):
            assert not handed_over(puts, TAKES)
            assert handed_over(puts, TAKES + CLEARS) == {"race-launch"}
    strong_read = weak_read.replace("ld.", "ld.relaxed.gpu.")
    assert not handed_over(PUTS + strong_read + byte, TAKES + CLEARS)


def test_weak_data_beside_words_that_are_handed_over_need_a_wait() -> None:
    """Polls order nothing but the words themselves."""
    data = "st.global.u32 [%rd5], %r20;"
    puts, reads = PUTS.replace(PUT, data + PUT), "ld.global.u32 %r16, [%rd5];"
    assert handed_over(puts, TAKES + reads) == {"race-launch"}
    assert not handed_over(puts, TAKES + WAIT + reads)


@pytest.mark.parametrize("between", [ELSEWHERE, PUTS], ids=["elsewhere", "puts"])
def test_only_the_launch_directly_before_hands_words_over(between: str) -> None:
    for begin in ("", ALLOW + WAIT):
        assert handed_over(PUTS, begin + between, TAKES) == {"race-launch"}
    assert not handed_over(PUTS, WAIT + between, WAIT + TAKES + CLEARS)


def test_sums_that_must_be_ordered_are_not_handed_over() -> None:
    adds = f"{PLACES} mov.f32 %f1, 0f3F800000; red.global.add.f32 [%rd4], %f1;"
    assert not handed_over(adds, adds)
    assert handed_over(adds, adds, orders_sums=True) == {"race-launch"}
    assert not handed_over(adds, WAIT + adds, orders_sums=True)
