"""Tasks: the problems on which a run checks and times its kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem, Semantics, serves_gradients
from flashsmith.families.head_dims import HeadPair
from flashsmith.operations import DEFAULT, operation
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.runtime.target import Target

_PLAIN = Semantics()
# The default batch of a packed problem.
PACKED_SEQUENCES = 4


def whole_tiles(seq: int, cfg: KernelConfig) -> int:
    """The smallest length that is at least `seq` and is a multiple of both the query tile and the
    key tile of the config.

    Each config has its own length, because the least common multiple over a set of configs can be
    very large (13,440 for the shipped Hopper kernels).
    """
    whole = math.lcm(*cfg.family.dividing_tiles(cfg).values())
    return -(-seq // whole) * whole


@dataclass(frozen=True)
class TimedSize:
    """The size of the problem that is timed. Over a cache, a sequence has one query."""

    batch: int = 16
    seq: int = 4096
    heads: int = 16

    def length(self, semantics: Semantics) -> int:
        """The length of the sequences.

        For a kernel for uneven lengths, this length is not a multiple of the kernel's tiles.
        """
        return self.seq - (semantics.uneven and not semantics.packed)

    def problem(self, cfg: KernelConfig, semantics: Semantics = _PLAIN) -> Problem:
        """The problem that is timed, with the dtype and head dimension of a config."""
        queries = 1 if operation(cfg.family.operation).has_pages else None
        return _problem(cfg, self.batch, self.length(semantics), self.heads, semantics, queries)


def _problem(
    cfg: KernelConfig,
    batch: int,
    seq: int,
    heads: int,
    semantics: Semantics,
    queries: int | None = None,
) -> Problem:
    """Returns the problem of these sizes for the kernel of a config; ``queries`` is ``seq`` by
    default."""
    family = cfg.family
    heads_k = 1 if family.operation == LATENT_DECODE.name else heads
    sizes = batch, seq if queries is None else queries, seq, heads, heads_k, cfg.d_head
    problem = Problem(*sizes, cfg.dtype, semantics, family.operation, d_v=cfg.d_head_v)
    return replace(problem, gradients=family.gradients_of(cfg), cache=family.cache_of(cfg))


TIMED = TimedSize()


@dataclass(frozen=True)
class Size:
    """The size of a problem for every kernel, to which each config adds its head dimension and
    dtype.

    For packed semantics, ``batch`` is the number of sequences, and ``seq`` is the length of the
    longest. With ``whole_tiles``, each kernel gets the shortest length that is at least ``seq`` and
    a multiple of the kernel's tiles.
    """

    batch: int
    seq: int
    heads: int
    semantics: Semantics = _PLAIN
    whole_tiles: bool = False

    def length(self, cfg: KernelConfig) -> int:
        """The number of queries, and of keys, for `cfg`'s kernel."""
        return whole_tiles(self.seq, cfg) if self.whole_tiles else self.seq

    def problem(self, cfg: KernelConfig) -> Problem:
        """The problem for `cfg`'s kernel, with the semantics for which the kernel is compiled."""
        return _problem(cfg, self.batch, self.length(cfg), self.heads, self.semantics)

    def timed(self, cfg: KernelConfig) -> Problem | None:
        """The problem on which the same kernel is timed. It is large enough to fill a GPU."""
        return TIMED.problem(cfg, self.semantics)

    def why_not(self, cfg: KernelConfig) -> str | None:
        """Returns the reason why the kernel of `cfg` cannot compute the task; None if it can."""
        return None

    def check(self, cfg: KernelConfig) -> None:
        """Raises ArgumentError if a value is below 1, or if a problem of this size would run a
        kernel compiled for semantics other than the task's."""
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
                    f"give {-(-self.seq // tile) * tile}, or use uneven semantics"
                )

    def describe(self, configs: Sequence[KernelConfig]) -> str:
        """The size in words, with the head dimensions, dtypes and operations of the configs."""
        d_heads = ", ".join(map(str, sorted({cfg.d_head for cfg in configs})))
        dtypes = ", ".join(sorted({cfg.dtype.name.lower() for cfg in configs}))
        lengths = describe_lengths([self.length(cfg) for cfg in configs])
        size = f"batch {self.batch}, seq {lengths}, heads {self.heads}, d_head {d_heads}, {dtypes}"
        others = sorted({cfg.family.operation for cfg in configs} - {DEFAULT})
        return ", ".join([size, *others])

    def describe_timed(self) -> str:
        """The size that is timed, in words."""
        return f"batch {TIMED.batch}, seq {TIMED.length(self.semantics)}, heads {TIMED.heads}"

    def to_json(self, configs: Sequence[KernelConfig]) -> dict[str, Any]:
        """The size as JSON. The length is None if the configs have different lengths."""
        lengths = {self.length(cfg) for cfg in configs}
        facts = asdict(self) | {"semantics": str(self.semantics)}
        facts["seq"] = lengths.pop() if len(lengths) == 1 else None
        del facts["whole_tiles"]
        return facts

    def timed_to_json(self) -> dict[str, Any]:
        """The timed size as JSON."""
        return asdict(TIMED) | {"seq": TIMED.length(self.semantics)}


