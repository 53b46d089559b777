"""The grid of decode problems that every release is proven on, and a small cover of it.

Dtypes, head dimensions, groups, queries, pages and masks are multiplied out; everything else is
drawn for each problem, by its own seed, so that all pairs occur many times.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, product
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem, Semantics, family_named
from flashsmith.operations import DECODE
from flashsmith.verify.attention_semantics import Lens, Window, unequal_lens
from flashsmith.verify.decode_reference import LAYOUTS, DecodeReference
from grids.proof_grid import SM_COUNTS, Pair, cover

D = (64, 96, 128, 256)
# Query heads that share one of the cache.
GROUPS = (1, 2, 4, 7, 8, 16)
QUERIES = (1, 2, 5, 64)
PAGES = (0, 1, 8, 16, 24, 256)
MASKS = ("none", "causal", "window")
# The longest sequence of each kind: 'empty' ones have 0 or 1 key, 'page' and 'boundary' lengths
# lie next to those of whole pages and of parts of keys.
LENGTHS = {"empty": 1, "short": 40, "page": 500, "boundary": 1030, "mixed": 300, "long": 9000}
APPENDS = ("", "append", "halves", "interleaved")
_DRAWN: dict[str, tuple[Any, ...]] = {
    "lengths_of": tuple(LENGTHS),
    "softcap": (0.0, 30.0),
    "sinks": (False, True),
    "packed": (False, True),
    "append": APPENDS,
    "wide_rotary": (False, True),
    "batch": (1, 4, 7),
    "heads_k": (1, 2),
    "layout": LAYOUTS,
    "capacity": (0, 0, 3, 40),
    "split": ("invariant", "free"),
    "scale": (None, None, 0.3),
    "sm_count": SM_COUNTS,
    "dropped": (0, 0, 50),
}


@dataclass(frozen=True)
class DecodeCase:
    """One problem of the grid for a kernel of one family ('': for none). ``lengths_of`` and
    ``mask`` name a kind; the case itself seeds what is random, so equal cases are equal problems.
    """

    dtype: DType
    d: int
    group: int
    queries: int
    page: int
    mask: str
    lengths_of: str = "mixed"
    softcap: float = 0.0
    sinks: bool = False
    packed: bool = False
    append: str = ""
    wide_rotary: bool = False
    batch: int = 4
    heads_k: int = 1
    layout: str = LAYOUTS[0]
    capacity: int = 0
    split: str = "invariant"
    scale: float | None = None
    sm_count: int | None = None
    inputs: str = "random"
    longest: int = 0
    family: str = ""
    dropped: int = 0

    def __str__(self) -> str:
        said = [
            self.family, self.dtype.name.lower(), f"d{self.d}", f"group {self.group}",
            f"{self.queries} queries", f"page {self.page}", f"mask {self.mask}",
            f"{self.lengths_of} lengths", f"softcap {self.softcap:g}" * (self.softcap > 0),
            "sinks" * self.sinks, "packed" * self.packed, self.append,
            "fp32 rotary" * self.wide_rotary, f"batch {self.batch}", f"heads_k {self.heads_k}",
            self.layout * (self.layout != LAYOUTS[0]),
            f"capacity +{self.capacity}" * bool(self.capacity), self.split,
            f"scale {self.scale}" * (self.scale is not None),
            f"{self.sm_count} SMs" * (self.sm_count is not None),
            f"{self.inputs} inputs" * (self.inputs != "random"),
            f"up to {self.longest} keys" * bool(self.longest),
            f"up to {self.dropped} dropped keys" * bool(self.dropped),
        ]  # fmt: skip
        return ", ".join(word for word in said if word)

    @cached_property
    def seed(self) -> int:
        """Of the lengths, the window, the pages and the inputs."""
        return zlib.crc32(str(self).encode())

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of the longest sequence."""
        keys = LENGTHS[self.lengths_of]
        keys = min(keys, self.longest) if self.longest else keys
        return self.queries, max(keys, self.queries if self.append else 1)

    @property
    def heads(self) -> tuple[int, int]:
        return self.group * self.heads_k, self.heads_k

    @cached_property
    def problem(self) -> Problem:
        """The problem, its semantics those of the lengths alone."""
        semantics = Semantics(self.mask, self.softcap > 0, self.packed, uneven=self.packed)
        return Problem(
            *(self.batch, *self.lengths, *self.heads, self.d, self.dtype),
            *(semantics, DECODE.name, self.page),
        )

    def options(self) -> dict[str, Any]:
        """What the problem's text leaves open, as DecodeReference takes it."""
        draw, keys = random.Random(self.seed), self.lengths[1]
        lens_q = None
        if self.packed:
            lens_q = unequal_lens(self.batch, self.queries, draw)
        least = lens_q or (self.queries,) * self.batch
        rotary = self.append in ("halves", "interleaved")
        said: dict[str, Any] = {
            "window": _window(draw, keys) if self.mask == "window" else None,
            "softcap": self.softcap or None,
            "sinks": self.sinks,
            "scale": self.scale,
            "lens_q": lens_q,
            "append": bool(self.append),
            "rotary": self.append if rotary else "",
            "rotary_dtype": "float32" if rotary and self.wide_rotary else None,
            "rotary_half": draw.choice((None, 8)) if rotary else None,
            "dropped": self.dropped,
            "capacity": self.capacity,
            "layout": self.layout,
            "split": self.split,
        }
        lens_k = _lengths(self.lengths_of, keys, self.batch, self.page or 16, draw)
        if lens_k is not None:
            if self.append:
                lens_k = tuple(map(max, lens_k, least))
            said["lens_k"] = lens_k
        return DecodeReference().options(self.problem, seed=self.seed, **said)

    @cached_property
    def config(self) -> KernelConfig:
        """The kernel to prove.

        Raises ArgumentError where the family has none.
        """
        found = _proof_configs(self.family, self.dtype, self.d)
        if not found:
            raise ArgumentError(
                f"family={self.family!r}: it has no proof_configs for {self.dtype.name} and "
                f"d {self.d}; give it some, or name a config and take prove()"
            )
        return found[self.seed // 2 % len(found)]

    @property
    def semantics(self) -> Semantics:
        """The semantics that the config's kernel must be compiled for."""
        return self.problem.required_semantics(self.config)

    def keywords(self) -> dict[str, Any]:
        """The keywords of ``prove``, besides the config and where to run."""
        return {
            "problem": self.problem, "options": self.options(), "inputs": self.inputs,
            "seed": self.seed, "sm_count": self.sm_count,
        }  # fmt: skip


@cache
def _proof_configs(family: str, dtype: DType, d: int) -> list[KernelConfig]:
    return list(family_named(family).proof_configs(dtype, d))


@cache
def _served_d(family: str) -> tuple[int, ...]:
    """The head dimensions that a family's kernels are proven for; all for no family."""
    return tuple(d for d in D if not family or _proof_configs(family, DType.FP16, d))


def _window(draw: random.Random, keys: int) -> Window:
    left, right = draw.randrange(keys + 1), draw.randrange(keys + 1)
    return draw.choice([(left, 0), (left, right), (left, None), (None, right or 1)])


def _lengths(kind: str, longest: int, batch: int, page: int, draw: random.Random) -> Lens | None:
    """Keys of each sequence; None where the reference draws them."""
    if kind == "empty":
        return tuple(draw.randint(0, 1) for _ in range(batch))
    if kind in ("page", "boundary"):
        step = page if kind == "page" else 2 ** draw.randint(5, 9)
        most = max(1, longest // step)
        beside = (draw.randint(1, most) * step + draw.choice((-1, 0, 1)) for _ in range(batch))
        return tuple(min(longest, max(0, keys)) for keys in beside)
    return None


def decode_grid(family: str = "") -> Iterator[DecodeCase]:
    """Every problem of the grid, 4,128 of all D, for the kernels of a family, of the d that it
    serves."""
    served = _served_d(family)
    for dtype, d, group, queries, page, mask in product(
        DType, served, GROUPS, QUERIES, PAGES, MASKS
    ):
        yield _filled(DecodeCase(dtype, d, group, queries, page, mask, family=family))
    for dtype, d, page, mask, kind in product(
        DType, served, (0, 1, 16, 24), MASKS, DecodeReference.kinds[1:]
    ):
        draw = random.Random(f"{dtype.name} {d} {page} {mask} {kind}")
        group, queries = draw.choice(GROUPS), draw.choice(QUERIES)
        case = DecodeCase(dtype, d, group, queries, page, mask, inputs=kind, family=family)
        yield _filled(case)


def _filled(case: DecodeCase) -> DecodeCase:
    """The case with all that the grid does not multiply out, drawn by its own seed."""
    draw = random.Random(case.seed)
    return _possible(case, {name: draw.choice(choices) for name, choices in _DRAWN.items()})


def _possible(case: DecodeCase, drawn: dict[str, Any]) -> DecodeCase:
    if drawn["append"] not in ("halves", "interleaved"):
        drawn["wide_rotary"] = False
    return replace(case, **drawn)


# The part of the grid for the emulator, and for models of kernels: short sequences of one K/V head.
_FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(DType),
    "d": D,
    "group": GROUPS,
    "queries": QUERIES,
    "page": PAGES,
    "mask": MASKS,
    "inputs": DecodeReference.kinds,
}
_QUICK = {"heads_k": (1,), "batch": (1, 3), "sm_count": (1, 3)}
_QUICK_LONGEST = 320
_POOL = 4_000


def _splits(cfg: Any) -> bool:
    """Whether a kernel leaves its parts to a launch that merges them."""
    return not (cfg.cluster or cfg.chunk_rows)


def _exchanges(cfg: Any) -> bool:
    return bool(cfg.cluster and not cfg.own_rows and not cfg.full_tiles)


def _owns_rows(cfg: Any) -> bool:
    return bool(cfg.own_rows)


def _has_full_tiles(cfg: Any) -> bool:
    return bool(cfg.cluster and cfg.full_tiles)


# What sequences of few keys never do, by whom: CTAs that merge in clusters, first each with a run,
# then some without one, and at last each with a run of two parts; that ask a counter for runs, and
# look for rows to merge; that keep the states of several parts, or have all keys of a sequence;
# chunks; and the merge by a CTA a row, of few runs and of more than 32. The number is of keys that
# all sequences together have at least. They are about the shortest that do it.
_Watched = tuple[Callable[[Any], bool], dict[str, Any], int]
_CLUSTERS: dict[str, Any] = {"batch": 1, "heads_k": 2, "longest": 1000}
_IDLE: dict[str, Any] = {"batch": 1, "heads_k": 2, "longest": 800}
_PAIRS: dict[str, Any] = {"batch": 2, "heads_k": 2, "longest": 1000, "sm_count": 16}
_COUNTED: dict[str, Any] = {"group": 8, "batch": 4, "heads_k": 1, "longest": 3000, "sm_count": 1}
_WATCHED: tuple[_Watched, ...] = (
    (_exchanges, _CLUSTERS | {"group": 8, "queries": 2}, 0),
    (_owns_rows, _CLUSTERS | {"group": 4, "queries": 5}, 0),
    (_exchanges, _IDLE | {"group": 8, "queries": 2}, 0),
    (_owns_rows, _IDLE | {"group": 4, "queries": 5}, 0),
    (_exchanges, _PAIRS | {"group": 8}, 1800),
    (_owns_rows, _PAIRS | {"group": 4, "queries": 5}, 1800),
    (_exchanges, _COUNTED, 7000),
    (_owns_rows, _COUNTED, 7000),
    (_has_full_tiles, {"group": 16, "batch": 1, "heads_k": 2, "longest": 1000}, 0),
    (_has_full_tiles, {"group": 16, "batch": 7, "heads_k": 1, "longest": 800, "sm_count": 8}, 0),
    (_has_full_tiles, {"group": 4, "batch": 1, "heads_k": 1, "longest": 1200, "queries": 64}, 0),
    (_splits, {"group": 16, "batch": 1, "heads_k": 1, "longest": 4400, "queries": 2}, 0),
    (_splits, {"group": 16, "batch": 1, "heads_k": 8, "longest": 300}, 0),
    (_splits, {"group": 4, "batch": 5, "heads_k": 2, "longest": 300, "sm_count": 3}, 0),
)
_MOST_TRIES = 2000


def watched_decode_cases(family: str) -> list[DecodeCase]:
    """Cases for a sanitizer of what short sequences never do, dense and in pages to which they
    append."""
    found = []
    for (is_kernel, said, least), page in product(_WATCHED, (0, 16)):
        # The seed, and so the scale, says which kernel a case is for, and its lengths.
        cases = (
            DecodeCase(
                *(DType.BF16, 128),
                **{"queries": 1, **said},
                page=page,
                mask="none",
                lengths_of="long",
                append="append" if page else "",
                scale=round(0.08 + number / 10_000, 4),
                family=family,
            )
            for number in range(_MOST_TRIES)
        )
        found.append(
            next(
                case
                for case in cases
                if is_kernel(case.config) and sum(case.options()["lens_k"]) >= least
            )
        )
    return found


def case_pairs(case: DecodeCase) -> list[Pair]:
    """All pairs of two factors with the values they have in ``case``."""
    factors = [(name, getattr(case, name)) for name in (*_FACTORS, *_DRAWN)]
    return list(combinations(factors, 2))


def covering_decode_cases(family: str = "") -> list[DecodeCase]:
    """Few cases that contain every possible pair of factors; the same on every machine."""
    draw = random.Random(1)
    pool = [random_case(draw, family) for _ in range(_POOL)]
    pairs = [case_pairs(case) for case in pool]
    return cover(pool, pairs, (lambda it: (it.config, it.semantics)) if family else None)


def random_case(draw: random.Random, family: str = "") -> DecodeCase:
    """A case of the emulator's part."""
    factors = _FACTORS | {"d": _served_d(family)}
    values = {name: draw.choice(choices) for name, choices in factors.items()}
    case = DecodeCase(**values, longest=_QUICK_LONGEST, family=family)
    drawn = {name: draw.choice(choices) for name, choices in (_DRAWN | _QUICK).items()}
    if case.queries * case.group > 128:
        # Many rows of a large d take the emulator long.
        drawn |= {"batch": 1, "lengths_of": draw.choice(("empty", "short"))}
    return _possible(case, drawn)
