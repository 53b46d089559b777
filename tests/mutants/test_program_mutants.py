"""Mistakes in kernels of score and mask functions: in the lists of blocks, in the code that walks
them, in masks, and in plans. All must be caught."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
from operation_victims import SourcePatch, StopAtFinding, patched_modules, void_mistakes
from program_calls import PROGRAMS, TABLES, BoundProgram, Call, Make, wrong

from flashsmith.errors import EmulatorError
from flashsmith.families import KernelConfig, Semantics
from flashsmith.families import parse_kernel_name_into_config as config
from flashsmith.runtime.launch_plan import LaunchPlan
from flashsmith.runtime.libraries import LoadedKernel, loaded_kernels
from ptxlab.checks import all_checks

CALL = Call(batch=2, seq_q=330, seq_k=140, heads_q=2, heads_k=1, d=56)


class Victim:
    """A config's kernel of a program, which the mistakes are made in."""

    def __init__(
        self, cfg: KernelConfig, make: Make = PROGRAMS["everything"], call: Call = CALL
    ) -> None:
        self.config, self.arch, self.make, self.call = cfg, cfg.OLDEST_ARCH, make, call

    @property
    def bound(self) -> BoundProgram:
        return self.make(self.call, np.random.default_rng(5))

    @property
    def semantics(self) -> Semantics:
        is_part = self.call.ranges is not None
        return Semantics(uneven=True, partial=is_part, program=self.bound.program)

    @property
    def kernel(self) -> LoadedKernel:
        return loaded_kernels.get(self.config, self.arch, self.semantics)

    def says(self, changed: LoadedKernel | None = None) -> str:
        """What is wrong with a changed kernel's outputs, or what the emulator found."""
        key = self.config, self.arch, self.semantics
        checks = all_checks()
        watching = [*checks, StopAtFinding(checks)]
        with patch.dict(loaded_kernels.kernels, {key: changed or self.kernel}):
            try:
                return wrong(
                    *(self.config, self.call, self.bound),
                    checks=False,
                    observers=watching,
                    arch=self.arch,
                    sm_count=3,
                )
            except EmulatorError as stopped:
                return str(stopped)


WGMMA = Victim(
    config(
        "(FP16, 64, 192, 32, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
        "+longest_first+rescale_8"
    )
)
MMA_SYNC = Victim(
    config("(FP16, 64, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+trim")
)
# A mask that does not depend on the sequence, over keys that do.
PARTS = Victim(
    config("(FP16, 64, 64, 32, 1wg): tma+stages_1+q_buffers_2+regs_24_240+direct_O"),
    PROGRAMS["scattered"],
    Call(batch=2, seq_q=64, seq_k=140, heads_q=1, heads_k=1, ranges=((30, 20), (0, 140))),
)
_LISTS, _SCORES = "common/block_lists.cuh", "common/program_scores.cuh"
_PRODUCER, _CONSUMER = "wgmma/producer.cuh", "sm90_forward/consumer.cuh"
_TILE, _MMA = "sm90_forward/work_tile.cuh", "mma_sync/forward_kernel.cuh"
MISTAKES = (
    SourcePatch("partial as full", _LISTS, "return BlockEntry::kPartial;",
                "return BlockEntry::kFull;"),
    SourcePatch("partial as within limits", _LISTS, "return BlockEntry::kPartial;",
                "return BlockEntry::kWithinLimits;"),
    SourcePatch("within limits as full", _LISTS,
                "return any_lane(!sees_all) ? BlockEntry::kWithinLimits : BlockEntry::kFull;",
                "return BlockEntry::kFull;"),
    SourcePatch("full as absent", _LISTS,
                "return any_lane(!sees_all) ? BlockEntry::kWithinLimits : BlockEntry::kFull;",
                "return any_lane(!sees_all) ? BlockEntry::kWithinLimits : 0;"),
    SourcePatch("unseen by this group as full", _LISTS,
                "return (bits >> shift & kWithinLimits) == 0;",
                "return (bits >> shift & kAny) == kPartial;"),
    SourcePatch("within limits as absent", _LISTS,
                "(bits >> 2 * g & BlockEntry::kAny) != 0",
                "(bits >> 2 * g & BlockEntry::kPartial) != 0"),
    SourcePatch("lists of the first sequence", _LISTS, "if constexpr (kByBatch) index = batch;",
                "if constexpr (kByBatch) index = 0;"),
    SourcePatch("lists of the first head", _LISTS, "index = index * problem.heads_q + head;",
                "index = index * problem.heads_q;"),
    SourcePatch("the first head's mask", _LISTS, "found.head = rest % problem.heads_q;",
                "found.head = 0;"),
    SourcePatch("an entry too late", _LISTS, "entries[count + __popc(present & before)]",
                "entries[count + __popc(present & before) + 1]"),
    SourcePatch("no barrier while a list is compacted", _LISTS,
                "__syncwarp();\n        if (bits != 0)", "if (bits != 0)"),
    SourcePatch("a group without its last block", _LISTS,
                "end[g] = count + __popc(present & (highest - 1)) + 1;",
                "end[g] = count + __popc(present & (highest - 1));"),
    SourcePatch("a group without its first block", _LISTS,
                "begin[g] = count + __popc(present & (lowest - 1));",
                "begin[g] = count + __popc(present & (lowest - 1)) + 1;"),
    SourcePatch("every eighth row", _LISTS, "const int q = min(row + i, row_end - 1);",
                "const int q = row;"),
    SourcePatch("the first group's blocks", _TILE, "list[1 + 2 * group], list[2 + 2 * group]",
                "list[1], list[2]"),
    SourcePatch("full for the first group", _CONSUMER, "!entry.is_full(tile.group_shift)",
                "!entry.is_full(0)"),
    SourcePatch("keys of a position", _CONSUMER, "return entry.block() * Kernel::B_c;",
                "return block * Kernel::B_c;"),
    SourcePatch("another stage's entry", _CONSUMER, "entry_offset + 4 * K.state.stage()",
                "entry_offset + 4 * (K.state.stage() ^ 1)"),
    SourcePatch("V of the next block", _PRODUCER,
                "\n            load_K(tile, next);\n"
                "            load(V, &args.v, tile, entry.block());",
                "\n            load_K(tile, next);\n"
                "            load(V, &args.v, tile, next.block());"),
    SourcePatch("an entry twice", _PRODUCER, "i >= 2 ? entries[i - 2] : 0",
                "i >= 2 ? entries[i - 1] : 0"),
    SourcePatch("the neighbour's element", _SCORES, "(seen >> (4 * n + e) & 1) == 0",
                "(seen >> ((4 * n + e) ^ 1) & 1) == 0"),
)  # fmt: skip
OF_MMA_SYNC = (
    SourcePatch("full blocks as partial ones, and the reverse", _MMA,
                "return !entry(position).is_full(0);", "return entry(position).is_full(0);"),
    SourcePatch("the next Q block's list", _MMA, ".list(at.batch, at.head, at.Q_block);",
                ".list(at.batch, at.head, (at.Q_block + 1) % args.n_Q_blocks);"),
    SourcePatch("the next entry", _MMA, "return {list[kBlockListHeader + position]};",
                "return {list[kBlockListHeader - 1 + position]};"),
)  # fmt: skip


