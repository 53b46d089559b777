"""flashsmith.parallel over processes of gloo, in the emulator: against float64 references of the
whole sequences, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from exact_attention import exact_attention  # noqa: E402
from ranks import (  # noqa: E402
    CFG,
    CFG_OF_PAIR,
    IDLE,
    REPEATABLE,
    REPEATABLE_OF_PAIR,
    Case,
    run_ranks,
)

import flashsmith  # noqa: E402
from flashsmith.families import DType, Semantics  # noqa: E402
from flashsmith.parallel import allgather  # noqa: E402
from flashsmith.verify.attention_semantics import Attention, row_slices  # noqa: E402
from flashsmith.verify.gradient_tolerance import compare_gradients  # noqa: E402
from flashsmith.verify.gradients import Rows, compute_gradients  # noqa: E402
from flashsmith.verify.reference import compute_references  # noqa: E402
from flashsmith.verify.tolerance import compare  # noqa: E402

# v has another d than q and k, and both are less than the kernels' tiles.
CAUSAL_PAIR: dict[str, Any] = {"causal": True, "d": 56, "d_v": 104}
# No part of a sequence is a multiple of a tile, so that all need the same kernels.
PLAIN = {
    "zigzag causal": Case("zigzag", (80,), batch=2, causal=True, sinks=True, dlse=True),
    "zigzag": Case("zigzag", (40,), (72,), batch=1),
    "zigzag again": Case("zigzag", (80,), batch=2, causal=True, sinks=True, dlse=True),
    "allgather": Case("allgather", (37,), (51,), batch=1, causal=True, sinks=True),
    "prefixes": Case("allgather", (80,), batch=2, causal=True, sinks=True, dlse=True),
    "prefixes again": Case("allgather", (80,), batch=2, causal=True, sinks=True, dlse=True),
    "prefixes of one": Case("allgather", (72,), batch=1, causal=True),
    "prefixes copied": Case("allgather", (80,), batch=2, causal=True, sinks=True, dlse=True),
    "prefixes of one copied": Case("allgather", (72,), batch=1, causal=True),
    "prefixes kept": Case("allgather", (80,), batch=2, causal=True, sinks=True, dlse=True),
    "prefixes copied and kept": Case(
        "allgather", (80,), batch=2, causal=True, sinks=True, dlse=True
    ),
    "prefixes of one copied and kept": Case("allgather", (72,), batch=1, causal=True),
    "ulysses": Case("ulysses", (53,), batch=1, causal=True, sinks=True, dlse=True),
    "ulysses packed window": Case("ulysses", (23, 40, 0), (61, 77, 9), window=(7, 3), softcap=5.0),
    "auto": Case("auto", (41,), batch=1, causal=True),
    "packed": Case("zigzag", (24, 0, 52), causal=True, sinks=True),
    "packed window": Case("allgather", (23, 40, 0), (61, 77, 9), window=(7, 3), softcap=5.0),
    "zigzag of a pair": Case("zigzag", (80,), batch=2, sinks=True, dlse=True, **CAUSAL_PAIR),
    "allgather of a pair": Case("allgather", (37,), (51,), batch=1, sinks=True, **CAUSAL_PAIR),
    "prefixes of a pair": Case("allgather", (80,), batch=2, dlse=True, **CAUSAL_PAIR),
    "prefixes of a pair copied": Case("allgather", (80,), batch=2, dlse=True, **CAUSAL_PAIR),
    "prefixes of one of a pair": Case("allgather", (72,), batch=1, sinks=True, **CAUSAL_PAIR),
    "prefixes of one of a pair copied": Case(
        "allgather", (72,), batch=1, sinks=True, **CAUSAL_PAIR
    ),
    "ulysses of a pair": Case("ulysses", (53,), batch=1, sinks=True, dlse=True, **CAUSAL_PAIR),
    "auto of a pair": Case("auto", (41,), batch=1, **CAUSAL_PAIR),
}
SCRIPTS = (
    "who_holds_what",
    "without_gradients",
    "empty_shards",
    "nothing_to_compute",
    "agreed_before",
    "without_a_host_backend",
    "refused",
    "left_out",
    "transfers",
    "bench_transfers",
    "late",
    "death",
)
SEMANTICS = [
    Semantics(uneven=True),
    Semantics("causal", uneven=True),
    Semantics(packed=True, uneven=True),
    Semantics("causal", packed=True, uneven=True),
    Semantics("window", softcap=True, packed=True, uneven=True),
]
# Of the ring's parts, and of whole sequences.
FORWARD = [
    *(replace(semantics, partial=True) for semantics in SEMANTICS),
    SEMANTICS[1],
    SEMANTICS[4],
]
for _semantics in FORWARD:
    shared_kernels.want([CFG], _semantics)
for _semantics in SEMANTICS:
    shared_kernels.want([REPEATABLE], _semantics)
OF_PAIR = [
    *((CFG_OF_PAIR, replace(semantics, partial=True)) for semantics in SEMANTICS[:2]),
    (CFG_OF_PAIR, SEMANTICS[1]),
    *((REPEATABLE_OF_PAIR, semantics) for semantics in SEMANTICS[:2]),
]
for _config, _semantics in OF_PAIR:
    shared_kernels.want([_config], _semantics)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both of two ranks found; the kernels are built before, so that no rank waits for it."""
    for semantics in FORWARD:
        shared_kernels.load([CFG], semantics)
    for semantics in SEMANTICS:
        shared_kernels.load([REPEATABLE], semantics)
    for config, semantics in OF_PAIR:
        shared_kernels.load([config], semantics)
    for shape in ((1, 1, 1, 64), (1, 1, 64)):
        part = torch.zeros(shape), torch.zeros(shape[:-1])
        flashsmith.merge_attention([part[0]], [part[1]], dtype="float16")
    return run_ranks(2, tmp_path_factory.mktemp("pair"), PLAIN, SCRIPTS)


