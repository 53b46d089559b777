"""Choices over a cache that do not depend on the batch.

A sequence over a cache must have the same bits in every batch. So its kernel must not depend on the
other sequences.
"""

from __future__ import annotations

from dataclasses import replace

from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.operations import DECODE
from flashsmith.operations.latent_decode import LATENT_DECODE

# The keys of the typical sequence for which a kernel is chosen if the choice must not depend on the
# number of keys.
TYPICAL_KEYS = 8192
# The number of sequences for which it is chosen. With one sequence over a latent cache most SMs
# would be idle, and repeated work would seem to cost nothing.
_TYPICAL_BATCH = {DECODE.name: 1, LATENT_DECODE.name: 32}


def without_batch(problem: Problem) -> Problem:
    """The problem for which a kernel is chosen, instead of the given one.

    Over a cache, the batch, the lengths, packing, the page size and the cache's format are replaced
    by fixed values; with canonical bits only the page size and the format. A latent cache keeps its
    format, which not all families serve. Other operations keep their problem.
    """
    if problem.operation not in _TYPICAL_BATCH:
        return problem
    if problem.bits:  # all kernels give the same canonical bits
        return for_any_pages(problem)
    # Kernels with a program are uneven.
    is_uneven = problem.semantics.program != ""
    semantics = replace(problem.semantics, packed=False, uneven=is_uneven)
    batch = _TYPICAL_BATCH[problem.operation]
    typical = replace(problem, batch=batch, seq_q=1, seq_k=TYPICAL_KEYS, semantics=semantics)
    return for_any_pages(typical)


def for_any_pages(problem: Problem) -> Problem:
    """The problem without its page size and, unless the cache is latent, the cache's format."""
    is_latent = problem.operation == LATENT_DECODE.name
    return replace(problem, page=0, cache=problem.cache if is_latent else "")


def adapt_to_queries(config: KernelConfig, problem: Problem, device: DeviceSpec) -> KernelConfig:
    """The config that serves the problem.

    ``config`` was chosen for any batch. The result may add kernels for sequences with many queries,
    which do not change the bits of other kernels.
    """
    found: KernelConfig = config.family.adapt_to_queries(config, problem, device)
    return found
