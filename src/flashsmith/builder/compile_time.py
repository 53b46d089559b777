"""Estimates the compile times of configs, and divides configs among shards that finish at about the
same time."""

from __future__ import annotations

from collections.abc import Iterable

from flashsmith.families import KernelConfig

_SECONDS_PER_PRODUCT = 1.4e-3


def expected_cost(cfg: KernelConfig) -> float:
    """The estimated compile time of a config, in arbitrary units in which configs can be
    compared."""
    return cfg.family.compile_cost(cfg)


def expected_seconds(cfg: KernelConfig) -> float:
    """The estimated compile time of a config on one core in seconds, accurate to a factor of about
    two."""
    return _SECONDS_PER_PRODUCT * expected_cost(cfg)


def balance(configs: Iterable[KernelConfig], n_shards: int) -> list[list[KernelConfig]]:
    """Divides ``configs`` among at most ``n_shards`` shards that cost about the same.

    The most expensive configs are assigned first, each to the shard that has cost least so far.
    Every shard is sorted, and none is empty. The result does not depend on the order of
    ``configs``.
    """
    shards: list[list[KernelConfig]] = [[] for _ in range(n_shards)]
    loads = [0.0] * n_shards
    for cfg in sorted(set(configs), key=lambda c: (-expected_cost(c), c.to_ints())):
        lightest = loads.index(min(loads))
        shards[lightest].append(cfg)
        loads[lightest] += expected_cost(cfg)
    return [sorted(shard, key=lambda c: c.to_ints()) for shard in shards if shard]
