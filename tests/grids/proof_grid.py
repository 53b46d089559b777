"""The grid of attention problems on which every release is proven, and a small cover of it.

Lengths, masks, heads and head dimensions are those of other libraries' tests, and harder ones: rows
that see no key, one query with many keys and many queries with one key, lengths just below and
above every tile size, windows wider than the sequence, and packed sequences of length 0.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any, TypeVar

from flashsmith.errors import ArgumentError
from flashsmith.families import FAMILIES, DType, KernelConfig, Problem, Semantics, family_named
from flashsmith.verify.attention_semantics import Attention, Lens, Window, unequal_lens
from flashsmith.verify.forward_reference import semantics_of

# The family of cases that name none.
FIRST_FAMILY = next(iter(FAMILIES))
D = (32, 40, 64, 96, 128, 160, 192, 224, 256)
REFUSED_D = (59, 111)
LENGTHS = (
    (1, 1), (1, 239), (3, 799), (64, 128), (113, 203), (128, 217), (108, 256), (239, 1),
    (256, 512), (512, 256), (799, 3), (1023, 1024), (1024, 1023), (2048, 2048), (4224, 4224),
)  # fmt: skip
# For packed sequences these are the longest; the others are shorter.
PACKED_LENGTHS = ((113, 203), (1024, 1023))
WINDOWS = ("none", "random", "one-sided", "wider")
HEADS = {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1)}
SOFTCAPS = (0.0, 30.0)
BATCHES = ("dense", "random lengths", "full lengths", "zero lengths")
# Sequences from here on are a batch of one: they are large enough.
LONG = 1000
PACKED_SEQUENCES = 4
SM_COUNTS = (1, 3, None)
# Kinds of inputs besides random ones.
EXTREME_INPUTS = ("nonfinite", "lost_keys", "huge", "far_scores")


@dataclass(frozen=True)
class Case:
    """One problem of the grid for a kernel of one family. ``window``, ``heads`` and ``batch`` name
    a kind; the case itself seeds what is random, so equal cases are equal problems.
    """

    dtype: DType
    d: int
    lengths: tuple[int, int]
    causal: bool
    window: str
    heads: str
    softcap: float
    batch: str
    sinks: bool = False
    family: str = FIRST_FAMILY
    inputs: str = "random"
    partial: bool = False
    head_counts: dict[str, tuple[int, int]] = field(default_factory=lambda: HEADS, compare=False)

    def __str__(self) -> str:
        said = [
            self.family * (self.family != FIRST_FAMILY),
            self.dtype.name.lower(), f"d{self.d}", "s{}:{}".format(*self.lengths), self.batch,
            self.heads, "causal" * self.causal, f"window {self.window}",
            f"softcap {self.softcap:g}", "sinks" * self.sinks,
            f"{self.inputs} inputs" * (self.inputs != "random"), "partial" * self.partial,
        ]  # fmt: skip
        return ", ".join(word for word in said if word)

    @cached_property
    def _seed(self) -> int:
        return zlib.crc32(str(self).encode())

    @property
    def schedule(self) -> int:
        """The index of the case's kernel among the family's proof configs."""
        return self._seed // 2 % len(self._schedules)

    @property
    def config(self) -> KernelConfig:
        """The kernel to prove."""
        return self._schedules[self.schedule]

    @property
    def _schedules(self) -> Sequence[KernelConfig]:
        found = family_named(self.family).proof_configs(self.dtype, self.d)
        if not found:
            raise ArgumentError(
                f"family={self.family!r}: it has no proof_configs for {self.dtype.name} and "
                f"d {self.d}; give it some, or name a config and take prove()"
            )
        return found

    @cached_property
    def semantics(self) -> Semantics:
        """The semantics that the config's kernel must be compiled for."""
        call = self.keywords()
        lens = call.get("lens_q"), call.get("lens_k")
        ranges = () if self.partial else None
        meaning = semantics_of(
            Attention(1.0, self.causal, call["window"], self.softcap, *lens, ranges)
        )
        problem = Problem(1, *self.lengths, 1, 1, self.d, self.dtype, meaning)
        return problem.required_semantics(self.config)

    def keywords(self) -> dict[str, Any]:
        """The keywords of ``prove``, besides the config and where to run."""
        heads, heads_k = self.head_counts[self.heads]
        draw = random.Random(self._seed)
        call = {
            "d": self.d,
            "heads": heads,
            "heads_k": heads_k,
            "causal": self.causal,
            "window": _window(self.window, self.lengths, draw),
            "softcap": self.softcap,
            "sinks": self.sinks,
            "inputs": self.inputs,
        }
        if self.partial:
            call |= {"partial": True, "seed": self._seed}
        if family_named(self.family).persistent:
            # With few SMs a CTA of a persistent kernel computes many tiles.
            call["sm_count"] = draw.choice(SM_COUNTS)
            # A kernel that returns them rescales always instead of lazily.
            call["row_max"] = bool(self._seed // 16 % 2)
        seq_q, seq_k = self.lengths
        if self.batch == "dense":
            return call | {
                "seq": seq_q,
                "seq_k": seq_k,
                "batch": 1 if min(seq_q, seq_k) >= LONG else 2,
            }
        lens_q, lens_k = (_lens(self.batch, longest, draw) for longest in self.lengths)
        return call | {"lens_q": lens_q, "lens_k": lens_k}


def _window(kind: str, lengths: tuple[int, int], draw: random.Random) -> Window:
    if kind == "none":
        return (None, None)
    if kind == "wider":
        return (max(lengths) + draw.randrange(9), max(lengths) + draw.randrange(9))
    left, right = draw.randrange(lengths[1] + 1), draw.randrange(lengths[1] + 1)
    if kind == "random":
        return (left, right)
    return draw.choice([(left, None), (None, right)])


def _lens(kind: str, longest: int, draw: random.Random) -> Lens:
    if kind == "full lengths":
        return (longest,) * PACKED_SEQUENCES
    return unequal_lens(PACKED_SEQUENCES, longest, draw, empty=2 * (kind == "zero lengths"))


def proof_grid(family: str = FIRST_FAMILY) -> Iterator[Case]:
    """Every problem of the grid, for kernels of a family; those with the same inputs are adjacent.
    Sinks alternate."""
    for dtype, d, batch, heads in product(DType, D, BATCHES, HEADS):
        for lengths in LENGTHS if batch == "dense" else PACKED_LENGTHS:
            for causal, window, softcap in product((False, True), WINDOWS, SOFTCAPS):
                case = Case(dtype, d, lengths, causal, window, heads, softcap, batch, False, family)
                yield replace(case, sinks=bool(zlib.crc32(str(case).encode()) % 2))
    yield from _extreme_cases(family)
    yield from partial_cases(family)


def partial_cases(family: str = FIRST_FAMILY) -> Iterator[Case]:
    """Parts of the keys with every dtype, d, batch, heads and mask; the rest is random."""
    for dtype, d, batch, heads in product(DType, D, BATCHES, HEADS):
        draw = random.Random(f"partial {dtype.name} {d} {batch} {heads}")
        for causal, window in product((False, True), WINDOWS):
            lengths = draw.choice(COVER_LENGTHS if batch == "dense" else PACKED_LENGTHS)
            kind = draw.choice(("random", "random", *EXTREME_INPUTS))
            yield Case(
                *(dtype, d, lengths, causal, window, heads, draw.choice(SOFTCAPS), batch),
                family=family,
                inputs=kind,
                partial=True,
            )


def _extreme_cases(family: str) -> Iterator[Case]:
    """Every kind of extreme inputs with every dtype, d, batch and mask; the rest is random."""
    for dtype, d, batch, kind in product(DType, D, BATCHES, EXTREME_INPUTS):
        draw = random.Random(f"{dtype.name} {d} {batch} {kind}")
        lengths = draw.choice(COVER_LENGTHS if batch == "dense" else PACKED_LENGTHS)
        heads = draw.choice(tuple(HEADS))
        for causal, window in product((False, True), WINDOWS):
            softcap, sinks = draw.choice(SOFTCAPS), draw.random() < 0.5
            yield Case(
                dtype, d, lengths, causal, window, heads, softcap, batch, sinks, family, kind
            )


# The emulator's part of the grid: fewer heads, and sequences that take it at most a few seconds.
COVER_HEADS = {"mha": (1, 1), "gqa": (4, 2), "mqa": (3, 1)}
COVER_LENGTHS = tuple(lengths for lengths in LENGTHS if min(lengths) < 2 * LONG)
_FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(DType),
    "d": D,
    "lengths": COVER_LENGTHS,
    "causal": (False, True),
    "window": WINDOWS,
    "heads": tuple(COVER_HEADS),
    "softcap": SOFTCAPS,
    "batch": BATCHES,
    "sinks": (False, True),
}
# Enough random cases that the rarest pair, an even problem under one schedule, is among them.
_POOL = 12_000
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def case_pairs(case: Case) -> list[Pair]:
    """All pairs of two factors with the values they have in ``case``; schedule and semantics too,
    since what a kernel does to its mask depends on both."""
    factors = [(name, getattr(case, name)) for name in _FACTORS]
    kernel = (("schedule", case.schedule), ("semantics", case.semantics))
    return [*combinations(factors, 2), kernel]


