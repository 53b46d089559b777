"""The kernel families: a config is of one of them."""

from __future__ import annotations

from flashsmith.configs.config import FlashForwardKernelConfig
from flashsmith.configs.hopper.config import HopperForwardKernelConfig

KernelConfig = FlashForwardKernelConfig | HopperForwardKernelConfig

# By the name in a library's manifest.
FAMILIES: dict[str, type[FlashForwardKernelConfig] | type[HopperForwardKernelConfig]] = {
    config_class.FAMILY: config_class
    for config_class in (FlashForwardKernelConfig, HopperForwardKernelConfig)
}
