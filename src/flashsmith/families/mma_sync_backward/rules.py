"""The rules of the mma_sync_backward family: for which configs kernels can be built.

Each rule has one predicate and one reason.
"""

from __future__ import annotations

from functools import partial

from flashsmith.families.head_dims import PAIRS, pair_rule
from flashsmith.families.mma_sync_backward.config import (
    MMA_ROWS,
    DqMode,
    FlashBackwardKernelConfig,
)
from flashsmith.families.rule import Rule, supported

# The maximum number of fp32 accumulators per thread. With more, too few of the 255 registers would
# remain for fragments and addresses, which would spill.
MAX_ACCUMULATORS = 192
# The number of columns in a panel of shared memory. Four warps with 16 columns each fill a panel.
PANEL_COLUMNS = 64

_supported = partial(
    supported,
    FlashBackwardKernelConfig,
    must_be="{}: the mma_sync_backward family has kernels for these only",
)


def shares_dq(cfg: FlashBackwardKernelConfig, row_warps: int) -> bool:
    """Whether the warps can divide the rows and columns of dQ = dS K evenly if they are arranged as
    row_warps x (n_warps / row_warps)."""
    if row_warps > cfg.n_warps or cfg.n_warps % row_warps:
        return False
    columns = cfg.n_warps // row_warps
    whole_rows = cfg.B_r % (MMA_ROWS * row_warps) == 0
    return whole_rows and columns <= 4 and (columns < 4 or cfg.d_head % PANEL_COLUMNS == 0)


RULES: tuple[Rule, ...] = (
    *map(_supported, ("d_head", "B_r", "B_c", "n_warps", "column_warps", "stages")),
    Rule(
        "warp_keys_in_mma_steps",
        "B_c column_warps / n_warps, the keys of one warp, must be a multiple of 16: an mma works "
        "on 16 rows",
        lambda cfg, device: cfg.B_c * cfg.column_warps % (MMA_ROWS * cfg.n_warps) == 0,
        ("B_c", "n_warps", "column_warps"),
    ),
    Rule(
        "warp_queries_in_mma_steps",
        "B_r / column_warps, the queries of one warp, must be 16 or more: fragments are loaded two "
        "tiles of 8 at a time",
        lambda cfg, device: cfg.B_r >= MMA_ROWS * cfg.column_warps,
        ("B_r", "column_warps"),
    ),
    Rule(
        "column_warps_fill_panels",
        "column_warps 4 needs d_head to be a multiple of 64: four warps take 16 columns of a panel "
        "each",
        lambda cfg, device: cfg.column_warps < 4 or cfg.d_head % PANEL_COLUMNS == 0,
        ("column_warps", "d_head"),
    ),
    Rule(
        "keys_fit_registers",
        "B_c (d_head + d_v + 2 B_r) / (32 n_warps), a thread's elements of dk, dv, S and dP, where "
        "a d_v of 0 is d_head, and 72 is 80 with column_warps 2, must be at most "
        f"{MAX_ACCUMULATORS}: it has 255 registers",
        lambda cfg, device: cfg.accumulators + 2 * cfg.scores <= MAX_ACCUMULATORS,
        ("B_r", "B_c", "d_head", "d_v", "n_warps", "column_warps"),
    ),
    Rule(
        "queries_fit_registers",
        "without dq_atomics, d_head / 2 + B_r, a thread's elements of dq, S and dP of 16 queries a "
        f"warp, must be at most {MAX_ACCUMULATORS}: it has 255 registers",
        lambda cfg, device: (
            cfg.dq == DqMode.ATOMICS or cfg.d_head // 2 + cfg.B_r <= MAX_ACCUMULATORS
        ),
        ("dq", "d_head", "B_r"),
    ),
    Rule(
        "warps_share_dq",
        "with dq_atomics, the warps must be able to split dQ, B_r x d_head: into multiples of 16 "
        "rows, and the columns by 1, 2 or, if d_head is a multiple of 64, 4",
        lambda cfg, device: (
            cfg.dq != DqMode.ATOMICS or any(shares_dq(cfg, rows) for rows in (1, 2, 4))
        ),
        ("dq", "B_r", "d_head", "n_warps"),
    ),
    Rule(
        "smem_within_limit",
        "the tiles must fit in the shared memory that the device gives one CTA",
        lambda cfg, device: cfg.smem_bytes() <= device.max_smem_per_block,
        ("B_r", "B_c", "d_head", "d_v", "n_warps", "column_warps", "stages", "dq"),
        lambda cfg, device: (
            f"{cfg.smem_bytes()} of {device.max_smem_per_block} bytes on {device.name}"
        ),
    ),
    pair_rule(PAIRS),
)
