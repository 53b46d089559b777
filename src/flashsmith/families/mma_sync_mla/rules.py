"""The rules of the mma_sync_mla family: for which configs kernels can be built."""

from __future__ import annotations

from flashsmith.families.latent import PAIRS
from flashsmith.families.mma_sync_mla.config import MmaSyncMlaKernelConfig
from flashsmith.families.rule import Rule, supported

RULES: tuple[Rule, ...] = (
    Rule(
        "widths_supported",
        f"d_head and d_v must be {' or '.join(map(str, PAIRS))}: there are kernels for these only",
        lambda cfg, device: (cfg.d_head, cfg.d_v) in PAIRS,
        ("d_head", "d_v"),
    ),
    *(
        supported(MmaSyncMlaKernelConfig, name)
        for name in ("B_c", "stages", "min_keys", "most_parts")
    ),
    Rule(
        "smem_within_limit",
        "the blocks of keys and the shares of the scores must fit in the shared memory that the "
        "device gives one CTA",
        lambda cfg, device: cfg.smem_bytes() <= device.max_smem_per_block,
        ("d_head", "B_c", "stages"),
        lambda cfg, device: (
            f"{cfg.smem_bytes()} of {device.max_smem_per_block} bytes on {device.name}"
        ),
    ),
)
