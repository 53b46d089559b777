"""Which entries speak about a problem, and how near each is.

The distance of an entry is counted in octaves, doublings of a size:

    |log2 of the ratio of seq_q| + the same of seq_k + half of that of batch x heads
    + what its relation costs: 0 for the very GPU, dtype and semantics class; else 4 for the other
      dtype, 6 for packed, 8 for softcap, 10 for another mask (5 between causal and a window), and
      20 for another GPU of the same architecture.

Sizes are the measured problem's own. An entry of the problem's very key comes before all others.
d_head and architecture must agree. A relation costs so much that an entry of another class counts
only where the problem's own class was not measured, or nowhere near.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flashsmith.configs import DeviceSpec, Problem, Semantics
from flashsmith.tuning.winners.entry import Entry, octaves
from flashsmith.tuning.winners.key import WinnerKey, parse_class, same_gpu

DTYPE, PACKED, SOFTCAP, MASK, NEAR_MASK, OTHER_GPU = 4.0, 6.0, 8.0, 10.0, 5.0, 20.0


class Found(NamedTuple):
    """An entry, how far it is from the problem (octaves), and in what it differs ('' in nothing).

    ``exact``: whether it stands under the problem's own key.
    """

    entry: Entry
    distance: float
    relation: str
    exact: bool


def entries_by_distance(
    entries: Iterable[Entry], problem: Problem, device: DeviceSpec
) -> list[Found]:
    """Every entry of the problem's d_head and the device's architecture, nearest first."""
    key = WinnerKey.of(problem, device)
    found = [
        _found(entry, problem, key)
        for entry in entries
        if entry.key.d_head == key.d_head and entry.key.arch == key.arch
    ]
    return sorted(found, key=lambda f: (not f.exact, f.distance, f.entry.place))


def _found(entry: Entry, problem: Problem, key: WinnerKey) -> Found:
    seq_q, seq_k, batch_heads = entry.sizes
    sizes = (
        octaves(seq_q, problem.seq_q)
        + octaves(seq_k, problem.seq_k)
        + octaves(batch_heads, problem.batch * problem.heads_q) / 2
    )
    differences = _differences(entry.key, key)
    related = sum(cost for _, cost in differences)
    relation = ", ".join(words for words, _ in differences)
    exact = not differences and _sizes(entry.key) == _sizes(key)
    return Found(entry, sizes + related, relation, exact)


def _sizes(key: WinnerKey) -> tuple[int, int, int]:
    return key.seq_q, key.seq_k, key.batch_heads


def _differences(measured: WinnerKey, wanted: WinnerKey) -> list[tuple[str, float]]:
    """In what an entry's key differs from the problem's, apart from sizes, and what that costs."""
    there, here = parse_class(measured.semantics), parse_class(wanted.semantics)
    differences = []
    if not same_gpu(measured.gpu, wanted.gpu):
        differences.append((f"measured on {measured.gpu}", OTHER_GPU))
    if measured.dtype != wanted.dtype:
        differences.append((f"measured with {measured.dtype}", DTYPE))
    if there.packed != here.packed:
        differences.append(("packed" if there.packed else "not packed", PACKED))
    if there.softcap != here.softcap:
        differences.append(("with softcap" if there.softcap else "without softcap", SOFTCAP))
    if there.mask != here.mask:
        differences.append((_mask_words(there), _mask_cost(there, here)))
    return differences


def _mask_words(semantics: Semantics) -> str:
    return "without a mask" if semantics.mask == "none" else f"with a {semantics.mask} mask"


def _mask_cost(one: Semantics, other: Semantics) -> float:
    return MASK if "none" in (one.mask, other.mask) else NEAR_MASK
