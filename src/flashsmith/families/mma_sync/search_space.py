"""The search space of `flashsmith tune` for the mma_sync family: all combinations of some knob
values, the neighbours of the fastest configs, and a filter that leaves out configs that are not
worth measuring.

The combinations go beyond the set 'tune' in every direction: every head dimension, 8 warps, long
tiles of keys. They cannot cover all knobs, because each added knob would double the number of
configs. Instead, a new knob gets a line in MOVES and is tried on the best config of each problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from flashsmith.families.config import THREADS_PER_WARP
from flashsmith.families.device import KNOWN_DEVICES
from flashsmith.families.head_dims import HeadDims, split_dims
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync.config import FlashForwardKernelConfig
from flashsmith.semantics.dtype import DType

SEARCH_KNOBS: dict[str, tuple[int, ...]] = {
    "B_r": (64, 128, 256),
    "B_c": (32, 64, 128),
    "n_warps": (4, 8),
    "async_copy": (True,),
    "eager_load_blocks": (True,),
    "swizzled": (True,),
    "Q_mma_load_K_tiles": (0, 2),
    "K_mma_load_K_tiles": (2,),
    "V_mma_load_K_tiles": (2,),
    "mma_double_buffer_loads": (False,),
    "optimized_softmax": (False, True),
    "kv_stages": (0, 2, 3),
    "lazy_rescale": (True,),
    "ping_pong": (False, True),
}
# The steps from a config to its neighbours: each changes one knob, or two knobs that depend on each
# other.
MOVES: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {
    ("B_r", "n_warps"): ((64, 4), (128, 4), (128, 8), (256, 8)),
    ("B_c",): ((32,), (48,), (64,), (96,), (128,)),
    ("eager_load_blocks",): ((False,), (True,)),
    ("Q_mma_load_K_tiles", "K_mma_load_K_tiles"): ((0, 0), (0, 2), (2, 2), (0, 4), (4, 4)),
    ("V_mma_load_K_tiles",): ((0,), (2,), (4,)),
    ("mma_double_buffer_loads",): ((False,), (True,)),
    ("optimized_softmax",): ((False,), (True,)),
    ("kv_stages",): ((0,), (2,), (3,)),
    ("lazy_rescale",): ((False,), (True,)),
    ("min_ctas_per_sm",): ((0,), (2,), (3,), (4,)),
    ("trim_masks",): ((False,), (True,)),
    ("l2_group_mib",): ((0,), (16,)),
}
SEARCH_D_HEADS = (64, 96, 128, 256)

# The maximum number of a thread's 255 registers that O, S and Q together may take. The other
# registers are needed for addresses, row statistics and the fragments of K and V.
_MAX_HELD_REGISTERS = 208
_ROOMIEST = max(KNOWN_DEVICES, key=lambda device: device.max_smem_per_block)


def held_registers(cfg: FlashForwardKernelConfig) -> int:
    """The number of registers per thread for O and S in fp32, and for Q if Q stays in registers."""
    rows = cfg.rows_per_warp
    held = rows * (cfg.d_head_v + cfg.B_c) // THREADS_PER_WARP
    return held + (0 if cfg.Q_mma_load_K_tiles else rows * cfg.d_head // (2 * THREADS_PER_WARP))


def worth_searching(cfg: FlashForwardKernelConfig) -> bool:
    """Whether a legal config could be the fastest one on some device."""
    return held_registers(cfg) <= _MAX_HELD_REGISTERS


def get_search_space_configs(
    dtypes: Sequence[DType] = tuple(DType), d_heads: Sequence[HeadDims] = SEARCH_D_HEADS
) -> list[FlashForwardKernelConfig]:
    """The set 'space': all combinations of the values in SEARCH_KNOBS that are worth searching, and
    legal on the known device with the most shared memory."""
    knobs = {"dtype": tuple(dtypes), "d_head": tuple(d_heads), **SEARCH_KNOBS}
    configs = (
        FlashForwardKernelConfig(**split_dims(dict(zip(knobs, values, strict=True))))
        for values in product(*knobs.values())
    )
    return [cfg for cfg in configs if worth_searching(cfg) and is_legal(cfg, _ROOMIEST)]


def moves(cfg: FlashForwardKernelConfig) -> Iterator[FlashForwardKernelConfig]:
    for knobs, choices in MOVES.items():
        for values in choices:
            yield replace(cfg, **dict(zip(knobs, values, strict=True)))  # type: ignore[arg-type]
