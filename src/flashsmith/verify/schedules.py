"""The kernels that the grid's problems are proven with: a few schedules of each family.

Of the second family, kernels that are asked for the row maxima rescale always, and always know the
maximum: the grid asks for them in half of its problems.
"""

from __future__ import annotations

from functools import cache

from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    HopperForwardKernelConfig,
    KernelConfig,
    compiled_d_head,
    parse_kernel_name_into_config,
)

MMA_SYNC, WGMMA = FlashForwardKernelConfig.FAMILY, HopperForwardKernelConfig.FAMILY

# Between them both softmaxes, both copies, both layouts, 16 and 32 rows a warp, tiles of every
# size, the ring of K and V, halves that take turns, lazy rescaling.
_MMA_SYNC = (
    "({dtype}, {d_head}, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
    "({dtype}, {d_head}, 128, 32, 8): async+eager+swizzled+load_2_2_2_tiles+stages_3"
    "+lazy_rescale+ping_pong",
    "({dtype}, {d_head}, 64, 32, 4): load_4_4_2_tiles+opt_softmax+lazy_rescale+trim",
    "({dtype}, {d_head}, 128, {B_c}, 4): async+eager+swizzled+load_2_2_4_tiles+opt_softmax"
    "+stages_2+trim+l2_16",
)

# Between them 1 to 3 warpgroups, every turn-taking, schedule and order of tiles, one and two Q
# buffers, an O of its own or straight out of registers, overlap, 1 to 4 stages, maxima that may be
# out of date, and key tiles from 32 to what fits.
_WGMMA = {
    64: (
        "192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
        "+longest_first+rescale_8+stale_max",
        "128, 80, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp"
        "+static_persistent+separate_O",
        "64, 48, 1wg): tma+stages_1+q_buffers_2+regs_24_240+longest_first+direct_O",
        "128, 176, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+pingpong_gemm+dynamic"
        "+rescale_4+stale_max",
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
        "128, 96, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp",
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
        "64, 64, 1wg): tma+stages_1+q_buffers_1+regs_24_240+overlap+separate_O",
        "128, 32, 2wg): tma+stages_3+q_buffers_2+regs_24_240+pingpong_exp+static_persistent",
        "128, 64, 2wg): tma+stages_2+q_buffers_1+regs_24_240+dynamic+direct_O",
    ),
}


@cache
def schedules(dtype: DType, d_head: int, family: str = MMA_SYNC) -> tuple[KernelConfig, ...]:
    """The configs of a family that problems of a dtype and compiled d_head are proven with."""
    if family == WGMMA:
        texts = [f"({dtype.name}, {d_head}, {rest}" for rest in _WGMMA[d_head]]
    else:
        B_c = 128 if d_head <= 64 else 64
        texts = [
            text.format(dtype=dtype.name, d_head=d_head, B_c=B_c)
            for text in (_MMA_SYNC if d_head <= 128 else _MMA_SYNC[:-1])
        ]
    return tuple(map(parse_kernel_name_into_config, texts))


def family_d_head(family: str, d: int) -> int:
    """The d_head of the family's kernels that head dimension ``d`` is proven with."""
    if family == WGMMA:
        return min(d_head for d_head in _WGMMA if d_head >= d)
    return compiled_d_head(d)
