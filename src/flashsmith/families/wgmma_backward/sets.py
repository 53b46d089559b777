"""The config set of the wgmma_backward family, and the candidate configs to use when there are no
measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from flashsmith.families.device import DeviceSpec, device_spec
from flashsmith.families.head_dims import HeadDims, HeadPair, is_whole
from flashsmith.families.legality import is_legal
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma_backward.config import (
    D_HEADS,
    WIDEST_IN_ONE_CTA,
    WIDEST_WHOLE,
    DqSums,
    StepOrder,
    WgmmaBackwardKernelConfig,
)
from flashsmith.semantics.dtype import DType


class _Tile(NamedTuple):
    B_r: int
    n_warpgroups: int
    ds_stages: int
    order: StepOrder
    pingpong: bool = False
    persistent: bool = False
    dq_sums: DqSums = DqSums.BESIDE_SCORES
    wide_stores: bool = False
    early_rows: bool = False
    q_stages: int = 2
    do_stages: int = 2
    consumer_registers: int = 0  # 0 means the number that registers() returns


_TOGETHER, _AHEAD, _UNDER = StepOrder.SCORES_TOGETHER, StepOrder.SCORES_AHEAD, DqSums.SUMS_UNDER_DK
_PERSISTENT_96 = _Tile(64, 2, 2, _TOGETHER, True, True, _UNDER, wide_stores=True)
_EARLY_64 = _Tile(128, 2, 2, _TOGETHER, persistent=True, dq_sums=_UNDER, early_rows=True)
_EARLY_128 = _Tile(64, 2, 2, _TOGETHER, True, True, _UNDER, wide_stores=True, early_rows=True)
# These tiles were chosen before any was measured. The first one is also first under a
# mask. It resembles the fastest tiles for d 64, but is not persistent and has no pingpong: a
# persistent kernel would spill without ordered_dq, and at d 80 one with pingpong would, too. The
# second tile is one of d 96.
_VISION = (
    _Tile(128, 2, 2, _TOGETHER, dq_sums=_UNDER),
    _Tile(64, 2, 2, _TOGETHER, True, False, _UNDER, True, True, q_stages=3),
    _Tile(128, 2, 2, _TOGETHER, dq_sums=_UNDER),
)
_SPLIT = _Tile(64, 2, 2, StepOrder.DV_FIRST, wide_stores=True, early_rows=True)
# For each d_head, its tiles in order of preference; under a mask, the order is reversed. These
# tiles were the fastest on the H200. The tiles in the middle leave more registers for masks and
# other semantics. Up to d_head 128, dq is computed one step later; kernels for wider heads have
# split roles.
_TILES: dict[HeadDims, tuple[_Tile, ...]] = {
    64: (
        _Tile(128, 2, 2, _TOGETHER, pingpong=True, dq_sums=_UNDER),
        _Tile(64, 3, 2, _TOGETHER, persistent=True),
        _Tile(128, 2, 2, _TOGETHER, persistent=True, dq_sums=_UNDER),
    ),
    72: _VISION,
    80: _VISION,
    96: (
        _Tile(64, 2, 2, _TOGETHER, True, False, _UNDER, True, True, q_stages=3),
        _Tile(64, 2, 3, _AHEAD, pingpong=True),
        _PERSISTENT_96,
    ),
    128: (
        _Tile(64, 2, 2, _TOGETHER, True, True, _UNDER, True, True, q_stages=3),
        _Tile(64, 2, 3, _AHEAD, pingpong=True),
        _Tile(64, 2, 2, _TOGETHER, True, True, _UNDER, wide_stores=True),
    ),
    192: (_SPLIT,),
    256: (_SPLIT,),
    512: (_SPLIT._replace(do_stages=1),),
    # These are the candidates for the wider of the two widths. Of the pairs, only 192:128 was
    # measured; its winners are in the table of the H200.
    HeadPair(64, 128): (_EARLY_128, _Tile(64, 2, 3, _AHEAD, pingpong=True)),
    HeadPair(128, 64): (_EARLY_128, _Tile(64, 2, 3, _AHEAD, pingpong=True)),
    HeadPair(192, 128): (_SPLIT,),
    HeadPair(256, 128): (_SPLIT,),
    HeadPair(256, 256): (_SPLIT,),
}

# For each d_head, the candidate with ordered_dq, which follows the candidates in _TILES.
_ORDERED: dict[HeadDims, _Tile] = {
    64: _Tile(128, 2, 2, _TOGETHER, True, True, _UNDER),
    72: _Tile(128, 2, 2, _TOGETHER, True, True, _UNDER),
    80: _PERSISTENT_96._replace(pingpong=False),
    96: _PERSISTENT_96._replace(pingpong=False),
    128: _EARLY_128,
    192: _SPLIT,
    256: _SPLIT,
    HeadPair(64, 128): _EARLY_128,
    HeadPair(128, 64): _EARLY_128,
    HeadPair(192, 128): _SPLIT,
    HeadPair(256, 128): _SPLIT,
    HeadPair(256, 256): _SPLIT,
}
_ORDERED_MASKED = _ORDERED | {64: _EARLY_64}

# Other configs that were the fastest on the H200; proofs check them together with the candidates.
_ALSO_PROVEN: dict[HeadDims, tuple[_Tile, ...]] = {
    64: (_EARLY_64, _EARLY_64._replace(q_stages=3, do_stages=3)),
    128: (_EARLY_128,),
    HeadPair(192, 128): (_SPLIT._replace(do_stages=4), _SPLIT._replace(consumer_registers=224)),
}


# The widths for which kernels with separate_dq are checked and tuned. Such kernels compute seven
# GEMMs instead of five, but they add nothing to sums in memory or in a fixed order. They were not
# measured, so they are chosen only if a table has them.
_SEPARATE: tuple[HeadDims, ...] = (64, 128, 192, 256, HeadPair(192, 128))

# The tiles with which kernels with shared_dq are checked and tuned. These kernels are chosen only
# if a table has them.
_SHARED: dict[HeadDims, _Tile] = {
    192: _SPLIT,
    256: _SPLIT._replace(do_stages=1),
    # With 208 registers per consumer thread, the kernel is 2 to 3% faster than with 232.
    HeadPair(192, 128): _SPLIT._replace(consumer_registers=208),
}


def ordered_like(cfg: WgmmaBackwardKernelConfig) -> WgmmaBackwardKernelConfig:
    """Returns the candidate with ordered_dq for the dtype and widths of a config."""
    d_head = HeadPair(cfg.d_head, cfg.d_v) if cfg.d_v else cfg.d_head
    return _config(cfg.dtype, d_head, _ORDERED[d_head], ordered_dq=True)


def with_separate_dq(cfg: WgmmaBackwardKernelConfig) -> WgmmaBackwardKernelConfig:
    """Returns a config that has the main kernel of without_dq(cfg) and computes dq in another
    launch."""
    return replace(without_dq(cfg), without_dq=False, separate_dq=True)


def without_shared_dq(cfg: WgmmaBackwardKernelConfig) -> WgmmaBackwardKernelConfig:
    """Returns `cfg` without shared_dq: each CTA adds the dq of its own keys, with the registers and
    the stages of do that are then possible."""
    producer, consumer = registers(2, False, cfg.ordered_dq)
    return replace(
        cfg,
        do_stages=max(cfg.do_stages, _SPLIT.do_stages),
        producer_registers=producer,
        consumer_registers=consumer,
        shared_dq=False,
        multicast=False,
    )


def without_dq(cfg: WgmmaBackwardKernelConfig) -> WgmmaBackwardKernelConfig:
    """Returns the config for dk and dv alone that is most similar to `cfg`, a config for all
    gradients."""
    order = cfg.order if cfg.split_roles else StepOrder.SCORES_TOGETHER
    # Without lagged_dq, ptxas serialises a persistent kernel for d 128, whose threads have 8 fewer
    # registers.
    persistent = cfg.persistent and cfg.d_head < WIDEST_WHOLE
    producer, consumer = registers(cfg.n_warpgroups, persistent, False, cfg.cta_pair)
    return replace(
        cfg,
        # At d 72 and 80, steps have 64 queries, because ptxas serialises steps of 128 queries at d
        # 80.
        B_r=cfg.B_r if is_whole(cfg.d_head) else WARPGROUP_ROWS,
        order=order,
        ds_stages=1,
        lagged_dq=False,
        persistent=persistent,
        producer_registers=producer,
        consumer_registers=consumer,
        dq_sums=DqSums.BESIDE_SCORES,
        ordered_dq=False,
        bulk_sums=False,
        early_rows=cfg.early_rows and cfg.split_roles,
        without_dq=True,
        separate_dq=False,
        shared_dq=False,
        multicast=False,
    )


def registers(
    n_warpgroups: int, persistent: bool, ordered_dq: bool, in_cluster: bool = False
) -> tuple[int, int]:
    """Returns the numbers of registers of a producer thread and of a consumer thread.

    The producer needs more registers in a persistent CTA, if its threads keep the additions to dq
    in order, and if its copies depend on the CTA's place in a cluster.
    """
    if n_warpgroups == 3:
        return 32, 160
    return (40, 232) if persistent or ordered_dq or in_cluster else (24, 240)


def get_hopper_backward_configs(
    dtypes: Sequence[DType] = tuple(DType),
) -> list[WgmmaBackwardKernelConfig]:
    """Returns the set 'hopper-backward': a few configs for each dtype and each d_head except 72 and
    80."""
    device, d_heads = device_spec("H200"), filter(is_whole, D_HEADS)
    return [cfg for dtype, d in product(dtypes, d_heads) for cfg in candidates(dtype, d, device)]


def candidates(
    dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool = False
) -> list[WgmmaBackwardKernelConfig]:
    """Returns the legal candidates for d_head on a device, in order of preference."""
    tiles = _TILES.get(d_head, ())
    ordered = _ORDERED_MASKED if masked else _ORDERED
    in_order = dict.fromkeys(reversed(tiles) if masked else tiles)
    made = [_config(dtype, d_head, tile) for tile in in_order]
    if d_head in ordered:
        made.append(_config(dtype, d_head, ordered[d_head], ordered_dq=True))
    return [cfg for cfg in made if is_legal(cfg, device)]


def separate_configs(dtype: DType, d_head: HeadDims) -> list[WgmmaBackwardKernelConfig]:
    """Returns the config with separate_dq for d_head; [] if there is none."""
    if d_head not in _SEPARATE:
        return []
    return [with_separate_dq(_config(dtype, d_head, _TILES[d_head][0]))]


def shared_configs(dtype: DType, d_head: HeadDims) -> list[WgmmaBackwardKernelConfig]:
    """Returns the configs with shared_dq for d_head: without and with ordered_dq, and with
    multicast; [] if there are none."""
    if d_head not in _SHARED:
        return []
    producer, consumer = registers(2, False, False, in_cluster=True)
    tile = _SHARED[d_head]
    consumer = tile.consumer_registers or consumer
    made = replace(
        _config(dtype, d_head, tile),
        producer_registers=producer,
        consumer_registers=consumer,
        shared_dq=True,
    )
    return [made, replace(made, ordered_dq=True), replace(made, multicast=True)]


def proof_configs(
    dtype: DType, d_head: HeadDims, device: DeviceSpec
) -> list[WgmmaBackwardKernelConfig]:
    """The configs that proofs check: the candidates with and without a mask, other configs that
    were the fastest, and the configs with separate_dq and shared_dq."""
    found = candidates(dtype, d_head, device)
    found += [_config(dtype, d_head, tile) for tile in _ALSO_PROVEN.get(d_head, ())]
    masked = candidates(dtype, d_head, device, masked=True)
    found += [cfg for cfg in masked if cfg not in found]
    return found + separate_configs(dtype, d_head) + shared_configs(dtype, d_head)


def _config(
    dtype: DType, d_head: HeadDims, tile: _Tile, ordered_dq: bool = False
) -> WgmmaBackwardKernelConfig:
    d_head, d_v = d_head if isinstance(d_head, HeadPair) else (d_head, 0)
    is_whole, cta_pair = d_head <= WIDEST_WHOLE, d_head > WIDEST_IN_ONE_CTA
    producer, consumer = registers(tile.n_warpgroups, tile.persistent, ordered_dq, cta_pair)
    return WgmmaBackwardKernelConfig(
        dtype,
        d_head,
        tile.B_r,
        WARPGROUP_ROWS * (tile.n_warpgroups if is_whole else 1),
        tile.n_warpgroups,
        q_stages=tile.q_stages,
        do_stages=tile.do_stages,
        ds_stages=tile.ds_stages,
        producer_registers=producer,
        consumer_registers=tile.consumer_registers or consumer,
        order=tile.order,
        split_roles=not is_whole,
        lagged_dq=is_whole,
        pingpong=tile.pingpong,
        persistent=tile.persistent,
        dq_sums=tile.dq_sums,
        ordered_dq=ordered_dq,
        wide_stores=tile.wide_stores,
        early_rows=tile.early_rows,
        d_v=d_v,
        cta_pair=cta_pair,
    )
