"""Order between CTAs: release and acquire in global memory, and waiting for other CTAs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from memory_order_programs import (
    AGREEING,
    ARRIVALS,
    CTAS,
    SIGNALS,
    SUM,
    THREADS,
    WAITS,
    WRONG_ARRIVALS,
    WRONG_SIGNALS,
    WRONG_WAITS,
    chain,
    chained,
    last_arriver,
    merged,
    summed,
)
from ptx_programs import STORE_R1, aligned, program, run

from ptxlab.checks import Bounds, Races
from ptxlab.errors import EmulatorError
from ptxlab.interface import Finding


def found_by(
    text: str, words: int, results: int, *, orders_sums: bool = False, **options: object
) -> tuple[list[int], list[Finding]]:
    """Results of a program, and the findings of the race check."""
    out, races = np.zeros(results, np.uint32), Races(orders_sums)
    flag, shared = np.zeros(1, np.uint32), np.zeros(words, np.uint32)
    run(
        text,
        [(flag, True), (shared, True), (out, True)],
        **{"ctas": CTAS, "threads": THREADS, "observers": [races], **options},  # type: ignore[arg-type]
    )
    return out.tolist(), races.findings


@pytest.mark.parametrize("name", AGREEING)
@pytest.mark.parametrize("seed", [None, 2, 3])
def test_right_programs_give_what_python_does(name: str, seed: int | None) -> None:
    text, words, expected = AGREEING[name]
    results, findings = found_by(text, words, len(expected), seed=seed)
    assert results == expected
    assert not findings, findings[0]


@pytest.mark.parametrize("wait", WRONG_WAITS)
def test_a_wait_without_acquire_is_a_race(wait: str) -> None:
    text = chain(WRONG_WAITS[wait], SIGNALS["st_release"])
    results, findings = found_by(text, THREADS, CTAS * THREADS)
    assert results == chained(), "right by chance"
    assert {finding.kind for finding in findings} >= {"race-raw"}
    if wait not in ("acquire_cta",):
        assert "neither .acquire nor a fence follows" in findings[0].message


@pytest.mark.parametrize("signal", WRONG_SIGNALS)
def test_a_signal_without_release_is_a_race(signal: str) -> None:
    text = chain(WAITS["acquire"], WRONG_SIGNALS[signal])
    results, findings = found_by(text, THREADS, CTAS * THREADS)
    assert results == chained(), "right by chance"
    assert {finding.kind for finding in findings} >= {"race-raw"}
    if signal != "release_cta":
        assert "neither .release nor a fence precedes" in findings[0].message


@pytest.mark.parametrize(
    "barrier", ["MEET: bar.sync 0;", "st.global.u32 [%rd6], %r9;\n        bar"]
)
def test_what_other_threads_of_the_cta_do_takes_its_barriers(barrier: str) -> None:
    text = chain(WAITS["acquire"], SIGNALS["st_release"])
    assert barrier in text
    without = barrier.replace("bar.sync 0;", "").replace("bar", "//bar")
    found = set()
    for seed in (None, 0, 1, 2, 3):
        found |= {f.kind for f in found_by(
            text.replace(barrier, without), THREADS, CTAS * THREADS, seed=seed
        )[1]}  # fmt: skip
    assert found & {"race-raw", "race-war", "race-waw"}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("arrive", WRONG_ARRIVALS)
def test_a_last_arriver_must_release_and_acquire(arrive: str, seed: int | None) -> None:
    text = last_arriver(WRONG_ARRIVALS[arrive])
    _, findings = found_by(text, CTAS * THREADS, THREADS, seed=seed)
    assert {finding.kind for finding in findings} == {"race-raw"}


def test_schedules_decide_which_cta_is_the_last() -> None:
    """And what was released before reaches the last one in waves of CTAs, too."""
    text = last_arriver(ARRIVALS["acq_rel"]).replace("st.global.u32 [%rd7], %r9;", "")
    text = text.replace("mov.u32 %r9, 0;", "st.global.u32 [%rd3], %r61; mov.u32 %r9, 0;")
    lasts = {found_by(text, CTAS * THREADS, 1, seed=seed)[0][0] for seed in range(12)}
    assert len(lasts) > 2
    alone = found_by(last_arriver(ARRIVALS["acq_rel"]), CTAS * THREADS, THREADS, threads=THREADS)
    assert alone == (merged(), [])


# Waiting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [1, 2, None])
@pytest.mark.parametrize("seed", [None, 1])
def test_waiting_for_earlier_ctas_takes_no_more_than_one_at_a_time(
    resident: int | None, seed: int | None
) -> None:
    text = chain(WAITS["acquire"], SIGNALS["red_release"])
    results, findings = found_by(text, THREADS, CTAS * THREADS, sm_count=resident, seed=seed)
    assert (results, findings) == (chained(), [])


def reversed_chain() -> str:
    """The last CTA is the first that works."""
    return chain(WAITS["acquire"], SIGNALS["st_release"]).replace(
        "setp.ne.u32 %p2", f"sub.u32 %r61, {CTAS - 1}, %r61; setp.ne.u32 %p2"
    )


def test_a_wait_for_a_cta_that_is_not_resident_is_an_error() -> None:
    results, findings = found_by(reversed_chain(), THREADS, CTAS * THREADS, sm_count=CTAS)
    assert not findings
    # Their places are in the order of CTAs, not of work.
    assert sorted(results) == sorted(chained())
    with pytest.raises(EmulatorError, match=r"deadlock: CTA 0 threads 0 .* the word at global ad"
                       r"dress 0x[0-9a-f]+, byte 0 of tensor 0, to change from 0 \(2 later "
                       r"CTAs of the launch do not become resident"):  # fmt: skip
        found_by(reversed_chain(), THREADS, CTAS * THREADS, sm_count=3)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_wait_that_nobody_satisfies_ends(seed: int | None) -> None:
    text = chain(WAITS["acquire"], "st.release.gpu.global.u32 [%rd1], 77;")
    with pytest.raises(EmulatorError, match=r"deadlock: .*CTA 1.*byte 0 of tensor 0, to change fro"
                       r"m 77"):  # fmt: skip
        found_by(text, THREADS, CTAS * THREADS, seed=seed)


def test_threads_of_one_warp_may_wait_for_each_other() -> None:
    """The even lanes wait until the odd ones, on another way, have counted."""
    out, flag = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    text = f"""
    and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; mov.u32 %r1, 5; @%p1 bra WAIT;
    red.release.gpu.global.add.u32 [%rd2], 1; bra DONE;
    WAIT: ld.acquire.gpu.global.u32 %r1, [%rd2]; setp.lt.u32 %p2, %r1, 16; @%p2 bra WAIT;
    DONE: {STORE_R1} ret;
    """
    run(program(text, 2), [(out, True), (flag, True)])
    assert out.tolist() == [16, 5] * 16


def test_a_loop_that_counts_is_no_wait() -> None:
    """It may end by itself: whoever polls a word three times, or reads many, goes on."""
    out, words = np.zeros(32, np.uint32), np.arange(8, dtype=np.uint32)
    polls = f"""
    mov.u32 %r2, 0; mov.u32 %r1, 0;
    POLL: ld.acquire.gpu.global.u32 %r3, [%rd2]; add.u32 %r1, %r1, %r3; add.s64 %rd2, %rd2, 4;
    add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 8; @%p1 bra POLL;
    {STORE_R1} ret;
    """
    run(program(polls, 2), [(out, True), (words, True)])
    assert out.tolist() == [28] * 32


# Waiting for vectors ---------------------------------------------------------------------------

#: CTA 1 waits for the words at %rd2 that CTA 0 writes one after the other, between other accesses.
LOADS = {
    "v4": ("ld.relaxed.gpu.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd2];", 4),
    "v4_acquire_generic": ("ld.acquire.gpu.v4.b32 {%r10, %r11, %r12, %r13}, [%rd2];", 4),
    "v4_volatile": ("ld.volatile.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd2];", 4),
    "v2": (
        "ld.relaxed.gpu.global.v2.u32 {%r10, %r11}, [%rd2]; mov.u32 %r12, %r10; mov.u32 %r13, 1;",
        2,
    ),
    "v2_u64": (
        "ld.relaxed.gpu.global.v2.u64 {%rd7, %rd8}, [%rd2]; mov.b64 {%r10, %r11}, %rd7;"
        "mov.b64 {%r12, %r13}, %rd8;",
        4,
    ),
}
LEAST = "min.u32 %r14, %r10, %r11; min.u32 %r15, %r12, %r13; min.u32 %r14, %r14, %r15;"
UNTIL_ALL = LEAST + "setp.eq.u32 %p1, %r14, 0; @%p1 bra SPIN;"


def handover(
    load: str,
    words: int,
    values: Sequence[int],
    again: str = UNTIL_ALL,
    order: Sequence[int] = range(4),
) -> str:
    """CTA 1 leaves the least of the words behind that it has waited for; they come in an order."""
    puts = "".join(
        f"mov.u32 %r20, {values[k]:#x}; st.relaxed.gpu.global.u32 [%rd2+{4 * k}], %r20; "
        f"bar.sync {1 + k};"
        for k in order
        if k < min(words, len(values))
    )
    return program(
        f"""
        mov.u32 %r14, 7; setp.eq.u32 %p2, %r61, 1; @%p2 bra SPIN; {puts} bra DONE;
        SPIN: {load} {again}
        DONE: mov.u32 %r1, %r14; {STORE_R1} ret;
        """,
        2,
    )


def waited(text: str, start: Sequence[int] = (0,) * 4, **options: object) -> tuple[list[int], int]:
    """What a thread of each of two CTAs leaves behind, and how many loads CTA 1's warp makes."""
    out, words = np.zeros(64, np.uint32), aligned((len(start),), np.uint32)
    words[:] = start
    result = run(
        text,
        [(out, True), (words, True)],
        **{"ctas": 2, "loop_limit": 2000, **options},  # type: ignore[arg-type]
    )
    loads = sum(
        count
        for name, count in result.instructions.items()
        if name[:3] == "ld." and "param" not in name
    )
    return out[[0, 63]].tolist(), loads


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", LOADS)
def test_a_loop_waits_for_all_words_of_a_vector(name: str, seed: int | None) -> None:
    """In any order of arrival. As floating-point numbers of 8 bytes 0x80000000 behind a zero is
    equal to zero, and 0xFFF80001 is not equal to itself."""
    load, words = LOADS[name]
    for values in (
        (9, 8, 7, 6),
        (0x80000000,) * 4,
        (0xFFF80001,) * 4,
        (0x7FF00001, 0x80000000, 1, 1),
    ):
        least = min((*values[:words], 1) if words == 2 else values)
        assert waited(handover(load, words, values), seed=seed)[0] == [7, least]


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("value", [1, 0x80000000, 0xFFF80001])
def test_a_vector_of_which_a_word_never_comes_is_a_deadlock(name: str, value: int) -> None:
    load, words = LOADS[name]
    values = [value] * (words - 1)
    each = 8 if "u64" in name else 4
    found = np.array([*values, 0], np.uint32).view(f"u{each}").tolist()
    places = (
        rf"deadlock: CTA 1 threads 0-31 at PTX line \d+: ld\.\S+ wait for one of the {len(found)} "
        rf"words of {each} bytes at global address 0x[0-9a-f]+, byte 0 of tensor 1, to change from "
        + ", ".join(str(word) for word in found)
        + "$"
    )
    with pytest.raises(EmulatorError, match=places):
        waited(handover(load, words, values))


