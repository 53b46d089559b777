"""The config sets, and the selection of configs by a key, such as the value of KERNELS."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashsmith.did_you_mean import did_you_mean
from flashsmith.env import KERNELS
from flashsmith.errors import SelectionError
from flashsmith.families import user_sets
from flashsmith.families.config import KernelConfig
from flashsmith.families.family import ConfigSet, families
from flashsmith.families.names import parse_kernel_name_into_config
from flashsmith.printable import quoted
from flashsmith.safe_json import whole_number

# --- all: what the package builds ----------------------------------------------------------------


def get_kernels_to_build() -> list[KernelConfig]:
    """The set 'all', sorted: the configs that `flashsmith build` compiles unless others are
    selected.

    To add a config to the package, add a line such as this one here:

        configs.add(parse_kernel_name_into_config("(FP16, 128, 64, 64, 4): ..."))

    Your own sets need no such line: set KERNELS to a file or the name of an entry point.
    """
    configs: set[KernelConfig] = set()
    for family in families():
        configs.update(family.kernels_to_build())
    return sorted(configs, key=lambda cfg: (cfg.FAMILY, cfg.to_ints()))


# --- selection -----------------------------------------------------------------------------------

_BLOCK_SIZE_KEY = re.compile(r"\s*(\d+)\s*,\s*(\d+)\s*", re.ASCII)


def config_sets() -> Mapping[str, ConfigSet]:
    """The sets of all families and the set 'all', by key."""
    sets = {key: offered for family in families() for key, offered in family.sets.items()}
    sets["all"] = ConfigSet(
        "get_kernels_to_build(), what a plain 'flashsmith build' compiles", get_kernels_to_build
    )
    return sets


def get_kernel_configs(key: str | None = None) -> list[KernelConfig]:
    """The configs that `key` selects; without a `key`, the environment variable KERNELS selects
    them.

    `key` is the name of a built-in set (prog, prog-all, tune, space, cover, all, hopper, backward,
    hopper-backward, hopper-dq, decode, latent, latent-mma); or "B_r,B_c", which stands for the
    configs of tune with these block sizes; or short forms separated by ';'. It can also be the name
    of an installed set (entry point group 'flashsmith.kernel_sets') or the path of a file with one
    short form per line. Duplicates are removed.

    Raises:
        SelectionError: the key is not set, empty or unknown, or it selects nothing.
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
        raise SelectionError(f"{source}={quoted(key)} {_why_unknown(key)} {_valid_keys()}")
    if not configs:
        raise SelectionError(f"{source}={quoted(key)} selects no config; {_valid_keys()}")
    return list(dict.fromkeys(configs))


def _select(key: str) -> Sequence[KernelConfig] | None:
    if built_in := config_sets().get(key):
        return built_in.make()
    if block := _BLOCK_SIZE_KEY.fullmatch(key):
        wanted = (whole_number(block.group(1)), whole_number(block.group(2)))
        return [cfg for cfg in _with_block_sizes() if (cfg.B_r, cfg.B_c) == wanted]
    if os.path.isfile(key):
        return user_sets.read_set_file(key)
    if "(" in key:
        texts = (text.strip() for text in key.split(";"))
        return [parse_kernel_name_into_config(text) for text in texts if text]
    if key in user_sets.installed_set_names():
        return user_sets.load_installed_set(key)
    return None


def _why_unknown(key: str) -> str:
    """The reason why `key` selects nothing, as far as it can be determined: `key` is a folder, a
    missing file or the name of a family, or it is misspelled."""
    if os.path.isdir(key):
        return "is a folder; give a file in it;"
    if os.sep in key or os.path.splitext(key)[1]:
        return f"is not a known key, and there is no such file in {os.getcwd()};"
    of_name = [family for family in families() if key in (family.name, family.operation)]
    sets = [name for family in of_name for name in family.sets]
    if sets:
        return f"is not a known key; its kernels are those of {', '.join(sets)};"
    return f"is not a known key{did_you_mean(key, kernel_set_sizes()) or ';'}"


def _with_block_sizes() -> list[Any]:
    return [cfg for family in families() for cfg in family.block_size_set()]


def kernel_set_sizes() -> dict[str, int | None]:
    """The number of configs in each set, by the set's key; None for a set that cannot be loaded."""
    sizes: dict[str, int | None] = {
        name: len(offered.make()) for name, offered in config_sets().items()
    }
    blocks = Counter((cfg.B_r, cfg.B_c) for cfg in _with_block_sizes())
    sizes.update({f"{B_r},{B_c}": count for (B_r, B_c), count in sorted(blocks.items())})
    for name in user_sets.installed_set_names():
        if name in sizes:
            continue
        try:
            sizes[name] = len(user_sets.load_installed_set(name))
        except SelectionError:
            sizes[name] = None
    return sizes


def by_family(configs: Iterable[KernelConfig]) -> list[list[KernelConfig]]:
    """Groups configs by family, because a kernel library has kernels of only one family. Within a
    group, configs keep their order."""
    groups: dict[str, list[KernelConfig]] = {}
    for cfg in configs:
        groups.setdefault(cfg.FAMILY, []).append(cfg)
    return list(groups.values())


def _valid_keys() -> str:
    """The keys of all sets, each with the number of its configs, for an error message."""
    # A key that contains a comma is quoted, because commas separate the keys.
    listed = ", ".join(
        f"{repr(name) if ',' in name else name} ({'cannot be loaded' if size is None else size})"
        for name, size in kernel_set_sizes().items()
    )
    return (
        f"valid keys, with the number of configs: {listed}; or the path of a file with one "
        "short form a line, or short forms separated by ';'"
    )
