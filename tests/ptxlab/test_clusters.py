"""Clusters: ranks, the cluster barrier, mbarriers of other CTAs, multicast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_programs import STORE_R1, aligned, map_of, map_program, program, run

from ptxlab.checks import all_checks
from ptxlab.errors import EmulatorError
from ptxlab.interface import Clusters

SHARED = ".shared .align 1024 .b8 s[4112];\n"
MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
#: The same of an arrival that orders nothing.
RELAXED = MEET.replace("arrive", "arrive.relaxed")


def test_ranks_and_peers_of_boxes() -> None:
    """Every CTA against its coordinates, for clusters of several dimensions."""
    grid, cluster = (4, 6, 4), (2, 3, 2)
    clusters, members = Clusters(grid, cluster), {}
    for z in range(4):
        for y in range(6):
            for x in range(4):
                cta = x + 4 * (y + 6 * z)
                rank = x % 2 + 2 * (y % 3 + 3 * (z % 2))
                number = x // 2 + 2 * (y // 3 + 2 * (z // 2))
                assert (clusters.rank(cta), clusters.number(cta)) == (rank, number)
                members[number, rank] = cta
    for (number, rank), cta in members.items():
        assert clusters.peer(members[number, 0], rank) == cta


def kinds_of(text: str, pointers: int, **options: object) -> tuple[list[int], set[str], str]:
    """(output, kinds of findings, error) of two clusters of two CTAs with 64 threads."""
    out, error, observers = aligned((256,), np.uint32), "", all_checks()
    tensors = [(out, True), *options.pop("more", [])]  # type: ignore[misc]
    try:
        run(
            text, tensors[:pointers] + tensors[pointers:], ctas=4, threads=64, cluster=2,
            observers=observers, **options,  # type: ignore[arg-type]
        )  # fmt: skip
    except EmulatorError as stopped:
        error = str(stopped)
    return out.tolist(), {f.kind for o in observers for f in o.findings}, error


#: Thread 0 of each CTA arrives at the peer's mbarrier and waits for its own.
HANDSHAKE = (
    """
mov.u32 %r9, s; add.u32 %r20, %r9, 4096; setp.ne.u32 %p7, %r60, 0;
mov.u32 %r21, %cluster_ctarank; xor.b32 %r22, %r21, 1;
@!%p7 mbarrier.init.shared::cta.b64 [%r20], 1;
@!%p7 fence.mbarrier_init.release.cluster;
"""
    + MEET
    + """
