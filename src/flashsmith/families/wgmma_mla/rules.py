"""The rules of the wgmma_mla family: for which configs kernels can be built."""

from __future__ import annotations

from flashsmith.families.latent import PAIRS
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
    Rule(
        "widths_supported",
        f"d_head and d_v must be {' or '.join(map(str, PAIRS))}: there are kernels for these only",
        lambda cfg, device: (cfg.d_head, cfg.d_v) in PAIRS,
        ("d_head", "d_v"),
    ),
    *(
        supported(WgmmaMlaKernelConfig, name)
        for name in ("min_keys", "most_parts", "rescale_threshold")
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
    Rule(
        "smem_within_limit",
        "Q, two blocks of keys and P must fit in the shared memory that the device gives one CTA",
        lambda cfg, device: cfg.smem_bytes() <= device.max_smem_per_block,
        ("d_head",),
        lambda cfg, device: (
            f"{cfg.smem_bytes()} of {device.max_smem_per_block} bytes on {device.name}"
        ),
    ),
)
