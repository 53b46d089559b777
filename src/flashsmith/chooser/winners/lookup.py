"""Finds the entries that are relevant to a problem, and the distance of each from the problem.

The distance is a sum in octaves (doublings of a size):

- Sizes: the octaves between the values of seq_q, plus the octaves for seq_k, plus half of the
  octaves for batch x heads.
- Semantics: 3 for other gradients, 6 for packed, 8 for softcap, 10 for another mask (5 between
  causal and a window). Dtype: 4 for the other one.
- Windows: half an octave if one window has twice as many keys as the other. If the problem does not
  give the size of its window, 2 for an entry with a given size.
- GPU: 20 for another GPU of the same architecture, or 1.5 if it has the same number of SMs. To
  this, the octaves between the numbers of SMs and between the sizes of the L2 are added, so that
  the most similar GPU is nearest.

The sizes of an entry are the measured problem's. Entries with exactly the key of the problem come
first. Operation, d_head and architecture must be the same. An entry of a cache with scales is for
caches of this format only. An entry and a problem must also agree in whether only dq is needed,
since other kernels compute only dq. The distances for another class are so large that an entry of
another class is used only if the problem's class was not measured, or was measured only at very
different sizes. Another GPU with the same number of SMs adds only a small distance, so that the
table of such a sister GPU is used if a GPU's own table has few problems. On an H100, the configs
chosen from the table of the H200 were at most 1.3% slower than the fastest of 16 kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from math import log2
from typing import NamedTuple

from flashsmith.chooser.winners.entry import Entry
from flashsmith.chooser.winners.key import (
    bucket,
    kind_class,
    parse_class,
    sizes_of,
)
from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, Problem, Semantics, d_head_for, device_spec
from flashsmith.families.gpu_names import gpu_name, same_gpu
from flashsmith.families.head_dims import HeadDims
from flashsmith.semantics.sizes import ONLY_DQ

DTYPE, PACKED, SOFTCAP, MASK, NEAR_MASK, OTHER_GPU = 4.0, 6.0, 8.0, 10.0, 5.0, 20.0
GRADIENTS = 3.0
ONE_WINDOW = 2.0
SISTER_GPU = 1.5

LoggedSizes = tuple[int, int, int]  # seq_q, seq_k, batch x heads


class NearEntry(NamedTuple):
    """An entry, its distance from the problem in octaves, and a string that says how the entry's
    kind differs from the problem's kind ('' if the kinds are equal).

    ``exact``: whether the entry has the key of the problem.
    """

    entry: Entry
    distance: float
    relation: str
    exact: bool


class _Kind(NamedTuple):
    """The parts of a key other than its sizes, d_head and architecture."""

    gpu: str
    dtype: str
    semantics: str


class _Placed(NamedTuple):
    entry: Entry
    logs: tuple[float, float, float]  # log2 of the sizes of the measured problem
    buckets: LoggedSizes


class EntryIndex:
    """An index of the entries, which finds the nearest of hundreds of entries in microseconds."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._kinds: dict[tuple[int, HeadDims], dict[_Kind, list[_Placed]]] = defaultdict(dict)
        for entry in sorted(entries, key=lambda one: one.place):
            key = entry.key
            kinds = self._kinds[key.arch, key.head_dims]
            buckets = key.seq_q, key.seq_k, key.batch_heads
            kinds.setdefault(_Kind(key.gpu, key.dtype, key.semantics), []).append(
                _Placed(entry, _logs(entry.sizes), buckets)
            )

    def by_distance(self, problem: Problem, device: DeviceSpec) -> list[NearEntry]:
        """All entries with the d_head of the problem and the architecture of the device, nearest
        first.

        Raises ArgumentError if no kernel has the problem's d.
        """
        kinds = self._kinds.get((device.arch, d_head_for(problem)), {})
        wanted = _Kind(gpu_name(device.name), problem.dtype.name.lower(), kind_class(problem))
        sizes = sizes_of(problem)
        seq_q, seq_k, batch_heads = _logs(sizes)
        buckets = tuple(map(bucket, sizes))
        found = []
        for kind, placed in kinds.items():
            measured = parse_class(kind.semantics)
            if measured.operation != problem.operation or measured.bits != problem.bits:
                continue
            if measured.cache not in ("", problem.cache):
                continue
            gradients = measured.gradients
            if gradients != problem.gradients and ONLY_DQ in (gradients, problem.gradients):
                continue
            relation, cost = _relation(kind, wanted)
            cost += _cost_of_gpu(kind.gpu, device)
            for entry, logs, its_buckets in placed:
                distance = abs(logs[0] - seq_q) + abs(logs[1] - seq_k)
                distance += abs(logs[2] - batch_heads) / 2 + cost
                exact = not cost and its_buckets == buckets
                found.append(NearEntry(entry, distance, relation, exact))
        keys = problem.window_keys
        return sorted(
            found,
            key=lambda one: (
                not one.exact,
                one.exact and one.entry.problem.window_keys != keys,
                one.distance,
            ),
        )