mapa.shared::cluster.u32 %r23, %r20, %r22;
@!%p7 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r23];
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p6, [%r20], 0;
@!%p6 bra WAIT;
mov.u32 %r1, %r21;
"""
)


def handshake(old: str = "", new: str = "", **options: object) -> tuple[list[int], set[str], str]:
    assert old in HANDSHAKE
    body = HANDSHAKE.replace(old, new, 1) + MEET + STORE_R1 + "ret;"
    return kinds_of(program(body, 1, SHARED), 1, **options)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_arrivals_in_the_other_cta(seed: int | None) -> None:
    got, kinds, error = handshake(seed=seed)
    assert (got, kinds, error) == (([0] * 64 + [1] * 64) * 2, set(), "")


@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4, 5])
def test_who_arrives_and_exits_is_no_arrival_of_others(seed: int | None) -> None:
    """Second warps leave without waiting; the barrier opens once the first ones have come too."""
    leaving = "setp.gt.u32 %p5, %r60, 31;\n" + MEET.replace("\n", "\n@%p5 exit;\n", 1)
    got, kinds, error = handshake(MEET, leaving, seed=seed)
    assert (kinds, error) == (set(), "")
    assert [got[first : first + 32] for first in range(0, 256, 64)] == [[0] * 32, [1] * 32] * 2


def test_the_peer_must_have_initialised() -> None:
    _, kinds, error = handshake(MEET, "bar.sync 0;")
    assert "race-mbarrier" in kinds or "never initialised" in error


def test_the_peer_must_not_have_exited() -> None:
    body = HANDSHAKE + STORE_R1 + "ret;"
    assert kinds_of(program(body, 1, SHARED), 1)[1] == set(), "each waits for the other here"
    one_sided = body.replace("WAIT: mbar", "setp.eq.u32 %p5, %r21, 1;\n@%p5 bra END;\nWAIT: mbar")
    one_sided = one_sided.replace("mov.u32 %r1, %r21;", "END: mov.u32 %r1, %r21;")
    _, kinds, _ = kinds_of(program(one_sided, 1, SHARED), 1)
    assert kinds == {"cluster-exit"}


def test_a_cluster_barrier_that_is_never_completed() -> None:
    skip = "setp.eq.u32 %p5, %r21, 1;\n@%p5 bra WAIT;\n" + MEET
    _, _, error = handshake(MEET, skip)
    assert "deadlock" in error
    assert "wait for the cluster barrier (64 of 128 threads have arrived)" in error


def test_arriving_without_waiting() -> None:
    _, kinds, _ = handshake(MEET, "barrier.cluster.arrive.aligned;\n" + MEET)
    assert "cluster-barrier" in kinds


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_fence_for_mbarriers_needs_no_release(seed: int | None) -> None:
    """It hands their initialisation over by an arrival that orders nothing else."""
    got, kinds, error = handshake(MEET, RELAXED, seed=seed)
    assert (got, kinds, error) == (([0] * 64 + [1] * 64) * 2, set(), "")
    got, kinds, error = letters(MEET, RELAXED, seed=seed)
    assert (got, kinds, error) == (([71] * 64 + [70] * 64) * 2, set(), "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@!%p7 fence.mbarrier_init.release.cluster;\n", ""),
        ("@!%p7 fence.mbarrier_init.release.cluster;\n", "fence.proxy.async;\n"),
        (
            "@!%p7 fence.mbarrier_init.release.cluster;\n",
            "@%p7 fence.mbarrier_init.release.cluster;\n",
        ),
        (
            "@!%p7 mbarrier.init.shared::cta.b64 [%r20], 1;\n"
            "@!%p7 fence.mbarrier_init.release.cluster;\n",
            "@!%p7 fence.mbarrier_init.release.cluster;\n"
            "@!%p7 mbarrier.init.shared::cta.b64 [%r20], 1;\n",
        ),
    ],
    ids=["no fence", "another fence", "other threads' fence", "fenced before"],
)
def test_a_relaxed_arrival_hands_over_nothing_else(old: str, new: str) -> None:
    assert old in HANDSHAKE
    body = HANDSHAKE.replace(old, new, 1).replace(MEET, RELAXED, 1)
    _, kinds, _ = kinds_of(program(body + MEET + STORE_R1 + "ret;", 1, SHARED), 1)
    assert "race-mbarrier" in kinds


@pytest.mark.parametrize(("meet", "is_ordered"), [(MEET, True), (RELAXED, False)])
def test_a_relaxed_arrival_orders_no_word(meet: str, is_ordered: bool) -> None:
    """One that a thread has stored in front of it, and the others of its CTA read behind it."""
    stored = HANDSHAKE.replace(MEET, "@!%p7 st.shared.u32 [%r9], %r21;\n" + meet, 1)
    read = stored.split("mapa")[0] + "ld.shared.u32 %r1, [%r9];\n" + STORE_R1 + "ret;"
    _, kinds, error = kinds_of(program(read, 1, SHARED), 1)
    assert kinds == (set() if is_ordered else {"race-raw"}), error


#: Each CTA loads half of the box for both; all read the whole.
MULTICAST = (
    """
mov.u32 %r9, s; add.u32 %r20, %r9, 4096; setp.ne.u32 %p7, %r60, 0;
mov.u32 %r21, %cluster_ctarank; shl.b32 %r22, %r21, 4; shl.b32 %r23, %r21, 11;
add.u32 %r23, %r23, %r9; mov.b16 %h1, 3;
@%p7 bra READY;
mbarrier.init.shared::cta.b64 [%r20], 1;
fence.mbarrier_init.release.cluster;
READY:
"""
    + MEET
    + """
@%p7 bra WAIT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 4096;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
    [%r23], [%rd11, {0, %r22}], [%r20], %h1;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r20], 0;
