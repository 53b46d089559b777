"""The space that `flashsmith tune` searches: a product of knobs, shapes with their schedules, the
neighbours of what did well in it, and what is not worth a try.

The product is wider than 'tune' in every direction: every head dimension, 8 warps, long key tiles.
It cannot hold every knob: each doubles it. Knobs that work together are tried as the few schedules
that make sense, and a new knob joins the search as a line of MOVES: it is then tried on every
problem's best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

from flashsmith.configs.config import THREADS_PER_WARP, FlashForwardKernelConfig
from flashsmith.configs.device_spec import KNOWN_DEVICES
from flashsmith.configs.dtype import DType
from flashsmith.configs.rules import is_legal

SEARCH_KNOBS: dict[str, tuple[int, ...]] = {
    "B_r": (64, 128),
    "B_c": (32, 64, 128),
    "n_warps": (4, 8),
    "async_copy": (True,),
    "eager_load_blocks": (True,),
    "swizzled": (True,),
    "Q_mma_load_K_tiles": (0, 2),
    "K_mma_load_K_tiles": (0, 2),
    "V_mma_load_K_tiles": (0, 2),
    "mma_double_buffer_loads": (False, True),
    "optimized_softmax": (False, True),
}
# What makes a config another one's neighbour: new values for one knob, or for two that depend on
# each other.
MOVES: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {
    ("B_r", "n_warps"): ((64, 4), (128, 4), (128, 8), (192, 6), (256, 8)),
    ("B_c",): ((32,), (64,), (128,)),
    ("eager_load_blocks",): ((False,), (True,)),
    ("Q_mma_load_K_tiles", "K_mma_load_K_tiles"): ((0, 0), (0, 2), (2, 2), (0, 4), (4, 4)),
    ("V_mma_load_K_tiles",): ((0,), (2,), (4,)),
    ("mma_double_buffer_loads",): ((False,), (True,)),
    ("optimized_softmax",): ((False,), (True,)),
    ("kv_stages", "ping_pong"): ((0, False), (2, False), (3, False), (3, True)),
    ("lazy_rescale", "trim_masks"): ((False, False), (True, False), (False, True), (True, True)),
    ("min_ctas_per_sm",): ((0,), (2,), (3,), (4,)),
    ("l2_group_mib",): ((0,), (16,), (32,)),
}
SEARCH_D_HEADS = (64, 96, 128, 256)


@dataclass(frozen=True)
class _Shape:
    """Tile sizes, and for how many CTAs per SM the registers are worth capping."""

    B_r: int
    B_c: int
    n_warps: int
    ctas: tuple[int, ...] = (0,)


# 32 rows a warp read shared memory half as often as 16 and are the choice wherever O and S leave
# registers for it; with two such warps a scheduler the register file is full.
_SHAPES: dict[int, tuple[_Shape, ...]] = {
    64: (
        _Shape(128, 64, 4, (0, 3)),
        _Shape(128, 32, 4, (0, 3, 4)),
        _Shape(128, 128, 4),
        _Shape(64, 64, 4, (0, 4)),
        _Shape(64, 64, 2),
        _Shape(256, 64, 8),
        _Shape(192, 64, 6, (0, 2)),
    ),
    128: (
        _Shape(128, 64, 4),
        _Shape(128, 32, 4),
        _Shape(64, 64, 4, (0, 3)),
        _Shape(64, 64, 2),
        _Shape(64, 32, 4, (0, 4)),
        _Shape(128, 64, 8, (0, 2)),
        _Shape(256, 64, 8),
        _Shape(256, 32, 8),
        _Shape(192, 64, 6),
    ),
    256: (
        _Shape(64, 32, 4),
        _Shape(64, 64, 4),
        _Shape(128, 32, 8),
        _Shape(128, 64, 8),
        _Shape(192, 32, 12),
    ),
}

# Schedules and softmaxes, apart from tiles: kv_stages, ping_pong, lazy_rescale, optimized_softmax,
# mma_double_buffer_loads.
_SCHEDULES = (
    (0, False, False, False, True),
    (0, False, False, True, True),
    (0, False, True, True, True),
    (2, False, True, True, True),
    (2, False, True, True, False),
    (3, False, True, True, True),
    (3, True, True, True, False),
    (3, True, True, True, True),
)

# Of a thread's 255 registers, what O, S and Q may take together: addresses, row statistics and the
# fragments of K and V need the rest.
_MAX_HELD_REGISTERS = 208
_ROOMIEST = max(KNOWN_DEVICES, key=lambda device: device.max_smem_per_block)


def held_registers(cfg: FlashForwardKernelConfig) -> int:
    """Registers per thread that hold O and S (fp32) and, where it stays in registers, Q."""
    rows = cfg.rows_per_warp
    held = rows * (cfg.d_head + cfg.B_c) // THREADS_PER_WARP
    return held + (0 if cfg.Q_mma_load_K_tiles else rows * cfg.d_head // (2 * THREADS_PER_WARP))


def worth_searching(cfg: FlashForwardKernelConfig) -> bool:
    """Whether a legal config may win on some device; narrower than legality, and apart from it."""
    return held_registers(cfg) <= _MAX_HELD_REGISTERS


def get_search_space_configs(
    dtypes: Sequence[DType] = tuple(DType), d_heads: Sequence[int] = SEARCH_D_HEADS
) -> list[FlashForwardKernelConfig]:
    """The set 'space': the product of SEARCH_KNOBS and the schedules of _SHAPES, as far as they are
    legal on the known device with the most shared memory, and worth it.
    """
    knobs = {"dtype": tuple(dtypes), "d_head": tuple(d_heads), **SEARCH_KNOBS}
    configs = (
        FlashForwardKernelConfig(**dict(zip(knobs, values, strict=True)))  # type: ignore[arg-type]
        for values in product(*knobs.values())
    )
    scheduled = (
        replace(cfg, dtype=dtype)
        for d_head in d_heads
        for cfg in _scheduled(d_head)
        for dtype in dtypes
    )
    return [
        cfg
        for cfg in dict.fromkeys(chain(configs, scheduled))
        if worth_searching(cfg) and is_legal(cfg, _ROOMIEST)
    ]


def _scheduled(d_head: int) -> Iterator[FlashForwardKernelConfig]:
    shapes = _SHAPES[min((known for known in _SHAPES if known >= d_head), default=256)]
    for shape in shapes:
        # Q stays in registers where they have room for it beside O and S.
        keep_q = shape.B_r * d_head <= 16 * 128 * shape.n_warps
        for stages, ping_pong, lazy, folded, buffered in _SCHEDULES:
            for ctas in shape.ctas:
                yield FlashForwardKernelConfig(
                    dtype=DType.FP16,
                    d_head=d_head,
                    B_r=shape.B_r,
                    B_c=shape.B_c,
                    n_warps=shape.n_warps,
                    async_copy=True,
                    eager_load_blocks=True,
                    swizzled=True,
                    Q_mma_load_K_tiles=0 if keep_q else 2,
                    K_mma_load_K_tiles=2,
                    V_mma_load_K_tiles=2,
                    mma_double_buffer_loads=buffered,
                    optimized_softmax=folded,
                    kv_stages=stages,
                    lazy_rescale=lazy,
                    ping_pong=ping_pong,
                    min_ctas_per_sm=ctas,
                    trim_masks=lazy,
                )


def neighbours(cfg: FlashForwardKernelConfig) -> list[FlashForwardKernelConfig]:
    """The configs one of MOVES away that are legal on the roomiest known device, and worth it."""
    moved = (
        replace(cfg, **dict(zip(knobs, values, strict=True)))  # type: ignore[arg-type]
        for knobs, choices in MOVES.items()
        for values in choices
    )
    return [
        other
        for other in dict.fromkeys(moved)
        if other != cfg and worth_searching(other) and is_legal(other, _ROOMIEST)
    ]
