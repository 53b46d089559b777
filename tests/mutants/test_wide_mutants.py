"""Mistakes in kernels of a d above 256: in those whose O two warpgroups halve, in those of the
gradients, and in those over caches. All must be caught.

The default run takes two mistakes, and one over caches; ``-m full`` takes all.
"""

from __future__ import annotations

from dataclasses import replace

import shared_kernels
from backward_cases import Asked
from decode_mistakes import AskedDecode
from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    MutantSuite,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_the_kernels_themselves_are_right,
)
from operation_victims import AskedForward, OperationVictim, SourcePatch

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

CAUSAL = Semantics("causal", uneven=True)
WAYS = "tma+stages_1+q_buffers_1+regs_32_232"
# Two SMs: CTAs compute several tiles, some of whose rows see no key.
ASKED = (
    AskedForward("b1 s150:100 h2 d512 causal", "nonfinite"),
    AskedForward("b1 s70:130 h2 d456 causal", options={"sinks": True}),
    AskedForward("b1 s70:130 h2 d264 causal", "nonfinite"),
)
APPENDED = {"append": True, "layout": "heads first"}
VICTIMS = {
    "alone": OperationVictim(
        config(f"(FP16, 512, 64, 32, 1wg): {WAYS}+dynamic+direct_O"), CAUSAL, ASKED, sm_count=2
    ),
    "cluster": OperationVictim(
        config(f"(FP16, 512, 64, 32, 1wg): {WAYS}+cluster_2+static_persistent+direct_O"),
        CAUSAL,
        ASKED,
        sm_count=2,
    ),
    "split": OperationVictim(
        config(f"(FP16, 512, 64, 32, 1wg): {WAYS}+direct_O+split_4"), CAUSAL, ASKED, sm_count=4
    ),
    "partial": OperationVictim(
        config(f"(FP16, 512, 64, 32, 1wg): {WAYS}+direct_O"),
        replace(CAUSAL, partial=True),
        (AskedForward("b1 s70:130 h2 d264 causal partial"),),
    ),
    "gradients": OperationVictim(
        config("(FP16, 512, 64, 32, 8): backward+columns_4+dq_atomics"),
        CAUSAL,
        (Asked("b1 s100:70 h2:1 d456 causal", "nonfinite"),),
        arch=90,
    ),
    "gradients by pairs": OperationVictim(
        config(
            "(BF16, 512, 64, 64, 2): tma_backward+q_stages_2+do_stages_1+ds_stages_2+regs_40_232"
            "+split_roles+wide_stores+early_rows+cta_pair"
        ),
        CAUSAL,
        (
            Asked("b1 s130:70 h1 d456 causal", "nonfinite", schedule_seed=1),
            Asked("b1 s190:64 h1 d512 causal", schedule_seed=2),
        ),
    ),
    "cache": OperationVictim(
        config("(FP16, 512, 16, 32, 4): decode+stages_2+least_64+parts_2"),
        CAUSAL,
        (
            AskedDecode("b2 s2:300 h4:2 d456 causal", options=APPENDED),
            AskedDecode(
                "b2 s2:300 h4:2 d504 causal page24",
                options={**APPENDED, "rotary": "halves", "rotary_half": 30},
            ),
            # So many parts that each warp of the merge has more than eight.
            AskedDecode("b1 s1:4800 h1 d480 causal", options={"lens_k": (4800,)}, sm_count=300),
            # A CTA takes one run after another.
            AskedDecode("b2 s1:300 h2:2 d480 causal", options={"lens_k": (300, 290)}, sm_count=1),
        ),
    ),
    "cluster over a cache": OperationVictim(
        config("(FP16, 512, 16, 32, 4): decode+stages_2+least_64+parts_2+early+cluster_8"),
        CAUSAL,
        (
            AskedDecode("b1 s1:900 h3:1 d480 causal", options={"lens_k": (900,)}),
            AskedDecode("b1 s1:300 h3:1 d264 causal", options={"lens_k": (300,)}),
        ),
        arch=90,
    ),
}
shared_kernels.want([VICTIMS["alone"].config], CAUSAL)
shared_kernels.want([VICTIMS["cache"].config], CAUSAL)

