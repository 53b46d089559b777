"""Finds and builds kernels that serve any batch and any lengths, for container images in which
nothing is built later.

The chooser prefers different kernels for different sizes, but most of these kernels differ in time
only by a percent or two. So a few kernels are enough if, for every problem that is examined, one of
the few is expected to take at most the share TOLERANCE longer than the best kernel. With
FLASHSMITH_JIT=0, a call whose best kernel was not built uses the best one of the few.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashsmith.builder import KernelLibrary, Progress, find_library, library_for
from flashsmith.chooser.choice import Expectation, expectation
from flashsmith.chooser.decode import CHOOSERS as DECODE_CHOOSERS
from flashsmith.chooser.winners import WinnersTable
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    Semantics,
    by_family,
    d_head_for,
)
from flashsmith.operations.decode import INVARIANT
from flashsmith.pluralize import pluralize
from flashsmith.printable import quoted

CallSizes = tuple[int, int, int]  # batch, seq_q, seq_k

# The maximum share by which a call may take longer than with its best kernel. This share is within
# the error of the model.
TOLERANCE = 0.02
_LONGEST = 17
_QUERIES = (*(4**power for power in range(_LONGEST // 2 + 1)), 2**_LONGEST)
_KEYS = tuple(2**power for power in range(_LONGEST + 1))
_BATCHES = (1, 2, 3, 4, 8, 12, 16, 32, 64)
# The sizes that are examined. The numbers of keys are powers of two, because the tables have a
# bucket for each power of two. Only some numbers of keys occur with more queries than keys.
SIZES: tuple[CallSizes, ...] = tuple(
    (batch, seq_q, seq_k)
    for batch, seq_q, seq_k in itertools.product(_BATCHES, _QUERIES, _KEYS)
    if seq_k >= seq_q or seq_k in (1, 64, 1024)
)

# The number of problems in a part of the search; a part takes some tenths of a second.
_PER_PART = 50
# The type of a function that is called as searched(finished, total); both numbers count parts of
# the search.
Searched = Callable[[int, int], None]


@dataclass(frozen=True)
class AnyLength:
    """The configs that together serve a problem on a device, for every batch and length that was
    examined.

    problem: the problem; its batch and lengths have no meaning.
    count: how many problems were examined.
    chosen: how many different configs choose() chooses for them.
    configs: for each semantics, the configs that must be compiled for it.
    """

    problem: Problem
    device: DeviceSpec
    count: int
    chosen: int
    configs: Mapping[Semantics, tuple[KernelConfig, ...]]

    @property
    def kernels(self) -> int:
        """The number of kernels."""
        return sum(map(len, self.configs.values()))

    def __str__(self) -> str:
        """A sentence with the numbers of configs, of kernels and of examined problems."""
        every = set(itertools.chain.from_iterable(self.configs.values()))
        families = Counter(config.FAMILY for config in every)
        of_families = ", ".join(f"{number} {family}" for family, number in families.items())
        kernels = ", ".join(
            f"{len(configs)} {semantics}" for semantics, configs in self.configs.items()
        )
        words = str(self.problem).partition(" h")[2]
        text = (
            f"h{words} of any length on {self.device.name}: {pluralize(len(every), 'config')} "
            f"({of_families})"
        )
        if self.chosen > len(every):
            text += f" within {TOLERANCE:.0%} of the {self.chosen}"
        return f"{text} chosen for {self.count:,} problems; as kernels {kernels}"


def parse_any_length(text: str) -> Problem:
    """Parses a problem without batch and lengths, such as 'h32:8 d128 bf16 causal', and sets the
    batch and the lengths to 1.

    Raises ArgumentError if the string has a batch or a length, and the errors of Problem.parse.
    """
    for word in text.lower().split():
        if re.fullmatch(r"[bs]\d+(:\d+)?", word):
            raise ArgumentError(
                f"problem={quoted(text)}: {quoted(word)} is a batch or a length, and "
                "--any-length is for all; leave it out, as in 'h32:8 d128 bf16 causal'"
            )
    return Problem.parse(f"{text} s1")


def parse_with_lengths(text: str) -> Problem:
    """Parses a problem by Problem.parse.

    Raises ArgumentError if the string is invalid. The message mentions --any-length if only the
    lengths are missing.
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
        f"problem={quoted(text)}: gives no length; add one, as s4096, or build for every batch and "
        f"length with --for {shown} --any-length"
    )


