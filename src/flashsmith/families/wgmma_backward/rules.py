"""The rules of the wgmma_backward family: for which configs kernels can be built.

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
from flashsmith.families.wgmma_backward.config import (
    BARRIER_PAGE,
    ORDER_BYTES,
    WIDEST_IN_ONE_CTA,
    WIDEST_WHOLE,
    DqSums,
    StepOrder,
    WgmmaBackwardKernelConfig,
)


def holds_p_beside_s(cfg: WgmmaBackwardKernelConfig) -> bool:
    """Whether a consumer has registers for P in addition to S. With a softcap, a consumer needs
    both even with scores_together."""
    beside = cfg.B_r // 4 if cfg.order == StepOrder.SCORES_TOGETHER else 0
    return cfg.accumulators + beside + REGISTERS_BESIDE_TILES <= cfg.consumer_registers


_supported = partial(
    supported,
    WgmmaBackwardKernelConfig,
    must_be="{}: the wgmma_backward family has kernels for these only",
)


RULES: tuple[Rule, ...] = (
    arch_rule(WgmmaBackwardKernelConfig.FAMILY),
    *map(_supported, ("d_head", "B_r", "n_warpgroups", "q_stages", "do_stages", "ds_stages")),
    Rule(
        "B_c_is_warpgroups",
        "B_c must be 64 n_warpgroups, with split_roles 64: a warpgroup has 64 keys",
        lambda cfg, device: cfg.B_c == WARPGROUP_ROWS * cfg.key_groups,
        ("B_c", "n_warpgroups", "split_roles"),
    ),
    Rule(
        "roles_are_two",
        "split_roles is for d_head above 128, with B_r 64, n_warpgroups 2, order dv_first and, "
        "unless without_dq or separate_dq, ds_stages above 1: one warpgroup has dv, the other dk, "
        "in a separate step order",
        lambda cfg, device: (
            not cfg.split_roles
            or (
                cfg.d_head > WIDEST_WHOLE
                and cfg.B_r == WARPGROUP_ROWS
                and cfg.n_warpgroups == 2
                and cfg.order == StepOrder.DV_FIRST
                and (cfg.ds_stages > 1 or not cfg.sums_dq)
            )
        ),
        (
            *("d_head", "B_r", "n_warpgroups", "order", "ds_stages", "split_roles"),
            *("without_dq", "separate_dq"),
        ),
    ),
    Rule(
        "dq_has_64_rows",
        "B_r must be 64 or 64 n_warpgroups: a part of dQ has 64 rows, shared by all warpgroups or "
        "one part for each",
        lambda cfg, device: cfg.shares_rows or cfg.B_r == WARPGROUP_ROWS,
        ("B_r", "n_warpgroups"),
    ),
    Rule(
        "turns_need_scores_together",
        "order must be scores_together if warpgroups alternate in computing dQ: with B_r 64 and "
        "d_head (72 and 80 are 96) not a multiple of 16 n_warpgroups",
        lambda cfg, device: cfg.order == StepOrder.SCORES_TOGETHER or not cfg.takes_turns,
        ("order", "B_r", "d_head", "n_warpgroups"),
    ),
    Rule(
        "early_exp_needs_a_product",
        "early_exp needs another order than dv_first, in which no GEMM runs during the "
        "exponentials",
        lambda cfg, device: cfg.order != StepOrder.DV_FIRST or not cfg.early_exp,
        ("early_exp", "order"),
    ),
    Rule(
        "scores_early_need_two_Q",
        "q_stages must be at least 2 with late_dq and scores_ahead, which begin the next step's S "
        "before this step's Q is free",
        lambda cfg, device: (
            cfg.order in (StepOrder.DV_FIRST, StepOrder.SCORES_TOGETHER) or cfg.q_stages > 1
        ),
        ("q_stages", "order"),
    ),
    Rule(
        "lagged_dq_needs_two_dS",
        "ds_stages must be at least 2 with lagged_dq, which reads the previous step's dS after "
        "this step's is stored",
        lambda cfg, device: cfg.ds_stages > 1 or not cfg.lagged_dq,
        ("ds_stages", "lagged_dq"),
    ),
    PINGPONG_NEEDS_TWO,
    Rule(
        "split_roles_have_their_own_step",
        "split_roles cannot be combined with lagged_dq, pingpong or persistent: its step has a "
        "separate order",
        lambda cfg, device: (
            not cfg.split_roles or not (cfg.lagged_dq or cfg.pingpong or cfg.persistent)
        ),
        ("split_roles", "lagged_dq", "pingpong", "persistent"),
    ),
    Rule(
        "pairs_are_for_the_widest",
        "cta_pair is for d_head above 256, and needed there: the tiles and gradients of 64 keys "
        "take the shared memory and registers of two CTAs",
        lambda cfg, device: cfg.cta_pair == (cfg.d_head > WIDEST_IN_ONE_CTA),
        ("d_head", "cta_pair"),
    ),
    Rule(
        "pairs_split_roles",
        "cta_pair needs split_roles, and cannot be combined with ordered_dq or d_v",
        lambda cfg, device: (
            not cfg.cta_pair or (cfg.split_roles and not cfg.ordered_dq and cfg.d_v == 0)
        ),
        ("split_roles", "ordered_dq", "d_v", "cta_pair"),
    ),
    Rule(
        "sums_wait_for_scores",
        "dq_sums must be beside_scores with split_roles, and if warpgroups alternate in computing "
        "dQ: both add their sums at another point",
        lambda cfg, device: (
            cfg.dq_sums == DqSums.BESIDE_SCORES or not (cfg.split_roles or cfg.takes_turns)
        ),
        ("dq_sums", "split_roles", "B_r", "d_head", "n_warpgroups"),
    ),
    Rule(
        "bulk_sums_are_whole",
        "bulk_sums cannot be combined with split_roles, whose warpgroups add dq by halves, or with "
        "ordered_dq, which waits for each lane's own sums",
        lambda cfg, device: not cfg.bulk_sums or not (cfg.split_roles or cfg.ordered_dq),
        ("bulk_sums", "split_roles", "ordered_dq"),
    ),
    Rule(
        "early_rows_before_scores",
        "early_rows needs scores_together or split_roles: with another order S begins one step "
        "earlier than its rows are read",
        lambda cfg, device: (
            not cfg.early_rows or cfg.split_roles or cfg.order == StepOrder.SCORES_TOGETHER
        ),
        ("early_rows", "split_roles", "order"),
    ),
    Rule(
        "dq_before_dk_is_lagged",
        "sums_under_dk needs lagged_dq, since a step's own dq waits for all warpgroups' dS, and it "
        "needs scores_together or scores_ahead",
        lambda cfg, device: (
            cfg.dq_sums != DqSums.SUMS_UNDER_DK
            or (cfg.lagged_dq and cfg.order in (StepOrder.SCORES_TOGETHER, StepOrder.SCORES_AHEAD))
        ),
        ("dq_sums", "lagged_dq", "order"),
    ),
    Rule(
        "without_dq_nothing_is_dqs",
        "without_dq and separate_dq need scores_together or split_roles, ds_stages 1, dq_sums "
        "beside_scores, and no lagged_dq, ordered_dq or bulk_sums: there is no dS in shared memory "
        "and no dq to sum",
        lambda cfg, device: (
            cfg.sums_dq
            or (
                cfg.ds_stages == 1
                and cfg.dq_sums == DqSums.BESIDE_SCORES
                and not (cfg.lagged_dq or cfg.ordered_dq or cfg.bulk_sums)
                and (cfg.split_roles or cfg.order == StepOrder.SCORES_TOGETHER)
            )
        ),
        (
            *("order", "split_roles", "ds_stages", "dq_sums", "lagged_dq", "ordered_dq"),
            *("bulk_sums", "without_dq", "separate_dq"),
        ),
    ),
    Rule(
        "separate_dq_has_a_kernel",
        "separate_dq cannot be combined with without_dq, which leaves dq out, or with cta_pair, "
        "for whose d_head the wgmma_dq family has no kernel",
        lambda cfg, device: not cfg.separate_dq or not (cfg.without_dq or cfg.cta_pair),
        ("without_dq", "cta_pair", "separate_dq"),
    ),
    Rule(
        "shared_dq_is_split",
        "shared_dq needs split_roles, and cannot be combined with cta_pair, whose CTAs have the "
        "same keys, or with without_dq and separate_dq, which sum no dq",
        lambda cfg, device: (
            not cfg.shared_dq or (cfg.split_roles and cfg.sums_dq and not cfg.cta_pair)
        ),
        ("split_roles", "without_dq", "cta_pair", "separate_dq", "shared_dq"),
    ),
    Rule(
        "multicast_has_two_readers",
        "multicast needs shared_dq, whose CTAs have the same queries at the same time",
        lambda cfg, device: not cfg.multicast or cfg.shared_dq,
        ("shared_dq", "multicast"),
    ),
    *register_rules(),
    REGISTERS_WITHIN_FILE,
    Rule(
        "tiles_fit_registers",
        "consumer_registers must hold a thread's share of dk and dv (half of d_head and of d_v, "
        "where a d_v of 0 is d_head), of S and dP (B_r), "
        "and of P unless scores_together (B_r / 4). With P, it must also hold dQ, half of its "
        "columns, if persistent or if its sums are beside_scores without lagged_dq. With "
        "scores_ahead and early_exp it must also hold dS (B_r / 4). With split_roles it must hold "
        "dk or dv, S, dP and P: d_head / 2, with cta_pair d_head / 4, + B_r + B_r / 4. Everything "
        "else takes "
        f"{REGISTERS_BESIDE_TILES}",
        lambda cfg, device: cfg.accumulators + REGISTERS_BESIDE_TILES <= cfg.consumer_registers,
        (
            "d_head",
            "d_v",
            "n_warpgroups",
            "B_r",
            "order",
            "early_exp",
            "split_roles",
            "lagged_dq",
            "persistent",
            "dq_sums",
            "consumer_registers",
            "cta_pair",
        ),
        lambda cfg, device: f"the tiles take {cfg.accumulators}",
    ),
    Rule(
        "smem_within_limit",
        "the tiles, 2 (d_head (B_c + q_stages B_r) + d_v (B_c + do_stages B_r) + ds_stages B_r "
        "B_c) bytes, where a d_v of 0 is d_head, 72 and 80 are 96, and cta_pair halves both, "
        "4 (q_stages + do_stages) B_r bytes of statistics and "
        f"{BARRIER_PAGE} bytes of barriers must fit in the shared memory that the device gives one "
        "CTA. without_dq and separate_dq have no dS. split_roles adds 4 B_r B_c bytes, cta_pair "
        "8 B_r B_c, shared_dq 2 ds_stages B_r B_c + 256 B_c, "
        "bulk_sums 256 n_warpgroups bytes for each column of dQ that a warpgroup has, and "
        "ordered_dq "
        f"{ORDER_BYTES}. With separate_dq, those of dq's kernel must fit, too",
        lambda cfg, device: max(cfg.smem_bytes(), cfg.dq_smem_bytes) <= device.max_smem_per_block,
        (
            "n_warpgroups",
            "B_r",
            "B_c",
            "d_head",
            "d_v",
            "q_stages",
            "do_stages",
            "ds_stages",
            "split_roles",
            "ordered_dq",
            "bulk_sums",
            "without_dq",
            "cta_pair",
            "separate_dq",
            "shared_dq",
        ),
        lambda cfg, device: (
            f"{max(cfg.smem_bytes(), cfg.dq_smem_bytes)} of {device.max_smem_per_block} bytes on "
            f"{device.name}"
        ),
    ),
    pair_rule(PAIRS),
)
