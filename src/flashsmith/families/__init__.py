"""What a kernel is: configs, their names, their rules and the sets of them."""

from flashsmith.families.cover import get_cover_configs
from flashsmith.families.device import (
    DEFAULT_DEVICE,
    KNOWN_DEVICES,
    DeviceSpec,
    device_spec,
)
from flashsmith.families.family import FAMILIES, KernelConfig, by_family
from flashsmith.families.legal_space import KNOB_VALUES, legal_completions
from flashsmith.families.legality import (
    RULES,
    SUPPORTED_D_HEADS,
    broken_rules,
    compiled_d_head,
    is_legal,
    rule_bitmask,
    rules_of,
)
from flashsmith.families.mma_sync.config import FlashForwardKernelConfig
from flashsmith.families.mma_sync.space import get_search_space_configs
from flashsmith.families.names import parse_kernel_name_into_config
from flashsmith.families.nearest import check_legal, nearest_legal
from flashsmith.families.rule import BrokenRule, Rule
from flashsmith.families.selection import (
    get_autotuning_kernel_configs,
    get_kernel_configs,
    get_kernel_progression_configs,
    get_kernels_to_build,
    kernel_set_sizes,
    should_autotune_config,
)
from flashsmith.families.wgmma import (
    HOPPER_KNOB_VALUES,
    HOPPER_RULES,
    HopperForwardKernelConfig,
    PingPong,
    Schedule,
    TileOrder,
    get_hopper_configs,
)
from flashsmith.operations.dtype import DType
from flashsmith.operations.problem import Problem
from flashsmith.operations.semantics import Semantics

__all__ = [
    "DEFAULT_DEVICE",
    "FAMILIES",
    "HOPPER_KNOB_VALUES",
    "HOPPER_RULES",
    "KNOB_VALUES",
    "KNOWN_DEVICES",
    "RULES",
    "SUPPORTED_D_HEADS",
    "BrokenRule",
    "DType",
    "DeviceSpec",
    "FlashForwardKernelConfig",
    "HopperForwardKernelConfig",
    "KernelConfig",
    "PingPong",
    "Problem",
    "Rule",
    "Schedule",
    "Semantics",
    "TileOrder",
    "broken_rules",
    "by_family",
    "check_legal",
    "compiled_d_head",
    "device_spec",
    "get_autotuning_kernel_configs",
    "get_cover_configs",
    "get_hopper_configs",
    "get_kernel_configs",
    "get_kernel_progression_configs",
    "get_kernels_to_build",
    "get_search_space_configs",
    "is_legal",
    "kernel_set_sizes",
    "legal_completions",
    "nearest_legal",
    "parse_kernel_name_into_config",
    "rule_bitmask",
    "rules_of",
    "should_autotune_config",
]
