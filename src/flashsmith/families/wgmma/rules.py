"""The rules of the wgmma family: for which configs a kernel can be built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flashsmith.families.canonical import canonical_rules
from flashsmith.families.config import RESERVED_SMEM_PER_CTA
from flashsmith.families.device import DeviceSpec
from flashsmith.families.head_dims import PAIRS, pair_rule
from flashsmith.families.rule import Rule, supported
from flashsmith.families.warpgroups import (
    REGISTERS_BESIDE_TILES,
    REGISTERS_WORD,
    WARPGROUP_ROWS,
    arch_rule,
    register_rules,
    registers_each,
)
from flashsmith.families.wgmma.config import (
    B_C_STEP,
    BARRIER_PAGE,
    DEFAULT_SECTION_MIB,
    MAX_B_C,
    MAX_CTAS,
    MAX_EXP2_FMA_SHARE,
    MAX_KV_STAGES,
    MAX_RESCALE_THRESHOLD,
    MAX_WARPGROUPS,
    MIN_B_C,
    PingPong,
    Schedule,
    TileOrder,
    WgmmaForwardKernelConfig,
)

# The number of registers that ptxas needs for a thread in addition to the accumulators of one
# wgmma. The thread must have them when it starts; registers that setmaxnreg adds later do not help
# (C7602).
REGISTERS_BESIDE_PRODUCT = 26


_supported = partial(supported, WgmmaForwardKernelConfig)


def tile_registers(cfg: WgmmaForwardKernelConfig) -> int:
    """The number of registers that a thread needs for O and S in fp32, and for P if P does not
    overwrite S."""
    return cfg.O_columns // 2 + cfg.B_c // 2 + (cfg.B_c // 4 if cfg.overlap else 0)


def _smem_figures(cfg: WgmmaForwardKernelConfig, device: DeviceSpec) -> str:
    return f"{cfg.smem_bytes()} of {device.max_smem_per_block} bytes on {device.name}"


def _for_partners(
    knob: str, allowed: str, predicate: Callable[[WgmmaForwardKernelConfig], bool]
) -> Rule:
    return Rule(
        f"{knob}_with_partners",
        f"with d_head 512, whose O two warpgroups halve, {knob} must be {allowed}",
        lambda cfg, device: not cfg.halves_O or predicate(cfg),
        ("d_head", "d_v", knob),
    )


HOPPER_RULES: tuple[Rule, ...] = (
    arch_rule(WgmmaForwardKernelConfig.FAMILY),
    _supported(
        "d_head",
        "32, 64, 72, 80, 96, 128, 192, 256 or 512: the wgmma family has kernels for these only",
    ),
    _supported(
        "n_warpgroups",
        f"1 to {MAX_WARPGROUPS}: with the producer, more than these "
        "have too few registers for their tiles",
    ),
    Rule(
        "B_r_is_warpgroups",
        "B_r must be 64 n_warpgroups: a wgmma has 64 rows",
        lambda cfg, device: cfg.B_r == WARPGROUP_ROWS * cfg.n_warpgroups,
        ("B_r", "n_warpgroups"),
    ),
    _supported(
        "B_c",
        f"a multiple of {B_C_STEP} from {MIN_B_C} to {MAX_B_C}: a PV GEMM "
        "takes 16 keys a step, a wgmma has at most 256 columns",
    ),
    _supported(
        "kv_stages",
        f"1 to {MAX_KV_STAGES}",
    ),
    _supported(
        "q_buffers",
        "1, or 2 to copy the next tile's Q during this tile's work",
    ),
    Rule(
        "smem_within_limit",
        "the tiles, 2 d_head (B_r q_buffers + kv_stages B_c) + 2 d_v (B_r separate_O + kv_stages "
        f"B_c) bytes, where a d_v of 0 is d_head and 72 and 80 are 96, {BARRIER_PAGE} bytes of "
        "barriers and with d_head 512 also 128 (B_c + 8) bytes must fit in the shared memory that "
        "the device gives one CTA",
        lambda cfg, device: cfg.smem_bytes() <= device.max_smem_per_block,
        ("d_head", "d_v", "B_r", "B_c", "kv_stages", "q_buffers", "separate_O"),
        _smem_figures,
    ),
    *register_rules(),
    Rule(
        "registers_within_file",
        "producer_registers + n_warpgroups consumer_registers must not exceed what the warpgroups "
        "start with, 512 / (ctas_per_sm (n_warpgroups + 1)) each, rounded down to a multiple of 8; "
        "with d_head 512, n_warpgroups counts twice",
        lambda cfg, device: (
            cfg.producer_registers + cfg.consumers * cfg.consumer_registers
            <= registers_each(cfg.consumers, cfg.ctas_per_sm) * (cfg.consumers + 1)
        ),
        ("d_head", "d_v", *REGISTERS_WORD.knobs, "n_warpgroups", "ctas_per_sm"),
    ),
    Rule(
        "tiles_fit_registers",
        "consumer_registers must hold a thread's share of O (d_v / 2, at most 128), of S (B_c / "
        f"2), with overlap also of P (B_c / 4), and {REGISTERS_BESIDE_TILES} for everything else",
        lambda cfg, device: tile_registers(cfg) + REGISTERS_BESIDE_TILES <= cfg.consumer_registers,
        ("d_head", "d_v", "B_c", "overlap", "consumer_registers"),
        lambda cfg, device: f"the tiles take {tile_registers(cfg)}",
    ),
    Rule(
        "product_fits_registers",
        "the accumulators of a GEMM, max(d_v, B_c) / 2 a thread and at most 128, plus "
        f"{REGISTERS_BESIDE_PRODUCT} must not exceed what a thread starts with, 512 / "
        "(ctas_per_sm (n_warpgroups + 1)) rounded down to a multiple of 8: ptxas refuses others",
        lambda cfg, device: (
            max(cfg.O_columns, cfg.B_c) // 2 + REGISTERS_BESIDE_PRODUCT
            <= registers_each(cfg.consumers, cfg.ctas_per_sm)
        ),
        ("d_head", "d_v", "B_c", "n_warpgroups", "ctas_per_sm"),
    ),
    Rule(
        "pingpong_needs_two",
        "pingpong needs n_warpgroups of 2 or more: it orders warpgroups",
        lambda cfg, device: cfg.pingpong == PingPong.NONE or cfg.n_warpgroups >= 2,
        ("pingpong", "n_warpgroups"),
    ),
    _supported(
        "cluster_size",
        "1 or 2: with more, waiting for other CTAs costs more than sharing K and V saves",
    ),
    _supported(
        "rescale_threshold",
        f"0 to {MAX_RESCALE_THRESHOLD}: probabilities grow up to 2^rescale_threshold, "
        "which is far from fp16's limit",
    ),
    _supported(
        "section_mib",
        "a power of two up to 64: no L2 is larger",
    ),
    Rule(
        "section_needs_longest_first",
        f"section_mib must be {DEFAULT_SECTION_MIB} unless tile_order is longest_first: other "
        "orders have no head grouping",
        lambda cfg, device: (
            cfg.section_mib == DEFAULT_SECTION_MIB or cfg.tile_order == TileOrder.LONGEST_FIRST
        ),
        ("section_mib", "tile_order"),
    ),
    _supported(
        "ctas_per_sm",
        f"1 to {MAX_CTAS}",
    ),
    Rule(
        "ctas_fit_shared_memory",
        "several CTAs, ctas_per_sm, must fit in the shared memory of an SM, each with "
        f"{RESERVED_SMEM_PER_CTA} bytes that the driver reserves",
        lambda cfg, device: (
            cfg.ctas_per_sm == 1  # smem_within_limit checks this case
            or cfg.ctas_per_sm * (cfg.smem_bytes() + RESERVED_SMEM_PER_CTA)
            <= device.max_smem_per_block + RESERVED_SMEM_PER_CTA
        ),
        ("ctas_per_sm", "d_head", "d_v", "B_r", "B_c", "kv_stages", "q_buffers", "separate_O"),
        _smem_figures,
    ),
    _supported(
        "exp2_fma_share",
        f"0 to {MAX_EXP2_FMA_SHARE} percent: beyond that the FMA pipe is the slower one",
    ),
    Rule(
        "early_exp_needs_overlap",
        "early_exp needs overlap: otherwise no GEMM runs during the exponentials",
        lambda cfg, device: cfg.overlap or not cfg.early_exp,
        ("early_exp", "overlap"),
    ),
    Rule(
        "stale_max_needs_rescale",
        "stale_max needs rescale_threshold of 1 or more: only that allows exponents relative to an "
        "older maximum",
        lambda cfg, device: cfg.rescale_threshold > 0 or not cfg.stale_max,
        ("stale_max", "rescale_threshold"),
    ),
    Rule(
        "stale_max_needs_sfu",
        "stale_max needs exp2_fma_share 0: scores far above a stale maximum must give infinity, "
        "and the FMA pipe's exponential wraps around",
        lambda cfg, device: cfg.exp2_fma_share == 0 or not cfg.stale_max,
        ("stale_max", "exp2_fma_share"),
    ),
    Rule(
        "stale_max_needs_no_cluster",
        "stale_max needs cluster_size 1: a warp may read a K tile by itself, and the other CTA "
        "is notified of its release by one warp of each warpgroup",
        lambda cfg, device: cfg.cluster_size == 1 or not cfg.stale_max,
        ("stale_max", "cluster_size"),
    ),
    _supported(
        "short_block",
        "0 or a multiple of 16 up to 64: a step of a PV GEMM takes 16 keys",
    ),
    Rule(
        "short_block_within_block",
        "short_block must be less than B_c: a short block has fewer keys than others",
        lambda cfg, device: cfg.short_block < cfg.B_c,
        ("short_block", "B_c"),
    ),
    _supported("register_Q", "0, 4 or 8 steps of 16 columns"),
    Rule(
        "register_Q_divides_steps",
        "register_Q must divide d_head / 16, rounded up: steps with Q in registers are evenly "
        "spread",
        lambda cfg, device: not cfg.register_Q or cfg.QK_steps % cfg.register_Q == 0,
        ("register_Q", "d_head"),
    ),
    Rule(
        "direct_O_is_not_separate",
        "direct_O and separate_O exclude each other: O is stored from registers or through shared "
        "memory",
        lambda cfg, device: not (cfg.direct_O and cfg.separate_O),
        ("direct_O", "separate_O"),
    ),
    _supported(
        "split_keys",
        "0, 2, 4, 8, 16 or 32: one launch merges at most 32 parts",
    ),
    Rule(
        "split_keys_needs_no_cluster",
        "split_keys needs cluster_size 1: the CTAs of a cluster go through the same K and V",
        lambda cfg, device: cfg.split_keys == 0 or cfg.cluster_size == 1,
        ("split_keys", "cluster_size"),
    ),
    *canonical_rules(
        (
            "rescale_threshold",
            "rescale_threshold 0: rows are relative to their current maximum",
            lambda cfg: cfg.rescale_threshold == 0,
        ),
        (
            "exp2_fma_share",
            "exp2_fma_share 0: the special function unit computes all exponentials",
            lambda cfg: cfg.exp2_fma_share == 0,
        ),
        (
            "short_block",
            "short_block 0: all tiles have the same number of keys",
            lambda cfg: cfg.short_block == 0,
        ),
        (
            "split_keys",
            "split_keys 0: parts and chunks end at different keys",
            lambda cfg: cfg.split_keys == 0,
        ),
        (
            "schedule",
            "a persistent schedule: each CTA has memory for the state of rows between chunks",
            lambda cfg: cfg.schedule != Schedule.ONE_TILE,
        ),
    ),
    _for_partners(
        "n_warpgroups",
        "1: two warpgroups for 64 rows take all registers",
        lambda cfg: cfg.n_warpgroups == 1,
    ),
    _for_partners(
        "direct_O",
        "set: both warpgroups store their half of O from registers",
        lambda cfg: cfg.direct_O,
    ),
    _for_partners(
        "short_block", "0: a partner multiplies whole blocks", lambda cfg: cfg.short_block == 0
    ),
    pair_rule(PAIRS),
    Rule(
        "wide_O_needs_a_place",
        "d_v above d_head needs direct_O or separate_O: O is wider than Q's slot",
        lambda cfg, device: cfg.d_v <= cfg.d_head or cfg.direct_O or cfg.separate_O,
        ("d_head", "d_v", "direct_O", "separate_O"),
    ),
)
