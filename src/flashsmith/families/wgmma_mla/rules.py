"""The rules of the wgmma_mla family: for which configs kernels can be built."""

from __future__ import annotations

from flashsmith.families.latent import WIDTHS_SUPPORTED, smem_rule
from flashsmith.families.rule import Rule, supported
from flashsmith.families.warpgroups import (
    REGISTERS_BESIDE_TILES,
    arch_rule,
    register_rules,
    registers_each,
)
from flashsmith.families.wgmma_mla.config import STAGES, WgmmaMlaKernelConfig

RULES: tuple[Rule, ...] = (
    arch_rule(WgmmaMlaKernelConfig.FAMILY),
    WIDTHS_SUPPORTED,
    *(
        supported(WgmmaMlaKernelConfig, name)
        for name in ("min_keys", "most_parts", "rescale_threshold", "run_keys", "panels_ahead")
    ),
    *register_rules(),
    Rule(
        "registers_within_file",
        "producer_registers + 2 consumer_registers must not exceed the 504 with which the three "
        "warpgroups start",
        lambda cfg, device: (
            cfg.producer_registers + STAGES * cfg.consumer_registers
            <= registers_each(STAGES) * (STAGES + 1)
        ),
        ("producer_registers", "consumer_registers"),
    ),
    Rule(
        "tiles_fit_registers",
        "consumer_registers must hold a thread's share of O (d_v / 4), S (32) and "
        f"P (16), and {REGISTERS_BESIDE_TILES} for everything else",
        lambda cfg, device: cfg.accumulators + REGISTERS_BESIDE_TILES <= cfg.consumer_registers,
        ("d_v", "consumer_registers"),
        lambda cfg, device: f"the tiles take {cfg.accumulators}",
    ),
    smem_rule("Q, two blocks of keys and P", ("d_head",)),
)
