"""The rules of the mma_sync family: for which configs a kernel can be built.

Each rule has one predicate and one reason.
"""

from __future__ import annotations

from functools import partial

from flashsmith.families.canonical import canonical_rules
from flashsmith.families.config import REGISTERS_PER_SM, RESERVED_SMEM_PER_CTA
from flashsmith.families.head_dims import PAIRS, pair_rule, step_columns
from flashsmith.families.mma_sync.config import (
    K_TILE_COLUMNS,
    MAX_LOAD_COUNT,
    FlashForwardKernelConfig,
)
from flashsmith.families.rule import Rule, supported

MMA_ROWS = 16  # the M and the K of an m16n8k16 MMA
MAX_THREADS_PER_CTA = 1024
# With 32 rows per warp, O alone takes d_head registers per thread, so d_head 192 would leave too
# few registers for everything else.
MAX_D_HEAD_OF_32_ROWS = 128
# The number of registers that a thread needs for scores, fragments and addresses, in addition to
# the registers for O.
MIN_REGISTERS_BESIDE_O = 48
# The minimum number of warps in each half of a CTA's warps, so that the half has a warp on each of
# the SM's four schedulers.
WARPS_PER_HALF = 4
MIN_PING_PONG_STAGES = 3


_supported = partial(
    supported,
    FlashForwardKernelConfig,
    must_be="{}: the mma.sync family has kernels for these only",
)


def _is_load_count(count: int, extent: int) -> bool:
    """Whether an operand of depth `extent` can be loaded in equal steps of `count` K-tiles each."""
    power_of_two = 2 <= count <= MAX_LOAD_COUNT and count & (count - 1) == 0
    return count == 0 or (power_of_two and step_columns(extent) % (K_TILE_COLUMNS * count) == 0)


def _load_count(operand: str, depth: str) -> Rule:
    knob = f"{operand}_mma_load_K_tiles"
    return Rule(
        f"{operand}_load_count",
        f"{knob} must be 0 (the whole block in registers) or a power of two from 2 (one m16n8k16 "
        f"step) to {MAX_LOAD_COUNT} that divides the {depth} / 8 K-tiles of {operand} (10 for 72)",
        lambda cfg, device: _is_load_count(getattr(cfg, knob), getattr(cfg, depth)),
        (knob, depth),
    )


def _buffered_load_count(operand: str, depth: str) -> Rule:
    knob = f"{operand}_mma_load_K_tiles"
    return Rule(
        f"{operand}_buffered_load_count",
        f"with mma_double_buffer_loads, {knob} must be at most half of the {depth} / 8 K-tiles of "
        f"{operand}: while one half is multiplied, another is loaded",
        lambda cfg, device: (
            not cfg.mma_double_buffer_loads
            or getattr(cfg, knob) * 2 * K_TILE_COLUMNS <= step_columns(getattr(cfg, depth))
        ),
        (knob, depth, "mma_double_buffer_loads"),
    )


