"""The kernels that attention() may choose for any batch and any lengths: what an image must
hold where nothing is built on first use."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from flashsmith.builder import KernelLibrary, Progress, library_for
from flashsmith.chooser.choice import choose_config
from flashsmith.chooser.winners import WinnersTable
from flashsmith.counted import counted
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    Semantics,
    by_family,
    compiled_d_head,
)
from flashsmith.printable import quoted

_POWERS = 17
# Powers of two, where tables have their buckets, and what is next to them, which fills no tile.
SIZES = tuple(sorted({2**power + off for power in range(_POWERS + 1) for off in (-1, 0, 1)}))

# Of a part of the search, which then takes seconds.
_BATCHES = 10
# Called with how many of how many parts of the search are done.
Searched = Callable[[int, int], None]
_Sizes = tuple[int, int, int]  # batch, seq_q, seq_k


@dataclass(frozen=True)
class AnyLength:
    """What is chosen on a device for a problem of every batch and every length looked at.

    problem: its batch and lengths are of no consequence. count: of the problems that were looked
    at. configs: by what their kernels are compiled for, those needed.
    """

    problem: Problem
    device: DeviceSpec
    count: int
    configs: Mapping[Semantics, tuple[KernelConfig, ...]]

    def __str__(self) -> str:
        """How many, in a sentence."""
        every = set(itertools.chain.from_iterable(self.configs.values()))
        families = Counter(config.FAMILY for config in every)
        of_families = ", ".join(f"{number} {family}" for family, number in families.items())
        kernels = ", ".join(
            f"{len(configs)} {semantics}" for semantics, configs in self.configs.items()
        )
        words = str(self.problem).partition(" h")[2]
        return (
            f"h{words} of any length on {self.device.name}: {counted(len(every), 'config')} "
            f"({of_families}), chosen for {self.count:,} problems; as kernels {kernels}"
        )


def parse_any_length(text: str) -> Problem:
    """The problem of a text without batch and lengths: 'h32:8 d128 bf16 causal'; both are 1.

    Raises ArgumentError when it names one, and what Problem.parse raises.
    """
    for word in text.lower().split():
        if re.fullmatch(r"[bs]\d+(:\d+)?", word):
            raise ArgumentError(
                f"problem={quoted(text)}: {quoted(word)} is a batch or a length, and "
                "--any-length is for all; leave it out, as in 'h32:8 d128 bf16 causal'"
            )
    return Problem.parse(f"{text} s1")


def parse_with_lengths(text: str) -> Problem:
    """The problem of a text, as Problem.parse reads it.

    Raises ArgumentError, which names --any-length where only the lengths are missing.
    """
    try:
        return Problem.parse(text)
    except ArgumentError:
        words = [word for word in text.split() if not re.fullmatch(r"[bB]\d+", word)]
        try:
            parse_any_length(" ".join(words))
        except ArgumentError:
            words = []
        if not words:
            raise
    shown = quoted(" ".join(words))
    raise ArgumentError(
        f"problem={quoted(text)}: says no length; add one, as s4096, or build for every batch and "
        f"length with --for {shown} --any-length"
    )


def choose_for_any_length(
    problem: Problem,
    device: DeviceSpec,
    *,
    sizes: Sequence[int] = SIZES,
    searched: Searched | None = None,
    deterministic: bool = False,
) -> AnyLength:
    """Every config that choose() gives on a device for ``problem`` with each batch, seq_q and seq_k
    of ``sizes``, and in every bucket of the table of winners.

    Each is needed for whole tiles and for uneven lengths; where the problem is packed, for packed
    sequences besides. ``deterministic``: the configs of deterministic=True.

    Raises ArgumentError when no kernel serves the problem there.
    """
    dense = replace(problem.semantics, packed=False, uneven=False)
    kinds = [dense]
    if problem.semantics.packed:
        kinds.append(replace(dense, packed=True, uneven=True))
    parts = [
        list(itertools.product(sizes[first : first + _BATCHES], sizes, sizes))
        for first in range(0, len(sizes), _BATCHES)
    ]
    parts.append(_of_the_table(problem, device))
    needed: dict[Semantics, tuple[KernelConfig, ...]] = {}
    count = 0
    for done, (kind, part) in enumerate(itertools.product(kinds, parts)):
        if searched is not None:
            searched(done, len(kinds) * len(parts))
        found = _chosen(replace(problem, semantics=kind), device, part, deterministic)
        count += len(part)
        for semantics in _compiled_for(kind, problem.d):
            needed[semantics] = tuple(dict.fromkeys((*needed.get(semantics, ()), *found)))
    return AnyLength(problem, device, count, needed)


def build_for_any_length(
    found: AnyLength, *, progress: Progress | None = None
) -> list[KernelLibrary]:
    """The libraries with all those kernels, built unless they are cached; raises what ``build``
    does."""
    return [
        library_for(group, arch=found.device.arch, semantics=semantics, progress=progress)
        for semantics, configs in found.configs.items()
        for group in by_family(configs)
    ]


def _chosen(
    problem: Problem, device: DeviceSpec, sizes: Iterable[_Sizes], deterministic: bool
) -> list[KernelConfig]:
    """The configs that are chosen, each once, the first that is chosen first."""
    choose = partial(choose_config, device=device, deterministic=deterministic)
    return list(
        dict.fromkeys(
            choose(replace(problem, batch=batch, seq_q=seq_q, seq_k=seq_k))
            for batch, seq_q, seq_k in sizes
        )
    )


def _of_the_table(problem: Problem, device: DeviceSpec) -> list[_Sizes]:
    """Of every bucket for the problem's d_head and the device's architecture, its own sizes and
    those that were measured in it."""
    found: set[_Sizes] = set()
    for entry in WinnersTable.merged():
        key = entry.key
        if (key.arch, key.d_head) == (device.arch, compiled_d_head(problem.d)):
            for seq_q, seq_k, batch_heads in (
                (key.seq_q, key.seq_k, key.batch_heads),
                entry.sizes,
            ):
                found.add((max(1, batch_heads // problem.heads_q), seq_q, seq_k))
    return sorted(found)


def _compiled_for(kind: Semantics, d: int) -> list[Semantics]:
    """What kernels of a kind are compiled for; no tile is whole where d does not fill d_head."""
    uneven = replace(kind, uneven=True)
    return [uneven] if kind.packed or d != compiled_d_head(d) else [kind, uneven]