@!%p6 bra WAIT;
shl.b32 %r2, %r60, 6; add.u32 %r2, %r2, %r9; ld.shared.u32 %r1, [%r2];
"""
)


def multicast(old: str = "", new: str = "", **options: object) -> tuple[list[int], set[str], str]:
    tensor = aligned((32, 64))
    tensor[...] = np.arange(2048).reshape(32, 64)
    assert old in MULTICAST
    body = MULTICAST.replace(old, new, 1) + MEET + STORE_R1 + "ret;"
    text = map_program(body, 1, 1, SHARED + ".reg .b16 %h<4>;\n")
    maps = [map_of(tensor, (64, 16), 0)]
    return kinds_of(text, 1, maps=maps, more=[(tensor, False)], **options)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_box_for_both(seed: int | None) -> None:
    got, kinds, error = multicast(seed=seed)
    words = np.arange(2048, dtype=np.uint16).view(np.uint32)[::16].tolist()
    assert (got, kinds, error) == (words * 4, set(), "")


def test_a_cta_that_is_left_out() -> None:
    _, _, error = multicast("%h1, 3", "%h1, 1")
    assert "4096 bytes to come" in error
    _, _, error = multicast("%h1, 3", "%h1, 7")
    assert "CTA mask 0x7 in a cluster of 2" in error


def test_bytes_of_the_other_half_are_expected_too() -> None:
    _, kinds, _ = multicast("[%r20], 4096;", "[%r20], 2048;")
    assert "race-raw" in kinds


#: Thread 0 of each CTA sends four words to the peer and waits for those it is sent.
LETTER = (
    """
mov.u32 %r9, s; add.u32 %r20, %r9, 4096; setp.ne.u32 %p7, %r60, 0;
mov.u32 %r21, %cluster_ctarank; xor.b32 %r22, %r21, 1;
@!%p7 mbarrier.init.shared::cta.b64 [%r20], 1;
@!%p7 fence.mbarrier_init.release.cluster;
"""
    + MEET
    + """
mapa.shared::cluster.u32 %r23, %r20, %r22; mapa.shared::cluster.u32 %r24, %r9, %r22;
@!%p7 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 16;
add.u32 %r4, %r21, 70;
@!%p7 st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r24], {%r4, %r4, %r21, %r60},
    [%r23];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r20], 0;
@!%p6 bra WAIT;
ld.shared.v4.u32 {%r1, %r5, %r6, %r7}, [%r9];
"""
)


def letters(old: str = "", new: str = "", **options: object) -> tuple[list[int], set[str], str]:
    assert old in LETTER
    body = LETTER.replace(old, new, 1) + MEET + STORE_R1 + "ret;"
    return kinds_of(program(body, 1, SHARED), 1, **options)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_words_for_the_other_cta(seed: int | None) -> None:
    got, kinds, error = letters(seed=seed)
    assert (got, kinds, error) == (([71] * 64 + [70] * 64) * 2, set(), "")


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("WAIT: mbar", "bra END;\nWAIT: mbar", "race-raw"),
        ("_, [%r20], 16;", "_, [%r20], 32;", "deadlock"),
        ("[%r24], {", "[%r24+4], {", "bulk-alignment"),
    ],
)
def test_words_without_a_wait_or_too_few(old: str, new: str, kind: str) -> None:
    body = LETTER.replace(old, new, 1).replace("ld.shared", "END: ld.shared")
    _, kinds, error = kinds_of(program(body + MEET + STORE_R1 + "ret;", 1, SHARED), 1)
    assert kind in kinds or kind in error


#: All threads fill half of the memory; thread 0 of each CTA copies it to the peer's other half.
PARCEL = (
    """
mov.u32 %r9, s; add.u32 %r20, %r9, 4096; setp.ne.u32 %p7, %r60, 0;
mov.u32 %r21, %cluster_ctarank; xor.b32 %r22, %r21, 1;
shl.b32 %r2, %r60, 4; add.u32 %r2, %r2, %r9;
mad.lo.u32 %r4, %r21, 1000, %r60;
@!%p7 mbarrier.init.shared::cta.b64 [%r20], 1;
@!%p7 fence.mbarrier_init.release.cluster;
st.shared.v4.u32 [%r2], {%r21, %r60, %r21, %r4};
fence.proxy.async.shared::cta;
"""
    + MEET
    + """
add.u32 %r25, %r9, 2048;
mapa.shared::cluster.u32 %r23, %r20, %r22; mapa.shared::cluster.u32 %r24, %r25, %r22;
@!%p7 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 1024;
@!%p7 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r24], [%r9], 1024,
    [%r23];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r20], 0;
