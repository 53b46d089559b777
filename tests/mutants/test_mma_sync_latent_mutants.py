"""Mistakes in the kernels of attention over a latent cache with mma.sync. All must be caught."""

from __future__ import annotations

from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    MutantSuite,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_the_kernels_themselves_are_right,
    test_wrong_plans_are_caught,
)
from operation_victims import OperationVictim, SourcePatch
from test_latent_mutants import AskedLatent

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

CONFIG = config("(FP16, 320:256, 32): latent_mma+stages_3+least_128+parts_4+lazy")
# Two tiles of a sequence, whose second is not full; pages of any size; a sequence without keys, and
# others shorter than two parts. The last keys of a tile's rows are in two blocks.
PACKED = AskedLatent(
    "b5 s3:706 h10:1 d320:256 window packed page24",
    options={
        "window": (500, 0),
        "append": True,
        "sinks": True,
        "lens_q": (3, 1, 0, 2, 1),
        "lens_k": (706, 97, 0, 200, 300),
    },
)
# Scores that grow from block to block by more than rows wait for.
LARGE = AskedLatent(
    "b2 s3:500 h10:1 d320:256 window packed page7",
    "large_scores",
    options={"window": (400, 0), "lens_q": (3, 2), "lens_k": (500, 140)},
)
VICTIMS = {
    "packed": OperationVictim(
        CONFIG, Semantics("window", packed=True, uneven=True), (PACKED, LARGE), arch=80
    ),
    "dense": OperationVictim(
        CONFIG,
        Semantics("causal"),
        (
            AskedLatent(
                "b2 s2:300 h10:1 d320:256 causal", options={"lens_k": (300, 1), "capacity": 9}
            ),
            AskedLatent(
                "b2 s2:300 h10:1 d320:256 causal",
                options={"lens_k": (170, 300), "capacity": 9, "append": True, "split": "free"},
            ),
        ),
        arch=80,
    ),
}