def choose_for_any_length(
    problem: Problem,
    device: DeviceSpec,
    *,
    sizes: Iterable[CallSizes] = SIZES,
    searched: Searched | None = None,
    deterministic: bool = False,
) -> AnyLength:
    """Finds a few configs that serve ``problem`` on a device at all ``sizes``, and at the sizes in
    the table of winners. At each size, one of them takes at most TOLERANCE longer than the config
    that choose() chooses.

    Each config is compiled for whole tiles and for uneven lengths and, if the problem is packed,
    also for packed sequences.
    ``deterministic``: whether calls will have deterministic=True. Over a cache, the result has all
        configs that are chosen with split='invariant', since a sequence must have the same bits in
        any batch.

    Raises ArgumentError if no kernel serves the problem on the device.
    """
    own = problem.semantics
    dense = replace(own, packed=False, uneven=own.caller_program is not None)
    kinds = [replace(problem, semantics=dense)]
    if problem.semantics.packed:
        kinds.append(replace(problem, semantics=replace(dense, packed=True, uneven=True)))
    if problem.computed.has_pages:
        return _over_a_cache(problem, kinds, device, list(sizes))
    of_table = _of_the_table(problem, device)
    looked_at = list(dict.fromkeys((*sizes, *of_table)))
    parts = [looked_at[first : first + _PER_PART] for first in range(0, len(looked_at), _PER_PART)]
    needed: dict[Semantics, tuple[KernelConfig, ...]] = {}
    chosen: set[KernelConfig] = set()
    for number, kind in enumerate(kinds):
        found: list[Expectation] = []
        for done, part in enumerate(parts):
            if searched is not None:
                searched(number * len(parts) + done, len(kinds) * len(parts))
            problems = (_with_sizes(kind, one) for one in part)
            found += [expectation(one, device, deterministic=deterministic) for one in problems]
        chosen |= {one.chosen.config for one in found}
        few = cover(found)
        for semantics in compiled_for(kind.semantics, problem):
            needed[semantics] = tuple(dict.fromkeys((*needed.get(semantics, ()), *few)))
    return AnyLength(problem, device, len(kinds) * len(looked_at), len(chosen), needed)


def build_for_any_length(
    found: AnyLength, *, progress: Progress | None = None
) -> list[KernelLibrary]:
    """Builds all kernels that ``found`` names and returns the libraries that contain them.

    Kernels that are in the cache are not built again. Raises the errors of ``build``.
    """
    arch = found.device.arch
    libraries: dict[Path, KernelLibrary] = {}
    for semantics, configs in found.configs.items():
        missing = []
        for config in configs:
            library = find_library(config, arch=arch, semantics=semantics)
            if library is None:
                missing.append(config)
            else:
                libraries[library.path] = library
        for group in by_family(missing):
            library = library_for(group, arch=arch, semantics=semantics, progress=progress)
            libraries[library.path] = library
    return list(libraries.values())


def cover(found: Sequence[Expectation], also: Iterable[KernelConfig] = ()) -> list[KernelConfig]:
    """Returns a few of the configs in ``found`` and ``also``. For each problem, one of the returned
    configs takes at most TOLERANCE longer than the best config. The search is greedy: the next
    config is the one that serves the most remaining problems. If several configs serve equally
    many, one in ``also`` is preferred."""
    chosen = dict.fromkeys([*also, *(one.chosen.config for one in found)])
    served = {
        config: {
            number
            for number, one in enumerate(found)
            if one.ms(config) <= one.chosen.ms * (1 + TOLERANCE)
        }
        for config in chosen
    }
    few, left = [], set(range(len(found)))
    while left:
        best = max(served, key=lambda config: len(served[config] & left))
        few.append(best)
        left -= served[best]
    return few


def _over_a_cache(
    problem: Problem, kinds: Iterable[Problem], device: DeviceSpec, sizes: Sequence[CallSizes]
) -> AnyLength:
    """Returns all configs that are chosen over a cache.

    There are few such configs, because the choice depends only on the queries.
    """
    needed: dict[Semantics, dict[KernelConfig, None]] = {}
    choose = DECODE_CHOOSERS[INVARIANT]
    count = 0
    for kind in kinds:
        for one in sizes:
            now = _with_sizes(kind, one)
            config = choose(now, device)
            needed.setdefault(now.required_semantics(config), {})[config] = None
            count += 1
    configs = {semantics: tuple(found) for semantics, found in needed.items()}
    every = set(itertools.chain.from_iterable(configs.values()))
    return AnyLength(problem, device, count, len(every), configs)


def _with_sizes(problem: Problem, sizes: CallSizes) -> Problem:
    batch, seq_q, seq_k = sizes
    return replace(problem, batch=batch, seq_q=seq_q, seq_k=seq_k)


def _of_the_table(problem: Problem, device: DeviceSpec) -> list[CallSizes]:
    """Returns the sizes in the table that are to be examined.

    From each entry for the problem's operation, the problem's d_head and the device's architecture,
    these are the sizes in the entry's key, and the sizes of the problem that was measured for the
    entry.
    """
    found: set[CallSizes] = set()
    for entry in WinnersTable.merged():
        key = entry.key
        of_d_head = (key.arch, key.head_dims) == (device.arch, d_head_for(problem))
        if of_d_head and entry.problem.operation == problem.operation:
            for seq_q, seq_k, batch_heads in (
                (key.seq_q, key.seq_k, key.batch_heads),
                entry.sizes,
            ):
                found.add((max(1, batch_heads // problem.heads_q), seq_q, seq_k))
    return sorted(found)


def compiled_for(kind: Semantics, problem: Problem) -> list[Semantics]:
    """Returns the semantics for which kernels of a kind must be compiled so that they serve the
    problem's widths.

    If the problem's d is less than the d_head of the kernel, or its d_v is less than the d_v of the
    kernel, no tile is whole. Then only the semantics for uneven lengths are needed.
    """
    uneven, d, d_v = replace(kind, uneven=True), problem.d, problem.d_v
    whole = d_head_for(problem) == (d if d == d_v else (d, d_v))
    return [kind, uneven] if whole and not kind.uneven else [uneven]