DENSE = [name for name, case in PLAIN.items() if case.batch and "copied" not in name]


@pytest.mark.parametrize("name", DENSE)
def test_the_problems_of_ranks_are_known_ahead(
    name: str, pair: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly those that some rank computes, forward and backward; merges have no others."""
    case = PLAIN[name]
    mask = "causal" if case.causal else ""
    sizes = f"s{case.lens_q[0]}:{case.keys[0]} h{case.heads_q}:{case.heads_k} d{case.d}:{case.d_v}"
    monkeypatch.setattr(allgather, "SMALLEST_MESSAGE", 1)
    ahead = flashsmith.parallel.problems(
        f"b{case.batch} {sizes} fp16 {mask}",
        ranks=2,
        schedule=case.schedule,
        gradients=True,
        sinks=case.sinks,
    )
    computed = {text for rank in pair for text in rank[f"problems of {name}"]}
    assert computed
    assert {str(one) for one in ahead if one.operation != "merge"} == computed
    merges = [one for one in ahead if one.operation == "merge"]
    assert bool(merges) is (case.schedule == "zigzag")


def found_by(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    for it in found:
        assert not isinstance(it, str), it
    return found


def check(case: Case, results: dict[str, Any]) -> None:
    """By the rules of proofs, forward and backward."""
    whole = {name: tensor.numpy() for name, tensor in case.draw().items()}
    got = {name: tensor.numpy() for name, tensor in results.items()}
    scale = case.d**-0.5
    lens_q, lens_k = (None, None) if case.batch else (case.lens_q, case.keys)
    references = compute_references(
        *(whole[name] for name in "qkv"),
        scale,
        sinks=whole.get("sinks"),
        lens_q=lens_q,
        lens_k=lens_k,
        **case.semantics,
    )
    forward = compare(
        DType.FP16, got["o"], got["lse"], references, row_max=got.get("row_max"), lens_q=lens_q
    )
    assert forward.ok, forward.reasons
    attention = Attention(scale, case.causal, case.window, case.softcap, lens_q, lens_k)
    if case.batch:
        places = [
            Rows(b, slice(0, case.lens_q[0]), slice(0, case.keys[0])) for b in range(case.batch)
        ]
    else:
        slices = zip(row_slices(case.lens_q), row_slices(case.keys), strict=True)
        places = [Rows(None, q, k) for q, k in slices]
    inputs = {**whole, "o": got["o"], "lse": got["lse"]}
    expected = compute_gradients(inputs, attention, places, references.o, references.lse)
    backward = compare_gradients(DType.FP16, got, expected)
    assert backward.ok, backward.reasons


@pytest.mark.parametrize("name", PLAIN)
def test_two_ranks(pair: list[dict[str, Any]], name: str) -> None:
    found = found_by(pair, name)
    check(PLAIN[name], found[0])
    for key, tensor in found[0].items():
        torch.testing.assert_close(found[1][key], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "name",
    [
        *("zigzag causal", "zigzag", "allgather", "prefixes", "ulysses"),
        *("zigzag of a pair", "allgather of a pair", "prefixes of a pair", "ulysses of a pair"),
    ],
)
def test_the_error_is_that_of_one_kernel(pair: list[dict[str, Any]], name: str) -> None:
    case = PLAIN[name]
    whole = case.draw()
    sinks = whole.get("sinks")
    results = []
    for attend, keywords, dtype in (
        (flashsmith.attention, {"return_lse": True, **case.kernels}, torch.float16),
        (exact_attention, {}, torch.float64),
    ):
        leaves = [whole[it].to(dtype, copy=True).requires_grad_() for it in "qkv"]
        o, lse = attend(*leaves, sinks=sinks, **keywords, **case.semantics)
        loss = (o * whole["do"]).double().sum()
        if case.dlse:
            loss = loss + (lse * whole["dlse"]).sum()
        loss.backward()
        results.append([o.detach(), *(leaf.grad for leaf in leaves)])
    found = [found_by(pair, name)[0][it] for it in ("o", "dq", "dk", "dv")]
    for ours, single, right in zip(found, *results, strict=True):
        assert (ours - right).abs().max() <= 1.1 * (single - right).abs().max()
        assert (ours - right).norm() <= 1.1 * (single - right).norm()


@pytest.mark.parametrize(
    ("name", "repeated"),
    [
        ("zigzag causal", "zigzag again"),
        ("prefixes", "prefixes again"),
        ("prefixes", "prefixes copied"),
        ("prefixes of one", "prefixes of one copied"),
        ("prefixes", "prefixes kept"),
        ("prefixes", "prefixes copied and kept"),
        ("prefixes of one", "prefixes of one copied and kept"),
        ("prefixes of a pair", "prefixes of a pair copied"),
        ("prefixes of one of a pair", "prefixes of one of a pair copied"),
    ],
)
def test_a_call_repeats_its_bits(pair: list[dict[str, Any]], name: str, repeated: str) -> None:
    (first, _), (again, _) = (found_by(pair, it) for it in (name, repeated))
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_shards_and_positions(pair: list[dict[str, Any]]) -> None:
    zero, one = found_by(pair, "who_holds_what")
    assert zero["rows"].tolist() == [0, 1, 6, 7, 8, 9, 16, 17, 18]
    assert one["rows"].tolist() == [2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert zero["positions"].tolist() == [0, 1, 6, 7, 0, 1, 8, 9, 10]
    assert one["of one"].tolist() == [2, 3, 4, 5, 6, 7]
    for rank in (zero, one):
        assert rank["whole"].tolist() == list(range(19))
        assert rank["dense"].flatten().tolist() == list(range(22))
        assert rank["empty"] == (2, 0, 3)
    assert torch.equal(zero["gradient"] + one["gradient"], torch.ones(1, 11, 2))


def test_groups_outputs_and_the_compiler(pair: list[dict[str, Any]]) -> None:
    for rank in found_by(pair, "without_gradients"):
        assert torch.equal(rank["o"], rank["out"])
        assert torch.equal(2 * rank["o"], rank["compiled"])
        assert "Unsupported" in rank["whole graph"]
        case = Case("zigzag", (80,), batch=1, causal=True)
        q, k, v = (case.draw()[name] for name in "qkv")
        assert torch.equal(flashsmith.attention(q, k, v, causal=True, config=CFG), rank["alone"])


def test_ranks_without_rows(pair: list[dict[str, Any]]) -> None:
    do = Case("allgather", (1,), batch=1).draw()["do"].view(1, 1, 2, 2, 64).float().sum(3).half()
    for rank in found_by(pair, "empty_shards"):
        assert rank.pop("none").shape == (2, 0, 2, 64)
        for dv in rank.values():
            torch.testing.assert_close(dv, do)


def test_ranks_that_compute_nothing_send_what_the_others_wait_for(
    pair: list[dict[str, Any]],
) -> None:
    check(IDLE, found_by(pair, "nothing_to_compute")[0])


def test_ranks_agree_over_the_host(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        said, backend, timeout, wrong = rank["without_a_host_backend"]
        assert said == [[{"rank": 0}, {"rank": 1}]] * 2
        assert backend == "gloo"
        assert timeout == "0:00:33"
        assert wrong.startswith("ArgumentError: group: its backend is gloo, and q is on cpu; make")


REFUSED = {
    "unequal shards": "q: rank 0 of the group holds 16 rows, and its shard of 33 over",
    "unequal allgather": "q: rank 0 of the group holds 16 rows",
    "zigzag": "schedule='zigzag': q's sequence has 34 rows; must be a multiple of 4",
    "zigzag packed": "schedule='zigzag': sequence 1 of q has 39 rows",
    "ulysses": "schedule='ulysses': k has 3 heads, which 2 ranks do not divide",
    "long text": "schedule='",
    "row_max": "return_row_max: given with schedule='zigzag'",
    "device": "q: on meta; give tensors on a GPU, or on the host",
    "schedule": "schedule='ring': allowed are 'auto', 'zigzag', 'allgather', 'ulysses'",
    "one schedule": "schedule: rank 1 of the group gave 'ulysses', and rank 0 'zigzag'",
    "one dtype": "dtype: rank 1 of the group gave 'torch.bfloat16', and rank 0 'torch.float16'",
    "gradients": "requires_grad: rank 1 of the group gave (True, True, True, False), and rank 0",
    "heads": "q: has 5 heads, and k 2",
    "d": "q: d is 60",
    "d_v": "v: d is 60; must be q's, 64, or a multiple of 8 up to 256",
    "rows of v": "v: has shape (1, 15, 2, 64), and k (1, 16, 2, 64); must be equal, except for",
    "one d_v": "d_v: rank 1 of the group gave 128, and rank 0 72",
    "sinks": "sinks: has shape (3,)",
    "max_seqlen": "max_seqlen_q=39: the longest sequence has 40 rows",
    "strided": "k: has shape (1, 4, 4, 64), and q (1, 64, 4, 4)",
    "unshard": "tensor: rank 0 of the group holds 3 rows, and its shard of 8",
    "no group": "group='world': give a ProcessGroup",
    "two dimensions": "group: a DeviceMesh of 2 dimensions",
    "rows": "dim=1: the tensor has shape (4,)",
    "length": "length=-1: give how many rows",
    "whole": "tensor: has 4 rows, and cu_seqlens describes 79",
    "falling": "cu_seqlens: must begin with 0 and not decrease; got [0, 3, 1]",
}
# Refused by rank 1 itself; rank 0 hears of it.
ONE_REFUSES = {
    "one is no tensor": "q: got int; parallel.attention() takes PyTorch's tensors",
    "one window": "window=(-1, None)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_all_ranks_refuse(pair: list[dict[str, Any]], name: str) -> None:
    for rank in found_by(pair, "refused"):
        assert rank[name].startswith(f"ArgumentError: {REFUSED[name]}")


@pytest.mark.parametrize("name", ONE_REFUSES)
def test_what_one_rank_refuses(pair: list[dict[str, Any]], name: str) -> None:
    zero, one = found_by(pair, "refused")
    text = ONE_REFUSES[name]
    assert one[name].startswith(f"ArgumentError: {text}")
    assert zero[name].startswith(f"ArgumentError: rank 1 of the group refused its call: {text}")


def test_other_calls_than_the_others(pair: list[dict[str, Any]]) -> None:
    for rank in found_by(pair, "refused"):
        assert "rank 1 of the group gave" in rank["other functions"]


def test_a_call_like_one_before_is_agreed_on_in_a_word(pair: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(found_by(pair, "agreed_before")):
        assert found["other"].startswith("ArgumentError: schedule: rank 1 of the group gave")
        whose = "" if rank == 1 else "rank 1 of the group refused its call: "
        assert found["refused"].startswith(f"ArgumentError: {whose}softcap=-1.0")
        first, *others = found["outputs"]
        assert all(torch.equal(first, other) for other in others)
        assert found["exchanges"] == []


def test_transfers_are_counted_alike_by_every_schedule(pair: list[dict[str, Any]]) -> None:
    zero, one = found_by(pair, "transfers")
    assert zero == one
    for schedule in ("zigzag", "allgather", "ulysses"):
        assert zero[f"{schedule} both"] > zero[f"{schedule} forward"] > 0


def test_the_benchmark_says_whether_ranks_share_memory_and_compares_messages(
    pair: list[dict[str, Any]],
) -> None:
    for without, shared in found_by(pair, "bench_transfers"):
        assert without == {"what": "transfers", "shared": False, "bytes": 256}
        assert (shared["shared"], shared["wrong"], shared["of"]) == (True, 0, 5)
        assert shared["ok"]
        assert shared["us"] >= shared["host_us"] > 0


def test_a_backward_pass_that_one_rank_runs_alone_is_told_at_the_next_call(
    pair: list[dict[str, Any]],
) -> None:
    for (text,) in found_by(pair, "left_out"):
        assert text.startswith("GroupError: group: rank 1 has made 5 transfers, and rank 0 2,")


@pytest.mark.parametrize(("script", "seconds"), [("late", 10), ("death", 20)])
def test_nobody_waits_for_a_lost_rank(
    pair: list[dict[str, Any]], script: str, seconds: float
) -> None:
    text, waited = found_by(pair, script)[0]
    assert text.startswith("GroupError: group: rank 0 of 2 lost the others")
    assert waited < seconds


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (19, 5)},
    "left": {"window": (11, 0), "softcap": 3.0},
}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(ranks: int, tmp_path: Path) -> None:
    even, heads = 2 * ranks * 9, {"heads_q": 2 * ranks, "heads_k": ranks}
    cases = {}
    for mask, options in MASKS.items():
        for schedule in ("zigzag", "allgather", "ulysses"):
            some = {**options, **heads, "sinks": mask != "full", "dlse": mask == "causal"}
            longer = even if schedule == "zigzag" else even + 5
            cases[f"{schedule} {mask}"] = Case(schedule, (longer,), batch=1, **some)
            cases[f"{schedule} {mask} packed"] = Case(
                schedule, (2 * ranks, longer, 0), (6 * ranks, even, 4 * ranks), **some
            )
    for batch in (1, 2):
        for name in ("prefixes", "prefixes copied", "prefixes copied and kept"):
            some = {"batch": batch, "sinks": True, "dlse": True, **heads}
            cases[f"{name} {batch}"] = Case("allgather", (even,), causal=True, **some)
            cases[f"{name} {batch} of a pair"] = Case("allgather", (even,), **some, **CAUSAL_PAIR)
    found = run_ranks(ranks, tmp_path, cases)
    for name, case in cases.items():
        results = found_by(found, name)
        check(case, results[0])
        for other in results[1:]:
            assert all(np.array_equal(results[0][key], other[key]) for key in other), name
