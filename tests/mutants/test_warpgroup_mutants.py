"""Mistakes in the kernel that computes chunks of a prompt by warpgroups, and in the division of a
batch between it and the other kernels over a cache. All must be caught."""

from __future__ import annotations

from decode_mistakes import AskedDecode
from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    MutantSuite,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_the_kernels_themselves_are_right,
)
from operation_victims import OperationVictim, SourcePatch

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

CONFIG = config("(FP16, 64, 16, 64, 4): decode+stages_2+least_64+parts_2+chunk_warpgroups_2")
PAIR = config("(FP16, 64:128, 16, 128, 4): decode+stages_2+least_128+parts_1+chunk_warpgroups_2")
WINDOW = Semantics("window", softcap=True, packed=True, uneven=True)
VICTIMS = {
    # Rows are copied by threads. Several tiles for each CTA, beside a token that is split.
    "gathered": OperationVictim(
        CONFIG,
        WINDOW,
        (
            AskedDecode(
                "b4 s100:700 h4:2 d64 window softcap packed page20",
                options={
                    "window": (600, 0),
                    "lens_q": (100, 1, 70, 66),
                    "lens_k": (700, 500, 90, 640),
                    "layout": "heads first",
                },
                seed=6,  # no sequence has page 0, where keys beyond the sequence are looked for
                sm_count=4,
            ),
            AskedDecode(
                "b2 s80:300 h4:2 d40 window softcap packed page2",
                options={
                    "window": (200, 0),
                    "append": True,
                    "lens_q": (80, 64),
                    "lens_k": (300, 170),
                },
                seed=6,
            ),
        ),
        sm_count=1,
        arch=90,
    ),
    # TMA copies boxes, two a tile.
    "boxes": OperationVictim(
        CONFIG,
        WINDOW,
        (
            AskedDecode(
                "b2 s80:300 h4:2 d64 window softcap packed page64",
                options={
                    "window": (250, 0),
                    "lens_q": (80, 70),
                    "lens_k": (300, 170),
                    "layout": "heads first",
                },
                seed=6,
            ),
        ),
        sm_count=1,
        arch=90,
    ),
    # v is wider than q and k. Rows are copied by threads in one problem, in boxes in the other.
    "pair": OperationVictim(
        PAIR,
        Semantics("causal", packed=True, uneven=True),
        (
            AskedDecode(
                "b2 s80:300 h4:2 d40:104 causal packed page6",
                options={"lens_q": (80, 64), "lens_k": (300, 170), "layout": "heads first"},
                seed=6,
            ),
            AskedDecode(
                "b2 s80:300 h4:2 d40:104 causal packed page64",
                options={"lens_q": (80, 70), "lens_k": (300, 170)},
                seed=6,
            ),
        ),
        sm_count=1,
        arch=90,
    ),
    # Without a mask only the last keys are cut.
    "dense": OperationVictim(
        CONFIG,
        Semantics(),
        (AskedDecode("b2 s70:300 h2:1 d64", options={"lens_k": (300, 170), "capacity": 9}),),
        sm_count=1,
        arch=90,
    ),
}

