"""The common parts of the backward families: their other kernels, and their cost models."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.device import DeviceSpec
from flashsmith.families.tile_work import rates_of
from flashsmith.operations.problem import Problem

# When all SMs add fp32 dq to sums in the L2, they add at this share of the rate at which they load
# from the L2; measured on an H200.
_SHARE_OF_L2 = 0.43
# The delay in milliseconds from the end of one launch to the first work of the next one. The first
# launch of a call has the same delay before its first work.
_LAUNCH_MS = 0.003
_NORM = 4.0
_FLOAT_BYTES = 4
# The templates of the kernels that run before the main kernel or complete its results, by purpose.
HELPER_TEMPLATES = {
    "prepare": "backward_prepare_kernel",
    "gaps": "backward_gaps_kernel",
    "sinks": "backward_sinks_kernel",
}


def reduced_per_clock(device: DeviceSpec) -> float:
    """The bytes of fp32 sums that an SM adds to the L2 per clock while all SMs do so."""
    return _SHARE_OF_L2 * rates_of(device).l2


def joined(bounds: Sequence[float]) -> float:
    """The cycles that an SM takes for several kinds of work that it does at the same time.

    This is the time of the longest kind plus a small share of the other kinds' times.
    """
    return float(sum(bound**_NORM for bound in bounds) ** (1 / _NORM))


def helpers_ms(problem: Problem, device: DeviceSpec, sums_dq: bool) -> float:
    """Milliseconds for all launches except the main kernel, including the gaps between launches.
    The launches before the main kernel compute D for all rows. If dq is summed in fp32, they also
    set the sums to zero, and a launch after the main kernel converts the sums to the dtype."""
    element = problem.dtype.element_size
    moved = 2 * element  # For do and o
    if sums_dq:
        moved += 2 * _FLOAT_BYTES + element
    elements = problem.batch * problem.heads_q * problem.seq_q * (problem.d + problem.d_v) / 2
    rates = rates_of(device)
    per_ms = rates.dram * device.sm_count * rates.clock * 1e6
    return elements * moved / per_ms + (4 if sums_dq else 3) * _LAUNCH_MS
