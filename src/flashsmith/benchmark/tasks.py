"""Tasks: what each kernel of a run is to compute, so that it can be proven and timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem, Semantics, serves_gradients
from flashsmith.operations import DECODE, DEFAULT
from flashsmith.runtime.target import Target

_PLAIN = Semantics()
# Of a packed problem whose batch nobody named.
PACKED_SEQUENCES = 4


def whole_tiles(seq: int, cfg: KernelConfig) -> int:
    """The least length of at least `seq` that the config's tiles divide, of queries and keys.

    Each config has a length of its own: the least common multiple of a set's tiles has no limit
    (13,440 for the Hopper kernels that the package ships).
    """
    whole = math.lcm(*cfg.family.dividing_tiles(cfg).values())
    return -(-seq // whole) * whole


@dataclass(frozen=True)
class TimedSize:
    """The problem that is timed; over a cache a sequence has one query."""

    batch: int = 16
    seq: int = 4096
    heads: int = 16

    def length(self, semantics: Semantics) -> int:
        """The length of its sequences: for an uneven kernel one that fills no tiles."""
        return self.seq - (semantics.uneven and not semantics.packed)

    def problem(self, cfg: KernelConfig, semantics: Semantics = _PLAIN) -> Problem:
        """It, for a config's dtype and head dimension."""
        queries = 1 if cfg.family.operation == DECODE.name else None
        return _problem(cfg, self.batch, self.length(semantics), self.heads, semantics, queries)


def _problem(
    cfg: KernelConfig,
    batch: int,
    seq: int,
    heads: int,
    semantics: Semantics,
    queries: int | None = None,
) -> Problem:
    """What a config's kernel computes of such sequences, with as many queries as keys unless so
    many are given."""
    sizes = batch, seq if queries is None else queries, seq, heads, heads, cfg.d_head
    family = cfg.family
    needed = family.gradients_of(cfg)
    return Problem(*sizes, cfg.dtype, semantics, family.operation, gradients=needed)


TIMED = TimedSize()


@dataclass(frozen=True)
class Size:
    """How large a problem every kernel gets; head dimension and dtype are the config's own.

    Packed, ``batch`` is the number of sequences, and ``seq`` the length of the longest.
    ``whole_tiles`` gives each kernel a length of its own: the shortest from ``seq`` on that its
    tiles divide.
    """

    batch: int
    seq: int
    heads: int
    semantics: Semantics = _PLAIN
    whole_tiles: bool = False

    def length(self, cfg: KernelConfig) -> int:
        """Queries and keys that `cfg`'s kernel gets."""
        return whole_tiles(self.seq, cfg) if self.whole_tiles else self.seq

    def problem(self, cfg: KernelConfig) -> Problem:
        """What `cfg`'s kernel computes, with the semantics that it is compiled for."""
        return _problem(cfg, self.batch, self.length(cfg), self.heads, self.semantics)

    def timed(self, cfg: KernelConfig) -> Problem | None:
        """What it is timed on: a size that fills a GPU, for the same kernel."""
        return TIMED.problem(cfg, self.semantics)

    def why_not(self, cfg: KernelConfig) -> str | None:
        """Why `cfg`'s kernel cannot compute it; None if it can."""
        return None

    def check(self, cfg: KernelConfig) -> None:
        """Raises ArgumentError where another kernel of `cfg` than the semantics' would run."""
        for name, value in (("batch", self.batch), ("heads", self.heads), ("seq", self.seq)):
            if value < 1:
                raise ArgumentError(f"{name}={value}: give a whole number above 0")
        if self.semantics.uneven:
            _check_uneven(f"seq={self.seq}", self.problem(cfg), cfg)
            return
        for name, tile in cfg.family.dividing_tiles(cfg).items():
            if self.length(cfg) % tile:
                raise ArgumentError(
                    f"seq={self.seq}: must be a multiple of {name}={tile} of {cfg}; "
                    f"take {-(-self.seq // tile) * tile}, or uneven semantics"
                )

    def describe(self, configs: Sequence[KernelConfig]) -> str:
        """The size, and what the configs add to it."""
        d_heads = ", ".join(map(str, sorted({cfg.d_head for cfg in configs})))
        dtypes = ", ".join(sorted({cfg.dtype.name.lower() for cfg in configs}))
        lengths = describe_lengths([self.length(cfg) for cfg in configs])
        size = f"batch {self.batch}, seq {lengths}, heads {self.heads}, d_head {d_heads}, {dtypes}"
        others = sorted({cfg.family.operation for cfg in configs} - {DEFAULT})
        return ", ".join([size, *others])

    def describe_timed(self) -> str:
        """The size that is timed."""
        return f"batch {TIMED.batch}, seq {TIMED.length(self.semantics)}, heads {TIMED.heads}"

    def to_json(self, configs: Sequence[KernelConfig]) -> dict[str, Any]:
        """As JSON takes it; the length is None where those of the configs differ."""
        lengths = {self.length(cfg) for cfg in configs}
        facts = asdict(self) | {"semantics": str(self.semantics)}
        facts["seq"] = lengths.pop() if len(lengths) == 1 else None
        del facts["whole_tiles"]
        return facts

    def timed_to_json(self) -> dict[str, Any]:
        """The size that is timed, likewise."""
        return asdict(TIMED) | {"seq": TIMED.length(self.semantics)}


