"""Lengths that kernels fill with whole tiles: others take the uneven kernel, which is another."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flashsmith.configs import KernelConfig


def whole_tiles(seq: int, configs: Iterable[KernelConfig]) -> int:
    """The least length of at least `seq` that every config's tiles divide, of queries and keys."""
    whole = math.lcm(*(tile for cfg in configs for tile in (cfg.B_r, cfg.B_c)))
    return -(-seq // whole) * whole