_PARTNER = "sm90_forward/partner.cuh"
_MESSAGES = "sm90_forward/partner_messages.cuh"
_STORE = "sm90_forward/output.cuh"
_PEER, _KEYS = "wgmma_backward/peer_scores.cuh", "wgmma_backward/key_block.cuh"
_COLUMNS = "mma_sync_decode/own_columns.cuh"
_RUN, _MERGE = "mma_sync_decode/decode_run.cuh", "mma_sync_decode/merge_kernel.cuh"
MISTAKES = {
    "alone": (
        SourcePatch("the partner multiplies the left half of V", _PARTNER,
                    "V.tile() + kRightPanels", "V.tile()"),
        SourcePatch("O is not rescaled", _PARTNER,
                    "if (O_is_begun && any_lane(rescales)) this", "if (false) this"),
        SourcePatch("O is not begun anew", _PARTNER,
                    "O_is_begun = false;\n#pragma unroll 1\n        for (int block = mine.end;",
                    "#pragma unroll 1\n        for (int block = mine.end;"),
        SourcePatch("the right half is stored to the left", _PARTNER,
                    "OutputStore<Kernel, Kernel::O_columns> right_output",
                    "OutputStore<Kernel> right_output"),
        SourcePatch("columns beyond the row", _STORE,
                    "kFirstColumn + 8 * (n + odd) < problem.d", "8 * (n + odd) < problem.d"),
        SourcePatch("the partner does not wait for P", _MESSAGES,
                    "mbarrier_wait(barriers_.full(0), state_.phase());\n        const", "const"),
        SourcePatch("P is sent before there is room", _MESSAGES,
                    "mbarrier_wait(barriers_.empty(0), state_.phase() ^ 1);", ""),
        SourcePatch("a lane arrives before the others have stored", _MESSAGES,
                    "__syncwarp();\n        if", "if"),
        SourcePatch("factors of blocks that rescale nothing are sent", _MESSAGES,
                    "store_floats(rescales ? factors[0] : 1.0f, rescales ? factors[1] : 1.0f);",
                    "store_floats(factors[0], factors[1]);"),
        SourcePatch("rows' factors are swapped", _MESSAGES,
                    "floats[0] = both.x, floats[1] = both.y;",
                    "floats[0] = both.y, floats[1] = both.x;"),
        SourcePatch("V is free before the partner has read it", "sm90_forward/init_barriers.cuh",
                    "Stages::arrivals_at_empty(Kernel::consumers)",
                    "Stages::arrivals_at_empty(Kernel::n_warpgroups)"),
        SourcePatch("Q's slot is free before the partner has read its info",
                    "sm90_forward/init_barriers.cuh",
                    "kWarpsPerWarpgroup * Kernel::consumers / Kernel::n_warpgroups",
                    "kWarpsPerWarpgroup"),
        SourcePatch("the last block is not sent", "sm90_forward/consumer.cuh",
                    "pack_P();\n        send_P();\n        if (order",
                    "pack_P();\n        if (order"),
    ),
    "cluster": (
        SourcePatch("the partner skips no block", _PARTNER,
                    "skip_values(tile.block_end - mine.end);", ""),
        SourcePatch("the partner releases blocks early", _PARTNER,
                    "V.consumer_wait();\n            V.consumer_release(warp, lane);",
                    "V.consumer_release(warp, lane);"),
    ),
    "split": (
        SourcePatch("parts have the left half twice", _STORE,
                    "Kernel::d_v + kFirstColumn +\n                  lane", "Kernel::d_v + lane"),
    ),
    "partial": (
        SourcePatch("columns of parts beyond the row", _STORE,
                    "kFirstColumn + 8 * n < args.problem.d", "8 * n < args.problem.d"),
    ),
    "gradients": (
        SourcePatch("the first rows of dq twice", "mma_sync_backward/keys_kernel.cuh",
                    "first * Kernel::dq_row_warps", "0"),
        SourcePatch("D is of the first 256 columns", "backward/rows_kernels.cuh",
                    "first < kColumns / kChunkElements; first += kLanes", "first < 1; ++first"),
        SourcePatch("D has columns beyond the row", "backward/rows_kernels.cuh",
                    "row < q.count && first + chunk < d_of_v<Kernel>(args) / kChunkElements",
                    "row < q.count"),
    ),
    "gradients by pairs": (
        SourcePatch("the other CTA's scores replace its own", _PEER,
                    "scores[0][n][1] += ", "scores[0][n][1] = "),
        SourcePatch("dP is of half of the columns", "wgmma_backward/split_consumer.cuh",
                    "add_peer_scores<kOfV>(dP);", ""),
        SourcePatch("scores are sent before there is room", _PEER,
                    "mbarrier_wait(empty, phase ^ 1);", ""),
        SourcePatch("scores are read before they are there", _PEER,
                    "mbarrier_wait(full, phase);", ""),
        SourcePatch("a lane reports for others that still read", _PEER,
                    "__syncwarp();\n        if (lane", "if (lane"),
        SourcePatch("the roles share a place", _PEER,
                    "role * Kernel::peer_tile_bytes +", "0 * Kernel::peer_tile_bytes +"),
        SourcePatch("the warps share a place", _PEER, "warp * kWarpBytes + lane", "lane"),
        SourcePatch("scores are sent to itself", _PEER,
                    "cluster_address(place, peer)", "cluster_address(place, peer ^ 1)"),
        SourcePatch("every step has the first one's phase", "wgmma_backward/split_consumer.cuh",
                    "kOfV ? 0 : 1, P_phase()}", "kOfV ? 0 : 1, 0}"),
        SourcePatch("the left half of the columns twice", _KEYS,
                    "block_index() % 2 * Kernel::columns", "0"),
        SourcePatch("the CTAs of a pair have different keys", _KEYS,
                    "block_index() / Kernel::cluster_size", "block_index()"),
        SourcePatch("the left half of dq twice", "wgmma_backward/dq_part.cuh",
                    "block_index() % 2 * Kernel::n_warpgroups + warpgroup", "warpgroup"),
        SourcePatch("columns of dk and dv beyond the row", "wgmma_backward/consumer_state.cuh",
                    "d_of_qk<Kernel>(args)) - column", "d_of_qk<Kernel>(args))"),
        SourcePatch("barriers are used before they are initialised",
                    "wgmma_backward/backward_kernel.cuh",
                    "cluster_barrier();  // the other CTA", "__syncthreads();  // the other CTA"),
        SourcePatch("a CTA ends before the other's last messages",
                    "wgmma_backward/backward_kernel.cuh",
                    "cluster_barrier();  // shared memory", "// shared memory"),
    ),
    "cache": (
        SourcePatch("the first half of the keys twice", _COLUMNS,
                    "key_half() * 8 * kShareTiles * Panel::kRowBytes", "0"),
        SourcePatch("the left half of the keys' columns twice", _COLUMNS,
                    "column_half() * KeysLayout::kBytes / 2", "0"),
        SourcePatch("the left half of the queries' columns twice", _RUN,
                    "this->column_half() * Kernel::QueriesLayout::kBytes / 2", "0"),
        SourcePatch("even steps are all of a score", _COLUMNS,
                    "shares[0][n][e] + shares[1][n][e]", "shares[0][n][e]"),
        SourcePatch("the left share is all of a score", _COLUMNS,
                    "left.o[e] + right.o[e]", "left.o[e]"),
        SourcePatch("shares are read early", _COLUMNS,
                    "__syncthreads();  // all shares", "// all shares"),
        SourcePatch("all warps have the first columns", _RUN,
                    "Kernel::own_columns ? this->warp : 0", "0"),
        SourcePatch("neighbouring columns are of one warp", _COLUMNS,
                    "16 * (warp + n / 2 * Kernel::n_warps)",
                    "16 * (warp * (Kernel::column_tiles / 2) + n / 2)"),
        SourcePatch("statistics of some rows", _COLUMNS,
                    "warp == 0 && lane % 4 == 0", "warp == 0 && lane == 0"),
        SourcePatch("columns are read before they are there", _COLUMNS,
                    "__syncthreads();\n        const RunInfo", "const RunInfo"),
        SourcePatch("copies overwrite a part's columns", _COLUMNS,
                    "__syncthreads();  // copies", "// copies"),
        SourcePatch("every group merges the first columns", _MERGE,
                    "Leaves(*this, begin, first)", "Leaves(*this, begin)"),
        SourcePatch("other subtrees have the first columns", _MERGE,
                    "Leaves(*this, first, column)", "Leaves(*this, first)"),
        SourcePatch("the second group is stored over the first", _MERGE,
                    "const int column = first + 128 * c", "const int column = 128 * c"),
        SourcePatch("groups do not wait for each other", _MERGE,
                    "if (!alone) __syncthreads();\n            merge_columns", "merge_columns"),
    ),
    "cluster over a cache": (
        SourcePatch("pushes before the cluster has begun", _COLUMNS,
                    "parts_left == 1) cluster_wait();", "parts_left == 0) cluster_wait();"),
        SourcePatch("arrived columns are not reset", _MERGE,
                    "first_column + 128 * c + 4 * lane;\n                if (column",
                    "128 * c + 4 * lane;\n                if (column"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES)


def test_the_first_mistakes_are_caught() -> None:
    assert SUITE.unnoticed_mistakes("alone", slice(0, 2)) == set()


def test_the_first_mistake_over_a_cache_is_caught() -> None:
    assert SUITE.unnoticed_mistakes("cache", slice(0, 1)) == set()
