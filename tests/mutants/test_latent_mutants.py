"""Mistakes in the kernels of attention over a latent cache. All must be caught."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from decode_mistakes import AskedDecode
from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    MutantSuite,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_the_kernels_themselves_are_right,
    test_wrong_plans_are_caught,
)
from operation_victims import OperationVictim, SourcePatch

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config
from flashsmith.verify.decode_reference import DecodeReference
from flashsmith.verify.latent_decode_reference import LatentDecodeReference


@dataclass(frozen=True)
class AskedLatent(AskedDecode):
    """A problem over a latent cache without its dtype, and options of the reference."""

    operation: ClassVar[str] = "latent_decode"
    reference: ClassVar[DecodeReference] = LatentDecodeReference()


CONFIG = config("(FP16, 320:256): latent+least_128+parts_4+regs_24_240+rescale_8")
# Two tiles of each sequence, whose second is not full; parts with odd numbers of blocks; pages
# smaller than a block; a sequence without keys, and one shorter than a part. The last keys of a
# tile's rows are in two blocks.
PACKED = AskedLatent(
    "b4 s3:706 h40:1 d320:256 window packed page16",
    options={
        "window": (500, 0),
        "append": True,
        "sinks": True,
        "lens_q": (3, 1, 0, 2),
        "lens_k": (706, 90, 0, 330),
    },
)
# Scores that grow by more than the threshold from block to block.
LARGE = AskedLatent(
    "b2 s3:500 h40:1 d320:256 window packed page64",
    "large_scores",
    options={"window": (400, 0), "lens_q": (3, 2), "lens_k": (500, 140)},
)
# CTAs that compute several parts: two of a tile's four.
IN_TURN = config(f"{CONFIG}+run_2048")
SHORT = AskedLatent("b2 s1:700 h128:1 d320:256 causal page64", options={"lens_k": (700, 265)})
# Scores ahead of products, panel by panel; parts end in either warpgroup.
AHEAD = config(f"{CONFIG}+run_2048+by_panel+ahead_3+evict_first")
NO_KEYS = AskedLatent(
    "b3 s2:300 h40:1 d320:256 window packed page64",
    options={"window": (400, 0), "lens_q": (2, 2, 1), "lens_k": (0, 300, 1)},
)
VICTIMS = {
    "ahead": OperationVictim(
        AHEAD,
        Semantics("window", packed=True, uneven=True),
        (NO_KEYS, PACKED, LARGE),
        sm_count=4,
        arch=90,
    ),
    "in turn": OperationVictim(IN_TURN, Semantics("causal"), (SHORT,), sm_count=8, arch=90),
    "packed": OperationVictim(
        CONFIG, Semantics("window", packed=True, uneven=True), (PACKED, LARGE), arch=90
    ),
    "dense": OperationVictim(
        CONFIG,
        Semantics("causal"),
        (
            AskedLatent(
                "b2 s2:300 h40:1 d320:256 causal", options={"lens_k": (300, 1), "capacity": 9}
            ),
            AskedLatent(
                "b2 s2:300 h40:1 d320:256 causal",
                options={"lens_k": (170, 300), "capacity": 9, "append": True, "split": "free"},
            ),
        ),
        arch=90,
    ),
}

_TILE, _PRODUCER = "mla/tile.cuh", "wgmma_mla/producer.cuh"
_CONSUMER, _KERNELS = "wgmma_mla/consumer.cuh", "wgmma_mla/kernels.cuh"
_PARTS = "wgmma_mla/part_range.cuh"
_MERGE, _APPEND = "mla/merge_kernel.cuh", "mla/append_kernel.cuh"
MISTAKES = {
    "packed": (
        SourcePatch("lengths before the call appends", _TILE,
                    "args.new_rows == nullptr ? 0 : q_count", "0"),
        SourcePatch("rows behind the sequence's", _TILE,
                    "min(first_row + Kernel::B_r, q_count * args.heads)",
                    "first_row + Kernel::B_r"),
        SourcePatch("rows head after head", _TILE, "return row / args.heads;",
                    "return row % q_count;"),
        SourcePatch("the first row's last key", _TILE, "bottom.last / Kernel::B_c + 1,",
                    "top.last / Kernel::B_c + 1,"),
        SourcePatch("blocks that some rows see in part", _TILE,
                    "(bottom.first + Kernel::B_c - 1) / Kernel::B_c", "top.first / Kernel::B_c"),
        SourcePatch("no block ends in the last key", _TILE, "(top.last + 1) / Kernel::B_c",
                    "bottom.last / Kernel::B_c + 1"),
        SourcePatch("parts of single blocks overlap", _TILE,
                    "min(boundary(part + 1), blocks.end)",
                    "min(boundary(part + 1) + 1, blocks.end)"),
        SourcePatch("pages of the first sequence", _PRODUCER,
                    "tile.batch * args.page_table_stride + key / args.slots", "key / args.slots"),
        SourcePatch("pages of the block before", _PRODUCER, "next = source(block + 1);", ";"),
        SourcePatch("slots as in a dense cache", _PRODUCER,
                    "args.page_table == nullptr ? key : key % args.slots", "key"),
        SourcePatch("rows beyond the sequence", _PRODUCER,
                    "min(max(tile.k_count - key, 0), args.box_keys)", "args.box_keys"),
        SourcePatch("boxes at one place", _PRODUCER, "box * Kernel::Panel::kRowBytes", "0"),
        SourcePatch("sections in use are overwritten", _PRODUCER,
                    "mbarrier_wait(barriers.empty(first), phase_of(i) ^ 1);", ";"),
        SourcePatch("the first panel of every section", _PRODUCER,
                    "from.column = p * Kernel::Panel::kColumns;",
                    "from.column = (p - Kernel::first_panel(kSection)) * Kernel::Panel::kColumns;"),
        SourcePatch("P of the block before", _CONSUMER,
                    "publish<kSecondPBarrier>();\n"
                    "        if (rescales_O) softmax.rescale(O, O_factors);",
                    "named_barrier_arrive<kSecondPBarrier, kBoth>();\n"
                    "        if (rescales_O) softmax.rescale(O, O_factors);"),
        SourcePatch("P before the product has read the other", _CONSUMER,
                    "compute_probabilities();\n        finish_PV_gemm(i);\n"
                    "        publish<kSecondPBarrier>();",
                    "compute_probabilities();\n        publish<kSecondPBarrier>();\n"
                    "        finish_PV_gemm(i);"),
        SourcePatch("P that wgmma need not see", _CONSUMER,
                    "tma_store_fence();  // wgmma reads P", ";  // wgmma reads P"),
        SourcePatch("Q that wgmma need not see", _CONSUMER,
                    "tma_store_fence();  // wgmma reads Q", ";  // wgmma reads Q"),
        SourcePatch("Q before it is there", _CONSUMER, "cp_async_wait<0>();", ";"),
        SourcePatch("rows that do not exist", _CONSUMER, "const bool exists = row < tile.row_end;\n"
                    "            const auto* from", "const bool exists = true;\n"
                    "            const auto* from"),
        SourcePatch("the own maximum is the other's", _CONSUMER,
                    "load_shared_float(maximum(kOther, r))",
                    "load_shared_float(maximum(kHalf, r))"),
        SourcePatch("sums of other maxima", _CONSUMER,
                    "softmax.row_sum[0][r] *= factors[r];", ";"),
        SourcePatch("O of other maxima", _CONSUMER,
                    "if (any_lane(any_moved)) softmax.rescale(O, factors);", ";"),
        SourcePatch("O of the own older maximum", _CONSUMER,
                    "publish<kFirstPBarrier>();\n"
                    "        if (rescales_O) softmax.rescale(O, O_factors);",
                    "publish<kFirstPBarrier>();"),
        SourcePatch("sums of the first warpgroup", _CONSUMER, "first.x + second.x", "first.x"),
        SourcePatch("sums before they are there", _CONSUMER,
                    "named_barrier_wait<kBothBarrier, kBoth>();\n        const float2 first",
                    "const float2 first"),
        SourcePatch("both have the left half", _CONSUMER,
                    "Kernel::first_panel(kHalf) * Kernel::panel_bytes",
                    "0 * Kernel::panel_bytes"),
        SourcePatch("masked blocks", _CONSUMER, "if (!blocks.needs_mask(block)) return;",
                    "return;"),
        SourcePatch("mask of the warp's first row", _CONSUMER,
                    "return tile.keys(first_row + 8 * r);", "return tile.keys(first_row);"),
        SourcePatch("a half is free before its product is done", _CONSUMER,
                    "wgmma_wait<0>(O);\n        release(i, kHalf);",
                    "release(i, kHalf);\n        wgmma_wait<0>(O);"),
        SourcePatch("the tail is free before the scores are there", _CONSUMER,
                    "wgmma_wait<0>(S);\n        release(i, kTail);",
                    "release(i, kTail);\n        wgmma_wait<0>(S);"),
        SourcePatch("V before it is there", _CONSUMER,
                    "wait_for_panel(i, kSection, kBegin);",
                    "if (kSection != 1) wait_for_panel(i, kSection, kBegin);"),
        SourcePatch("sinks in every part", _CONSUMER, "is_part ? nullptr : args.sinks",
                    "args.sinks"),
        SourcePatch("sinks of the first heads", _CONSUMER,
                    "return tile.head(first_row + 8 * r);", "return tile.head(8 * r);"),
        SourcePatch("LSE of the parts in one row", _CONSUMER,
                    "lse[8 * r] = softmax.row_sum[0][r];", "lse[0] = softmax.row_sum[0][r];"),
        SourcePatch("parts without a tile's last row", _CONSUMER,
                    "in_tile + 8 * r >= tile.row_end", "in_tile + 8 * r + 1 >= tile.row_end"),
        SourcePatch("the merge drops the last part", _MERGE, "part < tile.parts; ++part",
                    "part < tile.parts - 1; ++part"),
        SourcePatch("the merge has no sinks", _MERGE,
                    "args.sinks == nullptr ? nullptr : args.sinks + tile.head(row)", "nullptr"),
        SourcePatch("parts that a tile does not have", _KERNELS,
                    "|| parts.begin >= tile.parts) return;", ") return;"),
        SourcePatch("rows are appended at the first slot", _APPEND,
                    "slot = key % args.slots;", "slot = 0;"),
        SourcePatch("rows of the sequence before are appended", _APPEND,
                    "(q.first + query) * args.new_strides.row", "query * args.new_strides.row"),
    ),
    "in turn": (
        SourcePatch("sums of the part before", _CONSUMER,
                    "softmax = Softmax(args.scale_log2);", ";"),
        SourcePatch("every part is the CTA's first", _CONSUMER,
                    "blocks_before += blocks.end - blocks.begin;", ";"),
        SourcePatch("keys of the CTA's first part", _CONSUMER,
                    "mask(blocks.begin + i - blocks_before);", "mask(blocks.begin + i);"),
        SourcePatch("copies of the first part alone", _PARTS,
                    "blocks.end = tile.of_part(parts.end - 1).end;", ";"),
        SourcePatch("a run is a part too short", _PARTS, "tile.parts * (run + 1) / runs};",
                    "max(tile.parts * (run + 1) / runs - 1, 1)};"),
        SourcePatch("as many runs as SMs alone ask for", _PARTS,
                    "max((keys + kKeys - 1) / kKeys, tile.args.least_runs)",
                    "tile.args.least_runs + 1"),
    ),
    "ahead": (
        SourcePatch("scores of panels that are not there", _CONSUMER,
                    "wait_for_panel(i, kSection, step / kSteps);", ";"),
        SourcePatch("every panel's bytes at the first barrier", _PRODUCER,
                    "barriers.full(first + (p - Kernel::first_panel(kSection)) / kJoint)",
                    "barriers.full(first)"),
        SourcePatch("scores of some panels twice", _CONSUMER,
                    "start_scores<CFG.panels_ahead, Kernel::n_panels>(i);",
                    "start_scores<CFG.panels_ahead - 1, Kernel::n_panels>(i);"),
        SourcePatch("no product with the other's last block", _CONSUMER,
                    "if (i == count && i > blocks_before) add_other_block(i - 1);", ";"),
        SourcePatch("a part without keys waits for the other's block", _CONSUMER,
                    "if (i == count && i > blocks_before)", "if (i == count)"),
        SourcePatch("the first part's first block alone has none before it", _CONSUMER,
                    "if (i > blocks_before) add_other_block(i - 1);",
                    "if (i > 0) add_other_block(i - 1);"),
        SourcePatch("the other's P before it is there", _CONSUMER,
                    "named_barrier_wait<kHalf == 0 ? kSecondPBarrier : kFirstPBarrier, kBoth>();",
                    ";"),
        SourcePatch("maxima of the warpgroup's own blocks alone", _CONSUMER,
                    "receive_maxima();\n        start_other_PV_gemm(i);\n"
                    "        finish_PV_gemm(i);\n        pin(S);",
                    "start_other_PV_gemm(i);\n        finish_PV_gemm(i);\n        pin(S);"),
        SourcePatch("O of the older maximum", _CONSUMER,
                    "publish<kBarrier>();\n        if (rescales_O) softmax.rescale(O, O_factors);",
                    "publish<kBarrier>();"),
    ),
    "dense": (
        SourcePatch("the first sequence's keys", _PRODUCER,
                    "if (args.page_table == nullptr) return tile.batch;",
                    "if (args.page_table == nullptr) return 0;"),
        SourcePatch("heads of the first token", _TILE, "return row % args.heads;",
                    "return row % 64;"),
        SourcePatch("rows of other strides", _TILE, "head(row) * strides.head;",
                    "head(row) * 8;"),
    ),
}  # fmt: skip
SUITE = MutantSuite(
    VICTIMS,
    mistakes=MISTAKES,
    harmless_plans={"append first": "It is first."},
    harmless_plans_of={"in turn": {"main first": "It is first, as nothing is appended."}},
)
