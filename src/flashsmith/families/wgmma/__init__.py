"""The wgmma family: warp-specialised kernels of Hopper GPUs, fed by TMA."""

from flashsmith.families.wgmma.config import (
    HopperForwardKernelConfig,
    PingPong,
    Schedule,
    TileOrder,
)
from flashsmith.families.wgmma.knob_values import HOPPER_KNOB_VALUES
from flashsmith.families.wgmma.rules import HOPPER_RULES
from flashsmith.families.wgmma.sets import get_hopper_configs

__all__ = [
    "HOPPER_KNOB_VALUES",
    "HOPPER_RULES",
    "HopperForwardKernelConfig",
    "PingPong",
    "Schedule",
    "TileOrder",
    "get_hopper_configs",
]
