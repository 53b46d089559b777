"""pack_gqa: the knob that makes a group's query heads rows of one tile in forward kernels.

Query heads that share a K/V head attend to the same keys. As rows of one tile, token after token,
they share one read of K and V, and a few queries fill more of a tile.
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

# Packing is considered only if the tile count shrinks by at least this ratio.
_LEAST_RATIO = 1.25


def pack_gqa_knob(default: bool) -> Any:
    """The knob: whether a tile's rows are the query heads of a group or queries of one head."""
    return knob(
        "rows of a tile are the query heads of a group, token after token",
        word="pack_gqa",
        default=default,
        effect=_in_words,
        where="visible_blocks",
    )


def _in_words(cfg: Any) -> str:
    if not cfg.pack_gqa:
        return "a tile's rows are queries of one head"
    return "a tile's rows are the query heads that share a K/V head, token after token"


def pack_variants(cfg: Any, work: TileWork, problem: Problem, device: DeviceSpec) -> Sequence[Any]:
    """The variants of `cfg` whose tile rows are a group's query heads, first without and then with
    a split of the keys into parts. Empty if packing would not save many tiles."""
    packed = work._replace(packs_gqa=True, parts=0)
    are_fewer = packed.tiles(problem) * _LEAST_RATIO < work.tiles(problem)
    if cfg.pack_gqa or not work.resident or not are_fewer:
        return ()
    whole = replace(cfg, pack_gqa=True, split_keys=0)
    return (whole, *split_variants(whole, packed, problem, device))
