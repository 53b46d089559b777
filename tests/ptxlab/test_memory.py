"""Memories: guarded host ranges, shared memory's poison, asynchronous copies' latest landing."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_programs import STORE_R1, program, run, words_of

from ptxlab.errors import ArgumentError, EmulatorError
from ptxlab.execute import emulate
from ptxlab.interface import AsyncGroupEvent, AsyncLanding, MemoryAccess, Observer
from ptxlab.machine.memory import GlobalMemory

SHARED = ".shared .align 16 .b8 s[1024];\n"
NAN = 0xFFFFFFFF


def copy(source: np.ndarray, body: str, threads: int = 32, **options: object) -> np.ndarray:
    """Run ``body`` with tensor 0 = one output word a thread, tensor 1 = the read-only source."""
    out = np.zeros(threads, np.uint32)
    text = program(body + STORE_R1 + "ret;", 2, SHARED)
    run(text, [(out, True), (source, False)], threads=threads, **options)  # type: ignore[arg-type]
    return out


# Global memory


def test_reading_behind_a_tensor_names_it() -> None:
    source = np.zeros(31, np.uint32)
    with pytest.raises(
        EmulatorError, match="outside every tensor; 0 bytes after the end of tensor 1"
    ):
        copy(source, "add.s64 %rd3, %rd2, %rd0; ld.global.u32 %r1, [%rd3];")


def test_reading_before_a_tensor() -> None:
    source = np.zeros(64, np.uint32)[32:]
    body = "add.s64 %rd3, %rd2, %rd0; ld.global.u32 %r1, [%rd3-4];"
    with pytest.raises(EmulatorError, match="4 bytes before tensor 1"):
        copy(source, body)


def test_an_input_is_not_written() -> None:
    source = np.zeros(32, np.uint32)
    body = "mov.u32 %r1, 0; add.s64 %rd3, %rd2, %rd0; st.global.u32 [%rd3], %r0;"
    with pytest.raises(EmulatorError, match="write of 4 bytes to tensor 1, which is an input, at"):
        copy(source, body)
    assert not source.any()


def test_misaligned_access() -> None:
    source = np.zeros(64, np.uint32)
    with pytest.raises(EmulatorError, match="misaligned access: 8 bytes at global address"):
        copy(source, "ld.global.v2.u32 {%r1, %r2}, [%rd2+4];")


def test_one_instruction_may_reach_several_tensors() -> None:
    left, right = np.arange(32, dtype=np.uint32), np.arange(100, 132, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    body = """
    setp.lt.u32 %p1, %r60, 10; selp.b64 %rd4, %rd2, %rd3, %p1; add.s64 %rd4, %rd4, %rd0;
    ld.global.u32 %r1, [%rd4];
    """
    text = program(body + STORE_R1 + "ret;", 3)
    run(text, [(out, True), (left, False), (right, False)])
    assert out.tolist() == [*range(10), *range(110, 132)]


def test_a_strided_view_covers_what_it_touches() -> None:
    storage = np.arange(1000, dtype=np.uint32)
    memory = GlobalMemory()
    memory.register("view", storage[100:500:100][::-1], writable=False)
    (known,) = memory.ranges()
    assert known.begin == storage.ctypes.data + 400
    assert known.end - known.begin == 4 * 301


def test_registering_what_cannot_be_used() -> None:
    frozen = np.zeros(4, np.uint32)
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="o: the array is read-only"):
        GlobalMemory().register("o", frozen, writable=True)
    with pytest.raises(ArgumentError, match="q: expected a NumPy array, got list"):
        GlobalMemory().register("q", [1, 2], writable=False)  # type: ignore[arg-type]


def test_a_launch_leaves_no_ranges_behind() -> None:
    memory, out = GlobalMemory(), np.zeros(32, np.uint32)
    pointer = memory.register("out", out, writable=True)
    emulate(
        program("mov.u32 %r1, 5;" + STORE_R1 + "ret;"), "main", grid=(1, 1, 1), block=(32, 1, 1),
        smem_bytes=0, argument_bytes=pointer.to_bytes(8, "little"), memory=memory,
    )  # fmt: skip
    assert out.tolist() == [5] * 32
    assert [known.name for known in memory.ranges()] == ["out"]


# Shared memory


def test_shared_memory_starts_as_nan() -> None:
    body = "mov.u32 %r9, s; ld.shared.u32 %r1, [%r9+16];"
    assert words_of(body, declarations=SHARED) == [NAN] * 32


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (1024, "access of 4 bytes at shared address 1024, outside its 1024 bytes"),
        (1022, "access of 4 bytes at shared address 1022, outside"),
        (2, "misaligned access: 4 bytes at shared address 2"),
    ],
)
def test_shared_bounds(offset: int, message: str) -> None:
    body = f"mov.u32 %r9, s; ld.shared.u32 %r1, [%r9+{offset}];"
    with pytest.raises(EmulatorError, match=message):
        words_of(body, declarations=SHARED)


def test_one_cta_does_not_see_another_ones_shared_memory() -> None:
    body = """
    mov.u32 %r9, s; setp.eq.u32 %p1, %r61, 1; @%p1 st.shared.u32 [%r9], %r61;
    ld.shared.u32 %r1, [%r9];
    """
    got = words_of(body, ctas=3, declarations=SHARED)
    assert got == [NAN] * 32 + [1] * 32 + [NAN] * 32


def test_dynamic_shared_memory_follows_the_static() -> None:
    module = ".extern .shared .align 128 .b8 dyn[];\n"
    body = "mov.u32 %r2, s; mov.u32 %r3, dyn; sub.u32 %r1, %r3, %r2; st.shared.u32 [%r3+60], %r1;"
    declarations = ".shared .align 4 .b8 s[20];\n"
    got = words_of(body, declarations=declarations, module=module, smem_bytes=64)
    assert got == [128] * 32
    with pytest.raises(EmulatorError, match="outside its 160 bytes"):
        words_of(body, declarations=declarations, module=module, smem_bytes=32)


# Asynchronous copies

TARGET = "mov.u32 %r9, s; shl.b32 %r10, %r60, 2; add.u32 %r10, %r10, %r9; add.s64 %rd3, %rd2, %rd0;"
ISSUE = "cp.async.ca.shared.global [%r10], [%rd3], 4;"
SECOND = "cp.async.ca.shared.global [%r10+128], [%rd3+128], 4;"
COMMIT = "cp.async.commit_group;"
READ = "ld.shared.u32 %r1, [%r10];"
SOURCE = np.arange(1, 65, dtype=np.uint32)


@pytest.mark.parametrize(
    ("steps", "arrives"),
    [
        ([ISSUE, READ], False),
        ([ISSUE, COMMIT, READ], False),
        ([ISSUE, "cp.async.wait_group 0;", READ], False),
        ([ISSUE, COMMIT, "cp.async.wait_group 1;", READ], False),
        ([ISSUE, COMMIT, "bar.sync 0;", READ], False),
        ([ISSUE, COMMIT, "cp.async.wait_group 0;", READ], True),
        ([ISSUE, COMMIT, SECOND, COMMIT, "cp.async.wait_group 1;", READ], True),
        ([SECOND, COMMIT, ISSUE, COMMIT, "cp.async.wait_group 1;", READ], False),
        ([ISSUE, COMMIT, COMMIT, COMMIT, "cp.async.wait_group 2;", READ], True),
        ([ISSUE, "cp.async.wait_all;", READ], True),
        ([COMMIT, ISSUE, "cp.async.wait_group 0;", READ], False),
    ],
)
def test_a_copy_lands_at_the_wait_that_covers_it(steps: list[str], arrives: bool) -> None:
    got = copy(SOURCE, TARGET + "".join(steps))
    assert got.tolist() == (SOURCE[:32].tolist() if arrives else [NAN] * 32)


def test_groups_are_each_threads_own_across_a_branch() -> None:
    """Odd threads commit twice, so that the same wait covers a different copy for them."""
    body = (
        TARGET
        + ISSUE
        + COMMIT
        + """
    and.b32 %r2, %r60, 1; setp.eq.u32 %p1, %r2, 0;
    @%p1 bra EVEN;
    cp.async.commit_group;
    EVEN:
    cp.async.wait_group 1;
    """
        + READ
    )
    want = [int(SOURCE[t]) if t % 2 else NAN for t in range(32)]
    assert copy(SOURCE, body).tolist() == want


def test_a_copy_issued_inside_a_branch_lands_behind_it() -> None:
    body = TARGET + "setp.lt.u32 %p1, %r60, 7; @%p1 bra SKIP;" + ISSUE + "SKIP:" + COMMIT
    body += "cp.async.wait_group 0;" + READ
    assert copy(SOURCE, body).tolist() == [NAN] * 7 + SOURCE[7:32].tolist()


def test_a_guarded_copy() -> None:
    body = TARGET + "setp.lt.u32 %p1, %r60, 7; @!%p1 " + ISSUE + COMMIT + "cp.async.wait_group 0;"
    assert copy(SOURCE, body + READ).tolist() == [NAN] * 7 + SOURCE[7:32].tolist()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_source_size_fills_with_zeros(size: int) -> None:
    source = np.arange(0x01010101, 0x01010101 + 128, dtype=np.uint32)
    body = f"""
    mov.u32 %r9, s; mul.lo.u32 %r10, %r60, {size}; add.u32 %r10, %r10, %r9;
    mul.wide.u32 %rd3, %r60, {size}; add.s64 %rd3, %rd2, %rd3;
    rem.u32 %r2, %r60, {size + 1};
    cp.async.ca.shared.global [%r10], [%rd3], {size}, %r2;
    cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.u32 %r1, [%r10+{size - 4}];
    """
    got = copy(source, body)
    raw = source.view(np.uint8)
    for thread in range(32):
        length = thread % (size + 1)
        piece = raw[thread * size : thread * size + length].tolist() + [0] * (size - length)
        want = int.from_bytes(bytes(piece[-4:]), "little")
        assert got[thread] == want


def test_a_copy_of_no_bytes_reads_nothing() -> None:
    body = TARGET + "mov.u32 %r2, 0; mov.u64 %rd3, 16;"
    body += "cp.async.ca.shared.global [%r10], [%rd3], 4, %r2;" + COMMIT + "cp.async.wait_group 0;"
    assert copy(SOURCE, body + READ).tolist() == [0] * 32


def test_a_cache_policy_is_no_source_size() -> None:
    body = TARGET + "createpolicy.fractional.L2::evict_last.b64 %rd9, 1.0;"
    body += "cp.async.ca.shared.global.L2::cache_hint [%r10], [%rd3], 4, %rd9;" + COMMIT
    assert copy(SOURCE, body + "cp.async.wait_group 0;" + READ).tolist() == SOURCE[:32].tolist()


def test_what_a_short_copy_does_not_read_is_not_shown() -> None:
    recorder = Recorder()
    body = TARGET + "setp.lt.u32 %p1, %r60, 3; selp.u32 %r2, 4, 0, %p1;"
    body += "cp.async.ca.shared.global [%r10], [%rd3], 4, %r2;" + COMMIT + "cp.async.wait_group 0;"
    copy(SOURCE, body + READ, observers=[recorder])
    source = next(e for e in recorder.events if getattr(e, "kind", "") == "async_read")
    assert source.threads.tolist() == [0, 1, 2]
    assert source.sizes.tolist() == [4, 4, 4]


def test_a_source_size_above_the_copy() -> None:
    body = TARGET + "cp.async.ca.shared.global [%r10], [%rd3], 4, 5;" + READ
    with pytest.raises(EmulatorError, match=r"cp\.async of 4 bytes with src-size 5"):
        copy(SOURCE, body)


# What observers receive


class Recorder(Observer):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[object] = []

    def memory(self, event: MemoryAccess) -> None:
        self.events.append(event)

    def async_group(self, event: AsyncGroupEvent) -> None:
        self.events.append(event)

    def async_landing(self, event: AsyncLanding) -> None:
        self.events.append(event)


def test_events_of_a_copy_come_in_order() -> None:
    recorder = Recorder()
    body = TARGET + ISSUE + COMMIT + "cp.async.wait_group 0;" + READ
    copy(SOURCE, body, observers=[recorder])
    kinds = [getattr(e, "kind", "landing") for e in recorder.events]
    assert kinds == ["async_write", "async_read", "commit", "wait", "landing", "read", "write"]
    target, source, *_, landing, read, _ = recorder.events
    assert (target.space, source.space) == ("shared", "global")
    assert source.addresses.tolist() == [SOURCE.ctypes.data + 4 * t for t in range(32)]
    assert landing.addresses.tolist() == read.addresses.tolist() == [4 * t for t in range(32)]
    assert landing.issued == target.site
    clocks = [e.clock for e in recorder.events]
    assert clocks == sorted(set(clocks))


def test_guards_and_ctas_show_in_the_threads() -> None:
    recorder = Recorder()
    body = (
        "mov.u32 %r9, s; mov.u32 %r1, 0; setp.lt.u32 %p1, %r60, 2; @%p1 st.shared.u32 [%r9], %r0;"
    )
    words_of(body, ctas=2, declarations=SHARED, observers=[recorder])
    store = recorder.events[0]
    assert store.threads.tolist() == [0, 1, 32, 33]
    assert store.addresses.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("count", "lanes"), [(1, 8), (2, 16), (4, 32)])
def test_ldmatrix_shows_the_rows_that_count(count: int, lanes: int) -> None:
    recorder = Recorder()
    registers = ",".join(f"%r{20 + i}" for i in range(count))
    body = f"""
    shl.b32 %r10, %r60, 4; mov.u32 %r1, 0;
    setp.ge.u32 %p1, %r60, {lanes}; @%p1 mov.u32 %r10, 4096;
    ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{registers}}}, [%r10];
    """
    words_of(body, declarations=SHARED, observers=[recorder])
    event = recorder.events[0]
    assert (event.shape, event.sizes) == ("matrix", 16)
    assert event.threads.tolist() == list(range(lanes))
    assert event.addresses.tolist() == [16 * t for t in range(lanes)]


class Lenient(Recorder):
    handles_bad_access = True


def test_an_observer_may_take_care_of_bad_accesses() -> None:
    source = np.arange(1, 17, dtype=np.uint32)
    body = "add.s64 %rd3, %rd2, %rd0; ld.global.u32 %r1, [%rd3]; st.global.u32 [%rd3], %r1;"
    got = copy(source, body, observers=[Lenient()])
    assert got.tolist() == [*range(1, 17), *[0] * 16]
    assert source.tolist() == list(range(1, 17))
