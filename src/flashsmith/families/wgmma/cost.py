"""The wgmma family's cost model: the time of one step of a CTA's loop on an SM, which holds
ctas_per_sm CTAs, usually one.

In a step every warpgroup computes a QK GEMM, a softmax and a PV GEMM of 64 rows and B_c keys. All
warpgroups share the tensor cores and exp2 units. A warpgroup's own chain is GEMM, softmax, GEMM and
its waits at barriers; with overlap the chain is the longer of the GEMMs and the softmax, plus these
waits. The three bounds are combined as in mma_sync.

The constants below are fitted to 32 timings on an H200 at d 128 (benchmarks/h200/
hopper-first-run.csv). Unmasked problems with longest_first were left out. Other head dimensions are
extrapolated.
"""

from __future__ import annotations

from functools import lru_cache

from flashsmith.families.device import DeviceSpec
from flashsmith.families.legality import is_legal
from flashsmith.families.tile_work import EXP2, TileWork, rates_of
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma.config import (
    Schedule,
    TileOrder,
    WgmmaForwardKernelConfig,
)

# Relative compile time of a kernel, which is short for all tiles, since one wgmma is issued for a
# whole warpgroup.
COMPILE_COST = 700.0

# Cycles of a tile's first K copy, its epilogue, and the fetch of its work-tile info.
_TILE_CYCLES = 2000.0
# The wait for the next tile's Q, if there is neither a second Q buffer nor a separate O buffer.
_Q_WAIT = 600.0
# A launch's first copies, if every CTA has only one tile.
_LAUNCH_CYCLES = 1500.0
# The time of barriers, the wait for a GEMM and the row statistics. Nothing in the same warpgroup
# hides it.
_CHAIN_LATENCY = 1300.0
_OVERHEAD = 1.03
_NORM = 4.0


@lru_cache(maxsize=4096)
def tile_work(
    cfg: WgmmaForwardKernelConfig, device: DeviceSpec, registers: int | None, spill: int | None
) -> TileWork:
    """The work of a tile on ``device``. The config sets the registers and the kernel does not
    spill, so the compiler's figures are ignored."""
    rates = rates_of(device)
    resident = cfg.ctas_per_sm if is_legal(cfg, device) else 0
    hidden = cfg.q_buffers == 2 or cfg.separate_O
    persistent = cfg.schedule != Schedule.ONE_TILE
    return TileWork(
        packs_gqa=cfg.pack_gqa,
        rows=cfg.B_r,
        keys=cfg.B_c,
        resident=resident,
        cta_cycles=_TILE_CYCLES
        + (0.0 if hidden else _Q_WAIT)
        + (0.0 if persistent else _LAUNCH_CYCLES),
        step_cycles=(
            0.0,
            *(_step_cycles(cfg, rates.wgmma, n) for n in range(1, resident + 1)),
        ),
        clock=rates.wgmma_clock,
        masked_rows=WARPGROUP_ROWS,
        longest_first=persistent and cfg.tile_order == TileOrder.LONGEST_FIRST,
    )


def _step_cycles(cfg: WgmmaForwardKernelConfig, flop_per_cycle: float, resident: int) -> float:
    """SM cycles of one loop step while ``resident`` CTAs each do one on an SM."""
    products = 4 * WARPGROUP_ROWS * cfg.B_c * cfg.d_head / flop_per_cycle  # of one warpgroup
    softmax = WARPGROUP_ROWS * cfg.B_c / EXP2 * (1 - cfg.exp2_fma_share / 100)
    warpgroups = resident * cfg.n_warpgroups
    chain = max(products, softmax) if cfg.overlap else products + softmax
    bounds = (warpgroups * products, warpgroups * softmax, chain + _CHAIN_LATENCY)
    return float(_OVERHEAD * sum(bound**_NORM for bound in bounds) ** (1 / _NORM))