@pytest.mark.parametrize("name", LOADS)
def test_a_vector_that_is_there_is_read_once(name: str) -> None:
    load, words = LOADS[name]
    results, loads = waited(handover(load, words, ()), (5, 6, 0xFFF80001, 0xFFF80001))
    assert (results[1], loads) == (1 if words == 2 else 5, 1)


VECTORS = 5
#: A thread's vectors stand next to each other at %rd4; %r14 becomes the least of all their words.
READS = "".join(
    f"ld.relaxed.gpu.global.v4.u32 {{%r{10 + 4 * k}, %r{11 + 4 * k}, %r{12 + 4 * k}, "
    f"%r{13 + 4 * k}}}, [%rd4+{16 * k}];"
    for k in range(VECTORS)
)
SEVERAL = {
    "one_test": READS
    + "mov.u32 %r50, %r10;"
    + "".join(f"min.u32 %r50, %r50, %r{k};" for k in range(11, 30))
    + "setp.eq.u32 %p1, %r50, 0; @%p1 bra SPIN;",
    "test_by_test": READS
    + "mov.u32 %r50, %r10;"
    + "".join(
        f"min.u32 %r50, %r50, %r{k}; setp.eq.u32 %p1, %r{k}, 0; @%p1 bra SPIN;"
        for k in range(10, 30)
    ),
    "load_by_load": "mov.u32 %r50, 0xFFFFFFFF;"
    + "".join(
        f"{read}; min.u32 %r51, %r{k}, %r{k + 1}; min.u32 %r52, %r{k + 2}, %r{k + 3};"
        f"min.u32 %r51, %r51, %r52; min.u32 %r50, %r50, %r51;"
        "setp.eq.u32 %p1, %r51, 0; @%p1 bra SPIN;"
        for k, read in zip(range(10, 30, 4), READS.split(";")[:-1], strict=True)
    ),
    "skipping": "mov.u32 %r50, 0;"
    + "".join(
        f"{read}; min.u32 %r51, %r{k}, %r{k + 1}; min.u32 %r52, %r{k + 2}, %r{k + 3};"
        f"min.u32 %r51, %r51, %r52; setp.eq.u32 %p1, %r51, 0; @%p1 bra TEST;"
        for k, read in zip(range(10, 30, 4), READS.split(";")[:-1], strict=True)
    )
    + "mov.u32 %r50, 1; TEST: setp.eq.u32 %p1, %r50, 0; @%p1 bra SPIN;",
    "nested": "".join(
        f"SPIN{k}: {read}; min.u32 %r51, %r{k}, %r{k + 1}; min.u32 %r52, %r{k + 2}, %r{k + 3};"
        f"min.u32 %r51, %r51, %r52; setp.eq.u32 %p1, %r51, 0; @%p1 bra SPIN{k};"
        for k, read in zip(range(10, 30, 4), READS.split(";")[:-1], strict=True)
    )
    + "mov.u32 %r50, 1; setp.eq.u32 %p1, %r10, 5; @%p1 bra SPIN;",
}


