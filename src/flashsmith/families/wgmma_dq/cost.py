"""The cost model of the wgmma_dq family: how long an SM takes for one step of a CTA's loop.

An SM holds one CTA.

In a step, three GEMMs occupy the tensor cores, and their operands occupy shared memory. Within a
warpgroup, the GEMMs, exponentials and waits run one after another, so their times add up.
"""

from __future__ import annotations

from functools import lru_cache

from flashsmith.families.backward_work import joined
from flashsmith.families.device import DeviceSpec
from flashsmith.families.head_dims import step_columns
from flashsmith.families.legality import is_legal
from flashsmith.families.tile_work import EXP2, SMEM_BYTES, TileWork, rates_of
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma_dq.config import WgmmaDqKernelConfig

# The compile time of a config's four kernels, relative to other families. It is short, because a
# single wgmma instruction in a loop multiplies for a whole warpgroup.
COMPILE_COST = 1000.0

# Cycles that a CTA takes to load Q, do and the first keys, and to store dq.
_CTA_CYCLES = 3500.0
# Cycles per step for barriers, and for those GEMMs of a warpgroup with which none of its other work
# overlaps. If the dq of a step overlaps the exponentials of the next step, the time of a
# warpgroup's chain is multiplied by _LATE.
_CHAIN_LATENCY, _LATE = 700.0, 0.85
# The number of instructions per score of a thread. Each scheduler has one warp of a warpgroup.
_PER_SCORE = 7.0
_OVERHEAD = 1.1


@lru_cache(maxsize=4096)
def tile_work(cfg: WgmmaDqKernelConfig, device: DeviceSpec) -> TileWork:
    """The work of a tile on ``device``.

    The registers follow from the config, and the kernel does not spill, so the compiler's figures
    are ignored.
    """
    rates, resident = rates_of(device), int(is_legal(cfg, device))
    step = _step_cycles(cfg, rates.wgmma) if resident else 0.0
    return TileWork(
        rows=cfg.B_r,
        keys=cfg.B_c,
        resident=resident,
        cta_cycles=_CTA_CYCLES,
        step_cycles=(0.0, step)[: resident + 1],
        clock=rates.wgmma_clock,
    )


def _step_cycles(cfg: WgmmaDqKernelConfig, flop_per_cycle: float) -> float:
    """The number of cycles in which an SM computes one step of the loop."""
    # S and dP are computed in steps of 16 columns.
    columns = step_columns(cfg.d_head) + step_columns(cfg.d_head_v) + cfg.d_head
    products = 2 * cfg.B_r * cfg.B_c * columns / flop_per_cycle
    exp2 = cfg.B_r * cfg.B_c / EXP2
    # A warpgroup reads its rows of Q and do, V once and K twice; TMA writes K and V.
    both = cfg.d_head + cfg.d_head_v
    read = cfg.n_warpgroups * ((WARPGROUP_ROWS + cfg.B_c) * both + cfg.B_c * cfg.d_head)
    smem = (read + cfg.B_c * both) * cfg.dtype.element_size / SMEM_BYTES
    issue = cfg.B_c / 2 * _PER_SCORE
    chain = products / cfg.n_warpgroups + issue + _CHAIN_LATENCY
    chain *= _LATE if cfg.late_dq else 1.0
    return _OVERHEAD * joined([products, smem, exp2, cfg.n_warpgroups * issue, chain])
