"""The kernels of the mma_sync_decode family in the emulator: right rows, the same bits of a
sequence in any batch and in any pages, and an append that writes nothing else.

``-m full`` proves a cover of all pairs of what a call may be, and of all knobs."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import shared_kernels
from grids.decode_grid import DecodeCase, covering_decode_cases
from guessed_lengths import WRONG_BY_WARPS, WRONG_IN_WARP_0, asked_by_loads, guessing
from plain_run import full_after

from flashsmith.errors import EmulatorError
from flashsmith.families import (
    DeviceSpec,
    FlashDecodeKernelConfig,
    Problem,
    Semantics,
    device_spec,
    family_named,
    parse_kernel_name_into_config,
)
from flashsmith.families.covering_array import cover
from flashsmith.runtime import OperationResult, emulation, run_operation
from flashsmith.runtime.emulation import run_in_emulator
from flashsmith.runtime.launch_plan import LaunchPlan
from flashsmith.runtime.operation_run import prepare_operation
from flashsmith.runtime.prepared_call import PreparedCall
from flashsmith.verify import prove
from flashsmith.verify.decode_reference import DecodeReference, rotated
from ptxlab.checks import BankConflicts, all_checks
from ptxlab.interface import EmulationResult, MemoryAccess, Observer

FAMILY = family_named("mma_sync_decode")


def config(text: str) -> FlashDecodeKernelConfig:
    found = parse_kernel_name_into_config(text)
    assert isinstance(found, FlashDecodeKernelConfig)
    return found


SMALL = config("(FP16, 64, 16, 64, 4): decode+stages_2+least_64+parts_2")
SEVERAL_RUNS = replace(SMALL, rounds=4)
EIGHT_PARTS = replace(SMALL, parts_per_sm=8)
EARLY = replace(SMALL, early=True)
CLUSTERS = replace(SMALL, cluster=8)
# Of a tile of 16 rows a thread has two places; of the others four, and three of each of 32 rows'
# halves, with kernels for clusters.
FULL = replace(SMALL, full_tiles=True)
OTHER_FULL = (
    "(BF16, 128, 16, 64, 4): decode+stages_2+least_64+parts_2+cluster_8+full",
    "(BF16, 96, 32, 64, 4): decode+stages_3+least_64+parts_4+cluster_8+full",
    "(FP16, 256, 16, 32, 2): decode+stages_2+least_64+parts_2+full",
)
# Warps with rows of their own: a thread keeps all that it has of a first subtree in registers, and
# of the others some, or nothing.
OWN = config("(FP16, 64, 32, 32, 2): decode+stages_3+least_64+parts_2+own_rows")
OTHER_OWN = (
    "(BF16, 128, 32, 32, 2): decode+stages_3+least_64+parts_2+cluster_8+own_rows",
    "(FP16, 128, 32, 64, 2): decode+stages_2+least_64+parts_2+own_rows",
    "(BF16, 96, 32, 64, 2): decode+stages_3+least_64+parts_4+cluster_8+own_rows",
)
# Beside it 32 rows, panels of 32 columns, and warps that take 32 keys.
WIDE = config("(BF16, 96, 32, 64, 2): decode+stages_3+least_128+parts_4")
# Head dimensions of other panels, with every column of the tile and with fewer.
LARGE = config("(BF16, 128, 16, 64, 4): decode+stages_2+least_128+parts_2")
LARGEST = config("(FP16, 256, 16, 32, 2): decode+stages_2+least_64+parts_2")
# Beside SMALL's kernels one for sequences with more than 32 rows of a K/V head.
CHUNKS = replace(SMALL, chunk_rows=64)
PLAIN, CAUSAL = Semantics(), Semantics("causal")
WINDOW = Semantics("window", softcap=True, packed=True, uneven=True)
for semantics in (PLAIN, WINDOW):
    shared_kernels.want([SMALL, OWN], semantics)
shared_kernels.want([SEVERAL_RUNS], PLAIN)
shared_kernels.want([replace(OWN, rounds=4)], WINDOW)
shared_kernels.want([EIGHT_PARTS])
shared_kernels.want([FULL])
shared_kernels.want([WIDE], CAUSAL)
CAPPED = Semantics("causal", softcap=True, uneven=True)
shared_kernels.want([LARGE], CAPPED)
shared_kernels.want([LARGEST])
shared_kernels.want([SEVERAL_RUNS, EARLY], arch=90)
for semantics in (PLAIN, WINDOW):
    shared_kernels.want([SMALL, CLUSTERS], semantics, arch=90)
shared_kernels.want([CHUNKS], WINDOW)

# Room for so many keys that a sequence may be split among CTAs where there are tiles for all SMs.
SPLIT = 2049
# Two K/V heads split a long sequence into eight parts at most.
EIGHT_SMS = replace(device_spec("A100"), sm_count=8)
HEADS_K, GROUP = 2, 3


@dataclass(frozen=True)
class Cached:
    """Keys and values of a sequence, and its queries."""

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray


def draw(lengths: Sequence[int], queries: Sequence[int], d: int = 64) -> list[Cached]:
    rng = np.random.default_rng(0)

    def normal(rows: int, heads: int) -> np.ndarray:
        return rng.standard_normal((rows, heads, d), dtype=np.float32).astype(np.float16)

    return [
        Cached(normal(keys, HEADS_K), normal(keys, HEADS_K), normal(rows, HEADS_K * GROUP))
        for keys, rows in zip(lengths, queries, strict=True)
    ]


def dense(sequences: Sequence[Cached], capacity: int) -> dict[str, np.ndarray]:
    """Caches amid NaN."""
    found = {}
    for name in "kv":
        cache = np.full((len(sequences), capacity, *sequences[0].k.shape[1:]), np.nan, np.float16)
        for i, one in enumerate(sequences):
            cache[i, : len(one.k)] = getattr(one, name)
        found[f"{name}_cache"] = cache
    return found


def paged(sequences: Sequence[Cached], page: int, more: int = 0) -> dict[str, np.ndarray]:
    """The same in pages of a random order, with NaN in what no sequence uses."""
    rng = np.random.default_rng(page)
    counts = [-(-len(one.k) // page) for one in sequences]
    blocks = sum(counts) + 3
    table = np.full((len(sequences), max(counts) + more), -1, np.int32)
    order = iter(rng.permutation(blocks).tolist())
    shape = (blocks, page, *sequences[0].k.shape[1:])
    found = {f"{name}_cache": np.full(shape, np.nan, np.float16) for name in "kv"}
    for i, one in enumerate(sequences):
        for entry in range(counts[i]):
            table[i, entry] = block = next(order)
            for name in "kv":
                rows = getattr(one, name)[entry * page : (entry + 1) * page]
                found[f"{name}_cache"][block, : len(rows)] = rows
    return {**found, "page_table": table}


def attend(
    sequences: Sequence[Cached],
    caches: dict[str, np.ndarray],
    *,
    packed: bool = False,
    cfg: FlashDecodeKernelConfig = SMALL,
    counts: Counter[str] | None = None,
    **how: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """o and LSE of every query, rows of sequences one after another; the instructions of all
    launches are added to ``counts``."""
    slots = caches["k_cache"].shape[1]
    queries = [len(one.q) for one in sequences]
    text = f"b{len(sequences)} s{max(queries)}:{max(1, max(len(one.k) for one in sequences))}"
    text += f" h{HEADS_K * GROUP}:{HEADS_K} d64 fp16 decode"
    q = np.concatenate([one.q for one in sequences])
    tensors = dict(caches)
    options: dict[str, Any] = {}
    if packed:
        text += " window softcap packed"
        tensors["cu_seqlens_q"] = np.cumsum([0, *queries], dtype=np.int32)
        options = {"left": 200, "right": 0, "softcap": 20.0}
    else:
        q = q.reshape(len(sequences), -1, *q.shape[1:])
    problem = Problem.parse(text + f" page{slots}" * ("page_table" in caches))
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    lengths = np.array([len(one.k) for one in sequences], np.int32)
    how = {"arch": EIGHT_SMS, "emulate": True, "poisoned": True} | how
    found = run_operation(
        *(cfg, problem, {**tensors, "q": q, "cache_lens": lengths}),
        options={**options, **how.pop("options", {})},
        wanted=["lse"],
        **how,
    )
    if counts is not None:
        assert found.emulation is not None
        counts.update(found.emulation.instructions)
    o, lse = found.outputs["o"], found.outputs["lse"]
    if not packed:
        lse = np.moveaxis(lse, 1, 0)
    return o.reshape(-1, *o.shape[-2:]), lse.reshape(lse.shape[0], -1)


def assert_same(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert not np.isnan(one).any()
        np.testing.assert_array_equal(one, other)


LENGTHS = (700, 0, 1, 65, 320, 64)
BRIEF = (130, 0, 65)


@pytest.mark.parametrize("cfg", [SMALL, OWN], ids=["keys", "rows"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_sequence_has_the_same_bits_in_any_batch(
    packed: bool, cfg: FlashDecodeKernelConfig
) -> None:
    """Alone, beside others, in another order, and whatever fits into the cache besides."""
    queries = (2, 1, 5, 1, 9, 3) if packed else (1,) * len(LENGTHS)
    sequences = draw(LENGTHS, queries)
    o, lse = attend(sequences, dense(sequences, 701), packed=packed, cfg=cfg)
    first = 0
    for i, one in enumerate(sequences):
        rows = slice(first, first + queries[i])
        first = rows.stop
        capacity = max(1, len(one.k)) + (i % 3) * 500
        alone = attend([one], dense([one], capacity), packed=packed, cfg=cfg)
        assert_same(alone, (o[rows], lse[:, rows]))
    turned = sequences[::-1]
    again_o, again_lse = attend(turned, dense(turned, 900), packed=packed, cfg=cfg)
    first = 0
    for one in sequences:
        last = len(again_o) - first
        rows, theirs = slice(first, first + len(one.q)), slice(last - len(one.q), last)
        assert_same((again_o[theirs], again_lse[:, theirs]), (o[rows], lse[:, rows]))
        first = rows.stop
    assert np.isneginf(lse[:, queries[0] : queries[0] + queries[1]]).all()
    assert not o[queries[0] : queries[0] + queries[1]].any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("page", "cfg"),
    [*((page, SMALL) for page in (1, 8, 16, 24, 256)), (1, OWN), (24, OWN)],
    ids=lambda value: ("rows" if value.own_rows else "keys") if value in (SMALL, OWN) else None,
)
def test_pages_leave_every_bit(page: int, packed: bool, cfg: FlashDecodeKernelConfig) -> None:
    queries = (2, 1, 5, 1, 9, 3) if packed else (1,) * len(LENGTHS)
    sequences = draw(LENGTHS, queries)
    expected = attend(sequences, dense(sequences, 700), packed=packed, cfg=cfg)
    found = attend(sequences, paged(sequences, page, more=2), packed=packed, cfg=cfg)
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("packed", "small"),
    [
        pytest.param(False, SMALL, id="keys"),
        pytest.param(True, OWN, id="packed rows"),
        pytest.param(False, OWN, id="rows", marks=pytest.mark.full),
        pytest.param(True, SMALL, id="packed keys", marks=pytest.mark.full),
    ],
)
def test_runs_of_any_length_leave_every_bit(packed: bool, small: FlashDecodeKernelConfig) -> None:
    """A CTA merges runs of one, two and all parts of a sequence, as its share of a batch is; with
    many rows some states in between are in global memory."""
    lengths = (700, 0, 65, 330)
    queries = (2, 1, 4, 5) if packed else (1,) * len(lengths)
    sequences = draw(lengths, queries)
    how = {"packed": packed, "cfg": small}
    expected = [attend([one], dense([one], max(1, len(one.k))), **how) for one in sequences]
    stored = []
    several = replace(small, rounds=4)
    for cfg, order in ((several, [0, 1, 2, 3] * 4), (small, [0, 1, 1, 2] * 4), (small, [0] * 16)):
        many, counts = [sequences[i] for i in order], Counter[str]()
        o, lse = attend(many, dense(many, SPLIT), packed=packed, cfg=cfg, counts=counts)
        stored.append(counts["st.global.v4.u32"])
        first = 0
        for i in order:
            one_o, one_lse = expected[i]
            rows = slice(first, first + len(one_o))
            first = rows.stop
            assert_same((o[rows], lse[:, rows]), (one_o, one_lse))
    assert stored[0] > stored[1] > stored[2]


def test_parts_end_where_they_do_in_runs_of_their_own() -> None:
    """A step late, say: the numbers are right, and bits alone show it."""
    (one,) = draw((700,), (1,))
    alone_o, alone_lse = attend([one], dense([one], 700))
    many = 24
    o, lse = attend([one] * many, dense([one] * many, 700))
    assert_same((o, lse), (np.tile(alone_o, (many, 1, 1)), np.tile(alone_lse, (1, many))))


@pytest.mark.full
def test_a_warp_merges_as_many_runs_as_fill_its_tree() -> None:
    """528 parts, each a run: two warps have 256 of them."""
    cfg, keys = replace(SMALL, stages=3, parts_per_sm=4), 33780
    problem = Problem.parse(f"b1 s1:{keys} h1 d64 fp16 decode")
    shared_kernels.load([cfg], problem.required_semantics(cfg), arch=90)
    q, k = np.zeros((1, 1, 1, 64), np.float16), np.zeros((1, keys, 1, 64), np.float16)
    v = np.linspace(-1, 3, keys, dtype=np.float32).astype(np.float16)[None, :, None, None]
    tensors = {"q": q, "k_cache": k, "v_cache": np.repeat(v, 64, -1)}
    found = run_operation(
        *(cfg, problem, {**tensors, "cache_lens": np.array([keys], np.int32)}),
        wanted=["lse"],
        arch=device_spec("H200"),
        emulate=True,
        poisoned=True,
    )
    np.testing.assert_allclose(found.outputs["o"].astype(np.float64), 1.0, atol=2e-3)
    np.testing.assert_allclose(found.outputs["lse"], np.log(keys), atol=1e-4)


@pytest.mark.parametrize(
    ("times", "capacity", "grids"),
    full_after(
        2,
        [
            *((1, SPLIT - 1, [12]), (1, SPLIT, [32, 9]), (1, 700, [12])),
            *((6, 700, [32]), (6, SPLIT, [32, 8])),
        ],
    ),
)
def test_sequences_of_small_caches_are_one_run_each(
    times: int, capacity: int, grids: list[int]
) -> None:
    """Where there are tiles for most SMs, and room for 512 KiB in a K/V head: nothing is stored or
    merged, whatever the lengths, and there is no launch for it. Bits are those of a larger cache,
    and of a sequence alone."""
    lengths = (700, 0, 65, 330, 1, 64)
    sequences = draw(lengths, (1,) * len(lengths))
    expected = [attend([one], dense([one], max(1, len(one.k)))) for one in sequences]
    many = sequences * times
    made, plan = planned(many, dense(many, capacity))
    assert [launch.grid[0] for launch in plan.launches] == grids
    found = made.run(all_checks(), schedule_seed=times).emulation
    assert found is not None
    assert not found.findings
    stores = found.instructions.get("st.global.v4.u32", 0)
    assert (stores == 0) == (capacity < SPLIT)
    # Of the lengths one a CTA. Others are of first keys, before their number is known.
    asked = found.instructions["prefetch.global.L2"]
    assert (asked > grids[0]) == (capacity < SPLIT)
    for i, rows in enumerate(made.outputs["o"]):
        np.testing.assert_array_equal(rows, expected[i % len(lengths)][0])


# Of a d_head and stages whose small caches are one run each, and whose calls hold the next one.
WHOLE = config("(FP16, 128, 16, 64, 4): decode+stages_3+least_64+parts_2")


@pytest.mark.parametrize(
    ("cfg", "batch", "capacity", "held"),
    full_after(
        2,
        [
            *((WHOLE, 5, 500, 1), (WHOLE, 7, 500, 0), (WHOLE, 4, 500, 0), (WHOLE, 6, 500, 1)),
            *((WHOLE, 5, 190, 0), (WHOLE, 5, 1100, 0), (SMALL, 5, 700, 0)),
        ],
    ),
)
def test_whole_sequences_of_few_ctas_beyond_one_an_sm_hold_the_next_launch(
    cfg: FlashDecodeKernelConfig, batch: int, capacity: int, held: int
) -> None:
    """Up to half as many more, above d 64: CTAs of the next launch that came early would share SMs
    that a CTA of this one reads for alone. Where others begin early, every CTA lets them."""
    device = replace(device_spec("H200"), sm_count=8)
    allows = "griddepcontrol.launch_dependents"
    sequences = draw((70, 1) * 4, (1,) * 8, cfg.d_head)[:batch]
    made, plan = planned(sequences, dense(sequences, capacity), cfg, device)
    assert flags(plan) & HOLDS == HOLDS * held
    found = made.run(all_checks()).emulation
    assert found is not None
    assert not found.findings
    assert (allows in found.instructions) != bool(held)
    for one, rows in zip(sequences, made.outputs["o"], strict=True):
        np.testing.assert_allclose(rows[0], exact_rows(one), atol=2e-3)


def exact_rows(one: Cached) -> np.ndarray:
    """o of a sequence with one query, (heads, d), in float64."""
    k, v = (np.repeat(x.astype(np.float64), GROUP, axis=1) for x in (one.k, one.v))
    scores = np.einsum("hd,khd->hk", one.q[0].astype(np.float64), k) / np.sqrt(k.shape[-1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hk,khd->hd", weights / weights.sum(axis=1, keepdims=True), v)


HOLDS = 2  # kHoldsNextLaunch (config.cuh)


def flags(plan: LaunchPlan) -> int:
    """DecodeKernelArgs::flags of a plan's first launch."""
    return struct.unpack_from("h", bytes(plan.launches[0].argument_bytes), 164)[0]


