"""Mistakes in kernels whose tiles hold a group of heads. All must be caught.

The default run takes those that come first to mind; ``-m full`` takes all of both families.
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
)
from operation_victims import AskedForward, OperationVictim, SourcePatch

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

CAUSAL = Semantics("causal", uneven=True)
PACKED = replace(CAUSAL, packed=True)
SINKS = {"sinks": True}
ASKED = (
    AskedForward("b2 s45:60 h8:2 d56 causal", options=SINKS),
    AskedForward("b1 s30:20 h8:2 d56 causal", "nonfinite", SINKS),
)
WGMMA = "(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_1+regs_32_232+{}pack_gqa"
VICTIMS = {
    "mma_sync": OperationVictim(
        config(
            "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+trim+pack_gqa"
        ),
        CAUSAL,
        ASKED,
    ),
    "wgmma": OperationVictim(config(WGMMA.format("")), CAUSAL, ASKED),
    "direct": OperationVictim(config(WGMMA.format("direct_O+short_16+")), CAUSAL, ASKED),
    # Few SMs: tiles that are computed whole, and those in parts.
    "parts": OperationVictim(config(WGMMA.format("split_2+")), CAUSAL, ASKED, sm_count=6),
    "packed": OperationVictim(
        config(WGMMA.format("")),
        PACKED,
        (AskedForward("b3 s45:60 h8:2 d56 causal packed", options=SINKS),),
    ),
}
shared_kernels.want([VICTIMS["mma_sync"].config], CAUSAL)

_MMA, _CONSUMER, _SCHEDULER, _TILE = (
    "mma_sync/forward_kernel.cuh",
    "sm90_forward/consumer.cuh",
    "wgmma/scheduler.cuh",
    "sm90_forward/work_tile.cuh",
)
_TMA, _OUTPUT = "sm90/tma.cuh", "sm90_forward/output.cuh"
MISTAKES = {
    "mma_sync": (
        SourcePatch("sinks of the group's first head", _MMA,
                    "return at.head_of(at.first_row() + at.lane_row(m, r));",
                    "return at.head_of(0);"),
        SourcePatch("sinks of rows of the first tile", _MMA,
                    "return at.head_of(at.first_row() + at.lane_row(m, r));",
                    "return at.head_of(at.lane_row(m, r) + 1);"),
        SourcePatch("a mask by rows", _MMA,
                    "return at.token(at.first_row() + at.lane_row(m, r));",
                    "return at.first_row() + at.lane_row(m, r);"),
        SourcePatch("a head's token", _MMA, "Kernel::packs_gqa ? row / group : row;",
                    "Kernel::packs_gqa ? row % group : row;"),
        SourcePatch("heads of the first group", _MMA, "head * group + row % group :",
                    "row % group :"),
        SourcePatch("a token's heads backwards", _MMA, "head * group + row % group :",
                    "head * group + group - 1 - row % group :"),
        SourcePatch("statistics of the group's first head", _MMA,
                    "first_statistic<SEMANTICS>(args, at.batch, at.head_of(row))",
                    "first_statistic<SEMANTICS>(args, at.batch, at.head_of(0))"),
        SourcePatch("statistics of the first tile", _MMA,
                    "at.q.first + at.token(row);", "at.q.first + at.token(tile_row);"),
        SourcePatch("as many rows as queries", _MMA, "return q.count * group;", "return q.count;"),
        SourcePatch("blocks that rows would see", _MMA,
                    "return visible.blocks(at.token(first), tokens, Kernel::B_c);",
                    "return visible.blocks(at.token(first), 1, Kernel::B_c);"),
        SourcePatch("K and V of another head", _MMA, "Kernel::packs_gqa ? at.head : at.head /",
                    "false ? at.head : at.head /"),
        SourcePatch("rows of the first tile", _MMA,
                    "return GroupRows{at.first_row(), at.group,", "return GroupRows{0, at.group,"),
        SourcePatch("tokens and heads change places", _MMA,
                    "at.group, seq_stride * unit, head_stride * unit};",
                    "at.group, head_stride * unit, seq_stride * unit};"),
        SourcePatch("a warp sees to its first row", _MMA,
                    "visible.keys(at.token(row + N::rows_per_warp - 1)).last",
                    "visible.keys(at.token(row)).last"),
        SourcePatch("every pass copies the rows of the first", "common/tile_copy.cuh",
                    "return row_offset(rows, row + further) - row_offset(rows, row);", "return 0;"),
    ),
    "wgmma": (
        SourcePatch("sinks of the group's first head", _CONSUMER,
                    "{\n                return head_of<Kernel>(args, tile.head, "
                    "row_of_lane()(m, r));",
                    "{\n                return head_of<Kernel>(args, tile.head, 0);"),
        SourcePatch("a mask by rows", _CONSUMER, ".mask(S, lane, token_of_lane(),",
                    ".mask(S, lane, row_of_lane(),"),
        SourcePatch("statistics of the group's first head", _CONSUMER,
                    "const int head = head_of<Kernel>(args, tile.head, row);",
                    "const int head = head_of<Kernel>(args, tile.head, 0);"),
        SourcePatch("statistics by rows", _CONSUMER,
                    "token_of<Kernel>(args, row);\n                });",
                    "row;\n                });"),
        SourcePatch("heads of the first group", _TILE,
                    "head * group + (row & (group - 1)) : head;", "(row & (group - 1)) : head;"),
        SourcePatch("as many rows as queries", _SCHEDULER,
                    "if constexpr (Kernel::packs_gqa) q_rows *= args.heads_per_kv_head.divisor;",
                    ";"),
        SourcePatch("blocks of one token", _TILE,
                    "return visible.blocks(first, last - first + 1, Kernel::B_c);",
                    "return visible.blocks(first, 1, Kernel::B_c);"),
        SourcePatch("K and V of another head", _SCHEDULER, "Kernel::packs_gqa ? head : int(",
                    "false ? head : int("),
        SourcePatch("heads of all queries", _SCHEDULER,
                    "Kernel::packs_gqa ? args.problem.heads_k : args.problem.heads_q;",
                    "args.problem.heads_q;"),
        SourcePatch("Q of the first token", _TMA, "return {0, head, token, batch};",
                    "return {0, head, 0, batch};"),
        SourcePatch("boxes of the first head", _TILE,
                    "head_of<Kernel>(args, info.head, row), info.batch);", "0, info.batch);"),
    ),
    "direct": (
        SourcePatch("both rows of a lane in one place", _OUTPUT,
                    "return offset(row + 8) - offset(row);", "return 0;"),
        SourcePatch("rows of the group's first head", _OUTPUT,
                    "head_of<Kernel>(args, info.head, row) * problem.o_head_stride +"
                    " kFirstColumn +\n"
                    "                  8 * odd",
                    "head_of<Kernel>(args, info.head, 0) * problem.o_head_stride +"
                    " kFirstColumn +\n"
                    "                  8 * odd"),
        SourcePatch("a short block by rows", _CONSUMER,
                    "const int end = token_of<Kernel>(args, tile.first_row + kWarpgroupRows);",
                    "const int end = token_of<Kernel>(args, tile.first_row) + 1;"),
    ),
    "parts": (
        SourcePatch("the merge's sinks are of the keys' head", "wgmma/merge_kernel.cuh",
                    "head_of<Kernel>(args, info.head, row)", "info.head"),
        SourcePatch("the merge writes rows for queries", "wgmma/merge_kernel.cuh",
                    "token_of<Kernel>(args, row)", "row"),
    ),
    "packed": (
        SourcePatch("a sequence ends with the tile's rows", _TILE,
                    "token_of<Kernel>(args, info.row_end),", "info.row_end,"),
        SourcePatch("Q of the first sequence", _TMA,
                    "return {0, head, kRowsOfMap - count + token, sequence_first + count};",
                    "return {0, head, kRowsOfMap - count + token, count};"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES)


@pytest.mark.parametrize("place", [0, 2, 6])
def test_the_first_mistakes_are_caught(place: int) -> None:
    assert SUITE.unnoticed_mistakes("mma_sync", slice(place, place + 1)) == set()
