"""The config sets of the mma_sync family (tune, prog and cover), and the functions that return
candidates and the configs for proofs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product

from flashsmith.families.canonical import VERSION, tile_of
from flashsmith.families.config import KernelConfig
from flashsmith.families.covering_array import cover
from flashsmith.families.device import DEFAULT_DEVICE, DeviceSpec
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.families.legality import compiled_d_head, is_legal
from flashsmith.families.mma_sync.config import FlashForwardKernelConfig
from flashsmith.families.names import parse_kernel_name_into_config
from flashsmith.semantics.dtype import DType

# --- tune: the space an autotuner searches -------------------------------------------------------

_TUNE_SPACE: dict[str, tuple[int, ...]] = {
    "d_head": (128,),
    "B_r": (64, 128),
    "B_c": (32, 64),
    "n_warps": (4,),
    "async_copy": (True,),
    "eager_load_blocks": (True,),
    "swizzled": (True,),
    "Q_mma_load_K_tiles": (0, 2),
    "K_mma_load_K_tiles": (0, 2),
    "V_mma_load_K_tiles": (0, 2),
    "mma_double_buffer_loads": (False, True),
    "optimized_softmax": (False, True),
}


def should_autotune_config(cfg: FlashForwardKernelConfig) -> bool:
    """Whether a legal config is worth an autotuner's time."""
    if cfg.eager_load_blocks and not cfg.async_copy:
        return False
    if cfg.Q_mma_load_K_tiles not in (0, cfg.K_mma_load_K_tiles):
        return False
    q_in_registers = cfg.Q_mma_load_K_tiles == 0
    if cfg.B_r == 64:
        # 8 warps are left out, because each warp would have only 8 rows. For each length of the key
        # tile, Q is tried either only in registers or only in shared memory, which halves the
        # space.
        wrong_for_32 = cfg.B_c == 32 and q_in_registers
        wrong_for_64 = cfg.B_c == 64 and not q_in_registers
        return not (cfg.n_warps == 8 or wrong_for_32 or wrong_for_64)
    # With 32 rows per warp, O takes 128 registers per thread; 64 more for Q would spill.
    return not (cfg.B_r == 128 and q_in_registers)


def get_autotuning_kernel_configs(
    dtypes: Sequence[DType] = (DType.FP16, DType.BF16),
) -> list[FlashForwardKernelConfig]:
    """Returns the set 'tune': the combinations of knob values that are worth trying, 40 per
    dtype."""
    knobs = {"dtype": tuple(dtypes), **_TUNE_SPACE}
    configs = (
        FlashForwardKernelConfig(**dict(zip(knobs, values, strict=True)))  # type: ignore[arg-type]
        for values in product(*knobs.values())
    )
    return [cfg for cfg in configs if should_autotune_config(cfg)]


# --- prog: the ladder, one optimisation per step -------------------------------------------------

PROGRESSION_STEPS = (
    "async+load_0_0_0_tiles",
    "async+swizzled+load_0_0_0_tiles",
    "async+eager+swizzled+load_0_0_0_tiles",
    "async+eager+swizzled+load_2_2_2_tiles",
    "async+eager+swizzled+load_2_2_2_tiles+buffer",
    "async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax",
    "async+eager+swizzled+load_0_2_2_tiles+opt_softmax",
)


def get_kernel_progression_configs(
    all_block_sizes: bool = False,
) -> list[FlashForwardKernelConfig]:
    """Returns the set 'prog', the seven steps with 64 x 64 tiles and 4 warps, or the set
    'prog-all', the same steps with all block sizes.

    The configs are in the order of the steps. With all_block_sizes, which selects 'prog-all', each
    step has a config for every block size.
    """
    blocks = _progression_blocks() if all_block_sizes else [(64, 64, 4)]
    configs = (
        parse_kernel_name_into_config(f"(FP16, 128, {B_r}, {B_c}, {n_warps}): {step}")
        for step in PROGRESSION_STEPS
        for B_r, B_c, n_warps in blocks
    )
    return [cfg for cfg in configs if isinstance(cfg, FlashForwardKernelConfig)]


def _progression_blocks() -> list[tuple[int, int, int]]:
    blocks = product((128, 64), (128, 64, 32), (4, 8))
    return [
        (B_r, B_c, n_warps)
        for B_r, B_c, n_warps in blocks
        if not (B_r < 128 and n_warps == 8) and B_r >= B_c
    ]


# --- cover ---------------------------------------------------------------------------------------


def get_cover_configs(device: DeviceSpec | None = None) -> list[FlashForwardKernelConfig]:
    """Returns the set 'cover': a covering array for the pairs of knob values.

    The set is sorted, and it is the same on every machine.

    Each pair of values of two knobs that occurs in any config that is legal on `device` (None: the
    A100) occurs in a config of this set. So it contains configs without cp.async (also with eager
    loads), loads of 4 to 16 tiles, 8 warps, d_head 64 and both dtypes.
    """
    found = cover(FlashForwardKernelConfig.family, device or DEFAULT_DEVICE)
    return [cfg for cfg in found if isinstance(cfg, FlashForwardKernelConfig)]