RULES: tuple[Rule, ...] = (
    _supported("d_head"),
    _supported("B_r"),
    _supported("B_c"),
    _supported("n_warps"),
    Rule(
        "d_head_in_mma_steps",
        "d_head must be a multiple of 8: a tile of a PV GEMM has 8 columns",
        lambda cfg, device: cfg.d_head % K_TILE_COLUMNS == 0,
        ("d_head",),
    ),
    Rule(
        "B_c_in_mma_steps",
        "B_c must be a multiple of 16: a PV GEMM takes 16 keys a step",
        lambda cfg, device: cfg.B_c % MMA_ROWS == 0,
        ("B_c",),
    ),
    Rule(
        "warp_rows_in_mma_steps",
        "B_r / n_warps, the rows of one warp, must be a multiple of 16: an mma works on 16 rows",
        lambda cfg, device: cfg.B_r % (MMA_ROWS * cfg.n_warps) == 0,
        ("B_r", "n_warps"),
    ),
    Rule(
        "threads_within_limit",
        "32 n_warps, the threads of a CTA, must be at most 1024: no GPU starts a larger CTA",
        lambda cfg, device: cfg.n_threads <= MAX_THREADS_PER_CTA,
        ("n_warps",),
    ),
    Rule(
        "smem_within_limit",
        "the Q, K and V tiles, 2 (B_r max(d_head, d_v) + B_c max(1, kv_stages) (d_head + d_v)) "
        "bytes, where a d_v of 0 is d_head and 72 and 80 are 96, and with canonical 4 B_r (d_v + "
        "8) more, must fit in the shared memory that the device gives one CTA",
        lambda cfg, device: cfg.smem_bytes() <= device.max_smem_per_block,
        ("B_r", "B_c", "d_head", "d_v", "kv_stages", "canonical"),
        lambda cfg, device: (
            f"{cfg.smem_bytes()} of {device.max_smem_per_block} bytes on {device.name}"
        ),
    ),
    _load_count("Q", "d_head"),
    _load_count("K", "d_head"),
    _load_count("V", "B_c"),
    _buffered_load_count("Q", "d_head"),
    _buffered_load_count("K", "d_head"),
    _buffered_load_count("V", "B_c"),
    Rule(
        "Q_and_K_load_counts_agree",
        "Q_mma_load_K_tiles must be 0 or equal K_mma_load_K_tiles: both walk d_head in one loop",
        lambda cfg, device: cfg.Q_mma_load_K_tiles in (0, cfg.K_mma_load_K_tiles),
        ("Q_mma_load_K_tiles", "K_mma_load_K_tiles"),
    ),
    Rule(
        "O_fits_registers",
        "d_head, or d_v if it is not 0, above 128 needs B_r / n_warps, the rows of one warp, to be "
        "16: O takes as many columns x rows / 32 of the 255 registers of a thread",
        lambda cfg, device: (
            cfg.d_head_v <= MAX_D_HEAD_OF_32_ROWS or cfg.B_r <= MMA_ROWS * cfg.n_warps
        ),
        ("d_head", "d_v", "B_r", "n_warps"),
    ),
    _supported("kv_stages"),
    Rule(
        "kv_stages_copy_ahead",
        "kv_stages needs async_copy and eager_load_blocks: a ring is filled while other tiles of "
        "it are multiplied",
        lambda cfg, device: cfg.kv_stages == 0 or (cfg.async_copy and cfg.eager_load_blocks),
        ("kv_stages", "async_copy", "eager_load_blocks"),
    ),
    Rule(
        "ping_pong_stages",
        "ping_pong needs kv_stages of 3 or more: half a block apart, the halves use up to two "
        "tiles of K while the next is filled",
        lambda cfg, device: not cfg.ping_pong or cfg.kv_stages >= MIN_PING_PONG_STAGES,
        ("ping_pong", "kv_stages"),
    ),
    Rule(
        "ping_pong_warps",
        "ping_pong needs n_warps to be a multiple of 8: each half has a warp on each of the four "
        "schedulers of an SM",
        lambda cfg, device: not cfg.ping_pong or cfg.n_warps % (2 * WARPS_PER_HALF) == 0,
        ("ping_pong", "n_warps"),
    ),
    _supported("min_ctas_per_sm", name="min_ctas_supported"),
    Rule(
        "min_ctas_fit_registers",
        "min_ctas_per_sm must leave a thread 48 registers in addition to O, which takes B_r d_v / "
        "(32 n_warps), where a d_v of 0 is d_head: an SM has 65,536",
        lambda cfg, device: (
            cfg.min_ctas_per_sm == 0
            or REGISTERS_PER_SM // (cfg.n_threads * cfg.min_ctas_per_sm)
            >= cfg.B_r * cfg.d_head_v // cfg.n_threads + MIN_REGISTERS_BESIDE_O
        ),
        ("min_ctas_per_sm", "n_warps", "B_r", "d_head", "d_v"),
    ),
    Rule(
        "min_ctas_fit_smem",
        "min_ctas_per_sm CTAs must fit in the shared memory of one SM, each with its tiles and "
        "1,024 bytes that the system reserves",
        lambda cfg, device: (
            cfg.min_ctas_per_sm == 0
            or cfg.smem_bytes() + RESERVED_SMEM_PER_CTA
            <= (device.max_smem_per_block + RESERVED_SMEM_PER_CTA) // cfg.min_ctas_per_sm
        ),
        ("min_ctas_per_sm", "B_r", "B_c", "d_head", "d_v", "kv_stages", "canonical"),
        lambda cfg, device: f"{cfg.smem_bytes()} bytes a CTA on {device.name}",
    ),
    _supported("l2_group_mib", name="l2_group_supported"),
    _supported("split_keys"),
    *canonical_rules(
        (
            "optimized_softmax",
            "optimized_softmax: the scale is folded into the FMA before exp2",
            lambda cfg: cfg.optimized_softmax,
        ),
        (
            "lazy_rescale",
            "no lazy_rescale: rows are relative to their current maximum",
            lambda cfg: not cfg.lazy_rescale,
        ),
        ("ping_pong", "no ping_pong: that loop has no chunks", lambda cfg: not cfg.ping_pong),
        (
            "split_keys",
            "split_keys 0: parts and chunks end at different keys",
            lambda cfg: cfg.split_keys == 0,
        ),
    ),
    pair_rule(PAIRS),
)
