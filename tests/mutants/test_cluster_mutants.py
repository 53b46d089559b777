"""Mistakes in how the CTAs of a cluster exchange scores: the checks must find each.

The default run takes one; ``-m full`` takes all.
"""

from __future__ import annotations

import pytest
from decode_mistakes import AskedDecode
from operation_victims import OperationVictim, SourcePatch, patched_modules

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

_CHUNK = "mma_sync_decode/chunk_cluster.cuh"
#: Rounds enough that every buffer is used again. The last round has two of four tiles.
NAME = "(FP16, 64, 16, 128, 4): decode+stages_2+least_128+parts_1+canonical_1+chunk_cluster_4"
VICTIM, KEYS_FIRST = (
    OperationVictim(
        config(name),
        Semantics(mask="causal"),
        (AskedDecode("b1 s1:2300 h4:1 d64 causal canonical"),),
        arch=90,
    )
    for name in (NAME, f"{NAME}+keys_first")
)
QUICK = (
    SourcePatch("no fence before a copy", _CHUNK, "                fence_for_copies();\n", ""),
)  # fmt: skip
MORE = (
    SourcePatch("scores are used before they arrive", _CHUNK,
                "mbarrier_wait(scores_full(smem, buffer), (has_two ? round / 2 : round) & 1);", ""),
    SourcePatch("nothing is waited for at the end", _CHUNK,
                "for (int i = max(round - (has_two ? 2 : 1), 0); i < round; ++i)",
                "for (int i = round; i < round; ++i)"),
    SourcePatch("scores are stored while others copy them", _CHUNK,
                "if (before >= 0) wait_for_free(before, has_two);", ""),
    SourcePatch("scores are sent before they are stored", _CHUNK,
                "named_barrier_wait(stored_barrier(round), kStoredThreads);", ""),
    SourcePatch("a copy to the own CTA, too", _CHUNK, "for (int i = 1; i < kCtas; ++i) {",
                "for (int i = 0; i < kCtas; ++i) {"),
    SourcePatch("a copy too few", _CHUNK, "for (int i = 1; i < kCtas; ++i) {",
                "for (int i = 2; i < kCtas; ++i) {"),
    SourcePatch("own scores are waited for as well", _CHUNK,
                "(tiles - sends) * tile_bytes());", "tiles * tile_bytes());"),
    SourcePatch("one parity for all rounds", _CHUNK,
                "mbarrier_wait(scores_free(smem, round & 1), (round / 2) & 1);",
                "mbarrier_wait(scores_free(smem, round & 1), 0);"),
    SourcePatch("one buffer for two rounds", _CHUNK,
                "(buffer * kCtas + tile) * tile_bytes();", "tile * tile_bytes();"),
    SourcePatch("P is overwritten while it is multiplied", _CHUNK,
                "if (round > 1) mbarrier_wait(P_free(smem, P_index), (round / 2 - 1) & 1);", ""),
    SourcePatch("P is multiplied before it is stored", _CHUNK,
                "mbarrier_wait(P_full(smem, buffer, wave), (round / 2) & 1);", ""),
    SourcePatch("values are multiplied before they arrive", _CHUNK,
                "mbarrier_wait(V_full(smem, stage), wraps);", ""),
    SourcePatch("values are overwritten while they are multiplied", _CHUNK,
                "mbarrier_wait(V_free(smem, stage), wraps ^ 1);", ""),
    SourcePatch("values have arrived before they are waited for", _CHUNK,
                "cp_async_wait<0>();\n" + 16 * " " + "__syncwarp();", "__syncwarp();"),
    SourcePatch("P of absent rows is anything", _CHUNK, "        zero_P();\n", ""),
    SourcePatch("the sender does not wait for other CTAs", _CHUNK,
                "cluster_wait();\n        const bool has_two = has_two_buffers();\n        for",
                "const bool has_two = has_two_buffers();\n        for"),
)  # fmt: skip
#: Of kernels with keys_first.
OF_KEYS_FIRST = (
    SourcePatch("P is loaded ahead of its barrier", _CHUNK,
                "mbarrier_wait(P_is_full, (round / 2) & 1);", ""),
    SourcePatch("queries are read before they arrive", _CHUNK,
                "named_barrier_wait(kQueriesBarrier,", "named_barrier_arrive(kQueriesBarrier,"),
    SourcePatch("the operands of another tile", _CHUNK, "min(first + t + kAhead, last);",
                "min(first + t + 1, last);"),
    SourcePatch("values are loaded ahead before they arrive", _CHUNK,
                "mbarrier_wait(V_full(smem, stage), wraps);", ""),
    SourcePatch("a wave's tiles end too early", _CHUNK, "if (first + t > last) break;",
                "if (first + t >= last) break;"),
    SourcePatch("warps that copy values are counted at the queries", _CHUNK,
                "kWarpSize * (kWarps - Places::kValueWarps)", "kWarpSize * kWarps"),
    SourcePatch("the first values are not copied", _CHUNK,
                "            start_values(first_step_of_stage(), value_stage());\n", ""),
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mistake", OF_KEYS_FIRST, ids=str)
def test_mistakes_of_keys_first_are_noticed(mistake: SourcePatch) -> None:
    assert KEYS_FIRST.run(patched_modules(KEYS_FIRST, mistake)).caught


@pytest.mark.parametrize("mistake", QUICK, ids=str)
def test_mistakes_are_noticed(mistake: SourcePatch) -> None:
    assert VICTIM.run(patched_modules(VICTIM, mistake)).caught


@pytest.mark.full
@pytest.mark.parametrize("mistake", MORE, ids=str)
def test_more_mistakes_are_noticed(mistake: SourcePatch) -> None:
    assert VICTIM.run(patched_modules(VICTIM, mistake)).caught


@pytest.mark.full
def test_the_kernel_without_a_mistake_is_right() -> None:
    assert not VICTIM.run().caught
    assert not KEYS_FIRST.run().caught


def test_every_mistake_is_one_of_todays_sources() -> None:
    known = (*QUICK, *MORE, *OF_KEYS_FIRST)
    assert [str(mistake) for mistake in known if mistake.times() != 1] == []
