"""The cost model of the wgmma_backward family: how long an SM takes for one step of a CTA's loop.

An SM holds one CTA.

The model depends only on the knobs of the tile and on ordered_dq, with which each addition to the
sums of dq waits for the previous one. Among configs with the same tile, the first in order of
preference is chosen. In a step, five GEMMs occupy the tensor cores, their operands occupy shared
memory, and the additions to the sums of dq occupy the path to the L2. Within a warpgroup, the
GEMMs, exponentials and waits run one after another, so their times add up.

The constants below are fitted to timings on an H200, which are in
benchmarks/h200/wgmma-backward.csv.
"""

from __future__ import annotations

from functools import lru_cache

from flashsmith.families.backward_work import joined, reduced_per_clock
from flashsmith.families.device import DeviceSpec
from flashsmith.families.head_dims import step_columns
from flashsmith.families.legality import is_legal
from flashsmith.families.tile_work import EXP2, SMEM_BYTES, TileWork, rates_of
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma_backward.config import WgmmaBackwardKernelConfig

# The compile time of a config's five kernels, relative to other families. It is short, because a
# single wgmma instruction in a loop multiplies for a whole warpgroup.
COMPILE_COST = 1500.0

_FLOAT_BYTES = 4
# Cycles that a CTA takes to load K, V and the first queries, and to store dk and dv.
_CTA_CYCLES = 4300.0
# Cycles per step for barriers, and for those GEMMs of a warpgroup with which none of its other work
# overlaps.
_CHAIN_LATENCY = 920.0
_OVERHEAD = 1.1
# The cost of ordered_dq in cycles per step, mostly for waiting for the previous block of keys. It
# is 2 to 12% of a step.
_ORDER_LATENCY = 300.0
# With split roles, ordered_dq also multiplies the time of a step by this factor. 1.13 was measured
# at d 192, and 1.15 to 1.17 at d 192:128.
_ORDER_OF_SPLIT_ROLES = 1.13
# The same with shared_dq: half as many CTAs have turns at a block of queries. This is estimated.
_ORDER_OF_SHARED_DQ = 1.06
# Cycles per step in which a warpgroup of a CTA pair waits for the S or dP of the other CTA. This is
# estimated from the latency between SMs; no pair was measured.
_EXCHANGE_LATENCY = 800.0


@lru_cache(maxsize=4096)
def tile_work(cfg: WgmmaBackwardKernelConfig, device: DeviceSpec) -> TileWork:
    """The work of a tile on ``device``.

    The registers follow from the config, and the kernel does not spill, so the compiler's figures
    are ignored.
    """
    rates, resident = rates_of(device), int(is_legal(cfg, device))
    step = _step_cycles(cfg, rates.wgmma, device) if resident else 0.0
    return TileWork(
        rows=cfg.B_c // cfg.n_ctas,  # A pair takes two SMs
        keys=cfg.B_r,
        resident=resident,
        cta_cycles=_CTA_CYCLES,
        step_cycles=(0.0, step)[: resident + 1],
        clock=rates.wgmma_clock,
        of_keys=True,
    )


def _step_cycles(
    cfg: WgmmaBackwardKernelConfig, flop_per_cycle: float, device: DeviceSpec
) -> float:
    """The number of cycles in which an SM computes one step of the loop."""
    element, warpgroups = cfg.dtype.element_size, cfg.n_warpgroups
    both = cfg.columns + cfg.v_columns
    # S and dP are computed in steps of 16 columns.
    columns = step_columns(cfg.columns) + step_columns(cfg.v_columns) + both
    columns += cfg.dq_sum_columns if cfg.sums_dq else 0
    products = 2 * cfg.B_r * cfg.B_c * columns / flop_per_cycle
    exp2 = cfg.B_r * cfg.B_c / EXP2
    # A warpgroup reads K and V once, and Q and do twice; with split roles, it reads half as much.
    # For dQ, it reads dS and K, 64 rows at a time. Q, do, dS and the dq to be added are also
    # written to shared memory. So is P if warpgroups with split roles exchange it, and so are S and
    # dP if CTAs exchange them.
    read = (WARPGROUP_ROWS + cfg.B_r) * both + cfg.B_r * both
    read *= cfg.key_groups
    written = cfg.B_r * both + 4 * (cfg.split_roles + 2 * cfg.cta_pair) * cfg.B_r * cfg.B_c
    sums = 0
    if cfg.sums_dq:
        read += cfg.B_r * cfg.B_c * cfg.dq_sum_columns // cfg.dq_columns
        read += cfg.B_r // WARPGROUP_ROWS * cfg.B_c * cfg.dq_sum_columns
        written += cfg.B_r * cfg.B_c
        sums = cfg.B_r * cfg.dq_sum_columns * _FLOAT_BYTES
        if cfg.shared_dq:
            # Each CTA adds half of the columns, and the dS of the other CTA is written to shared
            # memory.
            sums //= 2
            written += cfg.B_r * cfg.B_c
    smem = ((read + written) * element + 2 * sums) / SMEM_BYTES
    chain = products / warpgroups + exp2 / cfg.key_groups + _CHAIN_LATENCY
    chain += cfg.ordered_dq * _ORDER_LATENCY + cfg.cta_pair * _EXCHANGE_LATENCY
    overhead = _OVERHEAD
    if cfg.ordered_dq and cfg.split_roles:
        overhead *= _ORDER_OF_SHARED_DQ if cfg.shared_dq else _ORDER_OF_SPLIT_ROLES
    return overhead * joined([products, smem, exp2, sums / reduced_per_clock(device), chain])
