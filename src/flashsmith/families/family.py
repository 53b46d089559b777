"""The kernel families: a config is of one of them."""

from __future__ import annotations

from collections.abc import Iterable

from flashsmith.families.mma_sync.config import FlashForwardKernelConfig
from flashsmith.families.wgmma.config import HopperForwardKernelConfig

KernelConfig = FlashForwardKernelConfig | HopperForwardKernelConfig

# By the name in a library's manifest.
FAMILIES: dict[str, type[FlashForwardKernelConfig] | type[HopperForwardKernelConfig]] = {
    config_class.FAMILY: config_class
    for config_class in (FlashForwardKernelConfig, HopperForwardKernelConfig)
}


def by_family(configs: Iterable[KernelConfig]) -> list[list[KernelConfig]]:
    """The configs of each family together, as a kernel library holds them; in their order."""
    groups: dict[str, list[KernelConfig]] = {}
    for cfg in configs:
        groups.setdefault(cfg.FAMILY, []).append(cfg)
    return list(groups.values())