# Tiles inside tables, beyond them, and across their ends.
ALONE = config("(FP16, 64, 64, 32, 1wg): tma+stages_1+q_buffers_2+regs_24_240+direct_O")
LONG = Call(batch=1, seq_q=64, seq_k=200, heads_q=1, heads_k=1, d=8)
TALL = replace(LONG, seq_q=200, seq_k=64)
NEAR, FROM_THE_END, STRIDED = (
    Victim(ALONE, TABLES[name], call)
    for name, call in (("near", LONG), ("from_the_end", TALL), ("strided", LONG))
)
_READS = "common/program.cuh"
OF_OTHERS = (
    (NEAR, SourcePatch("clamped keys as inside", _READS, "(follows & is_inside ? kInside : 0)",
                       "(is_inside ? kInside : 0)")),
    (NEAR, SourcePatch("across an end as beyond", _READS,
                       "counts & (min(first, end) == min(last, end))", "counts")),
    (NEAR, SourcePatch("the second row's reach", _SCORES, "found &=", "found =")),
    (NEAR, SourcePatch("the next element", _READS, "one.unclamped.column * int(sizeof(Element))",
                       "(one.unclamped.column + 1) * int(sizeof(Element))")),
    (FROM_THE_END, SourcePatch("below 0 as inside", _READS,
                               "const bool counts = min(first, last) >= 0;",
                               "const bool counts = true;")),
    (FROM_THE_END, SourcePatch("past the end as inside", _READS,
                               "counts & (max(first, last) <= end) &", "counts &")),
    (FROM_THE_END, SourcePatch("the last key untested", _SCORES,
                               "Place(first_column, 8 * (kNTiles - 1) + 1)",
                               "Place(first_column, 0)")),
    (PARTS, SourcePatch("one sequence's lists for all", "common/types.cuh",
                        "mask_by_batch || packed || partial;", "mask_by_batch || packed;")),
    (STRIDED, SourcePatch("strides as 1", _READS, " & (from.strides[kDim] == 1)", "")),
)  # fmt: skip


EVERY_MISTAKE = (
    *((WGMMA, it) for it in MISTAKES),
    *((MMA_SYNC, it) for it in OF_MMA_SYNC),
    *OF_OTHERS,
)
# Of each kind one is enough for a plain run.
QUICK = (
    *("partial as full", "no barrier while a list is compacted", "keys of a position"),
    *("the neighbour's element", "the next Q block's list", "clamped keys as inside"),
)


@cache
def _is_right(victim: Victim) -> str:
    return victim.says()


def _caught(victim: Victim, changed: LoadedKernel) -> bool:
    assert _is_right(victim) == ""
    return victim.says(changed) != ""


def test_mistakes_are_in_the_sources() -> None:
    assert void_mistakes((it for _, it in EVERY_MISTAKE)) == []


@pytest.mark.parametrize(
    ("victim", "mistake"),
    [
        pytest.param(
            *(victim, it), id=it.name, marks=[] if it.name in QUICK else [pytest.mark.full]
        )
        for victim, it in EVERY_MISTAKE
    ],
)
def test_mistakes_in_the_sources_are_caught(victim: Victim, mistake: SourcePatch) -> None:
    changed = replace(victim.kernel)
    changed.__dict__["modules"] = patched_modules(victim, mistake)  # type: ignore[arg-type]
    assert _caught(victim, changed)


def test_the_plain_runs_mistakes_are_among_them() -> None:
    assert set(QUICK) < {mistake.name for _, mistake in EVERY_MISTAKE}


@pytest.mark.parametrize("left_out", [0, 1], ids=["list_blocks", "compact_lists"])
def test_a_list_that_nobody_wrote_is_caught(left_out: int) -> None:
    kernel = WGMMA.kernel
    changed = replace(kernel)

    def plan(call: object) -> LaunchPlan:
        whole = kernel.plan(call)  # type: ignore[arg-type]
        launches = [it for i, it in enumerate(whole.launches) if i != left_out]
        return replace(whole, launches=tuple(launches))

    changed.__dict__["plan"] = plan
    assert _caught(WGMMA, changed)
