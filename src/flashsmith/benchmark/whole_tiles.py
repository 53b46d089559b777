"""Lengths that kernels fill with whole tiles: others take the uneven kernel, which is another."""

from __future__ import annotations

import math

from flashsmith.families import KernelConfig


def whole_tiles(seq: int, cfg: KernelConfig) -> int:
    """The least length of at least `seq` that the config's tiles divide, of queries and keys.

    Each config has a length of its own: the least common multiple of a set's tiles has no limit
    (13,440 for the Hopper kernels that the package ships).
    """
    whole = math.lcm(*cfg.family.dividing_tiles(cfg).values())
    return -(-seq // whole) * whole