def several(name: str, skipped: int = -1) -> str:
    """Threads of CTA 0 write the words of CTA 1's threads, the other way round, one by one in an
    order of each thread's own; ``skipped``: a word that thread 3 never writes."""
    return program(
        f"""
        setp.eq.u32 %p2, %r61, 1; mul.wide.u32 %rd5, %r60, {16 * VECTORS};
        add.s64 %rd4, %rd2, %rd5; mov.u32 %r50, 1; @%p2 bra SPIN;
        mov.u32 %r2, 0;
        PUT: mad.lo.u32 %r3, %r2, 7, %r60; rem.u32 %r3, %r3, {4 * VECTORS};
        mul.wide.u32 %rd6, %r3, 4; add.s64 %rd6, %rd6, %rd4; bar.sync 1;
        setp.eq.u32 %p3, %r60, 3; setp.eq.and.u32 %p3, %r3, {skipped}, %p3; mov.u32 %r5, 1;
        @%p3 mov.u32 %r5, 0;
        st.relaxed.gpu.global.u32 [%rd6], %r5;
        add.u32 %r2, %r2, 1; setp.lt.u32 %p4, %r2, {4 * VECTORS}; @%p4 bra PUT;
        bra DONE;
        SPIN: {SEVERAL[name]}
        DONE: mov.u32 %r1, %r50; {STORE_R1} ret;
        """,
        2,
    )


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("name", SEVERAL)
def test_a_loop_waits_for_several_vectors(name: str, seed: int | None) -> None:
    """Whichever lanes go which way through it: they read, and wait for, different words."""
    start = (0,) * (32 * 4 * VECTORS)
    assert waited(several(name), start, seed=seed, loop_limit=5000)[0] == [1, 1]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", SEVERAL)
