"""Makes the choice of a kernel over a cache independent of the batch.

A sequence over a cache must have the same bits in every batch. So the choice of its kernel must not
depend on the other sequences in the batch.
"""

from __future__ import annotations

from dataclasses import replace

from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.operations import DECODE
from flashsmith.operations.latent_decode import LATENT_DECODE

# The number of keys of a typical sequence. A kernel is chosen for such a sequence if the choice
# must not depend on the number of keys.
TYPICAL_KEYS = 8192
# The number of typical sequences for which a kernel is chosen, by operation. With a single sequence
# over a latent cache, most SMs would be idle, and the estimate would treat repeated work as free.
_TYPICAL_BATCH = {DECODE.name: 1, LATENT_DECODE.name: 32}


def without_batch(problem: Problem) -> Problem:
    """Returns the problem for which a kernel is chosen in the place of the given problem.

    For an operation over a cache, fixed values replace the batch, the lengths, packing, the page
    size and the format of the cache. With canonical bits, they replace only the page size and the
    format. A latent cache keeps its format, because not all families serve every format. A problem
    of any other operation is returned unchanged.
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
    """Returns the problem for which a kernel is chosen in the place of the given problem if the
    split of the keys, and therefore the kernel, may depend on the batch.

    Even then, kernels for 8-bit floats are chosen independently of the batch. The kernels that are
    best for large batches with caches of 16 bits have steps of more keys, which took 8% more time
    over caches of 8-bit floats.
    """
    if problem.operation == DECODE.name and problem.cache_format.is_8bit:
        return without_batch(problem)
    return for_any_pages(problem)


def for_any_pages(problem: Problem) -> Problem:
    """Returns the problem without its page size. Unless the cache is latent, the format of the
    cache is removed too."""
    is_latent = problem.operation == LATENT_DECODE.name
    return replace(problem, page=0, cache=problem.cache if is_latent else "")


def adapt_to_queries(config: KernelConfig, problem: Problem, device: DeviceSpec) -> KernelConfig:
    """Returns the config, adapted if necessary so that it serves the problem.

    ``config`` was chosen independently of the batch. The result may have additional kernels for
    sequences with many queries, which do not change the bits of other kernels.
    """
    found: KernelConfig = config.family.adapt_to_queries(config, problem, device)
    return found
