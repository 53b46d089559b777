"""Lengths that kernels fill with whole tiles: others take the uneven kernel, which is another."""

from __future__ import annotations

import math

from flashsmith.families import HopperForwardKernelConfig, KernelConfig


def tiles_of(cfg: KernelConfig) -> dict[str, int]:
    """The tiles that must divide a length, by their knobs.

    Of a wgmma kernel's queries TMA leaves out the rows that are not there.
    """
    keys = {"B_c": cfg.B_c}
    return keys if isinstance(cfg, HopperForwardKernelConfig) else {"B_r": cfg.B_r} | keys


def whole_tiles(seq: int, cfg: KernelConfig) -> int:
    """The least length of at least `seq` that the config's tiles divide, of queries and keys.

    Each config has a length of its own: the least common multiple of a set's tiles has no limit
    (13,440 for the wgmma kernels that the package ships).
    """
    whole = math.lcm(*tiles_of(cfg).values())
    return -(-seq // whole) * whole
