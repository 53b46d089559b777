"""The checks on running kernels: small ones, right and wrong, with line information."""

from __future__ import annotations

import emulator_executor
import pytest
from micro_kernels import SOURCE, kernel_text, pack, unpack

from ptxlab.checks import BankConflicts, all_checks
from ptxlab.interface import Finding

THREADS = 64
TILE = ".shared .align 16 .b8 tile[1024];\n"
# Each step carries a line number of its own, the step's place in its kernel.
ADDRESSES = "mov.u32 %r1, tile;\nshl.b32 %r2, %r0, 4; add.s32 %r2, %r1, %r2;\n"
OWN_WRITE = "st.shared.v4.b32 [%r2], {{a}, {a}, {a}, {a}};\n"
OTHER_READ = "xor.b32 %r3, %r0, 33; shl.b32 %r3, %r3, 4; add.s32 %r3, %r1, %r3;\n"
OTHER_READ += ".loc 1 30 1\nld.shared.b32 {d}, [%r3];\n"
MATE_READ = OTHER_READ.replace("%r0, 33", "%r0, 1")
BARRIER = ".loc 1 20 1\nbar.sync 0;\n"
COPY = "ld.param.u64 %rd5, [p0]; cvta.to.global.u64 %rd5, %rd5;\n"
COPY += "shl.b32 %r4, %r0, 2; and.b32 %r4, %r4, 0xf0; cvt.u64.u32 %rd6, %r4;\n"
COPY += "add.s64 %rd5, %rd5, %rd6;\n.loc 1 10 1\ncp.async.cg.shared.global [%r2], [%rd5], 16;\n"
COMMIT, WAIT = "cp.async.commit_group;\n", "cp.async.wait_group 0;\n"


def run(*steps: str) -> tuple[list[int], list[Finding]]:
    body = ".loc 1 1 1\nmov.b32 {d}, 0;\n" + ADDRESSES + "".join(steps)
    text = kernel_text(body, ("b32",), ("b32",), TILE)
    values = [1000 + i for i in range(THREADS)]
    checks = all_checks()
    sources, sizes = [pack(values, 32)], [4 * THREADS]
    (out,) = emulator_executor.execute(text, "micro", THREADS, sources, sizes, checks)
    return unpack(out, 32), [finding for check in checks for finding in check.findings]


def kinds(findings: list[Finding]) -> set[str]:
    return {finding.kind for finding in findings}


@pytest.mark.parametrize(
    "steps",
    [
        (OWN_WRITE, BARRIER, OTHER_READ),
        (OWN_WRITE, "bar.warp.sync 0xffffffff;\n", MATE_READ),
        (COPY, COMMIT, WAIT, BARRIER, OTHER_READ),
        (COPY, "cp.async.wait_all;\n", BARRIER, OTHER_READ),
        (OWN_WRITE, BARRIER, OTHER_READ, BARRIER, OWN_WRITE),
    ],
)
def test_correct_kernels_have_no_findings(steps: tuple[str, ...]) -> None:
    _, findings = run(*steps)
    assert findings == []


