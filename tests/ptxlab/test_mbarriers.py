"""mbarriers, barriers of several numbers in one group, setmaxnreg: order, misuse, deadlocks."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from ptx_programs import STORE_R1, program, run, words_of

from ptxlab.checks import all_checks
from ptxlab.errors import EmulatorError
from ptxlab.interface import Finding

#: ``full`` at 1024, ``empty`` at 1032; %r10 = this thread's word, %r11 = the other half's.
SHARED = ".shared .align 16 .b8 s[1040];\n"
ADDRESSES = """
mov.u32 %r9, s; add.u32 %r20, %r9, 1024; add.u32 %r21, %r9, 1032;
shl.b32 %r10, %r60, 2; add.u32 %r10, %r10, %r9;
xor.b32 %r11, %r60, 32; shl.b32 %r11, %r11, 2; add.u32 %r11, %r11, %r9;
setp.ne.u32 %p7, %r60, 0;
"""


def initialised(full: int = 32, empty: int = 32) -> str:
    return (
        ADDRESSES
        + f"""
    @%p7 bra READY;
    mbarrier.init.shared::cta.b64 [%r20], {full};
    mbarrier.init.shared::cta.b64 [%r21], {empty};
    READY:
    bar.sync 0;
    """
    )


def wait(label: str, barrier: str, parity: str, form: str = "try_wait") -> str:
    return (
        f"{label}: mbarrier.{form}.parity.shared::cta.b64 %p6, [{barrier}], {parity};\n"
        f"@!%p6 bra {label};\n"
    )


#: Warp 0 hands four words a thread to warp 1 through one slot, by phases.
RING = (
    initialised()
    + """
mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r3, 0; mov.u32 %r4, 1;
setp.ge.u32 %p1, %r60, 32;
@%p1 bra CONSUMER;
PRODUCE:
"""
    + wait("FREE", "%r21", "%r4")
    + """
add.s32 %r5, %r60, %r2;
st.shared.u32 [%r10], %r5;
mbarrier.arrive.shared::cta.b64 _, [%r20];
xor.b32 %r4, %r4, 1;
add.s32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4;
@%p2 bra PRODUCE;
bra.uni END;
CONSUMER:
"""
    + wait("FULL", "%r20", "%r3")
    + """
