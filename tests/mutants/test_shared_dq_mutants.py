"""Mistakes in kernels of the backward pass in which two CTAs of a cluster exchange dS and share dq.
All must be caught.

The default run takes two mistakes; ``-m full`` takes all.
"""

from __future__ import annotations

import shared_kernels
from backward_cases import Asked
from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    MutantSuite,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_the_kernels_themselves_are_right,
)
from operation_victims import OperationVictim, SourcePatch

from flashsmith.families import DType, Semantics
from flashsmith.families.wgmma_backward.sets import shared_configs

CAUSAL = Semantics("causal", uneven=True)
WINDOW = Semantics("window", packed=True, uneven=True)
HALVES, ORDERED, MULTICAST = shared_configs(DType.BF16, 192)
WHOLE, *_ = shared_configs(DType.BF16, 256)
VICTIMS = {
    # Each CTA has one and a half panels of dq, and the last pair has one block of keys.
    "halves": OperationVictim(
        HALVES,
        CAUSAL,
        (
            Asked("b1 s260:190 h2:1 d184 causal", "nonfinite", schedule_seed=1),
            Asked("b1 s130:300 h1 d192 causal", schedule_seed=2),
        ),
    ),
    "panels": OperationVictim(
        WHOLE, CAUSAL, (Asked("b1 s200:140 h1 d232 causal", schedule_seed=3),)
    ),
    "packed": OperationVictim(
        HALVES,
        WINDOW,
        (
            Asked(
                "b4 s200:140 h1 d192 window packed",
                options={
                    **{"lens_q": (200, 0, 13, 70), "lens_k": (30, 12, 0, 140), "spare": 6},
                    **{"left": 40, "right": 9},
                },
            ),
        ),
    ),
    "multicast": OperationVictim(
        MULTICAST, CAUSAL, (Asked("b1 s260:190 h1 d184 causal", schedule_seed=1),)
    ),
    # Pairs of blocks of keys that no query of a block sees are left out of its order.
    "ordered": OperationVictim(
        ORDERED,
        WINDOW,
        (
            Asked(
                "b2 s300 h1 d192 window packed",
                options={"lens_q": (300, 70), "lens_k": (300, 190), "left": 40, "right": 9},
            ),
        ),
    ),
}
shared_kernels.want([HALVES], CAUSAL)

