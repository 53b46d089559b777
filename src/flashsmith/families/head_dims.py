"""Head dimensions of kernels: either one width for q, k and v, or a width for q and k and another
for v."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from flashsmith.families.knob import knob
from flashsmith.families.rule import Rule
from flashsmith.operations.problem import Problem


class HeadPair(NamedTuple):
    """The tile widths of a kernel for calls in which v and o may have another head dimension than q
    and k.

    ``d_head`` is the width for q and k, and ``d_v`` is the width for v and o. In a pair of equal
    numbers, such as 256:256, each number is an upper bound for a width of the call, whose two
    widths differ.
    """

    d_head: int
    d_v: int

    def __str__(self) -> str:
        return f"{self.d_head}:{self.d_v}"


HeadDims = int | HeadPair

# Every problem with d and d_v up to 256 fits in one of these pairs.
PAIRS = (
    HeadPair(64, 128),
    HeadPair(128, 64),
    HeadPair(192, 128),
    HeadPair(256, 128),
    HeadPair(256, 256),
)


def tile_columns(columns: int) -> int:
    """The number of columns of shared memory that a tile of ``columns`` columns takes: a whole
    number of 32-column panels.

    Tiles of 72 and 80 columns are padded with columns of zeros.
    """
    return -(-columns // 32) * 32


def is_whole(columns: int) -> bool:
    """Whether a tile of ``columns`` columns needs no zero padding. Tiles of 72 and 80 columns need
    it, and config sets and covering arrays leave these widths out."""
    return tile_columns(columns) == columns


def step_columns(columns: int) -> int:
    """``columns``, rounded up to a whole number of 16-column steps of a GEMM. 72 columns take as
    many steps as 80."""
    return -(-columns // 16) * 16


def fitting_dims(problem: Problem, known: Iterable[HeadDims]) -> list[HeadDims]:
    """The widths among ``known`` whose kernels can compute a problem, the narrowest first. These
    are pairs if the problem's d_v differs from its d, and single widths otherwise.
    """
    if problem.d_v == problem.d:
        return sorted({d for d in known if isinstance(d, int) and problem.d <= d})
    pairs = {pair for pair in known if isinstance(pair, HeadPair)}
    fitting = [pair for pair in pairs if problem.d <= pair.d_head and problem.d_v <= pair.d_v]
    return [pair for _, pair in sorted((sum(pair), pair) for pair in fitting)]


def split_dims(knobs: dict[str, Any]) -> dict[str, Any]:
    """The knobs, with two numbers `d_head` and `d_v` in the place of a `d_head` that is a
    HeadPair."""
    widths = knobs["d_head"]
    return knobs | widths._asdict() if isinstance(widths, HeadPair) else knobs


def d_v_knob() -> Any:
    """Declares the field `d_v` of a config class. It must be the last field, so that kernels
    without a d_v keep their names."""
    return knob(
        "head dimension of v and o, elements; 0: d_head, for all calls",
        values=(0, *sorted({pair.d_v for pair in PAIRS})),
        default=0,
        lowest=0,
        effect=lambda cfg: (
            f"v and o have up to {cfg.d_v} columns, q and k up to {cfg.d_head}"
            if cfg.d_v
            else "v and o are as wide as q and k"
        ),
        where="d_v",
    )


def pair_rule(pairs: tuple[HeadPair, ...]) -> Rule:
    """Returns the rule that d_head and a nonzero d_v must be a pair for which kernels exist."""
    listed = ", ".join(map(str, pairs))
    return Rule(
        "d_v_supported",
        f"d_v must be 0 (v as wide as q and k), or d_head and d_v must be a pair, {listed}: there "
        "are kernels for these only",
        lambda cfg, device: cfg.d_v == 0 or (cfg.d_head, cfg.d_v) in pairs,
        ("d_head", "d_v"),
    )
