"""How long a config takes to compile, roughly, so that shards end at about the same time."""

from __future__ import annotations

from collections.abc import Iterable

from flashsmith.families import HopperForwardKernelConfig, KernelConfig

# What everything but the products costs, in products: over the 80 configs of tune a kernel took
# 0.25 s + 1.4 ms for each.
_FIXED_COST = 180.0
# A wgmma kernel is short, whatever its tiles: one instruction is a warpgroup's product.
_WGMMA_COST = 700.0
_SECONDS_PER_PRODUCT = 1.4e-3


def expected_cost(cfg: KernelConfig) -> float:
    """Relative compile time of one config (no unit).

    Both compilers spend their time on the unrolled body of the KV loop, whose length is the
    number of m16n8k16 products one warp issues for one KV block: rows per warp / 16, times B_c / 8,
    times d_head / 16, once for Q K^T and once for P V. A peeled first tile is a second body.
    """
    if isinstance(cfg, HopperForwardKernelConfig):
        return _WGMMA_COST
    products = 2 * (cfg.rows_per_warp // 16) * (cfg.B_c // 8) * (cfg.d_head // 16)
    bodies = 2 if cfg.optimized_softmax else 1
    return _FIXED_COST + products * bodies


def expected_seconds(cfg: KernelConfig) -> float:
    """Expected compile time of one config on one core, within a factor of about two."""
    return _SECONDS_PER_PRODUCT * expected_cost(cfg)


def balance(configs: Iterable[KernelConfig], n_shards: int) -> list[list[KernelConfig]]:
    """Split ``configs`` over at most ``n_shards`` shards of about equal expected cost.

    Heaviest first, each to the lightest shard so far. Every shard is sorted and none is empty;
    equal sets give equal shards whatever their order.
    """
    shards: list[list[KernelConfig]] = [[] for _ in range(n_shards)]
    loads = [0.0] * n_shards
    for cfg in sorted(set(configs), key=lambda c: (-expected_cost(c), c.to_ints())):
        lightest = loads.index(min(loads))
        shards[lightest].append(cfg)
        loads[lightest] += expected_cost(cfg)
    return [sorted(shard, key=lambda c: c.to_ints()) for shard in shards if shard]
