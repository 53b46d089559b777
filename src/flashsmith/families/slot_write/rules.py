"""The rules of the slot_write family: for which configs kernels can be built."""

from __future__ import annotations

from flashsmith.families.head_dims import PAIRS, pair_rule
from flashsmith.families.rule import Rule, supported
from flashsmith.families.slot_write.config import SlotWriteKernelConfig

RULES: tuple[Rule, ...] = (
    supported(SlotWriteKernelConfig, "d_head"),
    supported(SlotWriteKernelConfig, "n_warps"),
    pair_rule(PAIRS),
)