def test_data_pass_through_shared_memory() -> None:
    got, _ = run(OWN_WRITE, BARRIER, OTHER_READ)
    assert got == [1000 + (i ^ 33) for i in range(THREADS)]
    got, _ = run(COPY, COMMIT, WAIT, BARRIER, OTHER_READ)
    assert got == [1000 + (i ^ 33) // 4 * 4 for i in range(THREADS)]


@pytest.mark.parametrize(
    ("steps", "kind", "line"),
    [
        ((OWN_WRITE, OTHER_READ), "race-raw", 30),
        ((OWN_WRITE, "bar.warp.sync 0xffffffff;\n", OTHER_READ), "race-raw", 30),
        ((OWN_WRITE, MATE_READ), "race-raw", 30),
        ((OWN_WRITE, BARRIER, OTHER_READ, ".loc 1 40 1\n", OWN_WRITE), "race-war", 40),
        ((OTHER_READ,), "uninitialised", 30),
        ((COPY, COMMIT, BARRIER, OTHER_READ), "in-flight-read", 30),
        ((COPY, WAIT, BARRIER, OTHER_READ), "in-flight-read", 30),
        ((COPY, COMMIT, WAIT, OTHER_READ), "race-raw", 30),
        ((COPY, COMMIT, BARRIER, WAIT, OTHER_READ), "race-raw", 30),
        (
            (COPY, COMMIT, "cp.async.wait_group 1;\n", BARRIER, OTHER_READ),
            "in-flight-read",
            30,
        ),
        ((COPY, COMMIT, ".loc 1 40 1\n", OWN_WRITE), "in-flight-write", 40),
        ((".loc 1 40 1\nst.shared.b32 [%r2+1024], {a};\n",), "out-of-bounds", 40),
        ((".loc 1 40 1\nst.shared.v2.b32 [%r2+4], {{a}, {a}};\n",), "misaligned", 40),
        ((".loc 1 40 1\nst.global.b32 [%rd3], {a};\n",), "read-only", 40),
        ((".loc 1 40 1\nld.global.b32 {d}, [%rd3+4];\n",), "out-of-bounds", 40),
    ],
)
def test_a_mistake_is_found_on_its_line(steps: tuple[str, ...], kind: str, line: int) -> None:
    _, findings = run(*steps)
    assert kind in kinds(findings)
    found = next(finding for finding in findings if finding.kind == kind)
    assert found.source == f"{SOURCE}:{line}"
    assert found.threads


def test_a_bad_store_harms_nothing() -> None:
    """With the bounds check on, the run goes on and what lies beside is left alone."""
    got, findings = run(OWN_WRITE, "st.shared.b32 [%r2+4096], {a};\n", BARRIER, OTHER_READ)
    assert got == [1000 + (i ^ 33) for i in range(THREADS)]
    assert kinds(findings) == {"out-of-bounds"}


def test_a_copy_of_nothing_brings_zeros_wherever_it_points() -> None:
    nothing = COPY.replace("[%rd5], 16;", "[%rd5+4096], 16, 0;")
    got, findings = run(nothing, COMMIT, WAIT, BARRIER, OTHER_READ)
    assert findings == []
    assert got == [0] * THREADS


def test_forks_under_a_pending_copy_cost_no_more_each_time() -> None:
    """Each splits the copy and each join makes it whole again; parts that doubled never end."""
    forks = "setp.lt.u32 %p1, %r0, 5;\nmov.u32 %r5, 0;\n" + "".join(
        f"@%p1 bra JOIN{i};\nadd.u32 %r5, %r5, %r0;\nJOIN{i}:\n" for i in range(40)
    )
    got, findings = run(COPY, COMMIT, forks, WAIT, BARRIER, OTHER_READ, "add.u32 {d}, {d}, %r5;\n")
    assert findings == []
    late = [0 if i < 5 else 40 * i for i in range(THREADS)]
    assert got == [1000 + (i ^ 33) // 4 * 4 + late[i] for i in range(THREADS)]


def test_lanes_that_are_off_take_no_part() -> None:
    guarded = "setp.lt.u32 %p1, %r0, 3;\n@%p1 st.shared.b32 [%r2], {a};\n"
    _, findings = run(guarded, BARRIER, "@%p1 ld.shared.b32 {d}, [%r2];\n")
    assert findings == []
    _, findings = run(guarded, BARRIER, "ld.shared.b32 {d}, [%r2];\n")
    (finding,) = findings
    assert (finding.kind, finding.threads[0], finding.count) == ("uninitialised", 3, THREADS - 3)


def test_bank_conflicts_of_a_running_kernel() -> None:
    measure = BankConflicts()
    body = ADDRESSES + OWN_WRITE + BARRIER + "ld.shared.b32 {d}, [%r2];\n"
    text = kernel_text(body, ("b32",), ("b32",), TILE)
    emulator_executor.execute(text, "micro", THREADS, [bytes(256)], [256], [measure])
    assert measure.factors() == {"ld.shared.4B": 4.0, "st.shared.16B": 1.0}
