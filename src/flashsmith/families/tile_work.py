"""The common parts of all cost models: the rates of an SM, the work of one tile, and the work of a
call."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flashsmith.families.device import DeviceSpec
from flashsmith.operations.problem import Problem


class Rates(NamedTuple):
    """The rates of an SM per clock cycle, and its clock under load in GHz.

    mma: the FLOP of mma.sync with fp32 accumulators.
    l2, dram: bytes read from the L2 and from device memory while all SMs read.
    wgmma: FLOP of wgmma.
    wgmma_clock: the clock in GHz that the power draw of wgmma allows. wgmma and wgmma_clock are 0
        on GPUs without wgmma.
    """

    mma: float
    l2: float
    clock: float
    dram: float
    wgmma: float = 0.0
    wgmma_clock: float = 0.0


# Rates of an SM per clock that are the same on all GPUs: 128 bytes of shared memory, 16 exp2 by the
# special function units, and one instruction of each of the four schedulers.
SMEM_BYTES = 128.0
EXP2 = 16.0
QUARTERS = 4

# The rates for sm_90 were measured on an H200 (docs/results.md names these measurements). The other
# rates are from data sheets.
_OF_ARCH = {
    80: Rates(2048, 40, 1.35, 13),
    86: Rates(1024, 32, 1.6, 5),
    89: Rates(1024, 32, 1.8, 3.4),
    90: Rates(2716, 38, 1.75, 19.6, wgmma=4096, wgmma_clock=1.5),
    100: Rates(2048, 38, 1.8, 30),
    120: Rates(512, 32, 2.3, 4.6),
}
# The rate of MMAs with fp32 accumulators on consumer GPUs, half of the rate above for
# sm_86 and sm_89.
_CONSUMER_MMA = 512.0


@lru_cache(maxsize=64)
def rates_of(device: DeviceSpec) -> Rates:
    """The rates of a GPU.

    If the GPU's architecture is unknown, returns the rates of the newest known architecture that is
    older.
    """
    known = [arch for arch in _OF_ARCH if arch <= device.arch] or [min(_OF_ARCH)]
    rates = _OF_ARCH[max(known)]
    if "rtx 30" in device.name.lower() or "rtx 40" in device.name.lower():
        return rates._replace(mma=_CONSUMER_MMA)
    return rates


class TileWork(NamedTuple):
    """The work of one tile of a kernel on one GPU.

    A CTA computes ``rows`` rows of Q in steps of ``keys`` keys. With ``of_keys``, it computes
    ``rows`` rows of K in steps of ``keys`` queries, for all heads of q that share this K/V head. An
    SM holds ``resident`` CTAs. ``step_cycles[n]`` is the number of cycles that one step takes while
    n CTAs share an SM, for n from 0 to resident. ``cta_cycles`` is the number of cycles that a CTA
    takes outside its steps. ``clock`` is the clock of the SM under this work, in GHz.

    ``masked_rows``: where a mask hides keys, a CTA skips work for blocks of this many rows at once;
    0 means that it skips work only for all its rows at once.
    ``longest_first``: whether the longest tiles of many heads start first, so that short tiles run
    at the end of the launch.
    ``parts``: if tiles would leave SMs idle, the keys of a tile are split into this many parts.
    Each part takes ``part_cycles`` in addition to its steps and ``cta_cycles``.
    ``packs_gqa``: whether the rows are the query heads of a group, token after token.
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
        """The number of rows that each token has in a tile."""
        return problem.heads_q // max(1, problem.heads_k) if self.packs_gqa else 1

    def tokens(self, problem: Problem) -> int:
        """The minimum number of tokens that have rows in a tile."""
        return -(-self.rows // self.group(problem))

    def tiles(self, problem: Problem) -> int:
        """The number of tiles that all queries together need."""
        group = self.group(problem)
        return problem.batch * problem.heads_q // group * -(-problem.seq_q * group // self.rows)


class CallWork(NamedTuple):
    """The work of all launches of a call on one GPU, for kernels whose CTAs are not tiles of
    queries.

    ms: the time of all launches.
    ctas: the number of CTAs of the main launch.
    resident: the number of these CTAs that an SM holds at the same time.
    rows: the rows of one CTA.
    heads: the number of q's heads that these rows belong to.
    """

    ms: float
    ctas: int
    resident: int
    rows: int
    heads: int = 1