def test_one_word_of_several_vectors_that_never_comes_is_named(name: str, seed: int | None) -> None:
    start = (0,) * (32 * 4 * VECTORS)
    byte = 3 * 16 * VECTORS + 16 * 2
    places = rf"deadlock: .*byte {byte} of tensor 1, to change from 1, 0, 1, 1"
    with pytest.raises(EmulatorError, match=places):
        waited(several(name, skipped=9), start, seed=seed, loop_limit=5000)


ODD_LANES_READ_MORE = """
ld.relaxed.gpu.global.v2.u32 {%r10, %r11}, [%rd2]; mov.u32 %r12, 1; mov.u32 %r13, 1;
and.b32 %r2, %r60, 1; setp.eq.u32 %p3, %r2, 0; @%p3 bra TEST;
ld.relaxed.gpu.global.v2.u32 {%r12, %r13}, [%rd2+8]; TEST:
"""


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (1, 3, 0, 2)])
def test_lanes_wait_for_what_they_read_on_either_side_of_a_fork_in_the_loop(
    order: tuple[int, ...], seed: int | None
) -> None:
    text = handover(ODD_LANES_READ_MORE, 4, (9, 8, 7, 6), UNTIL_ALL, order)
    assert waited(text, seed=seed)[0] == [7, 6]
    for missing in (0, 3):
        values = [0 if word == missing else 5 for word in range(4)]
        byte, found = (
            missing // 2 * 8,
            f"{values[missing // 2 * 2]}, {values[missing // 2 * 2 + 1]}",
        )
        with pytest.raises(
            EmulatorError, match=rf"deadlock: .*byte {byte} of tensor 1, to change from {found}"
        ):
            waited(handover(ODD_LANES_READ_MORE, 4, values, UNTIL_ALL, order), seed=seed)