ld.shared.u32 %r5, [%r11];
add.s32 %r1, %r1, %r5;
mbarrier.arrive.release.cta.shared::cta.b64 %rd5, [%r21];
xor.b32 %r3, %r3, 1;
add.s32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4;
@%p2 bra CONSUMER;
END:
"""
)
SUMS = [0] * 32 + [4 * t + 6 for t in range(32)]


def checked(
    body: str, *, threads: int = 64, seed: int | None = None
) -> tuple[list[int], list[Finding]]:
    out = np.full(threads, 0xDEADBEEF, np.uint32)
    text = program(body + STORE_R1 + "ret;", 1, SHARED)
    result = run(text, [(out, True)], threads=threads, observers=all_checks(), seed=seed)
    return out.tolist(), result.findings


def test_a_ring_of_one_slot() -> None:
    assert words_of(RING, threads=64, ctas=3, declarations=SHARED) == SUMS * 3
    got, findings = checked(RING)
    assert got == SUMS
    assert not findings


@pytest.mark.parametrize("seed", range(6))
def test_a_ring_under_random_schedules(seed: int) -> None:
    got, findings = checked(RING, seed=seed)
    assert got == SUMS
    assert not findings


def test_test_wait_and_states() -> None:
    body = RING.replace("try_wait", "test_wait")
    assert words_of(body, threads=64, declarations=SHARED) == SUMS
    by_state = (
        initialised(64)
        + """
    st.shared.u32 [%r10], %r60;
    mbarrier.arrive.shared::cta.b64 %rd5, [%r20];
    AGAIN: mbarrier.try_wait.shared::cta.b64 %p6, [%r20], %rd5, 1000;
    @!%p6 bra AGAIN;
    ld.shared.u32 %r1, [%r11];
    """
    )
    got, findings = checked(by_state)
    assert got == [t ^ 32 for t in range(64)]
    assert not findings


def test_arrival_counts() -> None:
    body = (
        initialised(64)
        + """
    mov.u32 %r1, 0;
    setp.ge.u32 %p1, %r60, 32;
    @!%p1 mbarrier.arrive.shared::cta.b64 _, [%r20], 2;
    """
    )
    assert words_of(body + wait("W", "%r20", "0"), threads=64, declarations=SHARED) == [0] * 64


def test_a_phase_needs_its_bytes() -> None:
    body = (
        initialised(1)
        + """
    mov.u32 %r1, 0;
    @!%p7 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 256;
    @!%p7 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r20], 192;
    """
    )
    with pytest.raises(EmulatorError, match="address 1024") as caught:
        words_of(body + wait("W", "%r20", "0"), threads=64, declarations=SHARED)
    assert "64 bytes to come" in str(caught.value)
    more = "@!%p7 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r20], 64;\n"
    assert words_of(body + more + wait("W", "%r20", "0"), threads=64, declarations=SHARED)


# Deadlocks -----------------------------------------------------------------------------------


def test_a_flipped_parity_is_a_deadlock_with_names() -> None:
    body = RING.replace("mov.u32 %r4, 1;", "mov.u32 %r4, 0;")
    with pytest.raises(EmulatorError) as caught:
        words_of(body, threads=64, declarations=SHARED)
    message = str(caught.value)
    assert "deadlock: " in message
    assert "CTA 0 threads 0-31 at " in message
    assert "the mbarrier at shared address 1032 to end a phase of parity 0" in message
    assert "(phase 0: 32 of 32 arrivals and 0 bytes to come)" in message
    assert "CTA 0 threads 32-63" in message


def test_a_dropped_arrival_is_a_deadlock() -> None:
    body = RING.replace("mbarrier.arrive.shared::cta.b64 _, [%r20];", "")
    with pytest.raises(EmulatorError, match=r"threads 32-63 .* address 1024 .*32 of 32 arrivals"):
        words_of(body, threads=64, declarations=SHARED)


# Findings ------------------------------------------------------------------------------------


def kinds(body: str, seed: int | None = None) -> set[str]:
    """Kinds of all findings, also of a run that ends in a deadlock."""
    observers, out = all_checks(), np.zeros(64, np.uint32)
    text = program(body + STORE_R1 + "ret;", 1, SHARED)
    with contextlib.suppress(EmulatorError):
        run(text, [(out, True)], threads=64, observers=observers, seed=seed)
    return {finding.kind for observer in observers for finding in observer.findings}


def test_a_consumer_that_does_not_wait() -> None:
    body = RING.replace(wait("FULL", "%r20", "%r3"), "")
    assert "uninitialised" in kinds(body)
    assert any("race-raw" in kinds(body, seed) for seed in range(6))


def test_a_producer_that_does_not_wait() -> None:
    """It runs ahead, by an even number of phases: the consumer takes none of them for over."""
    body = RING.replace(wait("FREE", "%r21", "%r4"), "")
    with pytest.raises(EmulatorError, match="deadlock"):
        checked(body)
    assert any(kinds(body, seed) & {"race-raw", "race-war"} for seed in range(8))


def test_an_init_that_others_need_not_have_seen() -> None:
    assert kinds(RING.replace("bar.sync 0;", "")) & {"race-mbarrier", "mbarrier-uninitialised"}


def test_misuse() -> None:
    twice = "@!%p7 mbarrier.init.shared::cta.b64 [%r20], 32;\n"
    assert kinds(initialised() + "mov.u32 %r1, 0;" + twice) == {"mbarrier-reinitialised"}
    off = "@!%p7 mbarrier.inval.shared::cta.b64 [%r20];\n"
    assert not kinds(initialised() + "mov.u32 %r1, 0;" + off + twice)
    assert kinds(initialised(0) + "mov.u32 %r1, 0;") == {"mbarrier-count"}
    unknown = ADDRESSES + "mov.u32 %r1, 0; mbarrier.arrive.shared::cta.b64 _, [%r20];\n"
    assert kinds(unknown) == {"mbarrier-uninitialised"}
    with pytest.raises(EmulatorError, match="never initialised"):
        words_of(unknown, threads=64, declarations=SHARED)


def test_more_arrivals_than_a_phase_has() -> None:
    body = (
        initialised(1)
        + """
    mov.u32 %r1, 0;
    @!%p7 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 64;
    @!%p7 mbarrier.arrive.shared::cta.b64 _, [%r20];
    """
    )
    assert kinds(body) == {"mbarrier-over-arrival"}


def test_more_bytes_than_expected() -> None:
    body = (
        initialised(1)
        + """
    mov.u32 %r1, 0;
    @!%p7 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r20], 64;
    @!%p7 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 32;
    """
    )
    assert kinds(body) == {"mbarrier-bytes"}


# Numbered barriers ---------------------------------------------------------------------------


def test_warps_of_one_group_at_barriers_of_several_numbers() -> None:
    """Two warps each at a barrier of its own; a third one, elsewhere, lets them go in turn."""
    body = (
        ADDRESSES
        + """
    setp.ge.u32 %p1, %r60, 64;
    @%p1 bra OTHER;
    shr.u32 %r2, %r60, 5; add.u32 %r2, %r2, 1;
    barrier.cta.sync.aligned %r2, 64;
    ld.shared.u32 %r1, [%r9+512];
    bra.uni END;
    OTHER:
    mov.u32 %r1, 7;
    setp.ne.u32 %p2, %r60, 64;
    @!%p2 st.shared.u32 [%r9+512], 9;
    bar.warp.sync -1;
    bar.arrive 2, 64;
    barrier.cta.arrive.aligned 1, 64;
    END:
    """
    )
    assert words_of(body, threads=96, declarations=SHARED) == [9] * 64 + [7] * 32
    got, findings = checked(body, threads=96)
    assert got == [9] * 64 + [7] * 32
    assert not findings


# setmaxnreg ----------------------------------------------------------------------------------

SPLIT = """
mov.u32 %r1, 0; setp.lt.u32 %p1, %r60, 128;
@%p1 bra LESS;
setmaxnreg.inc.sync.aligned.u32 {more};
bra.uni END;
LESS:
setmaxnreg.dec.sync.aligned.u32 {less};
END:
"""


def register_findings(more: int, less: int, body: str = SPLIT) -> list[str]:
    _, findings = checked(body.format(more=more, less=less), threads=384)
    return [str(finding) for finding in findings]


def test_registers_come_from_those_given_back() -> None:
    assert register_findings(240, 24) == []
    (finding,) = register_findings(240, 40)
    assert "requests 66560 registers of the 64512 it was launched with" in finding


def test_register_counts_that_do_not_exist() -> None:
    assert "multiple of 8" in register_findings(236, 24)[0]
    assert "multiple of 8" in register_findings(240, 16)[0]
    assert "raises to 160 the registers of a warp that holds 168" in register_findings(160, 24)[0]


def test_registers_are_changed_by_whole_warpgroups() -> None:
    body = SPLIT.replace("%r60, 128", "%r60, 96")
    assert any("part of a warpgroup" in f for f in register_findings(240, 24, body))