_STAGES, _KEYS = "wgmma_backward/ds_stages.cuh", "wgmma_backward/key_block.cuh"
_SPLIT, _PRODUCER = "wgmma_backward/split_consumer.cuh", "wgmma_backward/producer.cuh"
_KERNEL, _ORDER = "wgmma_backward/backward_kernel.cuh", "wgmma_backward/dq_order.cuh"
_STATIC = "wgmma_backward/static_kernel_configuration.cuh"
MISTAKES = {
    "halves": (
        SourcePatch("dS is sent before it is stored", _STAGES,
                    "mbarrier_wait(Stages::stored(smem, stage), state.phase());", ""),
        SourcePatch("dq has the left columns twice", "wgmma_backward/dq_part.cuh",
                    "if constexpr (CFG.shared_dq) return block_index() % 2;", ""),
        SourcePatch("dS is sent to itself", _STAGES,
                    "cluster_address(stages.tile(stage) + kBytes, peer)",
                    "cluster_address(stages.tile(stage) + kBytes, peer ^ 1)"),
        SourcePatch("the other CTA's dS replaces its own", _STAGES,
                    "stages.tile(stage) + kBytes, peer", "stages.tile(stage), peer"),
        SourcePatch("a stage is free before the other CTA has read it", _STAGES,
                    "(kShared ? 2 * Kernel::n_warpgroups : ", "(kShared ? Kernel::n_warpgroups : "),
        SourcePatch("the sender does not say how much will arrive", _STAGES,
                    "mbarrier_arrive_expect(full, kBytes);", "mbarrier_arrive(full);"),
        SourcePatch("every stage is the first one", _STAGES,
                    "            state.advance();\n", ""),
        SourcePatch("dS is not made visible to copies", _STAGES,
                    "tma_store_fence();\n        __syncwarp();", "__syncwarp();"),
        SourcePatch("half of dq is of one CTA's keys", _SPLIT,
                    "tile + of_peer * Kernel::dS_panel_bytes", "tile"),
        SourcePatch("both blocks of keys are its own", _SPLIT,
                    "(of_peer ? Kernel::peer_K_offset", "(false ? Kernel::peer_K_offset"),
        SourcePatch("both CTAs have the first half of the middle panel", _SPLIT,
                    "kHalvesPanel ? rank * Panel::kRowBytes / 2 : 0", "0"),
        SourcePatch("the other CTA's K is its own", _PRODUCER,
                    "(rank == 0 ? 1 : -1) * Kernel::B_c", "0"),
        SourcePatch("the other CTA's K has other columns", _PRODUCER,
                    "Kernel::dq_panel(rank, p)", "Kernel::dq_panel(rank ^ 1, p)"),
        SourcePatch("the other CTA's K is not waited for", _PRODUCER,
                    "(kOfV ? 0 : Kernel::peer_K_bytes)", "0"),
        SourcePatch("both CTAs have the same keys", _KEYS,
                    "first_key += block_index() % 2 * Kernel::B_c;", ""),
        SourcePatch("full blocks of queries are those of the first CTA", _KEYS,
                    "own = mask.query_blocks(first_key,",
                    "own = mask.query_blocks(first_key - block_index() % 2 * Kernel::B_c,"),
        SourcePatch("the last dq is not added", _SPLIT,
                    "start_shared_dq<kOfV>();\n            finish_dq<kOfV ? 0 : 1, 0>();", ""),
        SourcePatch("the sums of one half go to the other's place", _SPLIT,
                    "finish_dq<kHalf, 1>();", "finish_dq<1, 1>();"),
        SourcePatch("barriers are used before they are initialised", _KERNEL,
                    "cluster_barrier();  // the other CTA", "__syncthreads();  // the other CTA"),
        SourcePatch("a CTA ends before the other's last messages", _KERNEL,
                    "cluster_barrier();  // shared memory", "// shared memory"),
    ),
    "panels": (
        SourcePatch("both CTAs have the first panels", _STATIC,
                    "return part * (dq_columns / Panel::kColumns) + half;", "return half;"),
        SourcePatch("the second panel of a CTA is its first one", _STATIC,
                    "return part * (dq_columns / Panel::kColumns) + half;",
                    "return part * (dq_columns / Panel::kColumns);"),
    ),
    "packed": (
        SourcePatch("a CTA without keys leaves the other alone", _KEYS,
                    "Kernel::CFG.shared_dq ? first_key - block_index() % 2 * Kernel::B_c : "
                    "first_key;", "first_key;"),
    ),
    "multicast": (
        SourcePatch("Q is free before the other CTA has read it", _KERNEL,
                    "Kernel::QPipeline::arrivals_at_empty(Kernel::n_warpgroups)", "kWarps"),
        SourcePatch("do is free before the other CTA has read it", _KERNEL,
                    "Kernel::DoPipeline::arrivals_at_empty(Kernel::n_warpgroups)", "kWarps"),
        SourcePatch("both CTAs copy the same panels", _PRODUCER,
                    "p % 2 == block_index() % 2", "p % 2 == 0"),
        SourcePatch("each CTA copies for the other one alone", _PRODUCER,
                    "0b11", "2 >> block_index() % 2"),
        SourcePatch("each CTA counts its own panels", _PRODUCER,
                    "(full, Pipeline::kBytes + Kernel::statistics_bytes)",
                    "(full, Pipeline::kBytes / 2 + Kernel::statistics_bytes)"),
    ),
    "ordered": (
        SourcePatch("both CTAs have the same counters", _ORDER,
                    "(CFG.shared_dq ? block_index() % 2 * Kernel::dq_parts : 0)", "0"),
        SourcePatch("the order is one of CTAs", _ORDER,
                    "constexpr int kKeys = Kernel::cluster_keys;",
                    "constexpr int kKeys = Kernel::B_c;"),
        SourcePatch("the second CTA's predecessor begins at its own key", _ORDER,
                    "CFG.shared_dq ? place * kKeys : keys.first_key;", "keys.first_key;"),
        SourcePatch("a pair has the order of two pairs", _ORDER,
                    "keep(key_block_of_cta<Kernel>());", "keep(block_index());"),
        SourcePatch("a half waits for both warpgroups' sums", _ORDER,
                    "Kernel::CFG.split_roles && !Kernel::CFG.shared_dq;",
                    "Kernel::CFG.split_roles;"),
        SourcePatch("the first half waits for its first turn alone", _SPLIT,
                    "if constexpr (kHalf == 1 || kShared) this->odd_turns",
                    "if constexpr (kHalf == 1) this->odd_turns"),
        SourcePatch("nobody waits for a turn", _SPLIT,
                    "dq_order.wait(kHalf, odd_turns);", ""),
        SourcePatch("dS is sent when a half's turns are over", _KERNEL,
                    "(1 + Kernel::order_keepers) * kWarpSize", "kWarpSize"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES)


def test_the_first_mistakes_are_caught() -> None:
    assert SUITE.unnoticed_mistakes("halves", slice(0, 2)) == set()
