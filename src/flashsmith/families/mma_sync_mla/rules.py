"""The rules of the mma_sync_mla family: for which configs kernels can be built."""

from __future__ import annotations

from flashsmith.families.latent import WIDTHS_SUPPORTED, smem_rule
from flashsmith.families.mma_sync_mla.config import MmaSyncMlaKernelConfig
from flashsmith.families.rule import Rule, supported

RULES: tuple[Rule, ...] = (
    WIDTHS_SUPPORTED,
    *(
        supported(MmaSyncMlaKernelConfig, name)
        for name in ("B_c", "stages", "min_keys", "most_parts")
    ),
    smem_rule(
        "the blocks of keys and the shares of the scores", ("d_head", "B_c", "stages", "cache")
    ),
)
