"""Mistakes in kernels over a cache that skip what a mask hides: in which steps are visited, in
where warps keep their sums, and in positions. All must be caught."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from cache_calls import (
    BLOCK,
    CHUNKS,
    EARLY,
    GROUP,
    ROWS,
    Cache,
    Emulation,
    Function,
    ScaledCache,
    curved_in_documents,
    in_documents,
    listed,
)
from operation_victims import SourcePatch, StopAtFinding, patched_modules, void_mistakes

from flashsmith.errors import EmulatorError
from flashsmith.families import KernelConfig, device_spec
from flashsmith.families.mma_sync_decode.sets import over_cache
from flashsmith.runtime.libraries import LoadedKernel
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.tracing.captures import Constant
from ptxlab.checks import all_checks


def more_to_the_first_row(cache: Cache) -> Function:
    """Few blocks for all rows, and others for the first query in the first head."""
    table, _ = listed(cache, 0.1)
    more = cache.draw.random(table.shape[-1]) < 0.7
    lens, queries, dropped = map(np.array, (cache.lens, cache.queries, cache.dropped))
    first = (lens - queries + dropped).astype(np.int32)
    block, group = Constant(BLOCK), Constant(GROUP)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        of_first = (q == first[b]) & (h == 0) & more[k // block]
        return table[b, h // group, 0, k // block] | of_first

    return mask


class Victim:
    """A config's kernel of ALiBi in documents, or of a curved score over 8-bit floats with scales,
    or of blocks that a table shows: few, or to the first row more than to others, or many, in long
    runs."""

    def __init__(self, cfg: KernelConfig, arch: int, queries: int, shows: str) -> None:
        # The queries of the third sequence are in two steps of a warp.
        self.lens = (queries, 300, 290, 255)
        made = ScaledCache if shows == "curved" else Cache
        self.cache = made(self.lens, (queries,) * 4, seed=queries, dropped=(0, 7, 40, 16))
        score: Function | None
        if shows == "curved":
            score, mask = curved_in_documents(self.cache)
        elif shows == "documents":
            score, mask = in_documents(self.cache)
        elif shows == "many":
            score, mask = None, listed(self.cache, 0.7)[1]
        elif shows == "to the first row":
            score, mask = None, more_to_the_first_row(self.cache)
        else:
            table, mask = listed(self.cache)
            table[1] = False
            table[2, :, :, 2:9] = False
            score = None
        # With few SMs a CTA takes all keys of a sequence.
        sm_count = 2 if shows == "many" else 6
        self.emulation = Emulation(cfg, arch, score, mask, sm_count)
        self.config, self.arch, self.semantics = cfg, arch, self.emulation.semantics

    def says(self, changed: LoadedKernel | None = None) -> str:
        """What is wrong with a changed kernel's outputs, or what the emulator found."""
        found = ""
        for paged in (False, True):
            checks = all_checks()
            watching = [*checks, StopAtFinding(checks)]
            try:
                found = self.emulation.wrong(
                    self.cache, paged=paged, observers=watching, changed=changed
                )
            except EmulatorError as stopped:
                found = str(stopped)
            if found:
                return found
        return found


@cache
def victim(name: str) -> Victim:
    made: dict[str, tuple[KernelConfig, int, int, str]] = {
        "blocks": (EARLY, 90, 3, "few"),
        "rows unlike": (EARLY, 90, 3, "to the first row"),
        "long runs": (ROWS, 90, 20, "many"),
        "documents": (CHUNKS, 80, 3, "documents"),
        "chunks in documents": (CHUNKS, 80, 70, "documents"),
        "scales": (over_cache(CHUNKS, CacheFormat.E4M3, device_spec(80)), 80, 3, "curved"),
    }
    return Victim(*made[name])


