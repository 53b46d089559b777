"""The common parts of the families for attention over a latent cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashsmith.families.device import DeviceSpec
from flashsmith.families.head_dims import HeadPair
from flashsmith.families.tile_work import CallWork, rates_of
from flashsmith.operations.problem import Problem

# The widths of a row of the cache and of its values.
PAIRS = (HeadPair(320, 256), HeadPair(576, 512))

# Cycles from a load to its data while all SMs read; of a launch in a graph; and of a CTA outside
# its loop. They are mma_sync_decode's; nothing was measured for these families.
_LATENCY, _LAUNCH, _PART = 1600.0, 2400.0, 2500.0
_FLOAT_BYTES = 4


def unsupported_reason(problem: Problem) -> str | None:
    """Why these families have no kernel for a problem on any device; None if they have."""
    if (problem.d, problem.d_v) not in PAIRS:
        served = " and ".join(map(str, PAIRS))
        return f"it has kernels of d {served}, and the problem's is {problem.d}:{problem.d_v}"
    if problem.heads_k != 1:
        return f"all query heads share one head of the cache, and it has {problem.heads_k}"
    return None


class LatentRates(NamedTuple):
    """The speed of a config on a device.

    resident: how many CTAs an SM holds. step_cycles: takes the number of CTAs on an SM, and returns
    the cycles in which each of them computes a block of keys. clock: in GHz.
    """

    resident: int
    step_cycles: Callable[[int], float]
    clock: float


def parts_of(cfg: Any, keys: int) -> int:
    """The number of parts of a tile's keys in the invariant split."""
    return max(1, min(-(-keys // cfg.B_c) * cfg.B_c // cfg.min_keys, cfg.most_parts))


def call_work(cfg: Any, problem: Problem, device: DeviceSpec, rates: LatentRates) -> CallWork:
    """The work of all launches of a call; its time is infinite if no CTA fits."""
    if not rates.resident:
        return CallWork(float("inf"), 0, 0, cfg.B_r)
    keys = problem.seq_k
    if problem.window is not None:
        keys = min(keys, problem.window[0] + problem.seq_q)
    rows = problem.seq_q * problem.heads_q
    tiles = problem.batch * -(-rows // cfg.B_r)
    parts = parts_of(cfg, keys)
    ctas = tiles * parts
    if not ctas * keys:
        return CallWork(0.0, 0, rates.resident, cfg.B_r)
    per_sm = rates_of(device)
    row_bytes = problem.d * problem.dtype.element_size
    # Tiles with the same keys read them from the L2.
    dram = problem.batch * keys * row_bytes / (per_sm.dram * device.sm_count)
    l2 = tiles * keys * row_bytes / (per_sm.l2 * device.sm_count)
    at_once = min(rates.resident, -(-ctas // device.sm_count))
    blocks = -(-keys // (cfg.B_c * parts))
    rounds = max(ctas / (device.sm_count * at_once), 1.0)
    computed = rounds * (blocks * rates.step_cycles(at_once) + _PART + _LATENCY)
    read = max(dram, l2) / per_sm.clock
    merged = 0.0
    if parts > 1:
        states = 2 * problem.batch * rows * parts * (problem.d_v + 1) * _FLOAT_BYTES
        merged = states / (per_sm.l2 * device.sm_count) + _LAUNCH + 2 * _LATENCY
    ms = (max(read, computed / rates.clock) + (merged + _LAUNCH) / per_sm.clock) / 1e6
    return CallWork(ms, ctas, rates.resident, cfg.B_r, heads=problem.heads_q)
