"""The config sets of the wgmma family, and the functions that return candidates for the chooser and
configs for proofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from flashsmith.families.canonical import VERSION, tile_of
from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.families.legality import is_legal
from flashsmith.families.names import parse_kernel_name_into_config
from flashsmith.families.wgmma.config import (
    DEFAULT_SECTION_MIB,
    PingPong,
    Schedule,
    TileOrder,
    WgmmaForwardKernelConfig,
)
from flashsmith.semantics.dtype import DType


def get_hopper_configs(
    dtypes: Sequence[DType] = (DType.FP16, DType.BF16),
) -> list[WgmmaForwardKernelConfig]:
    """Returns the set 'hopper': for each head dimension, configs for full and for causal
    attention."""
    by_head, longest_first = TileOrder.BY_HEAD, TileOrder.LONGEST_FIRST
    return [
        cfg
        for dtype in dtypes
        for cfg in (
            # With a small d_head, O leaves enough registers for long tiles of keys.
            _four_warpgroups(dtype, 32, 128, by_head),
            _four_warpgroups(dtype, 32, 128, longest_first),
            _three_warpgroups(dtype, 32, 192, longest_first, stale_max=True),
            # Up to a few thousand keys, most waits of each of the four warpgroups are hidden by the
            # work of the others. With more keys, longer tiles are faster if a GEMM overlaps the
            # softmax or if the softmax needs no maximum.
            _four_warpgroups(dtype, 64, 96, by_head),
            _four_warpgroups(dtype, 64, 96, longest_first),
            _three_warpgroups(dtype, 64, 128, by_head, stale_max=True),
            _three_warpgroups(dtype, 64, 128, longest_first, overlap=True),
            _three_warpgroups(dtype, 64, 160, longest_first, stale_max=True),
            _three_warpgroups(dtype, 96, 128, by_head),
            _three_warpgroups(dtype, 96, 128, longest_first),
            _three_warpgroups(dtype, 96, 112, longest_first, overlap=True),
            _three_warpgroups(dtype, 128, 128, by_head),
            _three_warpgroups(dtype, 128, 128, longest_first),
            _three_warpgroups(dtype, 128, 128, longest_first, stale_max=True),
            # The two CTAs of a cluster together read K and V only once, which halves the traffic.
            # The speed is within 1% of the speed of single CTAs.
            _three_warpgroups(dtype, 128, 128, by_head, cluster_size=2),
            # These are for short causal sequences: the diagonal wastes less of a tile with 128
            # rows.
            _two_warpgroups(dtype, 128, 128, longest_first, pingpong=PingPong.GEMM),
            _two_warpgroups(dtype, 128, 128, longest_first, pingpong=PingPong.GEMM, section_mib=8),
            # Two Q buffers are for up to a few thousand keys, and longer tiles of keys are for more
            # keys.
            _two_warpgroups(dtype, 192, 80, by_head),
            _two_warpgroups(dtype, 192, 80, longest_first),
            _two_warpgroups(dtype, 192, 112, by_head, q_buffers=1),
            # There is room for only one Q buffer; O is stored from registers so that the buffer is
            # free.
            _two_warpgroups(dtype, 256, 80, by_head, q_buffers=1, early_exp=True, direct_O=True),
            _two_warpgroups(dtype, 256, 80, longest_first, q_buffers=1, direct_O=True),
            _two_warpgroups(dtype, 256, 64, longest_first, q_buffers=1, direct_O=True),
        )
    ]


def get_pair_configs(dtype: DType) -> list[WgmmaForwardKernelConfig]:
    """Returns configs for each pair of widths, for full and for causal attention; they were not
    measured. The tiles are those of the neighbouring d_head, with more keys if a narrower V leaves
    room in shared memory."""
    return [
        replace(cfg, d_v=d_v)
        for order in TileOrder
        for cfg, d_v in (
            (replace(_three_warpgroups(dtype, 64, 128, order), direct_O=True), 128),
            (_three_warpgroups(dtype, 128, 128, order), 64),
            (_one_buffer(_two_warpgroups(dtype, 192, 128, order)), 128),
            (_one_buffer(_three_warpgroups(dtype, 192, 112, order)), 128),
            (_one_buffer(_two_warpgroups(dtype, 256, 96, order)), 128),
            (_one_buffer(_two_warpgroups(dtype, 256, 80, order)), 256),
        )
    ]


def get_vision_configs(dtype: DType) -> list[WgmmaForwardKernelConfig]:
    """Returns configs for d_head 72 and 80, for full and for causal attention; only full attention
    was measured.

    These configs were the fastest ones at d_head 96. The configs with long tiles and without maxima
    were the fastest from a few thousand keys on, and the others for fewer keys. The configs with
    128 rows are for images of some 200 patches.
    """
    return [
        cfg
        for d_head in (72, 80)
        for order in TileOrder
        for cfg in (
            _three_warpgroups(dtype, d_head, 144, order, stale_max=True),
            _three_warpgroups(dtype, d_head, 128, order),
            _three_warpgroups(dtype, d_head, 128, order, stale_max=True),
            _two_warpgroups(dtype, d_head, 128, order, pingpong=PingPong.GEMM),
        )
    ]


def get_wide_configs(dtype: DType) -> list[WgmmaForwardKernelConfig]:
    """Returns configs for d_head 512, for full and for causal attention.

    A tile has 64 rows. Each of two warpgroups has half of the columns of O in its registers, and
    one of the two computes all scores. K and V of 64 keys fill the rest of shared memory. Two CTAs
    that share K and V read half as much from the L2. On an H200, configs with two stages of 32 keys
    are a quarter faster, and the table of the H200 has these.
    """
    return [
        WgmmaForwardKernelConfig(
            dtype,
            d_head=512,
            B_r=64,
            B_c=64,
            n_warpgroups=1,
            kv_stages=1,
            q_buffers=1,
            producer_registers=32,  # With 24, kernels for packed sequences spill
            consumer_registers=232,
            cluster_size=cluster_size,
            schedule=Schedule.DYNAMIC,
            tile_order=order,
            rescale_threshold=8,
            direct_O=True,
        )
        for cluster_size in (1, 2)
        for order in TileOrder
    ]


def configs_of_other_widths(dtype: DType) -> tuple[WgmmaForwardKernelConfig, ...]:
    """Returns the configs for d 72, 80 and 512, and for pairs of widths."""
    return (*get_vision_configs(dtype), *get_pair_configs(dtype), *get_wide_configs(dtype))


def _one_buffer(cfg: WgmmaForwardKernelConfig) -> WgmmaForwardKernelConfig:
    """Returns `cfg` with one Q buffer, for widths that leave room for only one. O is stored from
    registers, so that the buffer is free."""
    return replace(cfg, q_buffers=1, direct_O=True)


def _three_warpgroups(
    dtype: DType,
    d_head: int,
    B_c: int,
    tile_order: TileOrder,
    *,
    overlap: bool = False,
    pingpong: PingPong = PingPong.GEMM,
    cluster_size: int = 1,
    stale_max: bool = False,
) -> WgmmaForwardKernelConfig:
    """Returns a config with 192 rows per CTA. While two warpgroups compute a softmax, the third
    runs GEMMs."""
    return WgmmaForwardKernelConfig(
        dtype,
        d_head=d_head,
        B_r=192,
        B_c=B_c,
        n_warpgroups=3,
        q_buffers=2,
        producer_registers=32,
        consumer_registers=160,
        overlap=overlap,
        pingpong=pingpong,
        cluster_size=cluster_size,
        schedule=Schedule.DYNAMIC,
        tile_order=tile_order,
        rescale_threshold=8,
        stale_max=stale_max,
    )


def _four_warpgroups(
    dtype: DType, d_head: int, B_c: int, tile_order: TileOrder
) -> WgmmaForwardKernelConfig:
    """Returns a config with 256 rows per CTA, for small d_head. While one of the four warpgroups
    waits, the other three work."""
    return WgmmaForwardKernelConfig(
        dtype,
        d_head=d_head,
        B_r=256,
        B_c=B_c,
        n_warpgroups=4,
        q_buffers=2,
        producer_registers=32,
        consumer_registers=112,
        pingpong=PingPong.GEMM,
        schedule=Schedule.DYNAMIC,
        tile_order=tile_order,
        rescale_threshold=8,
    )


def _two_warpgroups(
    dtype: DType,
    d_head: int,
    B_c: int,
    tile_order: TileOrder,
    *,
    q_buffers: int = 2,
    pingpong: PingPong = PingPong.NONE,
    section_mib: int = DEFAULT_SECTION_MIB,
    early_exp: bool = False,
    direct_O: bool = False,
) -> WgmmaForwardKernelConfig:
    """Returns a config with 128 rows per CTA, which leaves more registers for a large d_head or for
    a GEMM that overlaps the softmax."""
    return WgmmaForwardKernelConfig(
        dtype,
        d_head=d_head,
        B_r=128,
        B_c=B_c,
        n_warpgroups=2,
        q_buffers=q_buffers,
        producer_registers=32,  # With 24, kernels for packed sequences spill
        consumer_registers=232,
        overlap=True,
        pingpong=pingpong,
        schedule=Schedule.DYNAMIC,
        tile_order=tile_order,
        rescale_threshold=8,
        section_mib=section_mib,
        early_exp=early_exp,
        direct_O=direct_O,
    )


# --- the canonical order -------------------------------------------------------------------------


def canonical(cfg: WgmmaForwardKernelConfig, device: DeviceSpec) -> WgmmaForwardKernelConfig | None:
    """Returns the canonical counterpart of `cfg`, which has the canonical tile of keys and no knob
    that changes the order. If the counterpart is not legal, returns another canonical config with
    the same widths."""
    tile = tile_of(cfg, device.arch)
    order: dict[str, Any] = {
        "B_c": tile,
        "rescale_threshold": 0,
        "exp2_fma_share": 0,
        "stale_max": False,
        "short_block": 0,
        "split_keys": 0,
        "canonical": VERSION,
    }
    if cfg.schedule == Schedule.ONE_TILE:
        order["schedule"] = Schedule.DYNAMIC
    tiles = _two_warpgroups if max(cfg.d_head, cfg.d_v) > 128 else _three_warpgroups
    usual = tiles(cfg.dtype, cfg.d_head, tile, cfg.tile_order)
    wide: dict[str, Any] = {"q_buffers": 1, "direct_O": True} if cfg.d_head > 192 else {}
    wide |= {"d_v": cfg.d_v, "direct_O": cfg.direct_O} if cfg.d_v else {}
    others = (replace(usual, pack_gqa=cfg.pack_gqa, section_mib=cfg.section_mib, **wide),)
    made = (replace(one, **order) for one in (cfg, *others))
    return next((one for one in made if is_legal(one, device)), None)


# --- the configs of the proof grid ---------------------------------------------------------------

# Kernels that return row maxima always rescale, with the exact maximum. Half of the problems in the
# proof grid request row maxima. Together, these configs have 1 to 4 warpgroups, all kinds of
# ping-pong, all schedules and orders of tiles, one and two Q buffers, separate_O and direct_O,
# overlap, and 1 to 4 stages. They also have stale maxima, split keys, and key tiles from 32 keys to
# the longest that fits.
_PROOF_CONFIGS = {
    32: (
        "192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
        "+longest_first+rescale_8+stale_max",
        "128, 96, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp"
        "+static_persistent+separate_O",
        "64, 32, 1wg): tma+stages_1+q_buffers_2+regs_24_240+longest_first+direct_O",
        "256, 64, 4wg): tma+stages_4+q_buffers_1+regs_32_112+overlap+pingpong_gemm+dynamic"
        "+rescale_4",
    ),
    64: (
        "192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
        "+longest_first+rescale_8+stale_max",
        "128, 80, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp"
        "+static_persistent+separate_O",
        "64, 48, 1wg): tma+stages_1+q_buffers_2+regs_24_240+longest_first+direct_O+split_4",
        "128, 176, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+pingpong_gemm+dynamic"
        "+rescale_4+stale_max",
    ),
    72: (
        "192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
        "+longest_first+rescale_8+stale_max",
        "128, 96, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+pingpong_gemm"
        "+static_persistent+separate_O",
        "64, 32, 1wg): tma+stages_4+q_buffers_1+regs_24_240+overlap+dynamic+direct_O+split_4",
    ),
    80: (
        "192, 144, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
        "+longest_first+rescale_8+stale_max",
        "128, 112, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+pingpong_exp"
        "+static_persistent+separate_O",
        "64, 48, 1wg): tma+stages_2+q_buffers_2+regs_24_240+longest_first+direct_O+split_2",
    ),
    96: (
        "192, 112, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_exp+dynamic"
        "+longest_first+rescale_8+stale_max",
        "128, 144, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+pingpong_gemm"
        "+static_persistent+separate_O",
        "64, 32, 1wg): tma+stages_4+q_buffers_1+regs_24_240+overlap+dynamic+direct_O",
        "128, 64, 2wg): tma+stages_1+q_buffers_2+regs_24_240+rescale_8",
    ),
    128: (
        "192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic+rescale_8"
        "+stale_max",
        "128, 128, 2wg): tma+stages_2+q_buffers_2+regs_24_240+overlap+pingpong_gemm+dynamic"
        "+longest_first+rescale_8+direct_O",
        "64, 64, 1wg): tma+stages_1+q_buffers_1+regs_24_240+static_persistent+separate_O",
        "128, 96, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp+split_2",
    ),
    192: (
        "192, 64, 3wg): tma+stages_2+q_buffers_1+regs_32_160+pingpong_gemm+dynamic+rescale_8"
        "+stale_max",
        "128, 112, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+pingpong_gemm+dynamic"
        "+longest_first+direct_O",
        "64, 32, 1wg): tma+stages_3+q_buffers_2+regs_24_240+static_persistent+separate_O",
        "128, 80, 2wg): tma+stages_1+q_buffers_2+regs_24_240+pingpong_exp",
    ),
    256: (
        "128, 80, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+pingpong_gemm+dynamic"
        "+longest_first+rescale_8+stale_max+direct_O",
        "64, 64, 1wg): tma+stages_1+q_buffers_1+regs_24_240+overlap+separate_O+split_8",
        "128, 32, 2wg): tma+stages_3+q_buffers_2+regs_24_240+pingpong_exp+static_persistent",
        "128, 64, 2wg): tma+stages_2+q_buffers_1+regs_24_240+dynamic+direct_O",
    ),
    512: (
        "64, 64, 1wg): tma+stages_1+q_buffers_1+regs_32_232+dynamic+rescale_8+direct_O",
        "64, 32, 1wg): tma+stages_2+q_buffers_1+regs_32_232+overlap+longest_first+rescale_8"
        "+stale_max+direct_O",
        "64, 48, 1wg): tma+stages_1+q_buffers_1+regs_32_232+static_persistent+direct_O+split_4",
    ),
}


@cache
def proof_configs(dtype: DType, d: HeadDims) -> tuple[KernelConfig, ...]:
    """The configs that proofs check on problems with this dtype and head dimension."""
    if isinstance(d, HeadPair):
        return tuple(cfg for cfg in get_pair_configs(dtype) if cfg.head_dims == d)
    d_head = min(d_head for d_head in _PROOF_CONFIGS if d_head >= d)
    texts = (f"({dtype.name}, {d_head}, {rest}" for rest in _PROOF_CONFIGS[d_head])
    return tuple(map(parse_kernel_name_into_config, texts))


# --- candidates when there are no measurements -------------------------------------------------


def candidates(
    dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
) -> tuple[WgmmaForwardKernelConfig, ...]:
    """Returns the shipped configs for d_head, or the configs for a pair or for d_head 72, 80 or
    512. () if there are no kernels for the device or the widths.

    The configs with the faster order of tiles come first. The others follow, changed to this order.
    With a mask, longest-first is faster: 607 instead of 585 TFLOP/s (causal). Without a mask, it is
    slower: 637 instead of 687 (d 128, H200).
    """
    order = TileOrder.LONGEST_FIRST if masked else TileOrder.BY_HEAD
    known = (*get_hopper_configs((dtype,)), *configs_of_other_widths(dtype))
    shipped = [config for config in known if config.head_dims == d_head]
    ordered = sorted(shipped, key=lambda config: config.tile_order != order)
    found = (
        config
        if config.tile_order == order
        else replace(config, tile_order=order, section_mib=DEFAULT_SECTION_MIB)
        for config in ordered
    )
    return tuple(dict.fromkeys(config for config in found if is_legal(config, device)))
