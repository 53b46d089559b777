"""The wgmma family: warp-specialised kernels of Hopper GPUs, fed by TMA."""

from flashsmith.configs.hopper.config import (
    HopperForwardKernelConfig,
    PingPong,
    Schedule,
    TileOrder,
)
from flashsmith.configs.hopper.knob_values import HOPPER_KNOB_VALUES
from flashsmith.configs.hopper.rules import HOPPER_RULES
from flashsmith.configs.hopper.sets import get_hopper_configs

__all__ = [
    "HOPPER_KNOB_VALUES",
    "HOPPER_RULES",
    "HopperForwardKernelConfig",
    "PingPong",
    "Schedule",
    "TileOrder",
    "get_hopper_configs",
]