@dataclass(frozen=True)
class OneProblem:
    """A single given problem, for all kernels that can compute it."""

    given: Problem

    def problem(self, cfg: KernelConfig) -> Problem:
        """The problem, with the semantics for which `cfg`'s kernel is compiled."""
        return replace(self.given, semantics=self.given.required_semantics(cfg))

    def timed(self, cfg: KernelConfig) -> Problem | None:
        """The problem to time, which is the given problem; None if there is nothing to compute."""
        return self.problem(cfg) if self.given.attn_flop() else None

    def why_not(self, cfg: KernelConfig) -> str | None:
        """Returns the reason why the kernel of `cfg` cannot compute the problem; None if it can."""
        if cfg.family.operation != self.given.operation:
            return f"computes {cfg.family.operation}"
        if not serves_gradients(cfg, self.given):
            return f"computes {cfg.family.gradients_of(cfg)}"
        if cfg.dtype is not self.given.dtype:
            return f"is for {cfg.dtype.name.lower()}"
        is_pair = isinstance(cfg.head_dims, HeadPair)
        if cfg.d_head < self.given.d or cfg.d_head_v < self.given.d_v:
            return f"has d_head {cfg.head_dims}"
        if not is_pair and self.given.d != self.given.d_v:
            return f"has one width, d_head {cfg.d_head}"
        return None

    def check(self, cfg: KernelConfig) -> None:
        """Raises ArgumentError if the problem has no queries, if no kernel takes its d, or if `cfg`
        would run a kernel with other semantics."""
        if not self.given.batch * self.given.seq_q:
            raise ArgumentError(
                f"problem='{self.given}': has no queries, so that no kernel runs; give b and s of "
                "at least 1"
            )
        if self.given.d % 8:
            raise ArgumentError(
                f"problem='{self.given}': d={self.given.d} is not a multiple of 8, which all "
                f"kernels need; give {-(-self.given.d // 8) * 8}"
            )
        if self.given.semantics.uneven:
            _check_uneven(f"problem='{self.given}'", self.given, cfg)

    def describe(self, configs: Sequence[KernelConfig]) -> str:
        """The given problem, in words."""
        return str(self.given)

    def describe_timed(self) -> str:
        """The timed problem, in words."""
        return "the same problem"

    def to_json(self, configs: Sequence[KernelConfig] = ()) -> dict[str, Any]:
        """The problem as JSON."""
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
        """The timed problem as JSON."""
        return self.to_json()


Task = Size | OneProblem

# Four steps of 64 keys execute every part of the loop, and take a second or two per kernel.
EMULATED = Size(batch=1, seq=256, heads=2)
# The float64 reference, which runs on the CPU, takes seconds for this size.
PROVEN_ON_GPU = Size(batch=2, seq=1024, heads=4)


def default_size(target: Target, semantics: Semantics = _PLAIN) -> Size:
    """The default size of a proof.

    Each kernel gets a length that is a multiple of its tiles. For uneven semantics, all kernels get
    the same length, which is not a multiple of any tile.
    """
    return size_for(PROVEN_ON_GPU if target.backend == "gpu" else EMULATED, semantics)


def size_for(size: Size, semantics: Semantics) -> Size:
    """A task of about the given size, for kernels with these semantics; packed problems get
    PACKED_SEQUENCES sequences."""
    return replace(
        size,
        batch=PACKED_SEQUENCES if semantics.packed else size.batch,
        seq=size.seq - 1 if semantics.uneven else size.seq,
        semantics=semantics,
        whole_tiles=not semantics.uneven,
    )


def describe_lengths(lengths: Sequence[int]) -> str:
    """The length in words, or the range if the kernels have different lengths."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return str(shortest)
    return f"{shortest} to {longest} (each kernel its own)"


def _check_uneven(named: str, problem: Problem, cfg: KernelConfig) -> None:
    whole = cfg.fills_tiles(problem.seq_q, problem.seq_k, problem.d)
    if problem.semantics.packed or not whole or problem.d_v != cfg.d_head_v:
        return
    even = replace(problem.semantics, uneven=False)
    raise ArgumentError(
        f"{named}: fills whole tiles of {cfg}, for which its kernel '{even}' would run and not "
        f"the uneven one; give another length, or leave 'uneven' out"
    )
