"""The wgmma_dq family's cost model: the time of one loop step of a CTA on an SM, which holds one
CTA.

A step's three GEMMs occupy the tensor cores, and their operands occupy shared memory. Within a
warpgroup, GEMMs, exponentials and waits are serial.
"""

from __future__ import annotations

from functools import lru_cache

from flashsmith.families.backward_work import joined
from flashsmith.families.device import DeviceSpec
from flashsmith.families.legality import is_legal
from flashsmith.families.tile_work import EXP2, SMEM_BYTES, TileWork, rates_of
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma_dq.config import WgmmaDqKernelConfig

# Relative compile time of a config: four kernels, in whose loops each wgmma is issued for a whole
# warpgroup.
COMPILE_COST = 1000.0

# Cycles for a CTA's Q, do and first keys, and for storing dq.
_CTA_CYCLES = 3500.0
# Barriers and waits for GEMMs that no work of the same warpgroup hides. The factor applies if a
# step's dq overlaps the next step's exponentials.
_CHAIN_LATENCY, _LATE = 700.0, 0.85
# Instructions per score of a thread; a warpgroup has one warp on each scheduler.
_PER_SCORE = 7.0
_OVERHEAD = 1.1


@lru_cache(maxsize=4096)
def tile_work(cfg: WgmmaDqKernelConfig, device: DeviceSpec) -> TileWork:
    """The work of a tile on ``device``. The config sets the registers and the kernel does not
    spill, so the compiler's figures are ignored."""
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
    """SM cycles of one step of the loop."""
    products = 6 * cfg.B_r * cfg.B_c * cfg.d_head / flop_per_cycle
    exp2 = cfg.B_r * cfg.B_c / EXP2
    # A warpgroup reads its rows of Q and do, V once and K twice; TMA writes K and V.
    read = cfg.n_warpgroups * (2 * WARPGROUP_ROWS + 3 * cfg.B_c) * cfg.d_head
    smem = (read + 2 * cfg.B_c * cfg.d_head) * cfg.dtype.element_size / SMEM_BYTES
    issue = cfg.B_c / 2 * _PER_SCORE
    chain = products / cfg.n_warpgroups + issue + _CHAIN_LATENCY
    chain *= _LATE if cfg.late_dq else 1.0
    return _OVERHEAD * joined([products, smem, exp2, cfg.n_warpgroups * issue, chain])
