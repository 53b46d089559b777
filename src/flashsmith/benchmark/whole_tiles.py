"""Lengths that kernels fill with whole tiles: others take the uneven kernel, which is another."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flashsmith.configs import HopperForwardKernelConfig, KernelConfig


def tiles_of(cfg: KernelConfig) -> dict[str, int]:
    """The tiles that must divide a length, by their knobs.

    Of a wgmma kernel's queries TMA leaves out the rows that are not there.
    """
    keys = {"B_c": cfg.B_c}
    return keys if isinstance(cfg, HopperForwardKernelConfig) else {"B_r": cfg.B_r} | keys


def whole_tiles(seq: int, configs: Iterable[KernelConfig]) -> int:
    """The least length of at least `seq` that every config's tiles divide, of queries and keys."""
    whole = math.lcm(*(tile for cfg in configs for tile in tiles_of(cfg).values()))
    return -(-seq // whole) * whole
