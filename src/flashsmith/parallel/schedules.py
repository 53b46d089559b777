"""Schedules: how the ranks of a group share one call to attention().

The schedules are 'zigzag', 'allgather' and 'ulysses'.

A schedule consists of two functions, forward and backward. Tensors are the shards of one rank,
(batch, rows, heads, d) or packed (rows, heads, d). All ranks send and receive the same amounts in
the same order, even a rank that has nothing to compute.
"""

from __future__ import annotations

from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.parallel import allgather, causal_allgather, ulysses, zigzag
from flashsmith.parallel.group_call import GroupCall, GroupSchedule
from flashsmith.parallel.layout import CAUSAL, FULL
from flashsmith.printable import quoted
from flashsmith.runtime.bits import cannot_keep

SCHEDULES = {
    "zigzag": GroupSchedule(zigzag.forward, zigzag.backward),
    "allgather": GroupSchedule(allgather.forward, allgather.backward),
    "ulysses": GroupSchedule(ulysses.forward, ulysses.backward),
}


def check_schedule(schedule: Any) -> str:
    if isinstance(schedule, str) and schedule in ("auto", *SCHEDULES):
        return schedule
    names = ", ".join(repr(name) for name in ("auto", *SCHEDULES))
    raise ArgumentError(f"schedule={quoted(schedule)}: allowed are {names}")


# Under a causal mask, 'auto' gathers K and V if those of the whole sequences have at most this many
# bytes. On two GPUs, gathering 32, 128 or 512 MiB is faster than the ring. Larger sizes were not
# measured and would take more memory.
MOST_GATHERED = 512 << 20


def _bytes_of_keys(call: GroupCall, heads_k: int) -> int:
    """The size in bytes of K and V of a dense batch, for the whole sequences."""
    batch, _, _, d = call.shape
    return 2 * batch * call.k_layout.starts[-1] * heads_k * (d + call.d_v)


_NO_BITS = (
    "schedule='zigzag': merges parts of the keys in another order; take 'allgather' or 'ulysses'"
)


def schedule_named(name: str, call: GroupCall, heads_k: int) -> GroupSchedule:
    """The schedule with this name.

    The choice for 'auto' depends only on facts that are the same on all ranks.
    """
    count = 2 * call.group.size
    sides = (("q", call.q_layout), ("k", call.k_layout))
    uneven = [
        (side, place, length)
        for side, layout in sides
        for place, length in enumerate(layout.lengths)
        if length % count
    ]
    if name == "auto":
        same = call.q_layout == call.k_layout
        gathered = causal_allgather.serves(call) and _bytes_of_keys(call, heads_k) <= MOST_GATHERED
        ring = call.limits == FULL or (call.limits == CAUSAL and same)
        ring = ring and not (uneven or call.return_row_max or call.bits)
        name = "zigzag" if ring and not gathered else "allgather"
    if name == "zigzag" and call.bits:
        raise cannot_keep(call.bits, _NO_BITS)
    if name == "zigzag" and uneven:
        side, place, length = uneven[0]
        which = f"sequence {place} of {side}" if call.packed else f"{side}'s sequence"
        raise ArgumentError(
            f"schedule='zigzag': {which} has {length} rows; must be a multiple of {count}, twice "
            "the ranks: pad it, or take 'allgather'"
        )
    if name == "zigzag" and call.return_row_max:
        raise ArgumentError(
            "return_row_max: given with schedule='zigzag', which has no row maximum; take "
            "'allgather'"
        )
    if name == "allgather" and causal_allgather.serves(call):
        return causal_allgather.PREFIXES
    return SCHEDULES[name]
