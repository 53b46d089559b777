"""Choices over a cache that do not depend on the batch.

The result for a sequence over a cache must have the same bits in every batch. So the choice of the
kernel must not depend on the other sequences in the batch.
"""

from __future__ import annotations

from dataclasses import replace

from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.operations import DECODE
from flashsmith.operations.latent_decode import LATENT_DECODE

# If the choice must not depend on the number of keys, a kernel is chosen for a typical sequence
# with this many keys.
TYPICAL_KEYS = 8192
# The number of such sequences for which that kernel is chosen. With one sequence over a latent
# cache most SMs would be idle, and the estimate would treat repeated work as free.
_TYPICAL_BATCH = {DECODE.name: 1, LATENT_DECODE.name: 32}


def without_batch(problem: Problem) -> Problem:
    """The problem that replaces the given one when a kernel is chosen.

    Over a cache, the batch, the lengths, packing, the page size and the cache's format are replaced
    by fixed values; with canonical bits only the page size and the format. A latent cache keeps its
    format, because not all families serve every format. A problem of any other operation is
    returned unchanged.
    """
    if problem.operation not in _TYPICAL_BATCH:
        return problem
    if problem.bits:  # all kernels give the same canonical bits
        return for_any_pages(problem)
    # Kernels with a program are always compiled for uneven lengths.
    is_uneven = problem.semantics.program != ""
    semantics = replace(problem.semantics, packed=False, uneven=is_uneven)
    batch = _TYPICAL_BATCH[problem.operation]
    typical = replace(problem, batch=batch, seq_q=1, seq_k=TYPICAL_KEYS, semantics=semantics)
    return for_any_pages(typical)


def for_free_split(problem: Problem) -> Problem:
    """The problem that replaces the given one if the split of the keys, and so the kernel, may
    depend on the batch.

    Kernels for 8-bit floats are chosen for any batch nevertheless: those that are best for large
    batches of 16 bits have steps of more keys, which took 8% more time over 8-bit floats.
    """
    if problem.operation == DECODE.name and problem.cache_format.is_8bit:
        return without_batch(problem)
    return for_any_pages(problem)


def for_any_pages(problem: Problem) -> Problem:
    """The problem without its page size and, unless the cache is latent, the cache's format."""
    is_latent = problem.operation == LATENT_DECODE.name
    return replace(problem, page=0, cache=problem.cache if is_latent else "")


def adapt_to_queries(config: KernelConfig, problem: Problem, device: DeviceSpec) -> KernelConfig:
    """Adapts a config, if necessary, so that it serves the problem.

    ``config`` was chosen for any batch. The result may add kernels for sequences with many queries,
    which do not change the bits of other kernels.
    """
    found: KernelConfig = config.family.adapt_to_queries(config, problem, device)
    return found
