"""The problem that stands for a sequence in any batch.

Over a cache a sequence is to have the same bits whatever batch it is in: its kernel may depend on
nothing that others change.
"""

from __future__ import annotations

from dataclasses import replace

from flashsmith.families import Problem
from flashsmith.operations import DECODE

# The keys of the sequence that stands for all where a kernel may depend on none of them.
TYPICAL_KEYS = 8192


def of_any_batch(problem: Problem) -> Problem:
    """What of a problem its kernel is chosen by: of one over a cache GPU, dtype, d, heads and mask;
    of others all."""
    if problem.operation != DECODE.name:
        return problem
    semantics = replace(problem.semantics, packed=False, uneven=False)
    return replace(problem, batch=1, seq_q=1, seq_k=TYPICAL_KEYS, semantics=semantics, page=0)
