"""Mistakes in what kernels over latent caches with a scale have alone are caught: how codes are
copied, widened and written, and how the scale is applied."""

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

# Two blocks of codes a thread; a tile that is split, and one that is not.
VICTIMS = {
    "e4m3": OperationVictim(
        config("(BF16, 320:256, 64): latent_mma+stages_3+least_128+parts_4+lazy+cache_e4m3"),
        Semantics("causal"),
        (
            AskedLatent(
                "b3 s2:300 h10:1 d320:256 causal page24 cache_e4m3",
                options={"append": True, "lens_k": (300, 70, 290), "sinks": True},
            ),
        ),
        arch=90,
    ),
}
_COPIES, _PART = "mma_sync_mla/block_copies.cuh", "mma_sync_mla/part.cuh"
_SCALE, _MERGE, _APPEND = "mla/row_scale.cuh", "mla/merge_kernel.cuh", "mla/append_kernel.cuh"
_LAYOUT, _FRAGMENTS = "common/layout.cuh", "common/code_fragments.cuh"
MISTAKES = {
    "e4m3": (
        SourcePatch("chunks of eight codes", _COPIES, "kChunkBytes / sizeof(element_t);",
                    "kChunkElements;"),
        SourcePatch("the first half of the keys", _FRAGMENTS,
                    "cursor(tile, first_row + lane / 4, first_chunk",
                    "cursor(tile, lane / 4, first_chunk"),
        SourcePatch("the first half of the columns", _FRAGMENTS, "first_chunk, lane % 4 * 2)",
                    "0, lane % 4 * 2)"),
        SourcePatch("the first panel", _LAYOUT,
                    "chunk_step / Panel::kChunks * Panel::kBytes", "0"),
        SourcePatch("the first chunk of a panel", _LAYOUT,
                    "Panel::step(address, row_step, chunk_step % Panel::kChunks)",
                    "Panel::step(address, row_step, 0)"),
        SourcePatch("columns as they come", _PART,
                    "if constexpr (Kernel::has_codes) restore_columns(O, lane);", ""),
        SourcePatch("no scale of rows that are not split", _PART, "            scale_O();\n", ""),
        SourcePatch("no scale of merged rows", _MERGE,
                    "for (float& x : merged.o) scale_values(args, x);", ""),
        SourcePatch("parts are scaled, too", _PART, "            store_part(part);\n",
                    "            scale_O();\n            store_part(part);\n"),
        SourcePatch("times the inverse", _SCALE, "x = __fmul_rn(x, row_scale(args));",
                    "x = __fdiv_rn(x, row_scale(args));"),
        SourcePatch("appended without the scale", _APPEND, "{to, row_scale(args)}", "{to, 1.0f}"),
        SourcePatch("appended to half of the columns", _APPEND,
                    "column += kWarpSize)", "column += 2 * kWarpSize)"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES, harmless_plans={"append first": "It is first."})
