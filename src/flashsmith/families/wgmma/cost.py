"""The cost model of the wgmma family: how long an SM takes for one step of a CTA's loop.

An SM holds ctas_per_sm CTAs, in most configs one.

In a step, each warpgroup computes a QK GEMM, a softmax and a PV GEMM for 64 rows and B_c keys. All
warpgroups share the tensor cores and the exp2 units. The chain of one warpgroup consists of a GEMM,
a softmax, a GEMM, and waits at barriers. With overlap, the chain takes as long as the GEMMs or the
softmax, whichever is longer, plus these waits. The model combines these three limits as in
mma_sync.

The constants below are fitted to 32 timings on an H200 at d 128 (benchmarks/h200/
hopper-first-run.csv). Timings of problems without a mask with longest_first were left out. Other
head dimensions are extrapolated.
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

# The compile time of a kernel, relative to other families. It is short for all tiles, because a
# single wgmma instruction multiplies for a whole warpgroup.
COMPILE_COST = 700.0

# Cycles that a tile takes for its first copy of K, its epilogue, and the fetch of its work-tile
# info.
_TILE_CYCLES = 2000.0
# Cycles of waiting for Q of the next tile, if there is no second Q buffer and no separate O buffer.
_Q_WAIT = 600.0
# Cycles for the first copies of a launch in which every CTA has only one tile.
_LAUNCH_CYCLES = 1500.0
# Cycles that a warpgroup takes per step for barriers, waiting for a GEMM, and row statistics. None
# of its other work overlaps with these.
_CHAIN_LATENCY = 1300.0
_OVERHEAD = 1.03
_NORM = 4.0


@lru_cache(maxsize=4096)
def tile_work(
    cfg: WgmmaForwardKernelConfig, device: DeviceSpec, registers: int | None, spill: int | None
) -> TileWork:
    """The work of a tile on ``device``.

    The registers follow from the config, and the kernel does not spill, so the compiler's figures
    are ignored.
    """
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
    """The number of cycles in which an SM computes one loop step of each of its ``resident``
    CTAs."""
    columns = 16 * cfg.QK_steps + cfg.d_head_v
    products = 2 * WARPGROUP_ROWS * cfg.B_c * columns / flop_per_cycle  # Of one warpgroup
    softmax = WARPGROUP_ROWS * cfg.B_c / EXP2 * (1 - cfg.exp2_fma_share / 100)
    warpgroups = resident * cfg.n_warpgroups
    chain = max(products, softmax) if cfg.overlap else products + softmax
    bounds = (warpgroups * products, warpgroups * softmax, chain + _CHAIN_LATENCY)
    return float(_OVERHEAD * sum(bound**_NORM for bound in bounds) ** (1 / _NORM))