def covering_cases(family: str = FIRST_FAMILY) -> list[Case]:
    """Few cases that contain every possible pair of factors; the same on every machine. Few
    kernels, too, since compiling takes longer than proving."""
    draw = random.Random(1)
    pool = [_random_case(draw, family) for _ in range(_POOL)]
    pairs = [case_pairs(case) for case in pool]
    return cover(pool, pairs, lambda case: (case.config, case.semantics))


C = TypeVar("C")


def cover(
    pool: Sequence[C], pairs: Sequence[list[Pair]], kernel_of: Callable[[C], Any] | None = None
) -> list[C]:
    """Cases of ``pool`` that contain every pair that some case has: greedy, the most open pairs
    first, and among equals one whose kernel another case needs already."""
    holders: dict[Pair, list[int]] = {}
    for index, held in enumerate(pairs):
        for pair in held:
            holders.setdefault(pair, []).append(index)
    gains, kernels, chosen = [len(held) for held in pairs], set(), []
    while holders:
        most = max(gains)
        best = [index for index, gain in enumerate(gains) if gain == most]
        pick = best[0]
        if kernel_of is not None:
            pick = next((p for p in best if kernel_of(pool[p]) in kernels), pick)
            kernels.add(kernel_of(pool[pick]))
        chosen.append(pool[pick])
        for pair in pairs[pick]:
            for index in holders.pop(pair, ()):
                gains[index] -= 1
    return chosen


def _random_case(draw: random.Random, family: str) -> Case:
    values = {name: draw.choice(choices) for name, choices in _FACTORS.items()}
    if min(values["lengths"]) >= LONG:
        # One of the longest takes the emulator seconds; several of them, packed, most of a minute.
        values |= {"batch": "dense", "heads": "mha", "d": draw.choice(D[:4])}
    return Case(**values, family=family, head_counts=COVER_HEADS)
