"""Mistakes in the sources of gradients with score and mask functions, and where each shows."""

from __future__ import annotations

import numpy as np
from program_calls import PROGRAMS, Call, Make, bound

from flashsmith.semantics.program import SCORE, BoundProgram, K, Q
from flashsmith.semantics.typed import apply, where

_PROGRAM = "backward/program_scores.cuh"
_STATE, _SCORES = "wgmma_backward/consumer_state.cuh", "wgmma_backward/scores.cuh"
_DQ_PART, _LISTS = "wgmma_backward/dq_part.cuh", "backward/list_kernels.cuh"
_STEPS = "wgmma_backward/listed_steps.cuh"
_ROWS, _UNATTENDED = "backward/rows_kernels.cuh", "backward/unattended_rows.cuh"


def loud_where_hidden(call: Call, draw: np.random.Generator) -> BoundProgram:
    """Hidden scores and their slopes are infinite."""
    hidden = apply("remainder", Q + K, 3).equals(0)
    loud = apply("exp", SCORE + 400.0)
    return bound(where(hidden, loud, SCORE), apply("not", hidden))


def full_beside_partial(call: Call, draw: np.random.Generator) -> BoundProgram:
    """The first warpgroup's keys are visible to all rows, some of the second one's to none."""
    return bound(None, (K < 64) | (apply("remainder", Q + K, 3) < 2))


def full_above_partial(call: Call, draw: np.random.Generator) -> BoundProgram:
    """The first warpgroup's rows see all keys, some of the second one's only some."""
    return bound(None, (Q < 64) | (apply("remainder", Q + K, 3) < 2))


MAKERS: dict[str, Make] = {
    **PROGRAMS,
    "loud_where_hidden": loud_where_hidden,
    "full_beside_partial": full_beside_partial,
    "full_above_partial": full_above_partial,
}

#: Name, file, old and new text, and the program that shows it.
MISTAKES = (
    (
        "the slope left out",
        _PROGRAM,
        "ProgramOf<SEMANTICS>::slope(args, raw, batch, head, q, k, seq_q, seq_k), score);",
        "1.0f, score);",
        "capped",
    ),
    (
        "the slope at the new score",
        _PROGRAM,
        "::slope(args, raw,",
        "::slope(args, changed / args.scale,",
        "capped",
    ),
    (
        "hidden elements multiplied",
        _PROGRAM,
        "x[(word + i) / kNTiles][(word + i) % kNTiles][e] = 0.0f;",
        "x[(word + i) / kNTiles][(word + i) % kNTiles][e] *= 0.0f;",
        "loud_where_hidden",
    ),
    (
        "a hidden element's slope multiplied",
        _PROGRAM,
        "return p == 0.0f ? 0.0f : p * slope;",
        "return p * slope;",
        "loud_where_hidden",
    ),
    (
        "rows and keys exchanged in lists",
        _LISTS,
        "const int first_key = tile.tile_of_head * kKeys, first_row = block * kRows;",
        "const int first_key = block * kRows, first_row = tile.tile_of_head * kKeys;",
        "documents",
    ),
    (
        "partial as full",
        _STATE,
        "return !entry.is_full(2 * (first_row() / kWarpgroupRows));",
        "return false;",
        "documents",
    ),
    (
        "another warpgroup's part is full",
        _STATE,
        "return !entry.is_full(2 * (first_row() / kWarpgroupRows));",
        "return !entry.is_full(0);",
        "full_beside_partial",
    ),
    ("the first head's indices", _STATE, "head = step.head;", "head = 0;", "alibi_in_documents"),
    (
        "the first head's dq",
        _DQ_PART,
        "step.head * args.statistics_head_stride +",
        "0 * args.statistics_head_stride +",
        "documents",
    ),
    (
        "another step's dq",
        _SCORES,
        "8 * stages.written.stage());",
        "8 * stages.read.stage());",
        "documents",
    ),
    (
        "another block of keys' list",
        _STEPS,
        "keys.first_key / Kernel::B_c);",
        "keys.first_key / Kernel::B_c / 2);",
        "documents",
    ),
    (
        "rows that see no key multiplied",
        _UNATTENDED,
        "if (row < count && is_infinite(row)) return true;",
        ";",
        "everything",
    ),
    (
        "no look at the rows of other lanes",
        _UNATTENDED,
        "return any_lane(found);",
        "return found;",
        "everything",
    ),
    (
        "a sink as a key",
        _ROWS,
        "if (lse != -INFINITY && sees)",
        "if (lse != -INFINITY)",
        "everything",
    ),
    (
        "a sink's share of rows without keys",
        _ROWS,
        "lse_log2 = lse == -INFINITY ? INFINITY : lse * kLog2E;",
        ";",
        "everything",
    ),
    ("one lane's keys", _ROWS, "key += kLanes)", "key += kLanes * kLanes)", "everything"),
)

_DQ, _KEYS, _QUERIES = (
    "wgmma_dq/consumer.cuh",
    "mma_sync_backward/keys_kernel.cuh",
    "mma_sync_backward/queries_kernel.cuh",
)
#: The same of kernels that compute dq alone.
DQ_MISTAKES = (
    (
        "partial as full",
        _DQ,
        "return !entry.is_full(2 * warpgroup);",
        "return false;",
        "documents",
    ),
    (
        "another warpgroup's part is full",
        _DQ,
        "return !entry.is_full(2 * warpgroup);",
        "return !entry.is_full(0);",
        "full_above_partial",
    ),
    (
        "the block before",
        "wgmma_dq/producer.cuh",
        "load_listed_K(next);",
        "load_listed_K(entry);",
        "documents",
    ),
    (
        "V of the next block",
        "wgmma_dq/producer.cuh",
        "load_keys<Kernel::V_panels>(V, &args.v, entry.block());",
        "load_keys<Kernel::V_panels>(V, &args.v, next.block());",
        "documents",
    ),
    (
        "another tile's list",
        "wgmma_dq/query_block.cuh",
        "first_row / Kernel::B_r);",
        "first_row / Kernel::B_r / 2);",
        "documents",
    ),
)
#: The same of mma.sync kernels.
MMA_SYNC_MISTAKES = (
    (
        "partial as full",
        _KEYS,
        "return !is_full;",
        "return false;",
        "documents",
    ),
    ("the step after this one is full", _KEYS, "is_full = queries", "is_full |= queries", "blocks"),
    (
        "another block of keys' list",
        _KEYS,
        "of.first_key / Kernel::B_c);",
        "of.first_key / Kernel::B_c / 2);",
        "documents",
    ),
    (
        "partial as full for dq",
        _QUERIES,
        "needs_mask = !entry_at(list, place).is_full(0);",
        "needs_mask = false;",
        "documents",
    ),
    (
        "another tile of queries' list",
        _QUERIES,
        ".list(batch, head, first_row / Kernel::dq_rows);",
        ".list(batch, head, first_row / Kernel::dq_rows / 2);",
        "documents",
    ),
    (
        "rows that see no key multiplied",
        _KEYS,
        "store_shared_16B(do_tile(at.stage()) + place, uint4{0, 0, 0, 0});",
        "",
        "everything",
    ),
)