def test_what_a_loop_does_not_read_again_is_not_waited_for() -> None:
    """The second vector is read while the first is zero; it changes, and the first never gets to
    be 2."""
    load = """
    ld.relaxed.gpu.global.v2.u32 {%r10, %r11}, [%rd2]; setp.ne.u32 %p3, %r10, 0; @%p3 bra TEST;
    ld.relaxed.gpu.global.v2.u32 {%r12, %r13}, [%rd2+8]; TEST:
    """
    text = handover(load, 4, (1, 1, 1, 1), "setp.ne.u32 %p1, %r10, 2; @%p1 bra SPIN;")
    with pytest.raises(EmulatorError, match=r"deadlock: .*byte 0 of tensor 1, to change from 1, 1"):
        waited(text)


def test_lanes_that_read_nothing_in_the_loop_do_not_wait() -> None:
    load = """
    mov.u32 %r10, 0; mov.u32 %r11, 1; mov.u32 %r12, 1; mov.u32 %r13, 1;
    and.b32 %r2, %r60, 1; setp.ne.u32 %p3, %r2, 0; @%p3 bra TEST;
    ld.relaxed.gpu.global.v2.u32 {%r10, %r11}, [%rd2]; TEST:
    """
    with pytest.raises(EmulatorError, match="endless loop"):
        waited(handover(load, 2, (1, 1)))


def test_a_loop_that_reads_out_of_bounds_ends() -> None:
    bounds = Bounds()
    load = LOADS["v4"][0].replace("[%rd2]", "[%rd2+64]")
    with pytest.raises(EmulatorError, match="endless loop"):
        waited(handover(load, 4, ()), observers=[bounds])
    assert {finding.kind for finding in bounds.findings} == {"out-of-bounds"}


def test_words_of_a_loop_that_is_over_are_not_waited_for() -> None:
    """The second loop's word never comes; the report does not name the first's."""
    text = program(
        """
        ONE: ld.relaxed.gpu.global.v2.u32 {%r2, %r3}, [%rd1]; setp.eq.u32 %p1, %r2, 0; @%p1 bra ONE;
        TWO: ld.relaxed.gpu.global.v2.u32 {%r4, %r5}, [%rd1+8]; setp.eq.u32 %p2, %r5, 0;
        @%p2 bra TWO; ret;
        """
    )
    words = aligned((4,), np.uint32)
    words[:] = [1, 0, 1, 0]
    with pytest.raises(EmulatorError) as error:
        run(text, [(words, True)])
    assert str(error.value).count("to change from") == 1
    assert "byte 8 of tensor 0" in str(error.value)


