"""Bounds, uninitialised reads and copies in flight, on hand-written traces."""

from __future__ import annotations

import pytest
from traces import Trace

from ptxlab.checks import (
    Bounds,
    InFlight,
    Races,
    Rules,
    Uninitialised,
    all_checks,
)
from ptxlab.interface import MemoryRange, Observer

CTA = range(64)
ROWS = [16 * i for i in CTA]
TENSORS = [MemoryRange("q", 4096, 8192, False), MemoryRange("o", 16384, 20480, True)]


# Bounds --------------------------------------------------------------------------------------


def bounds() -> Trace:
    return Trace(Bounds(), shared_bytes=1024, ranges=TENSORS)


def test_shared_memory_ends_at_its_dynamic_size() -> None:
    t = bounds()
    t.read([0, 5], [0, 1008], 16)
    assert t.kinds() == []
    t.read([4, 5], [1008, 1024], 16)
    (finding,) = t.observers[0].findings
    assert (finding.kind, finding.threads, finding.address) == ("out-of-bounds", (5,), 1024)
    assert "leaves the CTA's 1024 bytes" in finding.message
    t.write([0], [-4])
    assert len(t.kinds()) == 2


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_an_access_is_aligned_to_its_whole_size(size: int) -> None:
    t = bounds()
    t.read([0], [3 * size], size)
    assert t.kinds() == []
    t.read([0], [3 * size + size // 2], size)
    assert t.kinds() == ["misaligned"]


def test_a_matrix_row_is_aligned_to_16_bytes() -> None:
    t = bounds()
    t.ldmatrix([0, 1], [0, 24])
    assert t.kinds() == ["misaligned"]


def test_global_addresses_must_lie_in_a_tensor() -> None:
    t = bounds()
    t.access("read", [0, 1], [4096, 8176], 16, space="global")
    assert t.kinds() == []
    t.access("read", [0, 1], [4096, 8192], 16, space="global")
    (finding,) = t.observers[0].findings
    assert finding.kind == "out-of-bounds"
    assert "(0 bytes after the end of q)" in finding.message
    t.access("read", [0], [16384 - 32], 16, space="global")
    assert "(32 bytes before o)" in t.observers[0].findings[-1].message


def test_an_access_across_a_tensors_end_is_outside() -> None:
    t = Trace(Bounds(), ranges=[MemoryRange("q", 4096, 4104, False)])
    t.access("read", [0], [4096], 16, space="global")
    assert t.kinds() == ["out-of-bounds"]


@pytest.mark.parametrize("kind", ["write", "atomic"])
def test_inputs_are_not_written(kind: str) -> None:
    t = bounds()
    t.access(kind, [0], [16384], space="global")
    assert t.kinds() == []
    t.access(kind, [0], [4096], space="global")
    assert t.kinds() == ["read-only"]
    assert "belongs to q" in t.observers[0].findings[0].message


def test_tensors_may_lie_interleaved_in_one() -> None:
    packed = [MemoryRange("q", 4096, 8000, False), MemoryRange("o", 4352, 8256, True)]
    t = Trace(Bounds(), ranges=[*packed, MemoryRange("lse", 4400, 4416, True)])
    t.access("read", [0, 1, 2], [4096, 7984, 8240], 16, space="global")
    t.access("write", [0, 1, 2], [4352, 4416, 8240], 16, space="global")
    assert t.kinds() == []
    t.access("write", [0], [4336], 16, space="global")
    assert t.kinds() == ["read-only"]


def test_a_copy_of_no_bytes_may_point_anywhere() -> None:
    t = bounds()
    t.access("async_read", [0, 1], [4096, 99_999_984], [16, 0], space="global")
    assert t.kinds() == []


def test_one_finding_a_line_with_a_count() -> None:
    observer = Bounds()
    t = Trace(observer, shared_bytes=1024)
    t.read(CTA, [2048] * 64)
    t._line = 0
    t.read(CTA, [2048] * 64)
    (finding,) = observer.findings
    assert finding.count == 128
    assert len(finding.threads) < 10


# Uninitialised -------------------------------------------------------------------------------


def test_unwritten_memory_is_not_read() -> None:
    t = Trace(Uninitialised())
    t.write([0], [0], 16)
    t.read([9], [12])
    assert t.kinds() == []
    t.read([9, 10], [12, 16])
    (finding,) = t.observers[0].findings
    assert (finding.kind, finding.threads, finding.address) == ("uninitialised", (10,), 16)


def test_every_cta_has_its_own_shared_memory() -> None:
    t = Trace(Uninitialised(), ctas=2)
    t.write([0], [0])
    t.read([64], [0])
    assert t.kinds() == ["uninitialised"]


def test_shared_memory_is_empty_again_in_the_next_wave() -> None:
    t = Trace(Uninitialised(), ctas=2)
    t.write([0], [0])
    t.observers[0].wave(1, 1)
    t.read([64], [0])
    assert t.kinds() == ["uninitialised"]


def test_single_bytes_are_distinguished() -> None:
    t = Trace(Uninitialised())
    t.write([0], [0], 2)
    t.read([0], [0], 2)
    assert t.kinds() == []
    t.read([0], [0], 4)
    assert t.kinds() == ["uninitialised"]


def test_a_copy_on_its_way_is_not_called_uninitialised() -> None:
    t = Trace(Uninitialised())
    t.copy(CTA, ROWS)
    t.read(CTA, ROWS, 16)
    assert t.kinds() == []


# In flight -----------------------------------------------------------------------------------


def test_no_thread_reads_a_copy_before_its_wait() -> None:
    t = Trace(InFlight())
    t.copy(CTA, ROWS)
    t.read([1], [16], 16)
    (finding,) = t.observers[0].findings
    assert finding.kind == "in-flight-read"
    assert "copy of CTA 0 thread 1" in finding.message
    assert "cp.async) has not been waited for" in finding.message


def test_after_the_wait_it_is_ordinary_memory() -> None:
    t = Trace(InFlight())
    t.copy(CTA, ROWS)
    t.wait(CTA)
    t.ldmatrix(range(32), ROWS[:32])
    t.write(CTA, ROWS)
    assert t.kinds() == []


def test_the_issuing_threads_own_wait_counts() -> None:
    t = Trace(InFlight())
    t.copy(CTA, ROWS)
    t.wait(range(32))
    t.barrier()
    t.read(range(32), ROWS[:32], 16)
    assert t.kinds() == []
    t.read(range(32), ROWS[32:], 16)
    assert t.kinds() == ["in-flight-read"]


def test_a_copy_in_flight_is_not_overwritten() -> None:
    t = Trace(InFlight())
    t.copy(CTA, ROWS)
    t.write([0], [0])
    assert t.kinds() == ["in-flight-write"]
    t = Trace(InFlight())
    t.copy(CTA, ROWS)
    t.copy(CTA, ROWS[::-1])
    assert t.kinds() == ["in-flight-write"], "not by another copy either"


def test_all_checks_are_fresh_and_agree_on_a_correct_pipeline() -> None:
    checks = all_checks()
    assert {type(check) for check in checks} == {Bounds, Uninitialised, InFlight, Races, Rules}
    assert not set(map(id, checks)) & set(map(id, all_checks()))
    t = Trace(*checks, shared_bytes=2048)
    first, second = ROWS, [1024 + row for row in ROWS]
    t.copy(CTA, first)
    for stage in range(4):
        here, there = (first, second) if stage % 2 == 0 else (second, first)
        t.wait(CTA)
        t.barrier()
        t.copy(CTA, there)
        t.ldmatrix(range(32), here[32:])
        t.ldmatrix(range(32, 64), here[:32])
    assert t.kinds() == []


@pytest.mark.parametrize(
    ("left_out", "kinds"),
    [
        ("wait", {"in-flight-read", "in-flight-write"}),
        ("barrier", {"race-raw", "race-war"}),
        ("copy", {"uninitialised"}),
    ],
)
def test_each_step_of_the_pipeline_is_needed(left_out: str, kinds: set[str]) -> None:
    checks: list[Observer] = all_checks()
    t = Trace(*checks, shared_bytes=2048)
    for stage in range(4):
        here = [1024 * (stage % 2) + row for row in ROWS]
        if left_out != "copy":
            t.copy(CTA, here)
        if left_out != "wait":
            t.wait(CTA)
        if left_out != "barrier":
            t.barrier()
        t.ldmatrix(range(32), here[32:])
        t.ldmatrix(range(32, 64), here[:32])
    assert kinds <= set(t.kinds())
