"""Mistakes in the sources of gradients with score and mask functions, and where each shows."""

from __future__ import annotations

import numpy as np
from program_calls import PROGRAMS, Call, Make, bound

from flashsmith.semantics.program import SCORE, BoundProgram, K, Q
from flashsmith.semantics.typed import apply, where

_PROGRAM = "backward/program_scores.cuh"
_STATE, _SCORES = "wgmma_backward/consumer_state.cuh", "wgmma_backward/scores.cuh"
_DQ_PART, _LISTS = "wgmma_backward/dq_part.cuh", "wgmma_backward/list_kernels.cuh"
_STEPS = "wgmma_backward/listed_steps.cuh"


def loud_where_hidden(call: Call, draw: np.random.Generator) -> BoundProgram:
    """Hidden scores and their slopes are infinite."""
    hidden = apply("remainder", Q + K, 3).equals(0)
    loud = apply("exp", SCORE + 400.0)
    return bound(where(hidden, loud, SCORE), apply("not", hidden))


def full_beside_partial(call: Call, draw: np.random.Generator) -> BoundProgram:
    """The first warpgroup's keys are visible to all rows, some of the second one's to none."""
    return bound(None, (K < 64) | (apply("remainder", Q + K, 3) < 2))


MAKERS: dict[str, Make] = {
    **PROGRAMS,
    "loud_where_hidden": loud_where_hidden,
    "full_beside_partial": full_beside_partial,
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
        "const int first_key = tile_of_head * Kernel::B_c, first_row = block * Kernel::B_r;",
        "const int first_key = block * Kernel::B_r, first_row = tile_of_head * Kernel::B_c;",
        "documents",
    ),
    (
        "partial as full",
        _STATE,
        "return !entry.is_full(2 * warpgroup);",
        "return false;",
        "documents",
    ),
    (
        "another warpgroup's part is full",
        _STATE,
        "return !entry.is_full(2 * warpgroup);",
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
)
