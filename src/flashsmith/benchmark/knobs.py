"""What each knob's value does in the kernel, in words, and where in the source it acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from flashsmith.benchmark.hopper_knobs import HOPPER_EFFECTS
from flashsmith.families import (
    FlashForwardKernelConfig,
    HopperForwardKernelConfig,
    KernelConfig,
)


@dataclass(frozen=True)
class KnobEffect:
    """One field of a config: its value, what that value does, and where (a name in csrc/)."""

    knob: str
    value: str
    effect: str
    where: str


Effect = Callable[[FlashForwardKernelConfig], str]


def _loads(operand: str, depth: str, unit: str) -> Effect:
    knob = f"{operand}_mma_load_K_tiles"

    def effect(cfg: FlashForwardKernelConfig) -> str:
        count = getattr(cfg, knob)
        if count == 0 and operand == "Q":
            return "all of Q's fragments are loaded once and stay in registers for the whole loop"
        if count == 0:
            return f"all of {operand}'s fragments are in registers before the product begins"
        total = getattr(cfg, depth)
        part = f"{8 * count} of {total} {unit}"
        return f"{operand}'s fragments come {count} K-tiles ({part}) at a time"

    return effect


def _buffer(cfg: FlashForwardKernelConfig) -> str:
    if not any(cfg.load_counts):
        return "nothing: every operand is loaded whole"
    if cfg.mma_double_buffer_loads:
        return "streamed fragments have two register sets: one is loaded while the other multiplies"
    return "streamed fragments are loaded right before they multiply"


def _ring(cfg: FlashForwardKernelConfig) -> str:
    if cfg.kv_stages == 0:
        return (
            "one K and one V tile, each filled once its last product is over; two barriers a block"
        )
    ahead = cfg.kv_stages - (2 if cfg.ping_pong else 1)
    return f"a ring of {cfg.kv_stages} K/V tiles, filled {ahead} ahead; one barrier a block"


def _group(cfg: FlashForwardKernelConfig) -> str:
    if cfg.l2_group_mib == 0:
        return "a head's blocks run side by side"
    return f"heads whose K and V take {cfg.l2_group_mib} MiB share the GPU, block by block"


def _eager(cfg: FlashForwardKernelConfig) -> str:
    if not cfg.eager_load_blocks:
        return "a tile's copy is issued where the tile is wanted, and waited for at once"
    if not cfg.async_copy:
        return "the next tile is copied as soon as its buffer is free, by ordinary loads"
    return "the next tile's copy is issued as soon as its buffer is free, under the other product"


def _swizzle(cfg: FlashForwardKernelConfig) -> str:
    if not cfg.swizzled:
        return "rows lie as they are: the eight rows of an ldmatrix share their banks"
    # As panels of 64 columns, and of 32 for what is left.
    wide, narrow = "c xor (r mod 8)", "c xor (r / 2 mod 4)"
    if cfg.d_head % 64 == 0:
        where = wide
    elif cfg.d_head < 64:
        where = narrow
    else:
        where = f"{wide}, in the last 32 columns {narrow}"
    return f"chunk c of row r lies at chunk {where}: ldmatrix meets no bank conflict"


# In the order of the fields.
_EFFECTS: dict[str, tuple[Effect, str]] = {
    "dtype": (lambda cfg: "element type of q, k, v and o; sums are fp32", "mma_m16n8k16"),
    "d_head": (
        lambda cfg: f"S = Q K^T takes {cfg.d_head // 16} k16-steps; O has {cfg.d_head // 8} tiles",
        "ForwardKernelTileShapes",
    ),
    "B_r": (
        lambda cfg: f"a CTA owns {cfg.B_r} query rows, a warp {cfg.rows_per_warp}",
        "ForwardKernelTileShapes",
    ),
    "B_c": (lambda cfg: f"a loop step takes {cfg.B_c} keys", "TwoTiles::step"),
    "n_warps": (lambda cfg: f"{cfg.n_threads} threads per CTA", "StaticForwardKernelConfig"),
    "async_copy": (
        lambda cfg: (
            "tiles go straight to shared memory by cp.async"
            if cfg.async_copy
            else "tiles go through registers, by 16-byte loads and stores"
        ),
        "TileCopy",
    ),
    "eager_load_blocks": (_eager, "TwoTiles::step"),
    "swizzled": (_swizzle, "SmemLayout"),
    "Q_mma_load_K_tiles": (_loads("Q", "d_head", "columns"), "StreamedOperand"),
    "K_mma_load_K_tiles": (_loads("K", "d_head", "columns"), "StreamedOperand"),
    "V_mma_load_K_tiles": (_loads("V", "B_c", "keys"), "StreamedOperand"),
    "mma_double_buffer_loads": (_buffer, "WarpGemm::run"),
    "optimized_softmax": (
        lambda cfg: (
            "the scale is folded into the FMA before exp2; the first tile is peeled"
            if cfg.optimized_softmax
            else "scores are scaled first; every tile rescales O, the first too"
        ),
        "OnlineSoftmax",
    ),
    "kv_stages": (_ring, "PairRing"),
    "lazy_rescale": (
        lambda cfg: (
            "O is rescaled only once some row's new maximum has much of its weight, or is 2^8 "
            "times the old one"
            if cfg.lazy_rescale
            else "O is rescaled for every K/V block"
        ),
        "OnlineSoftmax",
    ),
    "ping_pong": (
        lambda cfg: (
            "two halves of the warps take turns at P V, half a K/V block apart"
            if cfg.ping_pong
            else "warps run as the schedulers have it"
        ),
        "TakingTurns",
    ),
    "min_ctas_per_sm": (
        lambda cfg: (
            f"registers are capped for {cfg.min_ctas_per_sm} CTAs per SM"
            if cfg.min_ctas_per_sm
            else "registers are the compiler's choice, up to 255"
        ),
        "flash_forward_kernel",
    ),
    "trim_masks": (
        lambda cfg: (
            "masked blocks run code of their own, which skips what a warp sees nothing of"
            if cfg.trim_masks
            else "every block asks whether it needs its mask"
        ),
        "ForwardBlock::sees",
    ),
    "l2_group_mib": (_group, "Coordinates"),
}


def knob_effects(cfg: KernelConfig) -> tuple[KnobEffect, ...]:
    """Every field of `cfg` in order; a knob without words here falls back on its own meaning."""
    effects = []
    for knob in fields(cfg):
        value = getattr(cfg, knob.name)
        text = value.name if isinstance(value, IntEnum) else _plain(value)
        words, where = knob.metadata["meaning"], ""
        known: Mapping[str, tuple[Callable[[Any], str], str]] = (
            HOPPER_EFFECTS if isinstance(cfg, HopperForwardKernelConfig) else _EFFECTS
        )
        if knob.name in known:
            effect, where = known[knob.name]
            words = effect(cfg)
        effects.append(KnobEffect(knob.name, text, words, where))
    return tuple(effects)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
