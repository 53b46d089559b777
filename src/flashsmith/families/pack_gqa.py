"""pack_gqa: a knob of forward kernels that makes the query heads of a group the rows of a tile.

The query heads of a group share a K/V head, so they attend to the same keys. If all heads of a
token are rows of one tile, the kernel reads K and V only once for all of them, and even a few
queries fill much of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashsmith.families.device import DeviceSpec
from flashsmith.families.knob import knob
from flashsmith.families.split_keys import split_variants
from flashsmith.families.tile_work import TileWork
from flashsmith.operations.problem import Problem

# Packing is considered only if it divides the number of tiles by more than this factor.
_LEAST_RATIO = 1.25


def pack_gqa_knob() -> Any:
    """Declares the knob pack_gqa, with which the rows of a tile are the query heads of a group
    instead of queries of one head."""
    return knob(
        "rows of a tile are the query heads of a group, token after token",
        word="pack_gqa",
        default=False,
        effect=_in_words,
        where="visible_blocks",
    )


def _in_words(cfg: Any) -> str:
    if not cfg.pack_gqa:
        return "a tile's rows are queries of one head"
    return "a tile's rows are the query heads that share a K/V head, token after token"


def pack_variants(cfg: Any, work: TileWork, problem: Problem, device: DeviceSpec) -> Sequence[Any]:
    """Variants of `cfg` in which the rows of a tile are the query heads of a group; first the
    variant that does not split keys, then variants that do. Empty if packing would not save many
    tiles."""
    packed = work._replace(packs_gqa=True, parts=0)
    are_fewer = packed.tiles(problem) * _LEAST_RATIO < work.tiles(problem)
    if cfg.pack_gqa or not work.resident or not are_fewer:
        return ()
    whole = replace(cfg, pack_gqa=True, split_keys=0)
    return (whole, *split_variants(whole, packed, problem, device))
