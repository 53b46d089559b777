"""The problem that stands for a sequence in any batch, and what its kernel becomes in a call.

Over a cache a sequence is to have the same bits whatever batch it is in: its kernel may depend on
nothing that others change.
"""

from __future__ import annotations

from dataclasses import replace

from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.operations import DECODE

# The keys of the sequence that stands for all where a kernel may depend on none of them.
TYPICAL_KEYS = 8192


def of_any_batch(problem: Problem) -> Problem:
    """What of a problem its kernel is chosen by: of one over a cache GPU, dtype, d, heads and mask;
    of others all."""
    if problem.operation != DECODE.name:
        return problem
    if problem.bits:  # no bit depends on the kernel: another's page is all that plays no part
        return replace(problem, page=0)
    semantics = replace(problem.semantics, packed=False, uneven=False)
    return replace(problem, batch=1, seq_q=1, seq_k=TYPICAL_KEYS, semantics=semantics, page=0)


def for_its_queries(config: KernelConfig, problem: Problem, device: DeviceSpec) -> KernelConfig:
    """The config that serves the problem where `config` was chosen for any batch: kernels for
    sequences of many queries beside those for others, which have the same bits with and without."""
    found: KernelConfig = config.family.for_queries(config, problem, device)
    return found
