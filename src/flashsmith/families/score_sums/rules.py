"""The rules of the score_sums family: for which configs kernels can be built."""

from __future__ import annotations

from flashsmith.families.rule import Rule, supported
from flashsmith.families.score_sums.config import ScoreSumsKernelConfig

RULES: tuple[Rule, ...] = (
    supported(ScoreSumsKernelConfig, "d_head"),
    Rule(
        "smem_fits",
        "the tiles of q, do, k and v must fit into the shared memory of a CTA",
        lambda cfg, device: cfg.smem_bytes() <= device.max_smem_per_block,
        ("d_head",),
        lambda cfg, device: f"{cfg.smem_bytes()} bytes of {device.max_smem_per_block}",
    ),
)
