"""A cover of what canonical kernels compute: each pair of values of two of these is in some
case."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, product
from typing import Any

from bit_kernels import Kernels
from oracle import CHUNK
from sequence import Sequence

from flashsmith.families import DType, KernelConfig

#: First the forward kernel and its class of GPUs.
VALUES: dict[str, tuple[Any, ...]] = {
    "kernel": (
        ("wgmma", 90),
        ("wgmma_in_turns", 90),
        ("mma_sync", 90),
        ("mma_sync_of_groups", 90),
        ("mma_sync", 80),
        ("mma_sync_of_groups", 80),
    ),
    #: With d_v where v has another one.
    "d": (64, 80, 96, 128, 256, (40, 120), (128, 48), (184, 128), (200, 240)),
    "mask": ("none", "causal", "window"),
    "group": (1, 4, 8),
    "dtype": (DType.FP16, DType.BF16),
    "softcap": (0.0, 3.0),
    "sinks": ((), (0.5, -float("inf"), 3e38, -2.0)),
    "packed": (False, True),
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (CHUNK + 16, 0)},
}
#: Queries and keys, around the boundaries of tiles and chunks.
LENGTHS = (
    *((1, 1), (3, 0), (0, 5), (9, 63), (64, 64), (2, 65), (1, 127), (130, 128), (5, 129)),
    *((3, CHUNK - 1), (2, CHUNK), (7, CHUNK + 1), (1, CHUNK + 128)),
    *((2, 2 * CHUNK - 1), (1, 2 * CHUNK + 1)),
)
_FEWEST = 4  # of them, that each case has


@dataclass(frozen=True)
class Case:
    """Values by name, in the order of VALUES, and the case's number."""

    values: tuple[Any, ...]
    number: int

    def __str__(self) -> str:
        (kernel, arch), d, mask, group, dtype, softcap, sinks, packed = self.values
        words = ["softcap"] * bool(softcap) + ["sinks"] * bool(sinks) + ["packed"] * packed
        d = f"d{d}" if isinstance(d, int) else "d{}:{}".format(*d)
        return " ".join([kernel, str(arch), dtype.name, d, f"group{group}", mask, *words])

    def of(self, name: str) -> Any:
        return self.values[list(VALUES).index(name)]

    @cached_property
    def _kernels(self) -> Kernels:
        d, d_v = self.widths
        return Kernels(self.of("dtype"), d, self.of("kernel")[1], d_v)

    @property
    def widths(self) -> tuple[int, int]:
        """(d, d_v); d_v is 0 for d."""
        found = self.of("d")
        return (found, 0) if isinstance(found, int) else found

    @property
    def forward(self) -> KernelConfig:
        return getattr(self._kernels, self.of("kernel")[0])  # type: ignore[no-any-return]

    @property
    def decode(self) -> KernelConfig:
        return self._kernels.decode

    def sequence(self, queries: int, keys: int, kind: str = "random") -> Sequence:
        group, (d, d_v) = self.of("group"), self.widths
        return Sequence(
            *(queries, keys, self.of("dtype"), d, 2 if group == 1 else 1, group),
            **MASKS[self.of("mask")],
            softcap=self.of("softcap"),
            sinks=self.of("sinks"),
            packed=self.of("packed"),
            kind=kind,
            arch=self.of("kernel")[1],
            seed=self.number,
            d_v=d_v,
        )

    @property
    def lengths(self) -> list[tuple[int, int]]:
        step = len(LENGTHS) // _FEWEST
        return [LENGTHS[(self.number + i * step) % len(LENGTHS)] for i in range(_FEWEST)]


@cache
def cover() -> tuple[Case, ...]:
    """Greedily: always one of those combinations that have the most open pairs."""
    every = list(product(*VALUES.values()))
    random.Random(42).shuffle(every)  # equals differ in more than their last values
    bits: dict[Any, int] = defaultdict(lambda: 1 << len(bits))  # one for each pair
    pairs = {row: sum(bits[pair] for pair in combinations(enumerate(row), 2)) for row in every}
    missing = (1 << len(bits)) - 1
    chosen: list[Case] = []
    while missing:
        best = max(every, key=lambda row: (pairs[row] & missing).bit_count())
        missing &= ~pairs[best]
        chosen.append(Case(best, len(chosen)))
    return tuple(chosen)
