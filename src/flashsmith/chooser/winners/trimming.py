"""What of a ranking is worth keeping."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.chooser.winners.entry import Ranked
from flashsmith.errors import FlashsmithError
from flashsmith.families import parse_kernel_name_into_config

KEPT = 8


def worth_keeping(ranked: Sequence[Ranked]) -> list[Ranked]:
    """The best KEPT of a ranking (fastest first), and the best of every tile shape.

    A shape that loses here wins where there are more or fewer CTAs for the SMs: a lookup for
    another size weighs them anew, and must find them.
    """
    kept = list(ranked[:KEPT])
    shapes = {_shape(one) for one in kept}
    for one in ranked[KEPT:]:
        shape = _shape(one)
        if shape not in shapes:
            shapes.add(shape)
            kept.append(one)
    return kept


def _shape(one: Ranked) -> tuple[object, ...]:
    """Family, rows of a tile and threads; a config that no longer parses has a shape of its own."""
    try:
        config = parse_kernel_name_into_config(one.config)
    except FlashsmithError:
        return (one.family, one.config)
    return (one.family, getattr(config, "B_r", None), config.n_threads)
