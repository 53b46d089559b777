#!/usr/bin/env python3
"""Prints ten configs, separated by ';', that together have all values of all knobs.

`compute-sanitizer` is too slow for whole sets, and is run on these; see tools/gpu/prove.sh.
"""

from __future__ import annotations

from dataclasses import fields

from flashsmith.families import FlashForwardKernelConfig, get_kernel_configs

COUNT = 10


def knob_values(config: FlashForwardKernelConfig) -> set[tuple[str, object]]:
    """All (knob, value) pairs of a config."""
    return {(knob.name, getattr(config, knob.name)) for knob in fields(config)}


def covering_configs(count: int = COUNT) -> list[FlashForwardKernelConfig]:
    """`count` configs of `cover`; each is the one that adds the most new values.

    Raises:
        SystemExit: they do not have all values, so `count` must be larger.
    """
    pool = get_kernel_configs("cover")
    missing = set().union(*map(knob_values, pool))
    chosen: list[FlashForwardKernelConfig] = []
    while len(chosen) < count and pool:
        best = max(pool, key=lambda config: len(knob_values(config) & missing))
        pool.remove(best)
        chosen.append(best)
        missing -= knob_values(best)
    if missing:
        raise SystemExit(f"{count} configs leave out {sorted(missing, key=str)}: raise COUNT")
    return chosen


if __name__ == "__main__":
    print(";".join(config.short_form() for config in covering_configs()))