_TILE, _COPIES = "mla/tile.cuh", "mma_sync_mla/block_copies.cuh"
_PART, _MERGE = "mma_sync_mla/part.cuh", "mla/merge_kernel.cuh"
_KERNELS = "mma_sync_mla/kernels.cuh"
MISTAKES = {
    "packed": (
        SourcePatch("parts of single blocks overlap", _TILE,
                    "min(boundary(part + 1), blocks.end)",
                    "min(boundary(part + 1) + 1, blocks.end)"),
        SourcePatch("the first row's last key", _TILE, "bottom.last / Kernel::B_c + 1,",
                    "top.last / Kernel::B_c + 1,"),
        SourcePatch("parts that a tile does not have", _KERNELS,
                    "|| part >= tile.parts) return;", ") return;"),
        SourcePatch("pages of the first sequence", _COPIES,
                    "tile.batch * args.page_table_stride + key / args.slots", "key / args.slots"),
        SourcePatch("pages of the block before", _COPIES, "locate(block + 1);", ";"),
        SourcePatch("slots as in a dense cache", _COPIES, "slots[i] = key % args.slots;",
                    "slots[i] = key;"),
        SourcePatch("rows of the upper half", _COPIES,
                    "i * kRowStep * Panel::kRowBytes", "0"),
        SourcePatch("one panel", _COPIES, "from + p * Kernel::panel_columns", "from"),
        SourcePatch("blocks before they are there", _PART,
                    "cp_async_wait<Kernel::stages - 2>();",
                    "cp_async_wait<Kernel::stages - 1>();"),
        SourcePatch("blocks of which others have not copied their share", _PART,
                    "__syncthreads();  // the block has arrived, and all warps have read the",
                    ";  // the block has arrived, and all warps have read the"),
        SourcePatch("the block before is in use when it is overwritten", _PART,
                    "copies.start(i + Kernel::stages - 1);",
                    "copies.start(i + Kernel::stages);"),
        SourcePatch("shares before they are there", _PART,
                    "__syncthreads();  // all shares have arrived", ";"),
        SourcePatch("the first half of the keys", _PART,
                    "key_half() * Kernel::B_c / 2;", "0;"),
        SourcePatch("the first half of the columns of K", _PART,
                    "RowsB<Layout>(block, lane, first, kHalf * column_half())",
                    "RowsB<Layout>(block, lane, first, 0)"),
        SourcePatch("the first half of the columns of Q", _PART,
                    "32 * column_half() + lane % 4 * 2", "lane % 4 * 2"),
        SourcePatch("the first of two steps", _PART, "kPanelSteps * p + step", "kPanelSteps * p"),
        SourcePatch("the sums of one chain", _PART, "sums[0][n][e] + sums[1][n][e]",
                    "sums[0][n][e]"),
        SourcePatch("the share of the left columns", _PART, "share(of_warp + 1, n % kOwnTiles)",
                    "share(of_warp, n % kOwnTiles)"),
        SourcePatch("the scores of the first keys", _PART, "n / kOwnTiles * 2;", "0;"),
        SourcePatch("masked blocks", _PART, "if (blocks.needs_mask(blocks.begin + i))",
                    "if (false)"),
        SourcePatch("mask of the lane's first row", _PART,
                    "return tile.keys(lanes_row(r));", "return tile.keys(lanes_row(0));"),
        SourcePatch("columns of the first warp", _PART,
                    "value_t, Kernel::cache>(block, lane, warp)",
                    "value_t, Kernel::cache>(block, lane, 0)"),
        SourcePatch("rows that do not exist", _PART,
                    "const bool exists = row < tile.row_end;\n            const auto* from",
                    "const bool exists = true;\n            const auto* from"),
        SourcePatch("rows of Q swapped", _PART, "Q[p][i / 2][r + i % 2 * 2]",
                    "Q[p][i / 2][1 - r + i % 2 * 2]"),
        SourcePatch("sinks in every part", _PART, "is_part ? nullptr : args.sinks", "args.sinks"),
        SourcePatch("sinks of the first heads", _PART, "return tile.head(lanes_row(r)); });",
                    "return tile.head(lane / 4 + 8 * r); });"),
        SourcePatch("LSE of the parts in one row", _PART, "lse[8 * r] = softmax.row_sum[0][r];",
                    "lse[0] = softmax.row_sum[0][r];"),
        SourcePatch("parts in the columns of the first warp", _PART,
                    "row * Kernel::d_v + 16 * warp", "row * Kernel::d_v"),
        SourcePatch("the merge drops the last part", _MERGE, "part < tile.parts; ++part",
                    "part < tile.parts - 1; ++part"),
    ),
    "dense": (
        SourcePatch("rows beyond the sequence", _COPIES,
                    "const bool exists = key_of(block, i) < tile.k_count;",
                    "const bool exists = true;"),
        SourcePatch("the first sequence's keys", _COPIES, "cache_blocks[i] = tile.batch;",
                    "cache_blocks[i] = 0;"),
        SourcePatch("rows in the columns of the first warp", _PART,
                    "static_cast<uint16_t*>(args.o) + 16 * warp", "static_cast<uint16_t*>(args.o)"),
        SourcePatch("halves that are not swapped", _PART,
                    "odd ? uint2{swapped, right} : uint2{left, swapped}",
                    "odd ? uint2{left, right} : uint2{left, right}"),
        SourcePatch("rows behind the tile's", _PART,
                    "const bool exists = row < tile.row_end;\n            if (warp == 0",
                    "const bool exists = true;\n            if (warp == 0"),
        SourcePatch("LSE of every row in the first one's place", _PART,
                    "*tile.lse(row) = softmax.row_sum[0][r];",
                    "*tile.lse(tile.first_row) = softmax.row_sum[0][r];"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES, harmless_plans={"append first": "It is first."})
