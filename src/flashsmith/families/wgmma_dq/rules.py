"""The rules of the wgmma_dq family: for which configs kernels can be built.

Each rule has one predicate and one reason.
"""

from __future__ import annotations

from functools import partial

from flashsmith.families.head_dims import PAIRS, pair_rule
from flashsmith.families.rule import Rule, supported
from flashsmith.families.warpgroups import (
    PINGPONG_NEEDS_TWO,
    REGISTERS_BESIDE_TILES,
    REGISTERS_WITHIN_FILE,
    WARPGROUP_ROWS,
    arch_rule,
    register_rules,
)
from flashsmith.families.wgmma_dq.config import BARRIER_PAGE, WgmmaDqKernelConfig

_supported = partial(
    supported,
    WgmmaDqKernelConfig,
    must_be="{}: the wgmma_dq family has kernels for these only",
)


RULES: tuple[Rule, ...] = (
    arch_rule(WgmmaDqKernelConfig.FAMILY),
    *map(_supported, ("d_head", "B_c", "n_warpgroups", "k_stages", "v_stages")),
    Rule(
        "B_r_is_warpgroups",
        "B_r must be 64 n_warpgroups: a warpgroup has 64 queries",
        lambda cfg, device: cfg.B_r == WARPGROUP_ROWS * cfg.n_warpgroups,
        ("B_r", "n_warpgroups"),
    ),
    Rule(
        "late_dq_needs_two_K",
        "k_stages must be at least 2 with late_dq, which reads the K tiles of the previous and the "
        "current step",
        lambda cfg, device: cfg.k_stages > 1 or not cfg.late_dq,
        ("k_stages", "late_dq"),
    ),
    PINGPONG_NEEDS_TWO,
    *register_rules(),
    REGISTERS_WITHIN_FILE,
    Rule(
        "tiles_fit_registers",
        "consumer_registers must hold a thread's share of dq (d_head / 2), of S and dP (B_c), with "
        f"late_dq also of dS (B_c / 4), and {REGISTERS_BESIDE_TILES} for everything else",
        lambda cfg, device: cfg.accumulators + REGISTERS_BESIDE_TILES <= cfg.consumer_registers,
        ("d_head", "B_c", "late_dq", "consumer_registers"),
        lambda cfg, device: f"the tiles take {cfg.accumulators}",
    ),
    Rule(
        "smem_within_limit",
        "the tiles, 2 (d_head (B_r + k_stages B_c) + d_v (B_r + v_stages B_c)) bytes, where a d_v "
        "of 0 is d_head, and 72 and 80 are 96, "
        f"and {BARRIER_PAGE} bytes of barriers must fit in the shared memory that the device gives "
        "one CTA",
        lambda cfg, device: cfg.smem_bytes() <= device.max_smem_per_block,
        ("B_r", "B_c", "d_head", "d_v", "k_stages", "v_stages"),
        lambda cfg, device: (
            f"{cfg.smem_bytes()} of {device.max_smem_per_block} bytes on {device.name}"
        ),
    ),
    pair_rule(PAIRS),
)