_PRODUCER = "mma_sync_decode/warpgroup_producer.cuh"
_TILES, _SPLIT = "mma_sync_decode/warpgroup_tiles.cuh", "mma_sync_decode/split.cuh"
MISTAKES = {
    "gathered": (
        SourcePatch("rows beyond the sequence", _PRODUCER, "row < last &&", "true &&"),
        SourcePatch("columns beyond d", _PRODUCER, "kChunkElements < columns",
                    "kChunkElements < 1000"),
        SourcePatch("pages of the first sequence", _PRODUCER,
                    "tile.batch * args.page_table_stride + page", "page"),
        SourcePatch("slots as in a dense cache", _PRODUCER,
                    "return key - args.by_page.divide(key) *", "return key - 0 *"),
        SourcePatch("V's pages as far apart as K's", _PRODUCER,
                    "kOfK ? args.k_strides : args.v_strides", "args.k_strides"),
        SourcePatch("K for V", _PRODUCER, "kOfK ? args.k_cache : args.v_cache", "args.k_cache"),
        SourcePatch("the first head's keys", _PRODUCER, "tile.head_k * strides.head", "0"),
        SourcePatch("rows in the first step's pages", _PRODUCER,
                    "sources.of_step[step] * strides.block", "sources.of_step[0] * strides.block"),
        SourcePatch("pages of the block before", _PRODUCER,
                    "next = sources_of(tile, block + kNext);", ";"),
        SourcePatch("rows of the first warp", _PRODUCER,
                    "const int row = warp * kWarpKeys", "const int row = 0 * kWarpKeys"),
        SourcePatch("rows before they are there", _PRODUCER, "cp_async_wait<0>();", ";"),
        SourcePatch("rows that the MMA need not see", _PRODUCER,
                    "tma_store_fence();  // the MMA", ";  // the MMA"),
        SourcePatch("rows of the first lane are enough", _PRODUCER,
                    "__syncwarp();\n        if (lane == 0) mbarrier_arrive(KV.full());",
                    "if (lane == 0) mbarrier_arrive(KV.full());"),
        SourcePatch("Q of the first warpgroup", _PRODUCER, "tile.of_warpgroup<Kernel>(w);",
                    "tile.of_warpgroup<Kernel>(0);"),
        SourcePatch("tiles in use are overwritten", _PRODUCER, "KV.producer_wait();", ";"),
        SourcePatch("lengths before the call appends", _TILES,
                    "if (args.appends != 0) keys =", "if (false) keys ="),
        SourcePatch("sequences that no kernel computes", _TILES,
                    "q.count * group > args.most_rows;", "q.count * group > args.most_rows + 12;"),
        SourcePatch("tiles of the sequence before", _TILES,
                    "__ballot_sync(kAllLanes, end <= within)",
                    "__ballot_sync(kAllLanes, end < within)"),
        SourcePatch("tiles of other sequences", _TILES,
                    "__shfl_sync(kAllLanes, end - own, i);", "0;"),
        SourcePatch("a tile too few", _TILES,
                    "(q.count + Kernel::B_r - 1) / Kernel::B_r : 0", "q.count / Kernel::B_r : 0"),
        SourcePatch("heads of K as of Q", _TILES, "static_cast<int>(head / group)",
                    "static_cast<int>(head)"),
        SourcePatch("the counter is not reset", _TILES,
                    "tile - gridDim.x == before - 1", "tile - gridDim.x == before"),
        SourcePatch("tiles that no CTA takes", _TILES, "tile = gridDim.x +",
                    "tile = gridDim.x + 1 +"),
        SourcePatch("warps that do not wait for the number", _TILES,
                    "named_barrier_wait(kBarrier, kWarpgroupThreads);", ";"),
        SourcePatch("a number over the last one", _TILES, "round ^= 1;", ";"),
        SourcePatch("a sequence of warpgroups is merged", _SPLIT, "s.parts = s.runs = 1;",
                    "s.parts = s.runs = 2;"),
        SourcePatch("a sequence of warpgroups has tiles", _SPLIT,
                    "s.tiles = 0;\n            return;", "s.tiles = 1;\n            return;"),
    ),
    "boxes": (
        SourcePatch("rows beyond the sequence", _PRODUCER,
                    "min(max(tile.k_count - key, 0), args.box_keys);", "args.box_keys;"),
        SourcePatch("V's pages as far apart as K's", _PRODUCER,
                    "kOfK ? args.k_rows : args.v_rows", "args.k_rows"),
        SourcePatch("boxes at one place", _PRODUCER, "in_tile * Panel::kRowBytes +", ""),
        SourcePatch("the first head's keys", _PRODUCER, "row + left, tile.head_k};",
                    "row + left, 0};"),
        SourcePatch("the first box only", _PRODUCER, "if (in_tile >= Kernel::B_c) return;",
                    "if (in_tile > 0) return;"),
        SourcePatch("V for K", _PRODUCER, "kOfK ? &args.forward.k : &args.forward.v",
                    "&args.forward.v"),
    ),
    "pair": (
        SourcePatch("columns of K as of V", _PRODUCER, "kOfK && CFG.d_v > 0 ? args.d :", ""),
        SourcePatch("columns of V as of K", _PRODUCER, "kOfK && CFG.d_v > 0", "CFG.d_v > 0"),
        SourcePatch("panels of V as of K", _PRODUCER,
                    "kOfK ? Kernel::n_panels : Kernel::V_panels", "Kernel::n_panels"),
    ),
    "dense": (
        SourcePatch("the last keys are not cut", "mma_sync_decode/warpgroup_config.cuh",
                    "semantics.uneven = true;", ";"),
        SourcePatch("the first sequence's keys", _PRODUCER, "source = tile.batch;", "source = 0;"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES)