_TILE, _COPIES = "mma_sync_decode/program_tile.cuh", "mma_sync_decode/run_copies.cuh"
_RUN, _INFO = "mma_sync_decode/decode_run.cuh", "mma_sync_decode/run_info.cuh"
_MERGE, _SCORES = "mma_sync_decode/part_merge.cuh", "mma_sync_decode/run_tile.cuh"
MISTAKES: dict[str, tuple[SourcePatch, ...]] = {
    "blocks": (
        SourcePatch("the step after a visited one", _TILE,
                    "if (bits != 0) return min(step + __ffs(bits) - 1, steps);",
                    "if (bits != 0) return min(step + __ffs(bits), steps);"),
        SourcePatch("a block's first key alone", _TILE,
                    "seen |= sees(row, key, of) | sees(row, key + kVisitedKeys - 1, of);",
                    "seen |= sees(row, key, of);"),
        SourcePatch("the keys of warp 0", _TILE, "(kSharesStages ? 0 : warp * kVisitedKeys)",
                    "0"),
        SourcePatch("positions in the cache", _TILE,
                    "seen |= sees(row, key, of) | sees(row, key + kVisitedKeys - 1, of);",
                    "seen |= sees(row, key - dropped, of) |"
                    " sees(row, key - dropped + kVisitedKeys - 1, of);"),
        SourcePatch("a group's first head", _TILE,
                    "args.by_group.divide(own) * args.heads_per_group;",
                    "args.by_group.divide(own) * args.heads_per_group - args.heads_per_group;"),
        SourcePatch("rows of consecutive steps", _COPIES,
                    "if constexpr (kSkips) next_rows = rows_from(key);", ""),
        SourcePatch("the next step is the one to copy", _COPIES, "return steps[0];",
                    "return next;"),
        SourcePatch("the sums of the reader's stage", _MERGE,
                    "return static_cast<int>((warp < 4 ? of_warps.x : of_warps.y) >> warp % 4 * 8"
                    " & 0xff);", "return own;"),
        SourcePatch("stages of two warps in one byte", _INFO, "return address + 36 + warp;",
                    "return address + 36 + warp / 2;"),
    ),
    "long runs": (
        SourcePatch("a step is not asked for", _RUN,
                    "after = next_visited(after, steps, visits.known);",
                    "after = next_visited(after + 1, steps, visits.known);"),
        SourcePatch("the page of another step", _RUN, "next_entry = page_of(after);",
                    "next_entry = page_of(copied);"),
    ),
    "rows unlike": (
        SourcePatch("a row of the tile is not asked", _TILE, "any_row(0, rows, [&]",
                    "any_row(1, rows, [&]"),
    ),
    "documents": (
        SourcePatch("the first query's mask", _TILE, "if (row == last) break;", "break;"),
        SourcePatch("half of a step's keys", _TILE, "lane % kVisitedKeys, of);",
                    "lane % (kVisitedKeys / 2), of);"),
        SourcePatch("positions without dropped keys", _TILE,
                    "[&](int m, int r) { return head_of_row(row(m, r)); }, key + dropped);",
                    "[&](int m, int r) { return head_of_row(row(m, r)); }, key);"),
        SourcePatch("the length of what the cache holds", _TILE,
                    "item.sequence.keys + dropped}", "item.sequence.keys}"),
    ),
    "chunks in documents": (
        SourcePatch("every warp decides alone", _TILE,
                    "if constexpr (Kernel::own_rows) return __syncthreads_or(seen) != 0;", ""),
        SourcePatch("what the first warp's rows see", _TILE,
                    "return __syncthreads_or(seen) != 0;",
                    "return __syncthreads_or(seen && warp == 0) != 0;"),
    ),
    "scales": (
        SourcePatch("the scale of no head", _TILE,
                    "scaled.scale = scaled_by_k(args, given.scale, item.head_k);", ""),
        SourcePatch("the scale of the first head", _TILE,
                    "scaled_by_k(args, given.scale, item.head_k)",
                    "scaled_by_k(args, given.scale, 0)"),
        SourcePatch("the scale once more behind the function", _SCORES,
                    "!SEMANTICS.changes_scores && !SEMANTICS.program_scores)",
                    "!SEMANTICS.changes_scores)"),
    ),
}  # fmt: skip


@cache
def _is_right(name: str) -> str:
    return victim(name).says()


# One mistake is enough for a plain run.
QUICK = ("the sums of the reader's stage",)


def test_mistakes_are_in_the_sources() -> None:
    assert void_mistakes(it for mistakes in MISTAKES.values() for it in mistakes) == []


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param(
            *(name, it), id=f"{name}: {it}", marks=[] if it.name in QUICK else [pytest.mark.full]
        )
        for name, mistakes in MISTAKES.items()
        for it in mistakes
    ],
)
def test_mistakes_in_the_sources_are_caught(name: str, mistake: SourcePatch) -> None:
    own = victim(name)
    changed = replace(own.emulation.kernel)
    changed.__dict__["modules"] = patched_modules(own, mistake)  # type: ignore[arg-type]
    assert _is_right(name) == ""
    assert own.says(changed) != ""


def test_the_victims_visit_different_steps() -> None:
    """So that warps are at different stages, and steps between visited ones are left out."""
    cache = victim("blocks").cache
    table, _ = listed(Cache(cache.lens, cache.queries, cache.seed, cache.dropped))
    per_step = EARLY.B_c // BLOCK
    steps = table[..., : table.shape[-1] // per_step * per_step].reshape(4, 2, -1, per_step)
    assert (np.ptp(steps.sum(axis=2), axis=2) > 0).any()