@!%p6 bra WAIT;
ld.shared.v4.u32 {%r5, %r6, %r7, %r1}, [%r2+2048];
"""
)
SENT = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r24], [%r9], 1024"


def parcels(old: str = "", new: str = "", end: str = MEET, **options: object) -> Any:
    assert old in PARCEL
    body = PARCEL.replace(old, new, 1) + end + STORE_R1 + "ret;"
    return kinds_of(program(body, 1, SHARED), 1, **options)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_copy_to_the_other_cta(seed: int | None) -> None:
    got, kinds, error = parcels(seed=seed)
    one, other = [1000 + i for i in range(64)], list(range(64))
    assert (got, kinds, error) == ((one + other) * 2, set(), "")


def test_a_copy_within_the_own_cta() -> None:
    got, kinds, error = parcels("xor.b32 %r22, %r21, 1;", "mov.u32 %r22, %r21;")
    one, other = [1000 + i for i in range(64)], list(range(64))
    assert (got, kinds, error) == ((other + one) * 2, set(), "")


#: Overwrites what the copy reads. If all CTAs meet before that, it is over.
OVERWRITES = "st.shared.u32 [%r2], %r60;\n"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        # The reader does not wait; expects too much; expects too little.
        ("WAIT: mbar", "bra END;\nWAIT: mbar", "race-raw"),
        ("_, [%r20], 1024;", "_, [%r20], 1040;", "deadlock"),
        ("_, [%r20], 1024;", "_, [%r20], 1008;", "mbarrier-bytes"),
        # Addresses and sizes that are no multiples of 16.
        ("[%r24], [%r9], 1024", "[%r24+8], [%r9], 1024", "bulk-alignment"),
        ("[%r24], [%r9], 1024", "[%r24], [%r9+8], 1024", "bulk-alignment"),
        ("[%r24], [%r9], 1024", "[%r24], [%r9], 1020", "bulk-alignment"),
        # The target's end, the source's end, the rank.
        ("[%r24], [%r9], 1024", "[%r24+1104], [%r9], 1024", "access of 16 bytes at shared address"),
        ("[%r24], [%r9], 1024", "[%r24], [%r9+3104], 1024", "access of 16 bytes at shared address"),
        ("%r24, %r25, %r22;", "%r24, %r25, %r21;", "different CTAs"),
        # The source was written without a proxy fence, or by threads that no barrier orders.
        ("fence.proxy.async.shared::cta;\n", "", "proxy-fence"),
        ("fence.proxy.async.shared::cta;\n" + MEET, MEET + OVERWRITES, "race-raw"),
        # It is overwritten while only the peer knows that the copy has read it.
        ("WAIT: mbar", OVERWRITES + "WAIT: mbar", "race-war"),
        ("ld.shared.v4", OVERWRITES + "ld.shared.v4", "race-war"),
        # The target is still in use when the copy is issued.
        ("WAIT: mbar", "ld.shared.u32 %r8, [%r2+2048];\nWAIT: mbar", "in-flight-read"),
        ("WAIT: mbar", "st.shared.u32 [%r2+2048], %r8;\nWAIT: mbar", "in-flight-write"),
    ],
)
def test_mistakes_with_copies_between_ctas(old: str, new: str, kind: str) -> None:
    changed = new.replace("WAIT: mbar", "WAIT: mbar")
    body = PARCEL.replace(old, changed, 1).replace("ld.shared.v4", "END: ld.shared.v4", 1)
    assert old in PARCEL
    _, kinds, error = kinds_of(program(body + MEET + STORE_R1 + "ret;", 1, SHARED), 1)
    assert kind in kinds or kind in error, (kinds, error)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_source_may_be_overwritten_when_the_peer_has_its_copy(seed: int | None) -> None:
    _, kinds, error = parcels(end=MEET + OVERWRITES, seed=seed)
    assert (kinds, error) == (set(), "")


def test_late_overwriting_changes_what_arrives() -> None:
    """The emulator reads the source as late as it may."""
    got, kinds, _ = parcels("WAIT: mbar", "st.shared.u32 [%r2+12], 77;\nWAIT: mbar")
    assert "race-war" in kinds
    assert set(got) == {77}


def test_the_sender_must_not_exit_before_the_copy() -> None:
    _, kinds, _ = parcels(end="")
    assert kinds == {"cluster-exit"}


def test_other_forms_of_the_copy_are_refused() -> None:
    for word in (".multicast::cluster", ".L2::cache_hint"):
        _, _, error = parcels(SENT, SENT.replace("::bytes", "::bytes" + word))
        assert "is not supported" in error
