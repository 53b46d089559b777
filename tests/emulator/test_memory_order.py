"""Order between CTAs: release and acquire in global memory, and waiting for other CTAs."""

from __future__ import annotations

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
from ptx_programs import STORE_R1, program, run

from flashsmith.emulator.checks import Races
from flashsmith.emulator.interface import Finding
from flashsmith.errors import EmulatorError


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
                       r"dress 0x[0-9a-f]+, byte 0 of tensor 0, to change from 0 \(2 CTAs that "
                       r"come later in the launch are not resident"):  # fmt: skip
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