def test_few_sequences_are_split_whatever_the_room() -> None:
    """Fewer tiles than five eighths of the SMs, and packed sequences, whose tiles the host does not
    know."""
    for batch, device, launches in ((2, EIGHT_SMS, 2), (3, EIGHT_SMS, 1)):
        sequences = draw((330,) * batch, (1,) * batch)
        _, plan = planned(sequences, dense(sequences, 700), device=device)
        assert len(plan.launches) == launches, batch


# Of eight SMs, which take 32 CTAs at once: twice as many tiles. A few sequences are several runs,
# of 3 queries 9 rows each of a K/V head, and the merge has eight CTAs.
MANY = 29


def planned(
    sequences: Sequence[Cached],
    caches: Mapping[str, np.ndarray],
    cfg: FlashDecodeKernelConfig = SMALL,
    device: DeviceSpec = EIGHT_SMS,
) -> tuple[PreparedCall, LaunchPlan]:
    """A call that can be run again, and its plan."""
    slots, d = caches["k_cache"].shape[1], sequences[0].q.shape[-1]
    pages = caches["page_table"].shape[1] if "page_table" in caches else 1
    sizes = f"b{len(sequences)} s{len(sequences[0].q)}:{pages * slots}"
    sizes += f" h{HEADS_K * GROUP}:{HEADS_K} d{d} {cfg.dtype.name.lower()} decode"
    problem = Problem.parse(sizes + f" page{slots}" * ("page_table" in caches))
    shared_kernels.load([cfg], problem.required_semantics(cfg), arch=device.arch)
    lengths = np.array([len(one.k) for one in sequences], np.int32)
    tensors = {**caches, "q": np.stack([one.q for one in sequences]), "cache_lens": lengths}
    made = prepare_operation(cfg, problem, tensors, emulate=True, poisoned=True, arch=device)
    assert made.kernel is not None
    return made, made.kernel.plan(made.call)


