"""The config sets, and how the KERNELS key chooses among them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from flashsmith.did_you_mean import did_you_mean
from flashsmith.env import KERNELS
from flashsmith.errors import SelectionError
from flashsmith.families import user_sets
from flashsmith.families.cover import get_cover_configs
from flashsmith.families.family import KernelConfig
from flashsmith.families.mma_sync.config import FlashForwardKernelConfig
from flashsmith.families.mma_sync.space import get_search_space_configs
from flashsmith.families.names import parse_kernel_name_into_config
from flashsmith.families.wgmma.sets import get_hopper_configs
from flashsmith.operations.dtype import DType
from flashsmith.printable import quoted
from flashsmith.untrusted import whole_number

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
    """Whether a config is worth an autotuner's time. Narrower than legality, and apart from it."""
    if cfg.eager_load_blocks and not cfg.async_copy:
        return False
    if cfg.Q_mma_load_K_tiles not in (0, cfg.K_mma_load_K_tiles):
        return False
    q_in_registers = cfg.Q_mma_load_K_tiles == 0
    if cfg.B_r == 64:
        # 8 warps would own 8 rows each. One placement of Q per tile length halves the space.
        wrong_for_32 = cfg.B_c == 32 and q_in_registers
        wrong_for_64 = cfg.B_c == 64 and not q_in_registers
        return not (cfg.n_warps == 8 or wrong_for_32 or wrong_for_64)
    # With 32 rows a warp O takes 128 registers a thread; Q's 64 more would spill.
    return not (cfg.B_r == 128 and q_in_registers)


def get_autotuning_kernel_configs(
    dtypes: Sequence[DType] = (DType.FP16, DType.BF16),
) -> list[FlashForwardKernelConfig]:
    """The set 'tune': the product of the knobs worth trying, filtered; 40 per dtype."""
    knobs = {"dtype": tuple(dtypes), **_TUNE_SPACE}
    configs = (
        FlashForwardKernelConfig(**dict(zip(knobs, values, strict=True)))  # type: ignore[arg-type]
        for values in product(*knobs.values())
    )
    return [cfg for cfg in configs if should_autotune_config(cfg)]


# --- prog: the ladder, one optimisation a step ---------------------------------------------------

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
    """The sets 'prog' (the seven steps at 64 x 64, 4 warps) and 'prog-all' (at every block size).

    Without all_block_sizes in the order of the steps; with it, step by step over the block sizes.
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


# --- all: what the package builds ----------------------------------------------------------------


def get_kernels_to_build() -> list[KernelConfig]:
    """The set 'all', sorted: what a plain `flashsmith build` compiles.

    This is the place to add a config of the package's own:

        configs.add(parse_kernel_name_into_config("(FP16, 128, 64, 64, 4): ..."))

    A set of your own needs no change here: give KERNELS a file or an entry point's name.
    """
    configs: set[KernelConfig] = set(get_autotuning_kernel_configs())
    return sorted(configs, key=lambda cfg: (cfg.FAMILY, cfg.to_ints()))


# --- selection -----------------------------------------------------------------------------------

_BUILT_IN: dict[str, Callable[[], Sequence[KernelConfig]]] = {
    "prog": get_kernel_progression_configs,
    "prog-all": partial(get_kernel_progression_configs, all_block_sizes=True),
    "tune": get_autotuning_kernel_configs,
    "space": get_search_space_configs,
    "cover": get_cover_configs,
    "all": get_kernels_to_build,
    "hopper": get_hopper_configs,
}
_BLOCK_SIZE_KEY = re.compile(r"\s*(\d+)\s*,\s*(\d+)\s*", re.ASCII)


def get_kernel_configs(key: str | None = None) -> list[KernelConfig]:
    """The configs that `key`, else the environment variable KERNELS, stands for.

    Keys: prog, prog-all, tune, space, cover, all, hopper; "B_r,B_c" (the configs of tune with these
    block sizes); short forms separated by ';'; the name of an installed set (entry point group
    'flashsmith.kernel_sets'); the path of a file with one short form a line. Doubles count once.

    Raises:
        SelectionError: the key is unset, empty or unknown, or selects nothing.
        ConfigParseError: a short form cannot be parsed.
    """
    source = "kernels"
    if key is None:
        source, key = KERNELS.name, KERNELS.raw()
    key = (key or "").strip()
    if not key:
        raise SelectionError(f"{source} is unset or empty; {_valid_keys()}")
    configs = _select(key)
    if configs is None:
        hint = did_you_mean(key, kernel_set_sizes()) or ";"
        raise SelectionError(f"{source}={quoted(key)} is no known key{hint} {_valid_keys()}")
    if not configs:
        raise SelectionError(f"{source}={quoted(key)} selects no config; {_valid_keys()}")
    return list(dict.fromkeys(configs))


def _select(key: str) -> Sequence[KernelConfig] | None:
    if key in _BUILT_IN:
        return _BUILT_IN[key]()
    if block := _BLOCK_SIZE_KEY.fullmatch(key):
        wanted = (whole_number(block.group(1)), whole_number(block.group(2)))
        return [cfg for cfg in get_autotuning_kernel_configs() if (cfg.B_r, cfg.B_c) == wanted]
    if os.path.isfile(key):
        return user_sets.read_set_file(key)
    if "(" in key:
        texts = (text.strip() for text in key.split(";"))
        return [parse_kernel_name_into_config(text) for text in texts if text]
    if key in user_sets.installed_set_names():
        return user_sets.load_installed_set(key)
    return None


def kernel_set_sizes() -> dict[str, int | None]:
    """Every key that names a set, with the number of its configs; None: it cannot be loaded."""
    sizes: dict[str, int | None] = {name: len(make()) for name, make in _BUILT_IN.items()}
    blocks = Counter((cfg.B_r, cfg.B_c) for cfg in get_autotuning_kernel_configs())
    sizes.update({f"{B_r},{B_c}": count for (B_r, B_c), count in sorted(blocks.items())})
    for name in user_sets.installed_set_names():
        if name in _BUILT_IN:
            continue
        try:
            sizes[name] = len(user_sets.load_installed_set(name))
        except SelectionError:
            sizes[name] = None
    return sizes


def _valid_keys() -> str:
    """The keys with their sizes, for an error message."""
    # A comma in a key is quoted, since commas separate the keys here.
    listed = ", ".join(
        f"{repr(name) if ',' in name else name} ({'cannot be loaded' if size is None else size})"
        for name, size in kernel_set_sizes().items()
    )
    return (
        f"valid keys, with the number of configs: {listed}; or the path of a file with one "
        "short form a line, or short forms separated by ';'"
    )
