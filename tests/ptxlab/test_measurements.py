"""Bank conflicts against a scalar count, and the classes of the instruction mix."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from traces import Trace

from ptxlab.checks import BankConflicts, instruction_mix
from ptxlab.checks.instruction_mix import instruction_class

WARP = range(32)


def measured(threads: range, addresses: list[int], size: int, **more: str) -> tuple[int, int]:
    observer = BankConflicts()
    t = Trace(observer, shared_bytes=1 << 16)
    t.access(more.pop("kind", "read"), threads, addresses, size, **more)  # type: ignore[arg-type]
    (counted,) = observer.by_kind.values()
    return counted.ideal, counted.actual


def by_hand(threads: range, addresses: list[int], size: int) -> tuple[int, int]:
    """Wavefronts one phase, bank and word at a time."""
    lanes = {4: 32, 8: 16, 16: 8}[max(size, 4)]
    phases: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for thread, address in zip(threads, addresses, strict=True):
        for byte in range(address, address + size):
            word = byte // 4
            phases[thread // 32, thread % 32 // lanes][word % 32].add(word)
    return len(phases), sum(max(map(len, banks.values())) for banks in phases.values())


def test_rows_of_256_bytes_put_a_matrix_into_one_bank_group() -> None:
    plain = [256 * (lane % 8) + 16 * (lane // 8) for lane in WARP]
    swizzled = [256 * (lane % 8) + 16 * (lane // 8 ^ lane % 8) for lane in WARP]
    assert measured(WARP, plain, 16, shape="matrix") == (4, 32)
    assert measured(WARP, swizzled, 16, shape="matrix") == (4, 4)


@pytest.mark.parametrize(
    ("stride", "size", "expected"),
    [(4, 4, (1, 1)), (8, 4, (1, 2)), (128, 4, (1, 32)), (0, 4, (1, 1)), (132, 4, (1, 1)),
     (8, 8, (2, 2)), (16, 8, (2, 4)), (16, 16, (4, 4)), (32, 16, (4, 8)), (128, 16, (4, 32)),
     (2, 2, (1, 1)), (1, 1, (1, 1))],
)  # fmt: skip
def test_strided_accesses(stride: int, size: int, expected: tuple[int, int]) -> None:
    assert measured(WARP, [stride * lane for lane in WARP], size) == expected


@pytest.mark.parametrize("size", [4, 8, 16])
def test_random_accesses_agree_with_a_count_by_hand(size: int) -> None:
    rng = random.Random(size)
    for _ in range(20):
        threads = range(rng.choice([32, 64]))
        addresses = [size * rng.randrange(200) for _ in threads]
        assert measured(threads, addresses, size) == by_hand(threads, addresses, size)


def test_lanes_that_are_off_cost_nothing() -> None:
    observer = BankConflicts()
    t = Trace(observer)
    t.read([0, 5], [0, 128], 16)
    assert (observer.by_kind["ld.shared.16B"].ideal, observer.by_kind["ld.shared.16B"].actual) == (
        1,
        2,
    )


def test_kinds_and_factors() -> None:
    observer = BankConflicts()
    t = Trace(observer, shared_bytes=4096)
    t.write(WARP, [8 * lane for lane in WARP], 4)
    t.read(WARP, [4 * lane for lane in WARP], 4)
    t.ldmatrix(WARP, [16 * lane for lane in WARP])
    t.copy(WARP, [64 * lane for lane in WARP])
    t.access("read", WARP, [0] * 32, space="global")
    assert observer.factors() == {
        "cp.async": 4.0,
        "ld.shared.4B": 1.0,
        "ldmatrix": 1.0,
        "st.shared.4B": 2.0,
    }
    assert {site.mnemonic for site in observer.by_site} == {
        "write.shared", "read.shared", "ldmatrix.x4", "cp.async"
    }  # fmt: skip


def test_ctas_do_not_share_phases() -> None:
    observer = BankConflicts()
    t = Trace(observer, ctas=2, threads=32)
    t.read(range(64), [4 * (i % 32) for i in range(64)])
    assert observer.by_kind["ld.shared.4B"].ideal == 2


@pytest.mark.parametrize(
    ("mnemonic", "name"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mma"),
        ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "ldmatrix"),
        ("cp.async.cg.shared.global", "cp.async"),
        ("cp.async.wait_group", "cp.async wait"),
        ("cp.async.commit_group", "cp.async wait"),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16", "mma"),
        ("wgmma.wait_group.sync.aligned", "barrier"),
        ("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group", "TMA"),
        ("cp.async.bulk.commit_group", "cp.async wait"),
        ("cp.async.bulk.wait_group.read", "cp.async wait"),
        ("mbarrier.try_wait.parity.shared::cta.b64", "barrier"),
        ("setmaxnreg.inc.sync.aligned.u32", "control"),
        ("bar.sync", "barrier"),
        ("bar.warp.sync", "barrier"),
        ("shfl.sync.bfly.b32", "shuffle"),
        ("ex2.approx.ftz.f32", "special function"),
        ("ld.shared.v4.u32", "ld.shared"),
        ("st.shared.u32", "st.shared"),
        ("ld.global.v4.u32", "ld.global"),
        ("ld.param.u64", "ld.param"),
        ("ld.global.nc.L1::no_allocate.v4.u32", "ld.global"),
        ("fma.rn.f32", "float"),
        ("add.s32", "integer"),
        ("lop3.b32", "integer"),
        ("setp.lt.s32", "predicate"),
        ("and.pred", "predicate"),
        ("cvt.rn.f16x2.f32", "convert"),
        ("mov.b32", "move"),
        ("bra.uni", "control"),
        ("ret", "control"),
    ],
)
def test_classes(mnemonic: str, name: str) -> None:
    assert instruction_class(mnemonic) == name


def test_the_mix_adds_up_and_begins_with_the_largest() -> None:
    mix = instruction_mix({"add.s32": 5, "mul.lo.s32": 3, "fma.rn.f32": 10, "bar.sync": 1})
    assert list(mix.items()) == [("float", 10), ("integer", 8), ("barrier", 1)]
