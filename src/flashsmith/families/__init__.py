"""Kernel families: their config classes, rules and config sets, and the names of their kernels."""

from typing import TYPE_CHECKING

from flashsmith.families.config import KernelConfig
from flashsmith.families.device import (
    DEFAULT_DEVICE,
    KNOWN_DEVICES,
    DeviceSpec,
    device_spec,
)
from flashsmith.families.earlier_names import getter
from flashsmith.families.family import (
    FAMILIES,
    Family,
    families,
    family_named,
    register_family,
)
from flashsmith.families.kernel_sets import (
    by_family,
    get_kernel_configs,
    get_kernels_to_build,
    kernel_set_sizes,
)
from flashsmith.families.legal_space import legal_completions
from flashsmith.families.legality import (
    broken_rules,
    compiled_d_head,
    d_head_for,
    is_legal,
    rule_bitmask,
    rules_of,
    serves_gradients,
)
from flashsmith.families.mma_sync import MMA_SYNC
from flashsmith.families.mma_sync.config import FlashForwardKernelConfig
from flashsmith.families.mma_sync.rules import RULES
from flashsmith.families.mma_sync.search_space import get_search_space_configs
from flashsmith.families.mma_sync.sets import (
    get_autotuning_kernel_configs,
    get_cover_configs,
    get_kernel_progression_configs,
    should_autotune_config,
)
from flashsmith.families.mma_sync_backward import MMA_SYNC_BACKWARD
from flashsmith.families.mma_sync_backward.config import DqMode, FlashBackwardKernelConfig
from flashsmith.families.mma_sync_decode import MMA_SYNC_DECODE
from flashsmith.families.mma_sync_decode.config import FlashDecodeKernelConfig
from flashsmith.families.mma_sync_mla import MMA_SYNC_MLA
from flashsmith.families.mma_sync_mla.config import MmaSyncMlaKernelConfig
from flashsmith.families.names import parse_kernel_name_into_config
from flashsmith.families.nearest import check_legal, nearest_legal
from flashsmith.families.row_merge import ROW_MERGE
from flashsmith.families.row_merge.config import RowMergeKernelConfig
from flashsmith.families.rule import BrokenRule, Rule
from flashsmith.families.score_sums import SCORE_SUMS
from flashsmith.families.score_sums.config import ScoreSumsKernelConfig
from flashsmith.families.slot_write import SLOT_WRITE
from flashsmith.families.slot_write.config import SlotWriteKernelConfig
from flashsmith.families.wgmma import WGMMA
from flashsmith.families.wgmma.config import (
    PingPong,
    Schedule,
    TileOrder,
    WgmmaForwardKernelConfig,
)
from flashsmith.families.wgmma.rules import HOPPER_RULES
from flashsmith.families.wgmma.sets import get_hopper_configs
from flashsmith.families.wgmma_backward import WGMMA_BACKWARD
from flashsmith.families.wgmma_backward.config import WgmmaBackwardKernelConfig
from flashsmith.families.wgmma_dq import WGMMA_DQ
from flashsmith.families.wgmma_dq.config import WgmmaDqKernelConfig
from flashsmith.families.wgmma_mla import WGMMA_MLA
from flashsmith.families.wgmma_mla.config import WgmmaMlaKernelConfig
from flashsmith.operations.problem import Problem
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType

SUPPORTED_D_HEADS: tuple[int, ...] = MMA_SYNC.knob_values["d_head"]
KNOB_VALUES = MMA_SYNC.knob_values
HOPPER_KNOB_VALUES = WGMMA.knob_values

__all__ = [
    "DEFAULT_DEVICE",
    "FAMILIES",
    "HOPPER_KNOB_VALUES",
    "HOPPER_RULES",
    "KNOB_VALUES",
    "KNOWN_DEVICES",
    "MMA_SYNC",
    "MMA_SYNC_BACKWARD",
    "MMA_SYNC_DECODE",
    "MMA_SYNC_MLA",
    "ROW_MERGE",
    "RULES",
    "SCORE_SUMS",
    "SLOT_WRITE",
    "SUPPORTED_D_HEADS",
    "WGMMA",
    "WGMMA_BACKWARD",
    "WGMMA_DQ",
    "WGMMA_MLA",
    "BrokenRule",
    "DType",
    "DeviceSpec",
    "DqMode",
    "Family",
    "FlashBackwardKernelConfig",
    "FlashDecodeKernelConfig",
    "FlashForwardKernelConfig",
    "KernelConfig",
    "MmaSyncMlaKernelConfig",
    "PingPong",
    "Problem",
    "RowMergeKernelConfig",
    "Rule",
    "Schedule",
    "ScoreSumsKernelConfig",
    "Semantics",
    "SlotWriteKernelConfig",
    "TileOrder",
    "WgmmaBackwardKernelConfig",
    "WgmmaDqKernelConfig",
    "WgmmaForwardKernelConfig",
    "WgmmaMlaKernelConfig",
    "broken_rules",
    "by_family",
    "check_legal",
    "compiled_d_head",
    "d_head_for",
    "device_spec",
    "families",
    "family_named",
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
    "register_family",
    "rule_bitmask",
    "rules_of",
    "serves_gradients",
    "should_autotune_config",
]

if not TYPE_CHECKING:  # A type checker would otherwise accept any attribute
    __getattr__ = getter(__name__)