def test_a_loop_over_generic_addresses_that_are_shared_ends() -> None:
    """Nothing of it is global memory, so that nothing is waited for: it counts as endless."""
    body = """
    cvta.shared.u64 %rd3, s; mov.u32 %r2, 0; st.u32 [%rd3], %r2;
    SPIN: ld.volatile.v2.u32 {%r2, %r3}, [%rd3]; setp.eq.u32 %p1, %r2, 0; @%p1 bra SPIN; ret;
    """
    with pytest.raises(EmulatorError, match="endless loop"):
        run(program(body, 1, ".shared .align 16 .b8 s[16];\n"), [(np.zeros(1, np.uint32), True)])


# Sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_ordered_sums_have_the_same_bits_under_every_schedule(seed: int | None) -> None:
    text = chain(WAITS["acquire"], SIGNALS["st_release"], SUM)
    results, findings = found_by(text, THREADS, CTAS * THREADS, orders_sums=True, seed=seed)
    assert (results, findings) == (summed(), [])


@pytest.mark.parametrize(
    ("wait", "signal"),
    [("", "st_release"), (WRONG_WAITS["relaxed"], "st_release"), (WAITS["acquire"], "st_relaxed")],
    ids=["no_wait", "no_acquire", "no_release"],
)
def test_sums_that_nothing_orders_are_a_race_where_they_must_be_ordered(
    wait: str, signal: str
) -> None:
    text = chain(wait, {**SIGNALS, **WRONG_SIGNALS}[signal], SUM)
    assert not found_by(text, THREADS, CTAS * THREADS)[1], "sums need no order otherwise"
    findings = found_by(text, THREADS, CTAS * THREADS, orders_sums=True)[1]
    assert {finding.kind for finding in findings} == {"race-waw"}


def test_bulk_sums_of_other_ctas_are_ordered_by_a_full_wait() -> None:
    """wait_group, fence and release; acquire and proxy fence before the next CTA's own."""
    copy = """
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd2], [%r20], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    """
    text = """
    mov.u32 %r20, s; mov.u32 %r9, 0x3F800000; setp.ne.u32 %p2, %r60, 0; add.u32 %r2, %r61, 1;
    st.shared.v4.b32 [%r20], {%r9, %r9, %r9, %r9}; fence.proxy.async; @%p2 bra DONE;
    """ + WAITS["acquire"].format(again="setp.ne.u32 %p1, %r1, %r61; @%p1 bra SPIN;")
    text += copy + SIGNALS["st_release"] + "DONE: ret;"

    def kinds(body: str) -> set[str]:
        module = program(body, 2, ".shared .align 16 .b8 s[16];\n").replace("sm_80", "sm_90a")
        flag, sums, races = np.zeros(1, np.uint32), np.zeros(8, np.float32), Races(True)
        begin = -sums.ctypes.data % 16 // 4
        run(module, [(flag, True), (sums[begin : begin + 4], True)], ctas=3, observers=[races])
        assert sums[begin : begin + 4].tolist() == [3.0] * 4
        return {finding.kind for finding in races.findings}

    # One thread writes its own shared words: no barrier is needed for lane 0's copy.
    only = text.replace("st.shared.v4", "@!%p2 st.shared.v4")
    assert kinds(only) == set()
    assert kinds(only.replace("wait_group 0", "wait_group.read 0")) == {"race-waw"}
    assert kinds(only.replace("acquire", "relaxed")) == {"race-waw"}


# Forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "ld.release.gpu.global.u32 %r1, [%rd1];",
        "ld.acquire.global.u32 %r1, [%rd1];",
        "ld.relaxed.volatile.gpu.global.u32 %r1, [%rd1];",
        "st.acquire.gpu.global.u32 [%rd1], %r0;",
        "red.acquire.gpu.global.add.u32 [%rd1], %r0;",
        "atom.volatile.global.add.u32 %r1, [%rd1], %r0;",
        "fence.acquire.gpu;",
        "membar.gpu;",
    ],
)
def test_forms_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(EmulatorError, match=r"does not exist|not supported|no scope"):
        run(program(text + "ret;"), [(np.zeros(32, np.uint32), True)])
