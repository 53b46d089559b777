"""Hundreds of small backward problems, each with semantics, lengths and inputs of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from grids.backward_grid import BackwardCase, random_case

LENGTHS = ((1, 1), (3, 3), (1, 39), (40, 1), (17, 33), (33, 17), (48, 48), (37, 70), (70, 37))


def tiny_cases(count: int, seed: int, **fixed: object) -> Iterator[BackwardCase]:
    """``count`` random problems; ``fixed`` are fields that all of them have."""
    draw = random.Random(seed)
    for _ in range(count):
        case = replace(
            random_case(draw),
            lengths=draw.choice(LENGTHS),
            d=draw.choice((8, 16, 24, 40)),
            cut=0,
        )
        if case.batch != "dense" and min(case.lengths) > 3:
            case = replace(case, cut=draw.choice((0, 2)))
        yield replace(case, **fixed)  # type: ignore[arg-type]
