"""PeerCase: one case of a peer's test, in the peer's sizes or in the emulator's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

# Where a sliding window's sides are: both limits drawn, one, or FlashAttention 4's offsets, which
# end before a query's own position or begin after it.
LOCAL = ("", "both", "left", "right", "before", "after")
# Sizes of the emulator, in which a case takes about a second. Lengths up to the first stay.
_KEPT, _LONGEST, _LONGEST_CACHE = 20, 72, 200
_PAGES = {256: 32, 512: 48, 128: 24, 64: 20, 32: 16}


@dataclass(frozen=True)
class PeerCase:
    """``call`` is 'dense', 'packed' or 'cache'. ``lengths`` are the queries and keys of the longest
    sequence; for a cache, its capacity instead of the keys. ``append``: how many keys are new, 'as
    many' as there are queries, or 'others'. ``rotary``: the part of d that is rotated. ``used``:
    whether the call passes seqused_k, the number of keys that count. ``window``: the two limits, if
    the test gives numbers."""

    suite: str
    function: str
    call: str
    dtype: str
    heads: tuple[int, int]
    batch: int
    d: int
    lengths: tuple[int, int]
    causal: bool = False
    local: str = ""
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    page: int = 0
    append: str = ""
    rotary: float = 0.0
    interleaved: bool = False
    packed_queries: bool = False
    leftpad: bool = False
    batch_idx: bool = False
    used: bool = False
    splits: int = 0
    # Of the lengths of packed sequences: 'near' the longest, a 'third' of it at least, 'full', or
    # 'any' from 1.
    unequal: str = "near"
    seed: int = 0

    def __str__(self) -> str:
        """What differs from the defaults, for test ids."""
        said = [self.suite, self.function, self.dtype, "h{}:{}".format(*self.heads), f"d{self.d}"]
        said.append("{}x{}".format(*self.lengths))
        for field in fields(self)[8:-1]:
            value = getattr(self, field.name)
            if value != field.default:
                text = ":".join(map(str, value)) if isinstance(value, tuple) else value
                said.append(field.name if value is True else f"{field.name}_{text}")
        return "-".join(map(str, said)).replace(" ", "_")

    @property
    def rotated(self) -> int:
        """Columns that are turned, a multiple of 16."""
        return int(self.rotary * self.d) // 16 * 16

    @property
    def has_gradients(self) -> bool:
        """Whether it is a packed call that can be differentiated, and needs no padding."""
        return self.call == "packed" and not (self.page or self.used or self.d % 8)

    def in_the_emulator(self) -> PeerCase:
        """The same with sizes in which their structure is left: what is equal, next to each other,
        longer, a multiple of a tile or of 8, and how heads share keys."""
        lengths = _scaled(self.lengths, _LONGEST_CACHE if self.call == "cache" else _LONGEST)
        shrink = max(self.lengths) / max(lengths)
        heads_k = min(self.heads[1], 2)
        group = min(self.heads[0] // self.heads[1], 2 if heads_k == 2 else 4)
        window = None
        if self.window is not None:
            window = tuple(n if n <= 3 else max(1, round(n / shrink)) for n in self.window)
        return replace(
            self,
            lengths=lengths,
            d=_scaled_d(self.d),
            heads=(heads_k * group, heads_k),
            batch=min(self.batch, 3 if self.unequal == "any" else 2),
            window=window,
            page=_PAGES.get(self.page, self.page),
        )


def _scaled(lengths: tuple[int, int], longest: int) -> tuple[int, int]:
    large, small = max(lengths), min(lengths)
    if large <= _KEPT:
        return lengths
    # Multiples of 16, but of no tile, so that few kernels serve all.
    whole = longest - longest % 16
    most = min(large, whole if large % 64 == 0 else whole - 3 - large % 5)
    if large == small:
        least = most
    elif large - small <= 3:
        least = most - (large - small)
    elif small <= 3:
        least = small
    else:
        least = max(4, min(most - 4, round(small * most / large)))
        least = max(8, least - least % 8) if small % 16 == 0 else least | 1
    return (most, least) if lengths[0] > lengths[1] else (least, most)


def _scaled_d(d: int) -> int:
    """A d that a kernel of 64 columns serves; none that needs padding where d does not."""
    while d > 64:
        d = d // 2 if d % 2 == 0 and (d // 2) % 8 == 0 else (64 if d % 8 == 0 else d // 2)
    return d


@dataclass(frozen=True)
class PeerTest:
    """A test of a peer's suite: every combination of ``values``, names of PeerCase's fields or
    tuples of them, for which ``valid``; of those, ``draw`` are run."""

    suite: str
    function: str
    call: str
    values: Mapping[str | tuple[str, ...], Sequence[Any]]
    draw: int
    valid: Callable[[PeerCase], bool] = lambda case: True

    def cases(self) -> list[PeerCase]:
        """Drawn ones, the same every time, with every value of every name among them."""
        generator = random.Random(f"{self.suite} {self.function}")
        names, values = tuple(self.values), tuple(map(list, self.values.values()))
        count = 1
        for its in values:
            count *= len(its)
        found: dict[PeerCase, None] = {}
        if count <= 4 * self.draw:
            everything = list(product(*values))
            generator.shuffle(everything)
            drawn: Iterator[tuple[Any, ...]] = iter(everything)
        else:
            drawn = self._in_turns(values, generator)
        for combination in drawn:
            case = self._case(names, combination, len(found))
            if self.valid(case):
                found.setdefault(case)
            if len(found) == self.draw:
                break
        return list(found)

    def _in_turns(
        self, values: Sequence[list[Any]], generator: random.Random
    ) -> Iterator[tuple[Any, ...]]:
        """Combinations in which a value comes again when all others of its name have come."""
        left: list[list[Any]] = [[] for _ in values]
        for _ in range(100 * self.draw):
            for its, all_values in zip(left, values, strict=True):
                if not its:
                    its += all_values
                    generator.shuffle(its)
            yield tuple(its.pop() for its in left)

    def _case(
        self, names: Sequence[str | tuple[str, ...]], combination: Sequence[Any], seed: int
    ) -> PeerCase:
        given: dict[str, Any] = {}
        for name, value in zip(names, combination, strict=True):
            given.update(
                zip(name, value, strict=True) if isinstance(name, tuple) else [(name, value)]
            )
        return PeerCase(
            suite=self.suite, function=self.function, call=self.call, seed=seed, **given
        )
