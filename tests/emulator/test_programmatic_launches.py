"""Launches that may begin before the one before is over: what they touch without a wait for it."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_programs import program, run

from flashsmith.emulator.checks import Races
from flashsmith.errors import EmulatorError

THREADS, CTAS = 64, 2
WAIT, BARRIER = "griddepcontrol.wait;", "bar.sync 0;"
ONE_WAITS = "setp.ne.u32 %p1, %r60, 0; @%p1 bra MEET; griddepcontrol.wait; MEET: bar.sync 0;"

#: %rd1 and %rd2 have a word for each thread.
WRITES = "add.s64 %rd4, %rd1, %rd0; st.global.u32 [%rd4], %r0; griddepcontrol.launch_dependents;"
READS = "add.s64 %rd4, %rd1, %rd0; ld.global.u32 %r1, [%rd4];"
COPIES = READS + "add.s64 %rd5, %rd2, %rd0; st.global.u32 [%rd5], %r1;"
HALVES = ".reg .b16 %h1; add.s64 %rd4, %rd1, %rd0; ld.global.u16 %h1, [%rd4+2];"
ELSEWHERE = "add.s64 %rd5, %rd2, %rd0; st.global.u32 [%rd5], %r0;"


def findings(*launches: str, programmatic: bool = True, ctas: int = CTAS) -> list[tuple[str, str]]:
    """Kinds and messages of one launch after the other; all but the first may begin early."""
    races = Races()
    tensors = [(np.zeros(THREADS * CTAS, np.uint32), True) for _ in range(2)]
    for number, body in enumerate(launches):
        run(
            program(body + "ret;", 2),
            tensors,
            ctas=ctas,
            threads=THREADS,
            observers=[races],
            programmatic=programmatic and number > 0,
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
    assert "none in the launch between" in message


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
