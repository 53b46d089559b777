"""The problem that represents a sequence in any batch, and the config for an actual call.

Over a cache, a sequence must have the same bits in every batch. Its kernel therefore depends on
nothing that other sequences change.
"""

from __future__ import annotations

from dataclasses import replace

from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.operations import DECODE

# The number of keys of the representative sequence, if the kernel may not depend on key counts.
TYPICAL_KEYS = 8192


def without_batch(problem: Problem) -> Problem:
    """The problem by which a kernel is chosen. Over a cache it keeps only GPU, dtype, d, heads and
    mask; for other operations it is the problem itself."""
    if problem.operation != DECODE.name:
        return problem
    if problem.bits:  # canonical bits do not depend on the kernel, so only the page is dropped
        return replace(problem, page=0)
    semantics = replace(problem.semantics, packed=False, uneven=False)
    return replace(problem, batch=1, seq_q=1, seq_k=TYPICAL_KEYS, semantics=semantics, page=0)


def adapt_to_queries(config: KernelConfig, problem: Problem, device: DeviceSpec) -> KernelConfig:
    """The config that serves the problem, given the `config` chosen for any batch. It may add
    kernels for sequences of many queries, which do not change the other kernels' bits."""
    found: KernelConfig = config.family.adapt_to_queries(config, problem, device)
    return found
