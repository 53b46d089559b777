"""Bulk copies: boxes, bounds and swizzles against index formulas; groups, order, misuse."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ptx_programs import HALF, MapSpec, aligned, map_of, map_program, run

from ptxlab.checks import all_checks
from ptxlab.errors import ArgumentError, EmulatorError
from ptxlab.interface import Finding

#: The box at 0, an mbarrier behind it.
SHARED = ".shared .align 1024 .b8 s[{size}];\n"
BARRIER = 32768
INIT = f"""
mov.u32 %r9, s; add.u32 %r20, %r9, {BARRIER};
setp.ne.u32 %p7, %r60, 0;
@%p7 bra READY;
mbarrier.init.shared::cta.b64 [%r20], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
"""
WAIT = """
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r20], 0;
@!%p6 bra WAIT;
"""
#: Thread t copies the 16-byte pieces t, t + 64, ... of the box to the output.
DUMP = """
shl.b32 %r1, %r60, 4;
DUMP:
add.u32 %r2, %r9, %r1;
ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2];
cvt.u64.u32 %rd5, %r1; add.s64 %rd6, %rd1, %rd5;
st.global.v4.u32 [%rd6], {{%r4, %r5, %r6, %r7}};
add.u32 %r1, %r1, 1024;
setp.lt.u32 %p1, %r1, {size};
@%p1 bra DUMP;
ret;
"""


def load_text(rank: int, coordinates: Sequence[int], size: int, expect: int | None = None) -> str:
    where = ", ".join(str(c) for c in coordinates)
    expected = size if expect is None else expect
    return (
        INIT
        + f"""
    @%p7 bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {expected};
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r9], [%rd11, {{{where}}}], [%r20];
    """
        + WAIT
        + DUMP.format(size=size)
    )


def loaded(
    tensor: np.ndarray, box: Sequence[int], swizzle: int, coordinates: Sequence[int]
) -> np.ndarray:
    """The box as it lies in shared memory, through the emulator with all checks on."""
    size = 2 * int(np.prod(box))
    out = aligned((size // 2,))
    text = map_program(
        load_text(tensor.ndim, coordinates, size), 1, 1, SHARED.format(size=BARRIER + 16)
    )
    result = run(
        text, [(out, True), (tensor, False)], threads=64,
        maps=[map_of(tensor, box, swizzle)], observers=all_checks(),
    )  # fmt: skip
    assert not result.findings, result.findings
    return out


def expected_box(
    tensor: np.ndarray, box: Sequence[int], swizzle: int, coordinates: Sequence[int]
) -> np.ndarray:
    """The same, one element at a time."""
    out = np.zeros(int(np.prod(box)), np.uint16)
    rows = {0: 1, 32: 2, 64: 4, 128: 8}[swizzle]
    for flat in range(out.size):
        rest, index = flat, []
        for extent, start in zip(box, coordinates, strict=True):
            index.append(rest % extent + start)
            rest //= extent
        inside = all(0 <= i < n for i, n in zip(index, tensor.shape[::-1], strict=True))
        line, byte = divmod(2 * flat, 128)
        piece, within = divmod(byte, 16)
        if swizzle:
            # Of a line of eight pieces, the lowest bits of a piece's number are xor-ed with the
            # line's; a line is 128 bytes.
            piece ^= line % rows
        out[(128 * line + 16 * piece + within) // 2] = tensor[tuple(index[::-1])] if inside else 0
    return out


def numbered(*shape: int) -> np.ndarray:
    tensor = aligned(shape)
    tensor[...] = 1 + np.arange(tensor.size, dtype=np.uint64).reshape(shape) * 7 % 65521
    return tensor


@pytest.mark.parametrize(("swizzle", "inner"), [(0, 16), (0, 64), (32, 16), (64, 32), (128, 64)])
def test_a_swizzled_box(swizzle: int, inner: int) -> None:
    tensor = numbered(40, 128)
    box, where = (inner, 32), (64, 5)
    got = loaded(tensor, box, swizzle, where)
    assert np.array_equal(got, expected_box(tensor, box, swizzle, where))


@pytest.mark.parametrize("where", [(0, 0), (-8, -3), (120, 30), (64, 60), (-200, 4)], ids=str)
def test_what_lies_outside_is_zero(where: tuple[int, int]) -> None:
    tensor = numbered(40, 128)
    got = loaded(tensor, (64, 16), 128, where)
    assert np.array_equal(got, expected_box(tensor, (64, 16), 128, where))


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_boxes_of_more_dimensions(rank: int) -> None:
    tensor = numbered(*(3, 2, 5, 6, 64)[-rank:])
    box, where = (32, 4, 4, 2, 2)[:rank], (32, 3, 1, 1, 2)[:rank]
    got = loaded(tensor, box, 64, where)
    assert np.array_equal(got, expected_box(tensor, box, 64, where))


def test_strides_need_not_be_dense() -> None:
    tensor = numbered(24, 4, 64)[:, 1:3, :32]
    got = loaded(tensor, (32, 2, 16), 64, (0, 0, 2))
    assert np.array_equal(got, expected_box(tensor, (32, 2, 16), 64, (0, 0, 2)))


# Stores --------------------------------------------------------------------------------------

#: Thread t writes its number into words t, t + 64, ... of the box; thread 0 stores the box.
STORE = """
mov.u32 %r9, s; shl.b32 %r1, %r60, 2; setp.ne.u32 %p7, %r60, 0;
FILL:
add.u32 %r2, %r9, %r1; shr.u32 %r3, %r1, 2; add.u32 %r3, %r3, 1;
st.shared.u32 [%r2], %r3;
add.u32 %r1, %r1, 256; setp.lt.u32 %p1, %r1, {size};
@%p1 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p7 bra DONE;
cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%rd11, {{{where}}}], [%r9];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
DONE:
bar.sync 0;
{after}
ret;
"""


def stored(
    tensor: np.ndarray,
    box: Sequence[int],
    swizzle: int,
    where: Sequence[int],
    change: tuple[str, str] = ("", ""),
    after: str = "",
) -> list[Finding]:
    size = 2 * int(np.prod(box))
    text = STORE.format(size=size, rank=tensor.ndim, where=", ".join(map(str, where)), after=after)
    assert change[0] in text
    program = map_program(text.replace(*change), 1, 0, SHARED.format(size=BARRIER))
    observers = all_checks()
    with contextlib.suppress(EmulatorError):
        run(
            program, [(tensor, True)], threads=64,
            maps=[map_of(tensor, box, swizzle)], observers=observers,
        )  # fmt: skip
    return [finding for observer in observers for finding in observer.findings]


@pytest.mark.parametrize(("swizzle", "inner"), [(0, 64), (32, 16), (64, 32), (128, 64)])
def test_a_stored_box_is_clipped(swizzle: int, inner: int) -> None:
    box, where = (inner, 16), (128 - inner // 2, 33)
    tensor = aligned((40, 128))
    assert not stored(tensor, box, swizzle, where)
    # Loading is the inverse of storing: mark every place of the box with its own number.
    numbers = aligned((box[1] + where[1], 128 + inner))
    numbers[where[1] :, where[0] : where[0] + inner] = np.arange(1, inner * box[1] + 1).reshape(
        box[1], inner
    )
    order = expected_box(numbers, box, swizzle, where)
    words = np.arange(1, inner * box[1] // 2 + 1, dtype=np.uint32).view(np.uint16)
    want = np.zeros_like(numbers)
    for place, value in zip(order, words, strict=True):
        row, column = divmod(int(place) - 1, inner)
        want[where[1] + row, where[0] + column] = value
    assert np.array_equal(tensor, want[:40, :128])


def kinds(findings: list[Finding]) -> set[str]:
    return {finding.kind for finding in findings}


def store_kinds(*change: str, after: str = "") -> set[str]:
    found = stored(aligned((40, 128)), (64, 16), 128, (0, 0), (change[0], change[1]), after)
    return kinds(found)


def test_a_store_needs_its_proxy_fence() -> None:
    assert store_kinds("fence.proxy.async.shared::cta;", "") == {"proxy-fence"}


def test_a_proxy_fence_comes_before_the_barrier() -> None:
    """One thread's fence covers what it is ordered after: behind the barrier, all threads'
    stores."""
    late = "bar.sync 0;\nfence.proxy.async.shared::cta;"
    assert not store_kinds("fence.proxy.async.shared::cta;\nbar.sync 0;", late)


def test_a_store_needs_the_barrier() -> None:
    found = store_kinds("fence.proxy.async.shared::cta;\nbar.sync 0;", "fence.proxy.async;")
    assert "race-raw" in found


AFTERWARDS = "add.u32 %r2, %r9, 16; @!%p7 st.shared.u32 [%r2], 0;"


def test_memory_is_not_reused_before_it_was_read() -> None:
    assert not store_kinds("", "", after=AFTERWARDS)
    found = store_kinds("cp.async.bulk.wait_group.read 0;", "", after=AFTERWARDS)
    assert found == {"race-war", "bulk-unfinished"}
    assert store_kinds("cp.async.bulk.commit_group;", "", after=AFTERWARDS) >= {"race-war"}
    assert store_kinds("wait_group.read 0", "wait_group 1", after=AFTERWARDS) >= {"race-war"}


def test_a_store_and_ordinary_stores_meet_in_global_memory() -> None:
    after = "ld.param.u64 %rd5, [args]; @%p7 ret; st.global.u32 [%rd1], 7;"
    tensor = aligned((40, 128))
    text = STORE.format(size=2048, rank=2, where="0, 0", after=after.split(";", 1)[1])
    program = map_program(text, 1, 1, SHARED.format(size=BARRIER))
    program = program.replace("@%p7 ret; st.global", "@!%p7 ret; st.global")
    result = run(
        program, [(tensor, True)], threads=64, maps=[map_of(tensor, (64, 16), 128)],
        observers=all_checks(),
    )  # fmt: skip
    assert kinds(result.findings) == {"race-waw"}


# Plain ranges --------------------------------------------------------------------------------


def test_plain_bytes_in_and_out() -> None:
    source, out = numbered(1024), aligned((1024,))
    body = (
        INIT
        + """
    @%p7 bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 2048;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd2], 2048, [%r20];
    """
        + WAIT
        + """
    @%p7 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r9], 1024;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    DONE: ret;
    """
    )
    text = map_program(body, 0, 2, SHARED.format(size=BARRIER + 16))
    result = run(text, [(out, True), (source, False)], threads=64, observers=all_checks())
    assert not result.findings
    assert np.array_equal(out[:512], source[:512])
    assert not out[512:].any()


# Reductions ----------------------------------------------------------------------------------

#: Words of the range that every CTA adds; thread t of 64 has four of them.
WORDS = 256
#: Thread t copies its four words of %rd2, the CTA's own, to shared memory; thread 0 adds them to
#: the range at %rd1 and waits.
REDUCE = """
mov.u32 %r9, s; shl.b32 %r1, %r60, 4; add.u32 %r2, %r9, %r1; setp.ne.u32 %p7, %r60, 0;
shl.b64 %rd4, %rd0, 2; add.s64 %rd5, %rd2, %rd4;
ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd5];
st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};
cvt.u64.u32 %rd6, %r1; add.s64 %rd6, %rd1, %rd6;
{before}
fence.proxy.async;
bar.sync 0;
@%p7 bra DONE;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r9], {size};
cp.async.bulk.commit_group;
{wait}
DONE:
bar.sync 0;
{after}
ret;
"""
FULL_WAIT, READ_WAIT = "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"
LOAD_SUMS = "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd6];"


def reduced(
    ctas: int,
    *,
    before: str = "",
    wait: str = FULL_WAIT,
    after: str = "",
    change: tuple[str, str] = ("", ""),
    seed: int | None = None,
) -> tuple[np.ndarray, np.ndarray, set[str]]:
    """(sums, what every CTA adds, kinds of findings)."""
    rng, sums = np.random.default_rng(7), aligned((WORDS,), np.float32)
    terms = aligned((ctas, WORDS), np.float32)
    terms[...] = rng.standard_normal(terms.shape) * 10.0 ** rng.integers(-3, 4, terms.shape)
    body = REDUCE.format(size=4 * WORDS, before=before, wait=wait, after=after)
    assert change[0] in body
    text = map_program(body.replace(*change), 0, 2, SHARED.format(size=4 * WORDS))
    observers = all_checks()
    run(text, [(sums, True), (terms, False)], ctas=ctas, threads=64, observers=observers, seed=seed)
    return sums, terms, kinds([f for observer in observers for f in observer.findings])


@pytest.mark.parametrize("wait", [FULL_WAIT, READ_WAIT], ids=["full", "read"])
def test_ranges_are_added(wait: str) -> None:
    """At the end of the kernel, at the latest, all is there, whatever was waited for."""
    sums, terms, found = reduced(3, wait=wait)
    want = np.zeros(WORDS, np.float32)
    for row in terms:
        for i in range(WORDS):
            want[i] = np.float32(want[i] + row[i])
    assert not found
    np.testing.assert_array_equal(sums, want)


def test_the_schedule_decides_the_order_of_reductions() -> None:
    found = {}
    for seed in range(8):
        sums, terms, findings = reduced(6, seed=seed, wait=(FULL_WAIT, READ_WAIT)[seed // 4])
        assert not findings
        bound = np.abs(terms).sum(axis=0) * 1e-6
        assert (np.abs(sums - terms.astype(np.float64).sum(axis=0)) <= bound).all()
        assert reduced(6, seed=seed, wait=(FULL_WAIT, READ_WAIT)[seed // 4])[0].tobytes() == (
            sums.tobytes()
        )
        found[seed] = sums.tobytes()
    assert len({found[seed] for seed in range(4)}) > 1
    assert len({found[seed] for seed in range(4, 8)}) > 1


def test_sums_may_be_read_behind_a_full_wait() -> None:
    """``.read`` says that shared memory has been read, and nothing of global memory: neither to
    its own thread nor, behind a barrier, to others."""
    store = "mul.f32 %f1, %f1, 0f40000000; st.global.f32 [%rd6], %f1;"
    sums, terms, found = reduced(1, after=LOAD_SUMS + store)
    assert not found
    np.testing.assert_array_equal(sums[::4], 2 * terms[0, ::4])
    early, _, found = reduced(1, wait=READ_WAIT, after=LOAD_SUMS + store)
    assert found == {"race-raw", "race-waw"}
    assert not np.array_equal(early[::4], 2 * terms[0, ::4])
    own = f"@%p7 ret; {LOAD_SUMS}"
    assert not reduced(1, after=own)[2]
    assert reduced(1, wait=READ_WAIT, after=own)[2] == {"race-raw"}
    assert reduced(1, wait="cp.async.bulk.wait_group 1;", after=own)[2] == {
        "race-raw", "bulk-unfinished",
    }  # fmt: skip


def test_a_full_wait_covers_what_an_earlier_read_wait_left() -> None:
    assert not reduced(1, wait=READ_WAIT + FULL_WAIT, after=LOAD_SUMS)[2]
    second = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 1;"
    assert not reduced(1, wait=READ_WAIT + second, after=LOAD_SUMS)[2]
    assert reduced(1, wait=READ_WAIT + "cp.async.bulk.wait_group 1;", after=LOAD_SUMS)[2] == {
        "race-raw"
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("red.global.add.v4.f32 [%rd6], {%f1, %f1, %f1, %f1};", set()),
        ("red.global.add.f32 [%rd6], %f1;", set()),
        ("st.global.f32 [%rd6], %f1;", {"race-waw"}),
    ],
    ids=["vectors", "scalars", "stores"],
)
def test_reductions_meet_only_atomics(text: str, expected: set[str]) -> None:
    """In one CTA, unordered: before the wait, and after one for reads."""
    first = "mov.f32 %f1, 0f3F800000;"
    assert reduced(1, wait=READ_WAIT, after=first + text)[2] == expected
    # Stores that the fence and the barrier stand behind are ordered before.
    assert not reduced(1, before=first + text)[2]


def test_reductions_need_their_proxy_fence() -> None:
    """For what they read in shared and for what they add to in global memory."""
    assert reduced(1, change=("fence.proxy.async;", ""))[2] == {"proxy-fence"}
    first = "mov.f32 %f1, 0f3F800000; st.global.f32 [%rd6], %f1;"
    late = ("fence.proxy.async;", f"fence.proxy.async; {first}")
    assert reduced(1, change=late)[2] == {"proxy-fence"}


def test_ctas_of_other_waves_are_not_ordered_either() -> None:
    """Engines have numbers of their own in every wave of CTAs; 80 of 64 threads are two waves."""
    assert not reduced(80, wait=READ_WAIT)[2]
    assert reduced(80, wait=READ_WAIT, after="@%p7 ret;" + LOAD_SUMS)[2] >= {"race-raw"}
    stores = ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
              "cp.async.bulk.global.shared::cta.bulk_group")  # fmt: skip
    assert reduced(80, change=stores)[2] == {"race-waw"}


@pytest.mark.parametrize("what", [".max.f32", ".add.f16", ".add.noftz.bf16", ".add.u32"])
def test_other_reductions_are_refused(what: str) -> None:
    with pytest.raises(EmulatorError, match=r"use \.add on \.f32"):
        reduced(1, change=(".add.f32", what))


def test_a_reduced_box_is_clipped() -> None:
    """Into fp32 elements; a map of others is no target."""
    text = """
    mov.u32 %r9, s; shl.b32 %r1, %r60, 4; add.u32 %r2, %r9, %r1; setp.ne.u32 %p7, %r60, 0;
    cvt.rn.f32.u32 %f1, %r60; st.shared.v4.f32 [%r2], {%f1, %f1, %f1, %f1};
    fence.proxy.async.shared::cta; bar.sync 0; @%p7 ret;
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group
        [%rd11, {-8, 6}], [%r9];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; ret;
    """
    program = map_program(text, 1, 0, SHARED.format(size=1024))
    tensor = aligned((10, 32), np.float32)
    tensor[...] = np.arange(320).reshape(10, 32)
    want = tensor.copy()
    for row in range(16):
        for column in range(16):
            y, x = row + 6, column - 8
            if y < 10 and x >= 0:
                want[y, x] += (16 * row + column) // 4
    result = run(
        program, [(tensor, True)], threads=64, maps=[map_of(tensor, (16, 16))],
        observers=all_checks(),
    )  # fmt: skip
    assert not result.findings
    np.testing.assert_array_equal(tensor, want)
    halves = aligned((10, 64))
    with pytest.raises(EmulatorError, match="a map of elements of 2 bytes"):
        run(program, [(halves, True)], threads=64, maps=[map_of(halves, (32, 16))])


# Loads that go wrong -------------------------------------------------------------------------


def load_kinds(
    *changes: tuple[str, str], expect: int = 2048, seed: int | None = None
) -> tuple[set[str], str]:
    """(kinds of findings, error) of a load with its text changed."""
    tensor, out = numbered(40, 128), aligned((1024,))
    text = load_text(2, (64, 5), 2048, expect)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    observers, error = all_checks(), ""
    try:
        run(
            map_program(text, 1, 1, SHARED.format(size=BARRIER + 16)),
            [(out, True), (tensor, False)], threads=64, maps=[map_of(tensor, (64, 16), 128)],
            observers=observers, seed=seed,
        )  # fmt: skip
    except EmulatorError as stopped:
        error = str(stopped)
    return kinds([f for observer in observers for f in observer.findings]), error


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_a_read_before_the_data_arrived(seed: int | None) -> None:
    found, _ = load_kinds((WAIT, "WAIT:\n"), seed=seed)
    assert found & {"in-flight-read", "race-raw"}


def test_more_bytes_expected_than_come() -> None:
    _, error = load_kinds(expect=2064)
    assert "0 of 1 arrivals and 16 bytes to come" in error or "1 of 1" in error
    assert "threads 0-63" in error


def test_fewer_bytes_expected_than_come() -> None:
    found, _ = load_kinds(expect=2032)
    assert "mbarrier-bytes" in found


def test_a_barrier_that_the_bulk_copy_may_not_see() -> None:
    found, _ = load_kinds(("fence.mbarrier_init.release.cluster;", ""))
    assert found == {"proxy-fence"}


def test_a_copy_without_a_wait() -> None:
    found, _ = load_kinds((WAIT, "WAIT: ret;\n"))
    assert found == {"bulk-unfinished"}


ROWS_OF_MAP = 1 << 30


def rows_twice(tensor: np.ndarray, box_rows: int, early: int = 0) -> MapSpec:
    """A map with its rows in two dimensions, ROWS_OF_MAP rows too far in all, and a third that
    takes those back modulo 2^64; `early` moves its address so many rows before the tensor."""
    row = tensor.strides[0]
    sizes = (tensor.shape[1], ROWS_OF_MAP, len(tensor) + 1, ROWS_OF_MAP + 1)
    strides = (row, row, (1 << 34) - row)
    address = tensor.ctypes.data - row * early
    return MapSpec(0, address, HALF, sizes, strides, (64, box_rows, 1, 1), 128)


def load_rows(spec: MapSpec, tensor: np.ndarray, where: Sequence[int], **options: Any) -> Any:
    """The box, and what the checks find."""
    out = aligned((64 * 16,))
    text = map_program(load_text(4, where, 2048), 1, 1, SHARED.format(size=BARRIER + 16))
    result = run(text, [(out, True), (tensor, False)], threads=64, maps=[spec], **options)
    return out, result.findings


@pytest.mark.parametrize(("first", "count"), [(0, 16), (5, 16), (24, 16), (33, 7), (39, 1), (9, 0)])
def test_addresses_wrap(first: int, count: int) -> None:
    """A box of ``count`` rows up to where the map ends in its second dimension; zeros behind."""
    tensor = numbered(40, 64)
    where = (0, ROWS_OF_MAP - count, first + count, ROWS_OF_MAP)
    out, findings = load_rows(rows_twice(tensor, 16), tensor, where, observers=all_checks())
    assert not findings
    padded = numbered(56, 64)
    padded[:count], padded[count:] = tensor[first : first + count], 0
    assert np.array_equal(out, expected_box(padded, (64, 16), 128, (0, 0)))


@pytest.mark.parametrize("end", [15, 0])
def test_a_box_may_touch_nothing_outside(end: int) -> None:
    tensor = numbered(40, 64)
    where = (0, ROWS_OF_MAP - 16, end, ROWS_OF_MAP)
    out, findings = load_rows(rows_twice(tensor, 16), tensor, where, observers=all_checks())
    assert {finding.kind for finding in findings} == {"out-of-bounds"}
    beyond = 16 - end
    assert np.count_nonzero(out) == 64 * end
    assert not out[: 64 * beyond].any()
    with pytest.raises(EmulatorError, match="outside every tensor"):
        load_rows(rows_twice(tensor, 16), tensor, where)


def test_a_map_begins_in_memory() -> None:
    """A GPU faults on a map whose address is no memory, whatever the boxes touch."""
    tensor = numbered(40, 64)
    spec = rows_twice(tensor, 16, early=16)
    with pytest.raises(EmulatorError, match="argument offset 0 begins at global address 0x"):
        load_rows(spec, tensor, (0, ROWS_OF_MAP - 16, 32, ROWS_OF_MAP))


def test_a_misaligned_box() -> None:
    found, _ = load_kinds(("[%r9], [%rd11", "[%r9+64], [%rd11"))
    assert "bulk-alignment" in found


def test_a_tensor_map_that_is_not_there() -> None:
    _, error = load_kinds(("[%rd11, ", "[%rd11+64, "))
    assert "no tensor map at argument offset 64; the launch has these: 0" in error


def test_a_map_of_other_dimensions() -> None:
    _, error = load_kinds(("tensor.2d", "tensor.3d"), ("{64, 5}", "{64, 5, 0}"))
    assert "argument offset 0 has 2 dimensions" in error


BAD_MAPS = {
    "box=(64, 257)": lambda t: map_of(t, (64, 257)),
    "rows of 64 bytes with a 128-byte swizzle": lambda t: map_of(t, (32, 16), 128),
    "not a multiple of 16": lambda t: map_of(t, (4, 16)),
    "disagree": lambda t: map_of(t, (64, 16, 1)),
    "must be multiples of 16": lambda t: map_of(t[:, 1:], (64, 16)),
}


@pytest.mark.parametrize("message", BAD_MAPS)
def test_maps_that_cannot_be_encoded(message: str) -> None:
    tensor, out = numbered(40, 128), aligned((1024,))
    spec: MapSpec = BAD_MAPS[message](tensor)
    text = map_program(load_text(2, (0, 0), 2048), 1, 1, SHARED.format(size=BARRIER + 16))
    with pytest.raises(ArgumentError) as caught:
        run(text, [(out, True), (tensor, False)], threads=64, maps=[spec])
    assert "argument offset 0" in str(caught.value)
    assert message in str(caught.value)
