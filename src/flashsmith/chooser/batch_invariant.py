"""The problem that represents a sequence in any batch, and the config for an actual call.

Over a cache, a sequence must have the same bits in every batch. Its kernel therefore must not
depend on other sequences.
"""

from __future__ import annotations

from dataclasses import replace

from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.operations import DECODE

# Keys of the representative sequence, if the kernel must not depend on the number of keys.
TYPICAL_KEYS = 8192


def without_batch(problem: Problem) -> Problem:
    """The problem for which a kernel is chosen. Over a cache, fixed values replace the batch, the
    lengths, packing and the page size (with canonical bits only the page size). For other
    operations the problem is unchanged."""
    if problem.operation != DECODE.name:
        return problem
    if problem.bits:  # canonical bits do not depend on the kernel, so only the page is dropped
        return replace(problem, page=0)
    semantics = replace(problem.semantics, packed=False, uneven=False)
    return replace(problem, batch=1, seq_q=1, seq_k=TYPICAL_KEYS, semantics=semantics, page=0)


def adapt_to_queries(config: KernelConfig, problem: Problem, device: DeviceSpec) -> KernelConfig:
    """The config that serves the problem, given the `config` chosen for any batch. The result may
    add kernels for sequences of many queries, which do not affect the other kernels' bits."""
    found: KernelConfig = config.family.adapt_to_queries(config, problem, device)
    return found
