"""Mistakes in kernels that split keys, in their merge and in their plans. All must be caught.

The default run takes wrong plans and the mistakes that come first to mind; ``-m full`` takes all of
both families.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import shared_kernels
from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    MutantSuite,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_the_kernels_themselves_are_right,
    test_wrong_plans_are_caught,
)
from operation_victims import AskedForward, OperationVictim, SourcePatch

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

CAUSAL = Semantics("causal", uneven=True)
PACKED = replace(CAUSAL, packed=True)
SINKS = {"sinks": True}
# Few SMs: tiles that are computed whole, and those in parts, of which some see no key.
ASKED = (
    AskedForward("b1 s130:260 h5 d56 causal", options=SINKS),
    AskedForward("b1 s100:60 h5 d56 causal", "nonfinite", SINKS),
)
VICTIMS = {
    "mma_sync": OperationVictim(
        config("(FP16, 64, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+split_4"),
        CAUSAL,
        ASKED,
        sm_count=5,
    ),
    "wgmma": OperationVictim(
        config("(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_1+regs_32_232+split_4"),
        CAUSAL,
        ASKED,
        sm_count=4,
    ),
    "packed": OperationVictim(
        config("(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_1+regs_32_232+split_2"),
        PACKED,
        (
            AskedForward(
                "b3 s130:260 h4:2 d56 causal packed",
                options=SINKS,
            ),
        ),
    ),
}
shared_kernels.want([VICTIMS["mma_sync"].config], CAUSAL)

_SPLIT = "common/split_keys.cuh"
_OF_BOTH = (
    SourcePatch("the merge forgets the last part", _SPLIT,
                "for (int i = 0; i < kParts; ++i) {\n        merged.add",
                "for (int i = 0; i < kParts - 1; ++i) {\n        merged.add"),
    SourcePatch("parts share a block", _SPLIT, "blocks.end = begin + count * (part + 1) / kParts;",
                "blocks.end = begin + min(count, count * (part + 1) / kParts + 1);"),
    SourcePatch("row maxima of parts are mixed with their sums", _SPLIT,
                "maximum = fmaxf(maximum, lse_and_max[i].y);",
                "maximum = fmaxf(maximum, lse_and_max[i].x);"),
    SourcePatch("the row maximum is the last part's", _SPLIT,
                "maximum = fmaxf(maximum, lse_and_max[i].y);", "maximum = lse_and_max[i].y;"),
    SourcePatch("a block is in no part", _SPLIT, "blocks.begin = begin + count * part / kParts;",
                "blocks.begin = begin + (count * part + kParts - 1) / kParts;"),
    SourcePatch("rows of the first part alone", _SPLIT, "rows + int64_t{i} * Kernel::B_r",
                "rows + int64_t{0}"),
    SourcePatch("statistics of the first part alone", _SPLIT, "statistics[i * Kernel::B_r]",
                "statistics[0]"),
    SourcePatch("statistics lie where rows do", _SPLIT, "args.parts + args.part_rows * d_v",
                "args.parts + args.part_rows"),
    SourcePatch("sinks of the first head", _SPLIT, "args.sinks + of.head", "args.sinks"),
    SourcePatch("no sinks", _SPLIT, "SEMANTICS.partial || args.sinks == nullptr", "true"),
    SourcePatch("statistics of the first sequence", _SPLIT, "of.q_first + of.row;\n        if",
                "of.row;\n        if"),
    SourcePatch("statistics of the first head", _SPLIT, "+ head) * args.seq_q", ") * args.seq_q"),
    SourcePatch("rows of the first head", _SPLIT, "of.head * args.o_head_stride + column",
                "column"),
    SourcePatch("columns beyond the row", "ROLE", "thread.column >= ",
                "false && thread.column >= "),
)  # fmt: skip
_MMA, _WGMMA = "mma_sync/forward_kernel.cuh", "sm90_forward/consumer.cuh"
#: Of packed sequences, which only their own kernels have code for.
_OF_PACKED = ("statistics of the first sequence",)


def _in(file: str) -> tuple[SourcePatch, ...]:
    return tuple(
        replace(one, file=file) if one.file == "ROLE" else one
        for one in _OF_BOTH
        if one.name not in _OF_PACKED
    )


MISTAKES = {
    "mma_sync": (
        *_in(_MMA),
        SourcePatch("sinks join every part", _MMA, "SEMANTICS.partial || is_part() ||",
                    "SEMANTICS.partial ||"),
        SourcePatch("statistics of other rows", _MMA, "if (row < Q_rows) statistics[row] =",
                    "if (row < Q_rows) statistics[row ^ 1] ="),
        SourcePatch("a part's rows of the tile before", _MMA,
                    "int64_t{block_index() - args.n_whole_tiles} * Kernel::B_r;",
                    "int64_t{block_index() - args.n_whole_tiles} / 2 * Kernel::B_r;"),
        SourcePatch("the merge's tile", _MMA, "args.n_whole_tiles + thread.tile)",
                    "args.n_whole_tiles + thread.tile + 1)"),
        SourcePatch("a part of the next tile", _MMA,
                    "(block - args.n_whole_tiles) / Kernel::CFG.split_keys;",
                    "(block - args.n_whole_tiles + 1) / Kernel::CFG.split_keys;"),
    ),
    "wgmma": (
        *_in("wgmma/merge_kernel.cuh"),
        SourcePatch("sinks join every part", _WGMMA, "SEMANTICS.partial || is_part() ?",
                    "SEMANTICS.partial ?"),
        SourcePatch("Q's buffer is never free", _WGMMA, "if (kFreesQ || is_part()) {",
                    "if (kFreesQ) {"),
        SourcePatch("a warpgroup begins before its part", _WGMMA,
                    "blocks.begin = max(blocks.begin, tile.block_begin);", ""),
        SourcePatch("a warpgroup ends behind its part", _WGMMA,
                    "blocks.end = min(blocks.end, tile.block_end);", ""),
        SourcePatch("all warpgroups' rows in one place", "sm90_forward/work_tile.cuh",
                    "kNoPart : part_row + rows", "kNoPart : part_row"),
        SourcePatch("parts of the tile before", "wgmma/scheduler.cuh",
                    "args.n_whole_tiles + of_parts / CFG.split_keys",
                    "args.n_whole_tiles + (of_parts + 1) / CFG.split_keys"),
    ),
    "packed": tuple(one for one in _OF_BOTH if one.name in _OF_PACKED),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES, harmless_plans={"main first": "It is first."})


def test_a_merge_that_is_not_there_or_too_early_is_missed() -> None:
    plans = SUITE.plans("mma_sync")
    wrong = {change: plans[change] for change in ("without merge", "merge first")}
    assert SUITE.unnoticed_plans("mma_sync", wrong) == set()


@pytest.mark.parametrize("place", range(3))
def test_the_first_mistakes_are_caught(place: int) -> None:
    assert SUITE.unnoticed_mistakes("mma_sync", slice(place, place + 1)) == set()
