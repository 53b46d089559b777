"""The parts of a family's cost model: the rates of an SM, and the work of one tile."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flashsmith.families.device import DeviceSpec
from flashsmith.operations.problem import Problem


class Rates(NamedTuple):
    """Per SM and clock, and the clock under load in GHz.

    mma: FLOP of mma.sync with fp32 accumulators. l2 and dram: bytes read from L2 and from memory
    while all SMs read. wgmma and wgmma_clock: FLOP of wgmma, and the clock that its power leaves; 0
    where there is none.
    """

    mma: float
    l2: float
    clock: float
    dram: float
    wgmma: float = 0.0
    wgmma_clock: float = 0.0


# The same on all GPUs, per SM and clock: 128 bytes of shared memory, 16 exp2 of the special
# function units, and one instruction for each of the four schedulers.
SMEM_BYTES = 128.0
EXP2 = 16.0
QUARTERS = 4

# sm_90 is measured on an H200 (docs/results.md names the figures); the others are data sheets'.
_OF_ARCH = {
    80: Rates(2048, 40, 1.35, 13),
    86: Rates(1024, 32, 1.6, 5),
    89: Rates(1024, 32, 1.8, 3.4),
    90: Rates(2716, 38, 1.75, 19.6, wgmma=4096, wgmma_clock=1.5),
    100: Rates(2048, 38, 1.8, 30),
    120: Rates(512, 32, 2.3, 4.6),
}
# Consumer cards accumulate in fp32 at half the rate.
_CONSUMER_MMA = 512.0


@lru_cache(maxsize=64)
def rates_of(device: DeviceSpec) -> Rates:
    """The rates of a GPU; one of an unknown architecture gets those of the last known before it."""
    known = [arch for arch in _OF_ARCH if arch <= device.arch] or [min(_OF_ARCH)]
    rates = _OF_ARCH[max(known)]
    if "rtx 30" in device.name.lower() or "rtx 40" in device.name.lower():
        return rates._replace(mma=_CONSUMER_MMA)
    return rates


class TileWork(NamedTuple):
    """One kernel's tile on one GPU.

    A CTA computes ``rows`` rows of Q in steps of ``keys`` keys; with ``of_keys`` it has ``rows``
    rows of K, and steps over ``keys`` queries of every head of q that shares theirs. An SM holds
    ``resident`` CTAs.
    ``step_cycles[n]`` are the cycles in which each of n CTAs on an SM does one step, for n from 0
    to resident; ``cta_cycles`` those of a CTA apart from its steps. ``clock`` is the SM's under
    this work, GHz.

    ``masked_rows``: a mask skips a CTA's work in blocks of this many rows; 0: of all its rows.
    ``longest_first``: the longest tiles of many heads begin first, so that the short ones fill up
    the end.
    ``parts``: tiles that would leave SMs idle are computed in so many parts of their keys; each
    takes ``part_cycles`` more than its steps and a CTA's own.
    ``packs_gqa``: rows are the query heads of a group, token after token.
    """

    rows: int
    keys: int
    resident: int
    cta_cycles: float
    step_cycles: tuple[float, ...]
    clock: float
    masked_rows: int = 0
    longest_first: bool = False
    of_keys: bool = False
    parts: int = 0
    part_cycles: float = 0.0
    packs_gqa: bool = False

    def group(self, problem: Problem) -> int:
        """Rows of a token."""
        return problem.heads_q // max(1, problem.heads_k) if self.packs_gqa else 1

    def tokens(self, problem: Problem) -> int:
        """Tokens whose rows are in a tile, at least in part."""
        return -(-self.rows // self.group(problem))

    def tiles(self, problem: Problem) -> int:
        """Tiles of all queries."""
        group = self.group(problem)
        return problem.batch * problem.heads_q // group * -(-problem.seq_q * group // self.rows)


class CallWork(NamedTuple):
    """All launches of a call on one GPU, of kernels whose CTAs are no tiles of queries.

    ms: what they take; ctas: of the main launch; resident: of its CTAs on an SM; rows: of a CTA;
    heads: of q, whose queries share these rows.
    """

    ms: float
    ctas: int
    resident: int
    rows: int
    heads: int = 1
