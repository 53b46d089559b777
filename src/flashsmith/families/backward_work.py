"""Common parts of the cost models of the backward families."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.device import DeviceSpec
from flashsmith.families.tile_work import rates_of
from flashsmith.operations.problem import Problem

# The rate at which all SMs add fp32 dq in L2, as a share of the L2 load rate; measured on an H200.
_SHARE_OF_L2 = 0.43
# Milliseconds from the end of one launch to the first work of the next, and before the first work.
_LAUNCH_MS = 0.003
_NORM = 4.0
_FLOAT_BYTES = 4


def reduced_per_clock(device: DeviceSpec) -> float:
    """Bytes of fp32 sums per clock that one SM adds in L2 while all SMs add."""
    return _SHARE_OF_L2 * rates_of(device).l2


def joined(bounds: Sequence[float]) -> float:
    """Cycles of work that overlaps on an SM: the longest part, and a little of the others."""
    return float(sum(bound**_NORM for bound in bounds) ** (1 / _NORM))


def helpers_ms(problem: Problem, device: DeviceSpec, sums_dq: bool) -> float:
    """Milliseconds of the launches before and after the main kernel, including all launch gaps.
    These launches compute D of all rows and, if dq is summed in fp32, zero dq and convert it."""
    element = problem.dtype.element_size
    moved = 2 * element  # do and o
    if sums_dq:
        moved += 2 * _FLOAT_BYTES + element
    elements = problem.batch * problem.heads_q * problem.seq_q * problem.d
    rates = rates_of(device)
    per_ms = rates.dram * device.sm_count * rates.clock * 1e6
    return elements * moved / per_ms + (4 if sums_dq else 3) * _LAUNCH_MS