def _logs(sizes: LoggedSizes) -> tuple[float, float, float]:
    seq_q, seq_k, batch_heads = (log2(max(1, size)) for size in sizes)
    return seq_q, seq_k, batch_heads


@lru_cache(maxsize=1024)
def _relation(measured: _Kind, wanted: _Kind) -> tuple[str, float]:
    """Says how an entry's kind differs from the wanted kind, and returns the distance this adds."""
    kind_there, kind_here = parse_class(measured.semantics), parse_class(wanted.semantics)
    there, here = kind_there.semantics, kind_here.semantics
    differences = []
    if not same_gpu(measured.gpu, wanted.gpu):
        differences.append((f"measured on {measured.gpu}", 0.0))  # see _cost_of_gpu()
    if measured.dtype != wanted.dtype:
        differences.append((f"measured with {measured.dtype}", DTYPE))
    if kind_there.gradients != kind_here.gradients:
        words = "without dq" if kind_there.gradients else "with all gradients"
        differences.append((words, GRADIENTS))
    if there.packed != here.packed:
        differences.append(("packed" if there.packed else "not packed", PACKED))
    if there.score != here.score:
        plain = there.score.is_plain
        words = f"without {here.score}" if plain else f"with {there.score}"
        differences.append((words, SOFTCAP))
    if len({there.mask, here.mask}) > 1:
        differences.append((_mask_words(there), _mask_cost(there, here)))
    keys = kind_there.window_keys, kind_here.window_keys
    # An entry that names no window size adds no distance: it is suitable for a window of any size.
    # Among entries with the key of the problem, one with the problem's window size is preferred.
    if keys[0] and not keys[1]:
        differences.append((f"with windows of {keys[0]} keys", ONE_WINDOW))
    elif all(keys) and keys[0] != keys[1]:
        differences.append((f"with windows of {keys[0]} keys", abs(log2(keys[0] / keys[1])) / 2))
    return ", ".join(words for words, _ in differences), sum(cost for _, cost in differences)


@lru_cache(maxsize=1024)
def _cost_of_gpu(gpu: str, device: DeviceSpec) -> float:
    """The distance that a measurement on another GPU adds. It is computed from the two GPUs'
    figures that affect kernels."""
    if same_gpu(gpu, device.name):
        return 0.0
    try:
        other = device_spec(gpu)
    except ArgumentError:  # The GPU is unknown
        return OTHER_GPU
    sizes = (other.sm_count, device.sm_count), (other.l2_bytes, device.l2_bytes)
    unlike = sum(abs(log2(max(1, there)) - log2(max(1, here))) for there, here in sizes)
    return unlike + (SISTER_GPU if other.sm_count == device.sm_count else OTHER_GPU)


def _mask_words(semantics: Semantics) -> str:
    return f"with a {semantics.mask} mask" if semantics.key_mask.hides else "without a mask"


def _mask_cost(one: Semantics, other: Semantics) -> float:
    return NEAR_MASK if one.key_mask.hides and other.key_mask.hides else MASK