# --- the configs of the proof grid ---------------------------------------------------------------

# Together, these configs have both softmaxes, both kinds of copy, both layouts, 16 and 32 rows per
# warp, all tile sizes, the ring of K and V, ping-pong, lazy rescaling and split keys.
_PROOF_CONFIGS = (
    "({dtype}, {d_head}, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
    "({dtype}, {d_head}, 128, 32, 8): async+eager+swizzled+load_2_2_2_tiles+stages_3"
    "+lazy_rescale+ping_pong",
    "({dtype}, {d_head}, 64, 32, 4): load_{QK}_{QK}_2_tiles+opt_softmax+lazy_rescale+trim+split_2",
    "({dtype}, {d_head}, 128, {B_c}, 4): async+eager+swizzled+load_2_2_4_tiles+opt_softmax"
    "+stages_2+trim+l2_16",
)


@cache
def proof_configs(dtype: DType, d: HeadDims) -> tuple[KernelConfig, ...]:
    """The configs that proofs check on problems with this dtype and head dimension."""
    d_head = d if isinstance(d, HeadPair) else compiled_d_head(d)
    narrower, d_v = (d_head, d_head) if isinstance(d_head, int) else (min(d_head), d_head.d_v)
    B_c = 128 if narrower <= 64 and d_v <= 64 else 64
    QK = 2 if d_head in (72, 80) else 4  # K-tiles that divide the steps of Q K^T
    texts = _PROOF_CONFIGS if d_v <= 128 else _PROOF_CONFIGS[:-1]
    return tuple(
        parse_kernel_name_into_config(text.format(dtype=dtype.name, d_head=d_head, B_c=B_c, QK=QK))
        for text in texts
    )


# --- candidates when there are no measurements -------------------------------------------------

# The shapes in order of preference. A later shape is chosen only if it is sufficiently faster than
# the ones before it, because its kernel may have to be built first. A shape is (B_r, B_c, n_warps).
SHAPES = (
    (128, 64, 4),
    (128, 64, 8),
    (64, 64, 4),
    (128, 32, 4),
    (64, 32, 4),
    (128, 32, 8),
    (128, 128, 8),
    (64, 128, 4),
)


@lru_cache(maxsize=256)
def candidates(
    dtype: DType, d_head: HeadDims, device: DeviceSpec
) -> tuple[FlashForwardKernelConfig, ...]:
    """Returns the configs with the shapes in SHAPES that are legal on a device."""
    configs = (_of_shape(dtype, d_head, *shape) for shape in SHAPES)
    return tuple(config for config in configs if is_legal(config, device))


def _of_shape(
    dtype: DType, d_head: HeadDims, rows: int, keys: int, n_warps: int
) -> FlashForwardKernelConfig:
    """Returns the config with this shape, and with the optimisations that made kernels faster on an
    H200.

    Q stays in registers if enough registers are left for everything else: this was 4-7% faster at d
    64, but slower at larger d. If O takes half of all registers, optimized_softmax is off, because
    its peeled first tile costs more by spilling than it saves (causal, d 128: 325 instead of 338
    TFLOP/s).
    """
    d_head, d_v = d_head if isinstance(d_head, HeadPair) else (d_head, 0)
    of_a_warp = rows // n_warps * max(d_head, d_v)
    q_loads = 0 if of_a_warp <= 32 * 64 else 2
    peeled = of_a_warp < 32 * 128
    knobs = dtype, d_head, rows, keys, n_warps, True, True, True, q_loads, 2, 2, True, peeled
    return FlashForwardKernelConfig(*knobs, d_v=d_v)


# --- the canonical order -------------------------------------------------------------------------


def canonical(cfg: FlashForwardKernelConfig, device: DeviceSpec) -> FlashForwardKernelConfig | None:
    """Returns the canonical counterpart of `cfg`, which has the canonical tile of keys and no knob
    that changes the order of operations. Each warp has 16 rows. The config has as many K/V stages
    as fit in shared memory, and with these as many warps as fit."""
    made = (
        FlashForwardKernelConfig(
            cfg.dtype, cfg.d_head, 16 * warps, tile_of(cfg, device.arch), warps,
            async_copy=True, eager_load_blocks=True, swizzled=True, Q_mma_load_K_tiles=loads,
            K_mma_load_K_tiles=2, V_mma_load_K_tiles=2, optimized_softmax=True, kv_stages=stages,
            trim_masks=cfg.trim_masks, l2_group_mib=cfg.l2_group_mib, pack_gqa=cfg.pack_gqa,
            canonical=VERSION, d_v=cfg.d_v,
        )
        for stages in (2, 0)
        for warps in (8, 4)
        for loads in ((0, 2) if cfg.d_head <= 128 else (2,))
    )  # fmt: skip
    return next((one for one in made if is_legal(one, device)), None)
