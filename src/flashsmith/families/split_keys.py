"""split_keys: a knob of forward kernels that can split the keys of a tile into parts (split-KV).

If a call has too few tiles to fill the GPU, several CTAs compute each tile. Each CTA takes some of
the K/V blocks that the tile attends to, and a second launch merges the parts
(csrc/common/split_keys.cuh).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashsmith.families.device import DeviceSpec
from flashsmith.families.knob import knob
from flashsmith.families.tile_work import TileWork, rates_of
from flashsmith.operations.problem import Problem

_PARTS = (2, 4, 8, 16, 32)
_FLOAT_BYTES = 4
# Milliseconds from the end of a launch to the first work of the next launch.
_LAUNCH_MS = 0.003
# The minimum number of steps in a part; with fewer, the part's prologue and epilogue would cost too
# much.
_LEAST_STEPS = 2
# The maximum number of waves of tiles for which splitting is tried; with more waves, the last one
# matters little.
_MOST_ROUNDS = 2


def split_keys_knob() -> Any:
    """Declares the knob split_keys: the number of parts into which the keys of a tile are split, or
    0 if they are not split."""
    return knob(
        "parts that a tile's keys are split into if tiles leave SMs idle; 0: none",
        values=(0, *_PARTS),
        word="split",
        default=0,
        lowest=0,
        effect=_in_words,
        where="part_of",
    )


def _in_words(cfg: Any) -> str:
    if cfg.split_keys == 0:
        return "a CTA goes through all keys that its tile sees"
    return (
        f"tiles that would leave SMs idle are computed in {cfg.split_keys} parts of their keys, "
        "which a second launch merges"
    )


def order_of_parts(split_keys: int) -> dict[str, str]:
    """The fields of an Order that depend on split_keys, with their values."""
    if split_keys == 0:
        return {}
    return {
        "chunks": f"of 1/{split_keys} of the tiles that a CTA's rows see, where SMs would idle",
        "merge": "from the first part on, by natural log-sum-exps",
    }


def with_merge(templates: Mapping[str, str], split_keys: int, merge: str) -> Mapping[str, str]:
    """The kernel templates of a family; these include the merge kernel if the config splits
    keys."""
    return {**templates, "merge": merge} if split_keys else templates


# --- costs ---------------------------------------------------------------------------------------


def tiles_to_split(
    problem: Problem, parts: int, tokens: int, keys: int, tiles: int, at_once: int
) -> int:
    """The number of tiles of a problem that are computed in parts.

    The cost model uses this copy of tiles_to_split() in csrc/host/forward_problem.cc.
    """
    seq_q, seq_k = problem.seq_q, problem.seq_k
    if parts == 0 or seq_k <= keys or tiles == 0:
        return 0
    if problem.semantics.key_mask.is_triangular:
        seen = (
            min(2 * seq_k - seq_q + tokens, 2 * seq_k)
            if seq_q <= seq_k
            else (seq_k + tokens) * seq_k // seq_q
        )
        if tiles * seen < at_once * 2 * seq_k:
            return tiles
    rest = tiles % at_once
    return rest if -(-rest * parts // at_once) < parts else 0


def with_parts(work: TileWork, cfg: Any, device: DeviceSpec) -> TileWork:
    """Returns ``work``, the work of a config's tile, with the number of parts and the cycles that a
    part takes to write its rows in fp32."""
    if cfg.split_keys == 0:
        return work
    cycles = cfg.B_r * cfg.d_head_v * _FLOAT_BYTES / rates_of(device).l2
    return work._replace(parts=cfg.split_keys, part_cycles=cycles)


def merge_ms(work: TileWork, cfg: Any, problem: Problem, device: DeviceSpec) -> float:
    """The time in milliseconds that merging the parts of a problem's tiles takes; 0 if no tile is
    split."""
    if work.parts == 0:
        return 0.0
    at_once = device.sm_count * work.resident
    split = tiles_to_split(
        problem, work.parts, work.tokens(problem), work.keys, work.tiles(problem), at_once
    )
    if split == 0:
        return 0.0
    rates = rates_of(device)
    per_ms = rates.l2 * device.sm_count * rates.clock * 1e6
    return _LAUNCH_MS + split * work.parts * work.rows * cfg.d_head_v * _FLOAT_BYTES / per_ms


def split_variants(cfg: Any, work: TileWork, problem: Problem, device: DeviceSpec) -> Sequence[Any]:
    """Variants of `cfg` that split the keys of a tile into parts, for a problem with few tiles."""
    if cfg.split_keys or not work.resident:
        return ()
    tiles, at_once = work.tiles(problem), device.sm_count * work.resident
    if tiles > _MOST_ROUNDS * at_once:
        return ()
    return [
        replace(cfg, split_keys=parts)
        for parts in _PARTS
        if problem.seq_k >= _LEAST_STEPS * parts * work.keys
        and tiles_to_split(problem, parts, work.tokens(problem), work.keys, tiles, at_once)
    ]