@pytest.mark.full
@pytest.mark.parametrize("schedule", [None, 1])
def test_few_ctas_look_for_rows_to_merge(schedule: int | None) -> None:
    """Where sequences of one length would be one run each; in calls of one plan with other lengths
    there are other rows to merge, more than CTAs, fewer, and none."""
    long = draw((1100, 900), (3, 3))
    sequences = [*long, *draw((64, 0, 130), (3, 3, 3)) * (MANY // 3)]
    expected = [attend([one], dense([one], max(1, len(one.k)))) for one in sequences[:5]]
    made, plan = planned(sequences, dense(sequences, SPLIT))
    assert [launch.grid[0] for launch in plan.launches] == [32, 8]
    lengths, o = made.views["cache_lens"].source, made.outputs["o"]
    every = lengths.copy()
    stored = []
    for cut in ((), (0,), (0, 1), range(len(every))):
        lengths[:] = every
        lengths[list(cut)] = 0
        o.fill(np.nan)
        found = made.run(all_checks(), schedule_seed=schedule).emulation
        assert found is not None
        assert not found.findings
        stored.append(found.instructions.get("st.global.v4.u32", 0))
        for i, rows in enumerate(o):
            of = i if i < 2 else 2 + (i - 2) % 3
            np.testing.assert_array_equal(rows, 0 if i in cut else expected[of][0])
    # States are stored by runs alone; once a CTA's share is short, by those of shorter sequences.
    assert [count > 0 for count in stored] == [True, True, True, False]


def test_a_merge_has_a_cta_for_each_of_few_rows() -> None:
    """Up to two rows an SM. Of more, four CTAs an SM at most look for rows, a warp for each; and
    one an SM where every sequence of equal length is one run, whatever the power of two of its
    parts."""
    grids = {}
    for batch in (1, 2, 3, 14, 28, 29, 100):
        sequences = draw((64,), (1,)) * batch
        _, plan = planned(sequences, dense(sequences, SPLIT))
        grids[batch] = plan.launches[-1].grid[0]
        assert "merge" in plan.launches[-1].kernel
    rows = HEADS_K * GROUP
    assert grids == {1: rows, 2: 2 * rows, 3: 5, 14: 21, 28: 32, 29: 8, 100: 8}


def test_ctas_ask_a_counter_for_long_runs() -> None:
    """Where there are more runs than CTAs, these ask for the next when their own are all but done:
    in calls of one plan whose sequences are one run each, or two, and without a change of bits."""
    device = replace(EIGHT_SMS, sm_count=1)
    sequences = draw((2500, 3800, 60, 3840, 3800), (1,) * 5)
    expected = [
        attend([one], dense([one], len(one.k)), cfg=EIGHT_PARTS, arch=device)[0]
        for one in sequences
    ]
    made, plan = planned(sequences, dense(sequences, 3840), EIGHT_PARTS, device)
    assert plan.launches[0].grid[0] == 4
    lengths, o = made.views["cache_lens"].source, made.outputs["o"]
    asked = []
    for kept in (5, 3, 5):
        lengths[:] = [len(one.k) * (i < kept) for i, one in enumerate(sequences)]
        o.fill(np.nan)
        found = made.run(all_checks() if kept == 3 else ()).emulation
        assert found is not None
        assert not found.findings
        asked.append(sum(n for name, n in found.instructions.items() if name.startswith("atom")))
        for i in range(5):
            np.testing.assert_array_equal(o[i], expected[i] if i < kept else 0 * expected[i])
    # One of the three that are kept has more than twice the mean of the five.
    assert asked == [HEADS_K * 5, HEADS_K * 6, HEADS_K * 5]
    _, few = planned(sequences[:1], dense(sequences[:1], 3840), EIGHT_PARTS, device)
    assert "run_counter" not in [workspace.name for workspace in few.workspaces]


def shares_of(batch: int, capacity: int, heads_k: int = HEADS_K) -> tuple[float, ...]:
    """Of a plan on an H200: the share of a run in small and large calls, the units from which on
    they are large and may be ragged, and the share then."""
    problem = Problem.parse(f"b{batch} s1:{capacity} h{heads_k} d64 fp16 decode")
    cache = np.zeros((1, 1, heads_k, 64), np.float16)
    caches = np.broadcast_to(cache, (batch, capacity, heads_k, 64))
    tensors = {
        "q": np.zeros((batch, 1, heads_k, 64), np.float16),
        "k_cache": caches,
        "v_cache": caches,
        "cache_lens": np.zeros(batch, np.int32),
    }
    made = prepare_operation(SMALL, problem, tensors, emulate=True, arch=device_spec("H200"))
    assert made.kernel is not None
    launch = made.kernel.plan(made.call).launches[0]
    # Where DecodeKernelArgs has them (config.cuh).
    read = partial(struct.unpack_from, buffer=bytes(launch.argument_bytes))
    return *read("2f", offset=60), *read("2f", offset=168), *read("f", offset=492)


def test_runs_are_as_many_as_end_together() -> None:
    """Of equal sequences, by how many CTAs the GPU holds, and by the size of the call: a small one
    is not worth a merge. How much room a cache has changes none of it."""
    slots = 6 * 132  # CTAs
    runs = {5: (32, 16), 24: (4, 8), 60: (1, 8), 99: (1, 2), 100: (2, 4), 600: (1, 1)}
    for batch, expected in runs.items():
        small, large, _, from_ragged, ragged = shares_of(batch, 65536, 8)
        of_run = [1 / (abs(share) * batch) for share in (small, large, ragged)]
        found = [1 if one < 0.6 else round(1.25 * one) for one in of_run]
        assert tuple(found[:2]) == expected
        # CTAs ask for runs where there are more than they take at once.
        assert [share < 0 for share in (small, large, ragged)] == [
            8 * batch * n > slots for n in found
        ]
        assert found[2] == 32 or 8 * batch * found[2] > 2.4 * slots
        assert from_ragged == pytest.approx(192e6 / (8 * 64 * 64 * 4))
    for batch in (60, 99):
        assert shares_of(batch, 8192, 8) == shares_of(batch, 65536, 8)


def arrivals(instructions: Mapping[str, int]) -> int:
    """Polls of words that arrive, in what a call has executed."""
    return sum(n for name, n in instructions.items() if name.startswith("ld.relaxed.gpu.global.v"))


@pytest.mark.parametrize("page", [pytest.param(0, marks=pytest.mark.full), 24])
def test_states_of_few_runs_arrive_at_the_merge(page: int) -> None:
    """Where a cache has room for more than clusters merge: sequences of up to as many parts as a
    merge takes, of more, of one and of no key, in calls of one plan. Bits are those of the other
    kernels, and what has arrived is zero again."""
    device = replace(device_spec("H200"), sm_count=132)
    long = draw((LONG,), (1,))[0]
    lengths = (LONG, 16 * 64, 16 * 64 + 1, 65, 64, 0)
    sequences = [Cached(long.k[:n], long.v[:n], long.q) for n in lengths]
    expected = [
        attend([one], dense([one], max(len(one.k), 1)), arch=device)[0] for one in sequences
    ]
    caches = paged([long], page, more=ARRIVING // page) if page else dense([long], ARRIVING)
    made, plan = planned([long], caches, CLUSTERS, device)
    assert [launch.grid[0] for launch in plan.launches][1:] == [HEADS_K * GROUP]
    assert "arriving" in plan.launches[1].kernel
    cache_lens, o = made.views["cache_lens"].source, made.outputs["o"]
    polled = []
    for i, n in enumerate(lengths):
        cache_lens[:] = n
        o.fill(np.nan)
        found = made.run(all_checks(), schedule_seed=i).emulation
        assert found is not None
        assert not found.findings, (n, found.findings)
        polled.append(arrivals(found.instructions))
        np.testing.assert_array_equal(o[0], expected[i], err_msg=str(n))
    # One part is the row; and a merge's CTA has its instructions fetched before it waits.
    assert [count > 0 for count in polled] == [n <= 16 * 64 for n in lengths]


@pytest.mark.parametrize("word", range(6))
def test_the_merge_waits_for_every_word(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums and of statistics: where the decode kernel sends 0 in place of one, which is a word
    that never arrives, the merge has no end, and the emulator says what it waits for."""
    vector, place = ("v4", word) if word < 4 else ("v2", word - 4)
    sent = re.compile(rf"st\.relaxed\.gpu\.global\.{vector}\.u32\s+(\[[^]]*\]), {{([^}}]*)}};")

    def without(match: re.Match[str]) -> str:
        words = [one.strip() for one in match[2].split(",")]
        words[place] = "%nothing"
        to = f"{match[1]}, {{{', '.join(words)}}}"
        return f"mov.b32 %nothing, 0;\n\tst.relaxed.gpu.global.{vector}.u32 {to};"

    def run_without(ptx: Mapping[str, str], plan: LaunchPlan, **how: Any) -> EmulationResult:
        main = plan.launches[0].kernel
        changed, times = sent.subn(without, ptx[main])
        assert times
        changed = changed.replace(".reg .pred", ".reg .b32 %nothing;\n\t.reg .pred", 1)
        return run_in_emulator({**ptx, main: changed}, plan, **how)

    monkeypatch.setattr(emulation, "run_in_emulator", run_without)
    sequences = draw((300,), (1,))
    device = replace(device_spec("H200"), sm_count=132)
    made, _ = planned(sequences, dense(sequences, ARRIVING), CLUSTERS, device)
    with pytest.raises(EmulatorError, match="arriving"):
        made.run()


@pytest.mark.full
def test_states_arrive_where_few_parts_may_be() -> None:
    """Beyond clusters, or where a cache has room for no more parts than a merge takes; not of
    packed sequences, of several tiles, or where the merge looks for rows."""
    device = replace(device_spec("H200"), sm_count=132)

    def names(batch: int, queries: int, capacity: int, cfg: Any = CLUSTERS) -> list[str]:
        sequences = draw((64,), (queries,)) * batch
        _, plan = planned(sequences, dense(sequences, capacity), cfg, device)
        return [workspace.name for workspace in plan.workspaces]

    kept = ["arriving"]
    assert names(1, 1, ARRIVING)[2:] == kept
    # Where clusters could serve the cache, and it has room for no more parts than arrive.
    assert names(1, 1, 16 * 64, replace(CLUSTERS, parts_per_sm=8))[2:] == kept
    for batch, queries, capacity, cfg in (
        (1, 1, 8192, CLUSTERS),
        (1, 6, ARRIVING, CLUSTERS),
        (2, 1, ARRIVING, CLUSTERS),
        (1, 1, ARRIVING, SMALL),
    ):
        assert not set(kept) & set(names(batch, queries, capacity, cfg)), (batch, queries)


# Keys that a cache has room for, beyond those that clusters merge, and of a sequence that has more
# parts than arrive.
ARRIVING, LONG = 8208, 2100


# CTAs that begin before the launch before is over, of one sequence, of several, and in clusters.
BEFORE = replace(CLUSTERS, early=True)
LARGE_BEFORE = config("(FP16, 128, 16, 64, 4): decode+stages_3+least_64+parts_2+early+cluster_8")
shared_kernels.want([BEFORE, LARGE_BEFORE], arch=90)
GUESSES = {
    "nothing": "mov.b32 %guess, 0;",
    "the most there is": "mov.b32 %guess, 0x7fffffff;",
    "the least": "mov.b32 %guess, 0x80000000;",
    "other warps' are wrong": WRONG_BY_WARPS,
    "warp 0's are wrong": WRONG_IN_WARP_0,
}


# Lengths of sequences, keys that a cache has room for, and launches.
GUESSED_CALLS = (
    *(((300,), ARRIVING, 2), ((1100,), ARRIVING, 2), ((0,), ARRIVING, 2)),
    *(((700, 0, 65, 330, 1), SPLIT, 2), ((500,), 504, 1), ((64, 500), 504, 1)),
)


@pytest.mark.parametrize(
    ("page", "right_lengths", "calls"),
    [(24, False, GUESSED_CALLS[3:6:2]), (16, True, GUESSED_CALLS[1:2])],
    ids=["lengths", "pages"],
)
def test_wrong_guesses_change_no_bit(
    page: int, right_lengths: bool, calls: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"right_lengths": right_lengths, "calls": calls}
    _guess_wrongly(BEFORE, "other warps' are wrong", page, monkeypatch, **how)


@pytest.mark.full
@pytest.mark.parametrize("page", [0, 24])
@pytest.mark.parametrize("guess", GUESSES)
def test_what_lengths_seem_to_be_changes_no_bit(
    guess: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _guess_wrongly(BEFORE, guess, page, monkeypatch)


# A step of a warp's in one page, and not.
@pytest.mark.full
@pytest.mark.parametrize("page", [16, 24])
@pytest.mark.parametrize("guess", GUESSES)
def test_what_pages_seem_to_be_changes_no_bit(
    guess: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _guess_wrongly(BEFORE, guess, page, monkeypatch, right_lengths=True)


# Warps that share the stages, places that are merged at once, and two tiles of 16 rows.
OTHERS_BEFORE = (
    replace(OWN, early=True, cluster=8),
    replace(FULL, early=True, cluster=8),
    replace(SMALL, B_r=32, stages=3, early=True, cluster=8),
)


@pytest.mark.full
@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("cfg", OTHERS_BEFORE, ids=["own rows", "full", "32 rows"])
def test_other_kernels_guesses_change_no_bit(
    cfg: FlashDecodeKernelConfig, guess: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _guess_wrongly(cfg, guess, 24, monkeypatch)
    _guess_wrongly(cfg, guess, 0, monkeypatch)


def _guess_wrongly(
    cfg: FlashDecodeKernelConfig,
    guess: str,
    page: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    right_lengths: bool = False,
    calls: Sequence[tuple[tuple[int, ...], int, int]] = GUESSED_CALLS,
) -> None:
    """Lengths and pages are guessed before the launch before is over: here as they are not, pages
    alone with ``right_lengths``, and differently by the warps of a CTA, which loads what it asks
    for."""
    plain, guessed = replace(cfg, early=False, cluster=0), list[int]()

    def run_guessing(ptx: Mapping[str, str], plan: LaunchPlan, **how: Any) -> EmulationResult:
        main = plan.launches[0].kernel
        changed = asked_by_loads(guessing(ptx[main], GUESSES[guess], right_lengths=right_lengths))
        found = run_in_emulator({**ptx, main: changed}, plan, **how)
        guessed.append(found.instructions["ld.relaxed.gpu.global.s32"])
        return found

    device = replace(device_spec("H200"), sm_count=132)
    for lengths, capacity, launches in calls:
        sequences = draw(lengths, (1,) * len(lengths))
        alone = [dense([one], max(1, len(one.k))) for one in sequences]
        expected = [
            attend([one], cache, cfg=plain, arch=device)
            for one, cache in zip(sequences, alone, strict=True)
        ]
        caches = paged_to(sequences, capacity, page) if page else dense(sequences, capacity)
        with monkeypatch.context() as patched:
            patched.setattr(emulation, "run_in_emulator", run_guessing)
            made, plan = planned(sequences, caches, cfg, device)
            assert len(plan.launches) == launches
            assert flags(plan) & GUESSES_LENGTHS
            found = made.run(all_checks(), schedule_seed=1).emulation
        assert found is not None
        assert not found.findings, (lengths, found.findings)
        for (o, _), rows in zip(expected, made.outputs["o"], strict=True):
            np.testing.assert_array_equal(rows, o, err_msg=str(lengths))
    assert all(guessed)


def paged_to(sequences: Sequence[Cached], capacity: int, page: int) -> dict[str, np.ndarray]:
    """In pages, with room for so many keys at least."""
    most = max(-(-len(one.k) // page) for one in sequences)
    return paged(sequences, page, more=-(-capacity // page) - most)


@pytest.mark.parametrize("page", [0, 24])
@pytest.mark.parametrize(
    ("cfg", "batch", "capacity"),
    [(BEFORE, 1, ARRIVING), (BEFORE, 3, SPLIT), (BEFORE, 2, 500), (LARGE_BEFORE, 2, 500)],
    ids=str,
)
def test_early_calls_ask_for_the_first_keys_of_every_sequence(
    cfg: FlashDecodeKernelConfig, batch: int, capacity: int, page: int
) -> None:
    """As many of each, a power of two, and of all K/V heads: each line of their rows once."""
    sequences = draw((capacity,) * batch, (1,) * batch, cfg.d_head)
    caches = paged(sequences, page) if page else dense(sequences, capacity)
    device = replace(device_spec("H200"), sm_count=132)
    made, plan = planned(sequences, caches, cfg, device)
    keys = 1 << prefetched_keys(plan)
    assert keys == min(1 << capacity.bit_length() - 1, 8192 // batch * 64 // cfg.d_head)
    assert made.kernel is not None
    arrays = {name: view.source for name, view in made.views.items()}
    seen = SingleBytes()
    main = plan.launches[0].kernel
    run_in_emulator(
        {**made.kernel.modules, main: asked_by_loads(made.kernel.modules[main])},
        plan,
        readable={name: it for name, it in arrays.items() if name not in made.outputs},
        writable={name: arrays[name] for name in made.outputs},
        observers=[seen],
        sm_count=132,
    )
    lines = Counter[int]()
    for name in ("k_cache", "v_cache"):
        cache = arrays[name]
        for i in range(batch):
            for key in range(keys):
                block, slot = (
                    (i, key) if not page else (arrays["page_table"][i, key // page], key % page)
                )
                for head in range(HEADS_K):
                    row = cache[block, slot, head]
                    first = row.__array_interface__["data"][0]
                    lines.update(range(first, first + row.nbytes, 128))
    asked = {at: times for at, times in seen.at.items() if at in lines}
    assert asked == lines
    # Beside those, of the lengths alone.
    assert sum(seen.at.values()) - sum(asked.values()) <= plan.launches[0].grid[0]


class SingleBytes(Observer):
    """Where single bytes of global memory are read, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.at = Counter[int]()

    def memory(self, event: MemoryAccess) -> None:
        if event.space == "global" and event.kind == "read" and np.all(event.sizes == 1):
            self.at.update(event.addresses.tolist())


def test_only_calls_that_may_begin_early_guess_and_ask() -> None:
    """Of up to 32 sequences, whose runs are not known without a search; and eight keys of each at
    least."""
    device = replace(device_spec("H200"), sm_count=132)
    few = {name: np.zeros((3, 500, HEADS_K, 64), np.float16) for name in CACHES}
    for cfg, batch, capacity, is_guessed, asked in (
        *(
            (BEFORE, 1, ARRIVING, True, 13),
            (BEFORE, 32, 8192, True, 8),
            (BEFORE, 33, 8192, False, 7),
        ),
        *((BEFORE, 1, 7, True, 0), (BEFORE, 1, 8, True, 3), (CLUSTERS, 1, ARRIVING, False, 0)),
        *((BEFORE, 80, 500, False, 0), (BEFORE, 1025, SPLIT, False, 0)),
    ):
        sequences = draw((1,), (1,)) * batch
        caches = {name: np.zeros((batch, capacity, HEADS_K, 64), np.float16) for name in CACHES}
        _, plan = planned(sequences, caches, cfg, device)
        seen = bool(flags(plan) & GUESSES_LENGTHS), prefetched_keys(plan)
        assert seen == (is_guessed, asked), (batch, capacity)
    # As many tiles as five eighths of the SMs: whole runs, whose sequences lanes do not share.
    _, plan = planned(sequences[:3], few, BEFORE, replace(device, sm_count=8))
    assert (flags(plan) & GUESSES_LENGTHS, prefetched_keys(plan)) == (0, 0)
    _, plan = planned(
        sequences[:2],
        {name: it[:2] for name, it in few.items()},
        BEFORE,
        replace(device, sm_count=8),
    )
    assert flags(plan) & GUESSES_LENGTHS


CACHES = ("k_cache", "v_cache")
GUESSES_LENGTHS = 4  # kGuessesLengths (config.cuh)


def prefetched_keys(plan: LaunchPlan) -> int:
    """DecodeKernelArgs::log2_prefetched_keys of a plan's first launch."""
    return struct.unpack_from("h", bytes(plan.launches[0].argument_bytes), 166)[0]


def test_merges_let_the_next_launch_begin_before_they_wait() -> None:
    """It asks for its keys while they do."""
    device = replace(device_spec("H200"), sm_count=132)
    sequences = draw((300,), (1,))
    made, _ = planned(sequences, dense(sequences, ARRIVING), BEFORE, device)
    assert made.kernel is not None
    merges = [entry for entry in made.kernel.modules if "merge" in entry]
    assert len(merges) == 3
    for entry in merges:
        ptx = made.kernel.modules[entry]
        allows, waits = (ptx.index(f"griddepcontrol.{it}") for it in ("launch_dependents", "wait"))
        assert allows < waits, entry


@pytest.mark.parametrize(
    ("page", "packed", "times"),
    [(0, True, 1), pytest.param(24, False, 2, marks=pytest.mark.full)],
)
def test_clusters_merge_to_the_bits_of_the_merge_kernel(
    page: int, packed: bool, times: int
) -> None:
    """CTAs with a run and without, and in the larger call runs of two parts; sequences of one part
    and of no key."""
    device = replace(device_spec("H200"), sm_count=64)
    queries = (2, 1, 5, 4) if packed else (1,) * 4
    sequences = draw((330, 0, 65, 200), queries) * times
    caches = paged(sequences, page) if page else dense(sequences, 330)
    counts = Counter[str]()
    expected = attend(sequences, caches, packed=packed, arch=device)
    how = {"arch": device, "counts": counts, "schedule_seed": 1}
    assert_same(attend(sequences, caches, packed=packed, cfg=CLUSTERS, **how), expected)
    assert counts["barrier.cluster.wait.acquire.aligned"] > 0


@pytest.mark.parametrize("heads", ["s1:{} h16:1", "s3:{} h6:2"])
def test_full_tiles_have_the_bits_of_others(heads: str) -> None:
    """Tiles with all their rows and with some, of runs of several lengths whose states are in
    registers, in shared and in global memory; parts and warps without keys."""
    compare_full_tiles(FULL, heads, (EIGHT_SMS, replace(EIGHT_SMS, sm_count=2)))


@pytest.mark.full
@pytest.mark.parametrize("text", OTHER_FULL)
@pytest.mark.parametrize("heads", ["s1:{} h16:1", "s5:{} h7:1 causal"])
def test_other_full_tiles_have_the_bits_of_others(text: str, heads: str) -> None:
    """And in clusters, of runs of one part and of two."""
    many = (replace(device_spec("H200"), sm_count=count) for count in (16, 32))
    compare_full_tiles(config(text), heads, (EIGHT_SMS, *many))


def compare_full_tiles(
    cfg: FlashDecodeKernelConfig, heads: str, devices: Sequence[DeviceSpec]
) -> None:
    keys = 15 * cfg.min_keys + 9
    text = f"b4 {heads.format(keys)} d{cfg.d_head} {cfg.dtype.name.lower()} decode"
    problem, reference = Problem.parse(text), DecodeReference()
    lengths = (keys, problem.seq_q, 4 * cfg.min_keys, 11 * cfg.min_keys)
    asked = reference.options(problem, sinks=True, lens_k=lengths)
    for device in devices:
        found = []
        for one in (cfg, replace(cfg, full_tiles=False)):
            semantics = problem.required_semantics(one)
            shared_kernels.load([one], semantics, arch=device.arch)
            case = reference.case(one, problem, kind="random", seed=1, options=asked)
            result = reference.run(
                *(one, case, lambda array: array),
                **{"emulate": True, "arch": device, "observers": all_checks()},
            )
            assert result.emulation is not None
            assert not result.emulation.findings
            found.append((result.outputs["o"], result.outputs["lse"]))
        assert_same(*found)


@pytest.mark.full
@pytest.mark.parametrize("text", [str(OWN), *OTHER_OWN])
@pytest.mark.parametrize("heads", ["s1:{} h32:1", "s5:{} h14:2 causal"])
def test_own_rows_have_the_same_bits_in_runs_of_any_length(text: str, heads: str) -> None:
    """Of one part and of eight, whose states are in registers, in shared and in global memory, of
    tiles with all their rows and with some; in clusters, and with any number of stages."""
    cfg = replace(config(text), parts_per_sm=8)
    keys = 15 * cfg.min_keys + 9
    dtype = cfg.dtype.name.lower()
    problem = Problem.parse(f"b6 {heads.format(keys)} d{cfg.d_head} {dtype} decode")
    reference = DecodeReference()
    lengths = (keys, problem.seq_q, 4 * cfg.min_keys, 11 * cfg.min_keys, keys, keys)
    asked = reference.options(problem, sinks=True, lens_k=lengths, capacity=SPLIT)
    device = replace(device_spec("H200" if cfg.cluster else "A100"), sm_count=2)
    found, stored = [], []
    for one in (cfg, replace(cfg, stages=cfg.stages + 1), replace(cfg, rounds=8)):
        semantics = problem.required_semantics(one)
        shared_kernels.load([one], semantics, arch=device.arch)
        case = reference.case(one, problem, kind="random", seed=1, options=asked)
        how = {"emulate": True, "arch": device, "observers": all_checks()}
        result = reference.run(one, case, lambda array: array, **how)
        assert result.emulation is not None
        assert not result.emulation.findings
        assert reference.compare(one, case, result.outputs).ok
        found.append((result.outputs["o"], result.outputs["lse"]))
        stored.append(result.emulation.instructions.get("st.global.v4.u32", 0))
    for other in found[1:]:
        assert_same(other, found[0])
    assert stored[2] >= 2 * stored[0]


def test_clusters_merge_both_tiles_of_a_few_sequences() -> None:
    sequences, counts = draw((330, 65), (9, 1)), Counter[str]()
    caches = dense(sequences, 330)
    how = {"arch": device_spec("H200"), "packed": True}
    expected = attend(sequences, caches, **how)
    found = attend(sequences, caches, cfg=CLUSTERS, counts=counts, schedule_seed=1, **how)
    assert_same(found, expected)
    assert counts["barrier.cluster.wait.acquire.aligned"] > 0


# --- many rows -----------------------------------------------------------------------------------

# Of a group of 3 ten queries are no chunk, 11 are, and 23 are two tiles; 700 keys are two parts.
RAGGED = {"lengths": (700, 0, 65, 130, 700), "queries": (11, 12, 10, 23, 1)}


def ragged() -> list[Cached]:
    return draw(RAGGED["lengths"], RAGGED["queries"])


@pytest.fixture(scope="module")
def mixed() -> tuple[np.ndarray, np.ndarray]:
    """o and LSE of a call with chunks of prompts beside tokens."""
    sequences = ragged()
    return attend(sequences, dense(sequences, 701), packed=True, cfg=CHUNKS)


def rows_of(mixed: tuple[np.ndarray, np.ndarray], i: int) -> tuple[np.ndarray, np.ndarray]:
    first = sum(RAGGED["queries"][:i])
    rows = slice(first, first + RAGGED["queries"][i])
    return mixed[0][rows], mixed[1][:, rows]


def test_chunks_and_tokens_have_the_same_bits_in_any_batch(
    mixed: tuple[np.ndarray, np.ndarray],
) -> None:
    sequences = ragged()
    for i, one in enumerate(sequences):
        alone = attend(
            [one], dense([one], max(1, len(one.k)) + 500 * (i % 2)), packed=True, cfg=CHUNKS
        )
        assert_same(alone, rows_of(mixed, i))
    chosen = (3, 2, 0, 3)
    again = [sequences[i] for i in chosen]
    o, lse = attend(again, dense(again, 700), packed=True, cfg=CHUNKS)
    first = 0
    for i in chosen:
        rows = slice(first, first + len(sequences[i].q))
        assert_same((o[rows], lse[:, rows]), rows_of(mixed, i))
        first = rows.stop
    empty_o, empty_lse = rows_of(mixed, 1)
    assert not empty_o.any()
    assert np.isneginf(empty_lse).all()


def test_tokens_beside_chunks_have_the_bits_of_kernels_without_chunks(
    mixed: tuple[np.ndarray, np.ndarray],
) -> None:
    for i in (2, 4):
        one = ragged()[i]
        assert_same(attend([one], dense([one], 700), packed=True), rows_of(mixed, i))


@pytest.mark.parametrize("cfg", [SMALL, CHUNKS], ids=str)
def test_rows_without_keys_are_zero_beside_nan(cfg: FlashDecodeKernelConfig) -> None:
    """Neighbours in the tile see a value of NaN, which is not 0 times a weight of 0."""
    (one,) = draw((5,), (20,))
    one.v[0, :, 7] = np.nan
    o, lse = attend([one], dense([one], 9), packed=True, cfg=cfg)
    blind = len(one.q) - len(one.k)
    assert not o[:blind].any()
    assert np.isneginf(lse[:, :blind]).all()
    assert np.isnan(o[blind:, :, 7]).all()
    assert np.isfinite(lse[:, blind:]).all()


@pytest.mark.parametrize("page", [1, 24])
def test_pages_leave_every_bit_of_chunks(page: int, mixed: tuple[np.ndarray, np.ndarray]) -> None:
    sequences = ragged()
    assert_same(attend(sequences, paged(sequences, page, 2), packed=True, cfg=CHUNKS), mixed)


@pytest.mark.parametrize("page", [0, 24, 64])
@pytest.mark.parametrize(
    ("cfg", "packed"),
    [*((cfg, packed) for cfg in (SMALL, OWN) for packed in (False, True)), (CHUNKS, True)],
    ids=["keys", "packed keys", "rows", "packed rows", "chunks"],
)
def test_strides_leave_every_bit(cfg: FlashDecodeKernelConfig, packed: bool, page: int) -> None:
    """Keys and values that lie apart, each in its own way: rows of all heads with others between
    them, and heads first."""
    queries = (13, 1, 2) if packed else (1,) * len(BRIEF)
    sequences = draw(BRIEF, queries)
    caches = paged(sequences, page) if page else dense(sequences, 131)
    expected = attend(sequences, caches, packed=packed, cfg=cfg)
    blocks, slots, *_ = caches["k_cache"].shape
    wide = np.full((blocks, slots, HEADS_K + 2, 80), np.nan, np.float16)[:, :, 1:-1, 8:72]
    values = np.full((blocks, HEADS_K + 1, slots + 9, 72), np.nan, np.float16)
    turned = values[:, :HEADS_K, :slots, :64].transpose(0, 2, 1, 3)
    for k, v in ((wide, turned), (turned, wide)):
        assert all(one != other for one, other in zip(k.strides[:3], v.strides[:3], strict=True))
        k[:], v[:] = caches["k_cache"], caches["v_cache"]
        apart = {**caches, "k_cache": k, "v_cache": v}
        assert_same(attend(sequences, apart, packed=packed, cfg=cfg), expected)


def test_shared_pages_leave_every_bit() -> None:
    one, two = draw((300, 300), (1, 1))
    for name in "kv":
        getattr(two, name)[:256] = getattr(one, name)[:256]
    expected = attend([one, two], dense([one, two], 300))
    caches = paged([one, two], 16)
    spare = caches["page_table"][1, :16].copy()
    caches["page_table"][1, :16] = caches["page_table"][0, :16]
    for name in "kv":
        caches[f"{name}_cache"][spare] = np.nan
    assert_same(attend([one, two], caches), expected)


def test_the_schedule_leaves_every_bit() -> None:
    sequences = draw(BRIEF, (1,) * len(BRIEF))
    expected = attend(sequences, dense(sequences, 130))
    assert_same(attend(sequences, dense(sequences, 130), schedule_seed=1), expected)


def test_long_sequences_are_split_and_short_caches_are_not() -> None:
    """A merge is launched where some sequence may have two parts."""
    launches = {}
    for capacity in (64, 65, 5000):
        sequences = draw((64,), (1,))
        problem = Problem.parse(f"b1 s1:64 h{HEADS_K * GROUP}:{HEADS_K} d64 fp16 decode")
        shared_kernels.load([SMALL], problem.required_semantics(SMALL))
        tensors = {
            **dense(sequences, capacity),
            "q": sequences[0].q[None],
            "cache_lens": np.array([64], np.int32),
        }
        made = prepare_operation(SMALL, problem, tensors, emulate=True, arch=EIGHT_SMS)
        assert made.kernel is not None
        plan = made.kernel.plan(made.call)
        launches[capacity] = ["merge" in launch.kernel for launch in plan.launches]
        # Of the two heads' eight parts each, CTAs that the device holds at once.
        assert plan.launches[0].grid[0] == min(16, 2 * -(-capacity // 64))
    assert launches == {64: [False], 65: [False, True], 5000: [False, True]}


# --- what is appended ----------------------------------------------------------------------------


def test_an_append_writes_its_rows_and_nothing_else() -> None:
    """Rows whose place is no part of the cache are not written: behind its capacity, in a page that
    there is not, or in front of it."""
    page, rows = 8, 3
    sequences = draw((20, 9, 0, 30, 31, 5), (rows,) * 6)
    caches = paged(sequences, page, more=1)
    table, lengths = caches["page_table"], np.array([20, 9, 0, 30, 31, 5], np.int32)
    blocks, most = caches["k_cache"].shape[0], table.shape[1]
    table[:, 4:] = -1
    free = sorted(set(range(blocks)) - set(table.ravel().tolist()))
    table[0, 3] = blocks  # not reached
    table[1, 1] = blocks  # behind the last page
    table[2, 0] = free[0]
    table[3, 3:5] = (free[1], -1)  # two of three rows have a page
    lengths[4] = most * page - 1  # one row fits, into a page that there is not
    table[5, 0] = -(2**31)
    rng = np.random.default_rng(1)
    new = {
        name: rng.standard_normal((6, rows, HEADS_K, 64), dtype=np.float32).astype(np.float16)
        for name in "kv"
    }
    expected = {name: caches[f"{name}_cache"].copy() for name in "kv"}
    written = 0
    for i in range(6):
        for row in range(rows):
            key = int(lengths[i]) + row
            if key >= most * page:
                continue
            block = int(table[i, key // page])
            if 0 <= block < blocks:
                written += 1
                for name in "kv":
                    expected[name][block, key % page] = new[name][i, row]
    assert written == 3 + 0 + 3 + 2 + 0 + 0
    run_append(sequences, caches, lengths, new)
    for name in "kv":
        np.testing.assert_array_equal(
            caches[f"{name}_cache"].view(np.uint16), expected[name].view(np.uint16)
        )


@pytest.mark.parametrize("length", [-1, -(2**31), 41, 2**31 - 1])
def test_bad_lengths_write_nothing_and_read_the_cache_alone(length: int) -> None:
    sequences = draw((40, 40), (1, 1))
    caches = dense(sequences, 40)
    before = {name: array.copy() for name, array in caches.items()}
    new = {name: np.ones((2, 1, HEADS_K, 64), np.float16) for name in "kv"}
    run_append(sequences, caches, np.array([length, 40], np.int32), new)
    for name, array in before.items():
        np.testing.assert_array_equal(caches[name], array)


def run_append(
    sequences: Sequence[Cached],
    caches: dict[str, np.ndarray],
    lengths: np.ndarray,
    new: dict[str, np.ndarray],
    **how: Any,
) -> OperationResult:
    slots, queries = caches["k_cache"].shape[1], len(sequences[0].q)
    text = f"b{len(sequences)} s{queries}:40 h{HEADS_K * GROUP}:{HEADS_K} d64 fp16 decode"
    problem = Problem.parse(text + f" page{slots}" * ("page_table" in caches))
    shared_kernels.load([SMALL], problem.required_semantics(SMALL))
    q = np.stack([one.q for one in sequences])
    found = run_operation(
        *(SMALL, problem, {**caches, **new, "q": q, "cache_lens": lengths}),
        **{"arch": EIGHT_SMS, "observers": all_checks(), "emulate": True} | how,
    )
    assert found.emulation is not None
    assert not found.emulation.findings
    return found


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_turned_has_the_bits_of_unfused_sums(interleaved: bool) -> None:
    sequences = draw((40, 40), (2, 2))
    caches, rng = dense(sequences, 44), np.random.default_rng(2)
    new = {
        name: rng.standard_normal((2, 2, HEADS_K, 64), dtype=np.float32).astype(np.float16)
        for name in "kv"
    }
    # Of equal elements an angle next to a quarter leaves what was rounded, and little else.
    new["k"][:] = 100 * new["k"][..., :1]
    angles = np.pi / 4 + rng.uniform(-1, 1, (44, 20)) * 1e-5
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    options = {"rotary_interleaved": interleaved, "rotary_dtype": "float32"}
    lengths = np.array([40, 7], np.int32)
    run_append(sequences, caches, lengths, new | tables, options=options)
    for i, length in enumerate(lengths):
        turn = tables["cos"], tables["sin"], np.arange(length, length + 2)
        expected = rotated(new["k"][i], *turn, interleaved)
        x = new["k"][i, 0, 0, 0].astype(np.float32)
        products = x * tables["cos"][length], x * tables["sin"][length]
        fused = np.float64(x) * tables["cos"][length] - products[1]
        assert (fused.astype(np.float16) != (products[0] - products[1]).astype(np.float16)).any()
        np.testing.assert_array_equal(caches["k_cache"][i, length : length + 2], expected)
        np.testing.assert_array_equal(caches["v_cache"][i, length : length + 2], new["v"][i])


# --- proofs --------------------------------------------------------------------------------------


PROOFS = [
    (SMALL, "b3 s1:300 h8:2 d64", {"sinks": True, "layout": "heads first"}),
    (SMALL, "b2 s1:130 h7:1 d64 page24", {"sinks": True, "append": True, "split": "free"}),
    (
        SMALL,
        "b4 s5:300 h4:2 d40 window softcap packed page8",
        {
            **{"append": True, "rotary": "halves", "window": (70, 0), "sinks": True},
            "layout": "heads first",
        },
    ),
    (WIDE, "b1 s20:200 h2:1 d96 causal", {"append": True, "rotary": "interleaved"}),
    (
        LARGE,
        "b3 s2:300 h16:1 d120 causal softcap page1",
        {"append": True, "rotary": "halves", "rotary_dtype": "float32", "lens_k": (300, 2, 129)},
    ),
    (LARGE, "b1 s2:129 h8:1 d120 causal softcap page16", {"layout": "heads first"}),
    (LARGEST, "b2 s64:130 h1 d256 page256", {"sinks": True, "lens_k": (130, 1)}),
    (
        LARGEST,
        "b2 s1:140 h16:2 d256",
        {"append": True, "lens_k": (140, 64), "layout": "heads first"},
    ),
    # Of 64 rows each, one and two tiles; the first is split, and so is a token beside them.
    (
        CHUNKS,
        "b3 s40:1100 h4:2 d40 window softcap packed page24",
        {
            **{"window": (900, 3), "sinks": True, "lens_q": (30, 1, 40)},
            **{"lens_k": (1100, 260, 70), "layout": "heads first"},
        },
    ),
]


@pytest.mark.parametrize(("cfg", "text", "options"), PROOFS, ids=str)
def test_rows_are_right(cfg: FlashDecodeKernelConfig, text: str, options: dict[str, Any]) -> None:
    problem = Problem.parse(f"{text} {cfg.dtype.name.lower()} decode")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    asked = DecodeReference().options(problem, **options)
    verdict = prove(cfg, problem, options=asked, checks=True, sm_count=3)
    assert verdict.ok, str(verdict)


def test_the_proofs_have_every_kind_of_call() -> None:
    problems = [Problem.parse(f"{text} {cfg.dtype.name.lower()} decode") for cfg, text, _ in PROOFS]
    assert {cfg.d_head for cfg, _, _ in PROOFS} == {64, 96, 128, 256}
    assert {problem.dtype.name for problem in problems} == {"FP16", "BF16"}
    assert {p.heads_q // p.heads_k for p in problems} == {1, 2, 4, 7, 8, 16}
    assert {problem.seq_q for problem in problems} >= {1, 2, 5, 64}
    assert {problem.page for problem in problems} == {0, 1, 8, 16, 24, 256}
    assert {p.semantics.mask for p in problems} == {"none", "causal", "window"}
    for said in ("sinks", "append", "rotary", "split", "layout", "lens_k"):
        assert any(said in options for _, _, options in PROOFS)
    # K and V with strides of their own, of several heads: dense and in pages, with what is appended
    # and without, and of chunks.
    apart = {
        (bool(problem.page), "append" in options, cfg.chunk_rows > 0)
        for problem, (cfg, _, options) in zip(problems, PROOFS, strict=True)
        if options.get("layout") == "heads first" and problem.heads_k > 1
    }
    assert apart >= {
        *((False, False, False), (False, True, False), (True, True, False)),
        (True, False, True),
    }


@pytest.mark.parametrize("schedule", [None, 1])
@pytest.mark.parametrize(
    ("cfg", "lengths", "sm_count"),
    [(SEVERAL_RUNS, (330, 1, 65, 200, 330), 2), (EARLY, (700, 20, 330) + (30,) * 9, 1)],
    ids=("rounds", "few merge"),
)
def test_launches_that_begin_early_wait(
    cfg: FlashDecodeKernelConfig, lengths: tuple[int, ...], sm_count: int, schedule: int | None
) -> None:
    """From sm_90 on the kernels of a call are programmatic launches; CTAs that take their runs from
    a counter leave it zero, and few that merge have found their rows before they wait."""
    shared_kernels.load([cfg], arch=90)
    problem = Problem.parse(f"b{len(lengths)} s1:{max(lengths)} h7:1 d64 fp16 decode")
    asked = DecodeReference().options(problem, append=True, lens_k=lengths)
    verdict = prove(
        *(cfg, problem),
        options=asked,
        checks=True,
        sm_count=sm_count,
        arch=90,
        schedule_seed=schedule,
    )
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("waits", [True, False])
def test_calls_that_begin_early_wait_for_those_before(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls that append to one cache: every launch is ordered after those before it, and the
    checks would find one that is not."""
    if not waits:

        def run_without(ptx: Mapping[str, str], plan: LaunchPlan, **how: Any) -> EmulationResult:
            mutated = {entry: it.replace("griddepcontrol.wait;", "") for entry, it in ptx.items()}
            return run_in_emulator(mutated, plan, **how)

        monkeypatch.setattr(emulation, "run_in_emulator", run_without)
    shared_kernels.load([EARLY], arch=90)
    sequences = draw((330, 65), (1, 1))
    tensors = {**dense(sequences, 335), "q": np.stack([one.q for one in sequences])}
    tensors |= {name: np.ones((2, 1, HEADS_K, 64), np.float16) for name in "kv"}
    problem = Problem.parse(f"b2 s1:335 h{HEADS_K * GROUP}:{HEADS_K} d64 fp16 decode")
    checks, findings = all_checks(), []
    for more in range(2):
        asked = {**tensors, "cache_lens": np.array([330, 65], np.int32) + np.int32(more)}
        found = run_operation(*(EARLY, problem, asked), arch=90, emulate=True, observers=checks)
        assert found.emulation is not None
        findings = list(map(str, found.emulation.findings))
    assert bool(findings) != waits, findings
    assert waits or any("griddepcontrol.wait" in finding for finding in findings)


def test_no_access_to_shared_memory_meets_a_bank_conflict() -> None:
    observer = BankConflicts()
    sequences = draw((700,), (1,))
    attend(sequences, dense(sequences, 700), observers=[observer])
    factors = observer.factors()
    assert {"cp.async", "ldmatrix", "st.shared.8B", "ld.shared.16B"} <= set(factors)
    tiles = {kind: factors[kind] for kind in ("cp.async", "ldmatrix", "ld.shared.16B")}
    assert set(tiles.values()) == {1.0}


PARTS = 6


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_two_factors_of_a_call(part: int) -> None:
    """A cover of dtypes, head dimensions, groups, queries, pages, masks, lengths, what is appended
    and how, layouts, capacities, splits and kinds of inputs."""
    chosen: list[DecodeCase] = covering_decode_cases("mma_sync_decode")[part::PARTS]
    for case in chosen:
        shared_kernels.load([case.config], case.semantics)
        verdict = prove(case.config, **case.keywords(), checks=True)
        assert verdict.ok, f"{case}: {verdict}"


@pytest.mark.full
@pytest.mark.parametrize("semantics", [PLAIN, WINDOW], ids=str)
def test_every_two_knob_values(semantics: Semantics) -> None:
    configs = cover(FAMILY, device_spec("A100"))
    shared_kernels.load(configs, semantics)
    for number, cfg in enumerate(configs):
        # Of configs with a kernel for many rows, every other time more rows than the others take.
        many = cfg.chunk_rows // 2 // GROUP + 1 if cfg.chunk_rows and number % 2 else 0
        queries = f"b1 s{many}" if many else f"b3 s{1 + 2 * number % 5}"
        sizes = f"{queries}:{3 * cfg.min_keys} h{HEADS_K * GROUP}:{HEADS_K}"
        words = "window softcap packed page24" if semantics == WINDOW else ""
        d = cfg.d_head - 8 * (semantics == WINDOW)
        problem = Problem.parse(f"{sizes} d{d} {words} {cfg.dtype.name.lower()} decode")
        said = {"window": (cfg.min_keys, 0)} if semantics == WINDOW else {"append": True}
        asked = DecodeReference().options(problem, seed=number, **said)
        verdict = prove(cfg, problem, options=asked, checks=True, sm_count=3, seed=number)
        assert verdict.ok, str(verdict)
