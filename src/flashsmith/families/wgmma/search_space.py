"""The search space of `flashsmith tune` for the wgmma family. For each head dimension, it has a
list of tile shapes with a few values of other knobs; the search adds the neighbours of the fastest
configs.

Shapes are listed rather than combined from all sizes, because a kernel takes five times as long to
compile as an mma_sync kernel, and the registers allow few shapes. A new knob gets a line in MOVES.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma.config import (
    B_C_STEP,
    MAX_RESCALE_THRESHOLD,
    MIN_B_C,
    MOST_COLUMNS_OF_O,
    PingPong,
    Schedule,
    TileOrder,
    WgmmaForwardKernelConfig,
)
from flashsmith.families.wgmma.sets import configs_of_other_widths, get_hopper_configs
from flashsmith.semantics.dtype import DType


class TileShape(NamedTuple):
    """The tiles of a CTA; B_r is 64 times n_warpgroups."""

    n_warpgroups: int
    B_c: int
    overlap: bool = False
    q_buffers: int = 2
    kv_stages: int = 2
    ctas_per_sm: int = 1


# The registers of a producer thread and of a consumer thread, keyed by (warpgroups per CTA, CTAs
# per SM). All threads together use the whole register file.
REGISTERS = {
    (1, 1): (24, 240), (2, 1): (24, 240), (3, 1): (32, 160), (4, 1): (32, 112),
    (1, 2): (24, 232), (2, 2): (32, 104), (1, 3): (24, 136),
}  # fmt: skip
# With three warpgroups, K and V are read the least often, but there are no registers for overlap
# above d_head 96. Four warpgroups fit only at small d_head. With two warpgroups, each thread has
# more registers. One warpgroup is for problems with few rows, or for two or three CTAs per SM with
# a small d_head. The length of key tiles is limited by registers with three warpgroups, and by
# shared memory with d_head 192 and 256 or with several CTAs per SM.
_VISION_SHAPES = (
    TileShape(3, 128),
    TileShape(3, 144),
    TileShape(3, 160),
    TileShape(3, 112, overlap=True),
    TileShape(4, 80),
    TileShape(2, 128, overlap=True),
    TileShape(2, 160, overlap=True),
    TileShape(1, 128, overlap=True),
    TileShape(1, 112, overlap=True, ctas_per_sm=2),
)
SHAPES: dict[HeadDims, tuple[TileShape, ...]] = {
    32: (
        TileShape(4, 128),
        TileShape(4, 96),
        TileShape(4, 64, overlap=True),
        TileShape(3, 128),
        TileShape(3, 192),
        TileShape(3, 128, overlap=True),
        TileShape(2, 96, ctas_per_sm=2),
        TileShape(2, 80, overlap=True, ctas_per_sm=2),
        TileShape(1, 192, overlap=True, ctas_per_sm=2),
        TileShape(1, 96, overlap=True, ctas_per_sm=3),
    ),
    64: (
        TileShape(3, 128),
        TileShape(3, 128, overlap=True),
        TileShape(3, 192),
        TileShape(4, 96),
        TileShape(4, 64, overlap=True),
        TileShape(2, 80, ctas_per_sm=2),
        TileShape(2, 128, overlap=True),
        TileShape(2, 192, overlap=True),
        TileShape(1, 128, overlap=True),
        TileShape(1, 192, overlap=True, ctas_per_sm=2),
        TileShape(1, 96, overlap=True, ctas_per_sm=3),
    ),
    72: _VISION_SHAPES,
    80: _VISION_SHAPES,
    96: (
        TileShape(3, 128),
        TileShape(3, 144),
        TileShape(3, 96, overlap=True),
        TileShape(2, 128, overlap=True),
        TileShape(2, 160, overlap=True),
        TileShape(1, 128, overlap=True),
        TileShape(1, 112, overlap=True, ctas_per_sm=2),
    ),
    128: (
        TileShape(3, 128),
        TileShape(3, 96),
        TileShape(2, 128, overlap=True),
        TileShape(2, 160, overlap=True),
        TileShape(1, 128, overlap=True),
        TileShape(1, 96, overlap=True, q_buffers=1, ctas_per_sm=2),
    ),
    192: (
        TileShape(2, 112, q_buffers=1),
        TileShape(2, 112, overlap=True, q_buffers=1),
        TileShape(2, 80, overlap=True),
        TileShape(3, 64, q_buffers=1),
        TileShape(1, 96, overlap=True),
    ),
    256: (
        TileShape(2, 80, q_buffers=1),
        TileShape(2, 80, overlap=True, q_buffers=1),
        TileShape(2, 64, overlap=True, q_buffers=1),
        TileShape(2, 48, overlap=True),
        TileShape(1, 80, overlap=True),
    ),
    512: (
        TileShape(1, 64, q_buffers=1, kv_stages=1),
        TileShape(1, 48, q_buffers=1, kv_stages=1),
        TileShape(1, 32, q_buffers=1),
        TileShape(1, 32, overlap=True, q_buffers=1),
    ),
    HeadPair(64, 128): (
        TileShape(3, 128),
        TileShape(3, 112),
        TileShape(2, 128, overlap=True),
        TileShape(2, 160, overlap=True),
    ),
    HeadPair(128, 64): (
        TileShape(3, 128),
        TileShape(3, 160, q_buffers=1),
        TileShape(3, 96, overlap=True),
        TileShape(2, 160, overlap=True),
    ),
    HeadPair(192, 128): (
        TileShape(2, 128, overlap=True, q_buffers=1),
        TileShape(2, 128, q_buffers=1),
        TileShape(2, 96, overlap=True),
        TileShape(3, 112, q_buffers=1),
        TileShape(3, 96, q_buffers=1),
    ),
    HeadPair(256, 128): (
        TileShape(2, 96, overlap=True, q_buffers=1),
        TileShape(2, 64, overlap=True),
        TileShape(3, 64, q_buffers=1),
    ),
    HeadPair(256, 256): (TileShape(2, 80, overlap=True, q_buffers=1),),
}
# The d_head from which on GEMMs take so much longer than the softmax that ping-pong only costs
# time.
_WITHOUT_TURNS = 192

# The steps from a config to its neighbours: each changes one knob, or several knobs that depend on
# each other. No step changes the order of tiles, because the space has all orders for each shape.
MOVES: dict[tuple[str, ...], tuple[tuple[object, ...], ...]] = {
    ("B_r", "n_warpgroups", "ctas_per_sm", "producer_registers", "consumer_registers"): tuple(
        (WARPGROUP_ROWS * n, n, ctas, *registers) for (n, ctas), registers in REGISTERS.items()
    ),
    ("overlap",): ((False,), (True,)),
    ("pingpong",): tuple((turn,) for turn in PingPong),
    ("schedule",): ((Schedule.STATIC_PERSISTENT,), (Schedule.DYNAMIC,)),
    ("kv_stages",): ((2,), (3,), (4,)),
    ("q_buffers", "separate_O"): ((1, False), (1, True), (2, False), (2, True)),
    ("cluster_size",): ((1,), (2,)),
    ("section_mib",): ((8,), (16,), (32,)),
    ("rescale_threshold",): ((0,), (MAX_RESCALE_THRESHOLD,)),
    ("exp2_fma_share",): ((0,), (10,), (25,)),
    ("early_exp",): ((False,), (True,)),
    ("stale_max",): ((False,), (True,)),
    ("direct_O",): ((False,), (True,)),
    ("short_block",): ((0,), (16,), (64,)),
    ("register_Q",): ((0,), (4,), (8,)),
}
# The maximum change of B_c in a step.
_B_C_STEPS = (-2 * B_C_STEP, -B_C_STEP, B_C_STEP, 2 * B_C_STEP)
_SHORTEST_B_C = 48


def worth_searching(cfg: WgmmaForwardKernelConfig) -> bool:
    """Whether a legal config could be the fastest one."""
    return (
        cfg.B_c >= (MIN_B_C if cfg.halves_O else _SHORTEST_B_C)
        # With one stage, GEMMs wait for every copy. But wide tiles leave no room for two stages.
        and (cfg.kv_stages >= 2 or cfg.halves_O)
        # The second Q buffer is for the next tile of a CTA; if a CTA computes only one tile, there
        # is no next tile.
        and not (cfg.schedule == Schedule.ONE_TILE and cfg.q_buffers == 2)
    )


def get_hopper_space_configs(
    dtypes: Sequence[DType], d_heads: Sequence[HeadDims], masked: bool
) -> list[WgmmaForwardKernelConfig]:
    """Returns the wgmma configs with which the search begins; [] for a head dimension without
    kernels.

    masked: whether some rows see fewer keys than others. Only then is longest_first tried, because
    it was 1 to 14% slower without a mask on an H200.
    """
    orders = tuple(TileOrder) if masked else (TileOrder.BY_HEAD,)
    found = dict.fromkeys(
        cfg
        for dtype, d_head in product(dtypes, d_heads)
        for shape in SHAPES.get(d_head, ())
        for cfg in _of_shape(dtype, d_head, shape, orders)
    )
    others = (cfg for dtype in dtypes for cfg in configs_of_other_widths(dtype))
    shipped = (cfg for cfg in (*get_hopper_configs(dtypes), *others) if cfg.tile_order in orders)
    found.update(dict.fromkeys(cfg for cfg in shipped if cfg.head_dims in d_heads))
    return list(found)


def _of_shape(
    dtype: DType, d_head: HeadDims, shape: TileShape, orders: Sequence[TileOrder]
) -> Iterator[WgmmaForwardKernelConfig]:
    d_head, d_v = d_head if isinstance(d_head, HeadPair) else (d_head, 0)
    alone = shape.n_warpgroups == 1 or d_head >= _WITHOUT_TURNS
    is_wide = max(d_head, d_v) > MOST_COLUMNS_OF_O
    # If a tile is wide, two warpgroups compute it as partners.
    warpgroups = 2 if is_wide else shape.n_warpgroups
    producer, consumer = REGISTERS[warpgroups, shape.ctas_per_sm]
    for order in orders:
        yield WgmmaForwardKernelConfig(
            dtype,
            d_head,
            WARPGROUP_ROWS * shape.n_warpgroups,
            shape.B_c,
            shape.n_warpgroups,
            kv_stages=shape.kv_stages,
            q_buffers=shape.q_buffers,
            producer_registers=producer,
            consumer_registers=consumer,
            overlap=shape.overlap,
            pingpong=PingPong.NONE if alone else PingPong.GEMM,
            schedule=Schedule.DYNAMIC,
            tile_order=order,
            rescale_threshold=MAX_RESCALE_THRESHOLD,
            ctas_per_sm=shape.ctas_per_sm,
            direct_O=is_wide or d_v > d_head,
            d_v=d_v,
        )


def moves(cfg: WgmmaForwardKernelConfig) -> Iterator[WgmmaForwardKernelConfig]:
    """The configs that are one step away from `cfg`, legal or not, and `cfg` itself."""
    for knobs, choices in MOVES.items():
        for values in choices:
            yield replace(cfg, **dict(zip(knobs, values, strict=True)))  # type: ignore[arg-type]
    for step in _B_C_STEPS:
        if cfg.B_c + step > 0:
            yield replace(cfg, B_c=cfg.B_c + step)
