"""The common parts of the backward families' cost models."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.device import DeviceSpec
from flashsmith.families.tile_work import rates_of
from flashsmith.operations.problem import Problem

# All SMs together add fp32 dq in the L2 at this share of the rate at which they load from it;
# measured on an H200.
_SHARE_OF_L2 = 0.43
# Milliseconds from the end of one launch to the first work of the next; the same time passes before
# the first work.
_LAUNCH_MS = 0.003
_NORM = 4.0
_FLOAT_BYTES = 4


def reduced_per_clock(device: DeviceSpec) -> float:
    """How many bytes of fp32 sums an SM adds per clock in the L2 while all SMs do this."""
    return _SHARE_OF_L2 * rates_of(device).l2


def joined(bounds: Sequence[float]) -> float:
    """The cycles of several kinds of work that overlap on an SM: the cycles of the longest, and a
    small share of the others."""
    return float(sum(bound**_NORM for bound in bounds) ** (1 / _NORM))


def helpers_ms(problem: Problem, device: DeviceSpec, sums_dq: bool) -> float:
    """Milliseconds for the launches before and after the main kernel, with the gaps between
    launches. The launches before it compute D for all rows. If dq is summed in fp32, they also set
    it to zero, and a launch after it converts it."""
    element = problem.dtype.element_size
    moved = 2 * element  # For do and o
    if sums_dq:
        moved += 2 * _FLOAT_BYTES + element
    elements = problem.batch * problem.heads_q * problem.seq_q * (problem.d + problem.d_v) / 2
    rates = rates_of(device)
    per_ms = rates.dram * device.sm_count * rates.clock * 1e6
    return elements * moved / per_ms + (4 if sums_dq else 3) * _LAUNCH_MS