@dataclass(frozen=True)
class OneProblem:
    """The same problem for every kernel that can compute it."""

    given: Problem

    def problem(self, cfg: KernelConfig) -> Problem:
        """It, with the semantics that `cfg`'s kernel is compiled for."""
        return replace(self.given, semantics=self.given.required_semantics(cfg))

    def timed(self, cfg: KernelConfig) -> Problem | None:
        """What it is timed on: itself, unless there is nothing to compute."""
        return self.problem(cfg) if self.given.attn_flop() else None

    def why_not(self, cfg: KernelConfig) -> str | None:
        """Why `cfg`'s kernel cannot compute it; None if it can."""
        if cfg.family.operation != self.given.operation:
            return f"computes {cfg.family.operation}"
        if not serves_gradients(cfg, self.given):
            return f"computes {cfg.family.gradients_of(cfg)}"
        if cfg.dtype is not self.given.dtype:
            return f"is for {cfg.dtype.name.lower()}"
        if cfg.d_head < self.given.d:
            return f"has d_head {cfg.d_head}"
        return None

    def check(self, cfg: KernelConfig) -> None:
        """Raises ArgumentError for a problem of which nothing would run, a d that no kernel takes,
        and where another kernel of `cfg` than the one that the problem names would run."""
        if not self.given.batch * self.given.seq_q:
            raise ArgumentError(
                f"problem='{self.given}': has no queries, so that no kernel runs; give b and s of "
                "at least 1"
            )
        if self.given.d % 8:
            raise ArgumentError(
                f"problem='{self.given}': d={self.given.d} is no multiple of 8, which all kernels "
                f"need; take {-(-self.given.d // 8) * 8}"
            )
        if self.given.semantics.uneven:
            _check_uneven(f"problem='{self.given}'", self.given, cfg)

    def describe(self, configs: Sequence[KernelConfig]) -> str:
        """The problem as it was given."""
        return str(self.given)

    def describe_timed(self) -> str:
        """The problem that is timed."""
        return "the same problem"

    def to_json(self, configs: Sequence[KernelConfig] = ()) -> dict[str, Any]:
        """As JSON takes it."""
        facts = asdict(self.given) | {
            "dtype": self.given.dtype.name.lower(),
            "semantics": str(self.given.semantics),
        }
        if self.given.operation == DEFAULT:
            del facts["operation"]
        if not self.given.gradients:
            del facts["gradients"]
        return facts

    def timed_to_json(self) -> dict[str, Any]:
        """The problem that is timed, likewise."""
        return self.to_json()


Task = Size | OneProblem

# Four K/V steps of 64 keys: enough for every part of the loop, a second or two per kernel.
EMULATED = Size(batch=1, seq=256, heads=2)
# On a GPU: what the float64 reference on the CPU does in seconds.
PROVEN_ON_GPU = Size(batch=2, seq=1024, heads=4)


def default_size(target: Target, semantics: Semantics = _PLAIN) -> Size:
    """What is proven unless something else is asked for: for each kernel of a length that its
    tiles divide or, for uneven semantics, that none's do."""
    return size_for(PROVEN_ON_GPU if target.backend == "gpu" else EMULATED, semantics)


def size_for(size: Size, semantics: Semantics) -> Size:
    """About this size, for kernels of these semantics; packed, of some sequences."""
    return replace(
        size,
        batch=PACKED_SEQUENCES if semantics.packed else size.batch,
        seq=size.seq - 1 if semantics.uneven else size.seq,
        semantics=semantics,
        whole_tiles=not semantics.uneven,
    )


def describe_lengths(lengths: Sequence[int]) -> str:
    """One length, or from which to which those of the kernels are."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return str(shortest)
    return f"{shortest} to {longest} (each kernel its own)"


def _check_uneven(named: str, problem: Problem, cfg: KernelConfig) -> None:
    if problem.semantics.packed or not cfg.fills_tiles(problem.seq_q, problem.seq_k, problem.d):
        return
    even = replace(problem.semantics, uneven=False)
    raise ArgumentError(
        f"{named}: fills whole tiles of {cfg}, for which its kernel '{even}' would run and not "
        f"the uneven one; give another length, or leave 'uneven' out"
    )
