"""canonical: the knob of kernels that compute every row in one fixed order of operations, so that a
row always has the same bits.

docs/bits.md specifies the order, and csrc/common/canonical.cuh has the code that the kernels share.
The number of keys in a tile depends on the head dimension and the architecture, and B_c must be
this number in a canonical config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashsmith.families.device import DeviceSpec
from flashsmith.families.knob import knob
from flashsmith.families.rule import Rule

# The version of the canonical order, and the order's name in errors, in tables and in the output of
# `flashsmith choose`.
VERSION = 1
ORDER = f"canonical-{VERSION}"
# The number of keys in a chunk; csrc/common/canonical_sizes.cuh has the same value.
CHUNK = 4096
_HOPPER = 90
# If d or d_v is larger than _MOST_COLUMNS, a tile has _SHORTEST keys on all GPUs, because two
# longer tiles do not fit in shared memory.
_MOST_COLUMNS, _SHORTEST = 256, 32


def canonical_tile(d: int, arch: int, d_v: int = 0) -> int:
    """The number of keys in a tile of the canonical order. This number depends on the call's head
    dimension d, on the architecture (90 for 9.0) and on the head dimension of v (0: the same as d).

    If the widths of q and v differ, the number also depends on the narrower width, as in the
    kernels.
    """
    if max(d, d_v) > _MOST_COLUMNS:
        return _SHORTEST
    differ = d_v not in (0, d)
    tile = 64 if max(d, d_v) <= 128 and (not differ or min(d, d_v) <= 64) else 32
    return 2 * tile if arch >= _HOPPER else tile


def tile_of(cfg: Any, arch: int) -> int:
    """The number of keys in the canonical tile of a config's kernel on an architecture."""
    return canonical_tile(cfg.d_head, arch, getattr(cfg, "d_v", 0))


def version_of(cfg: Any) -> int:
    """The version of the canonical order in which a config's kernels compute rows; 0 if the config
    is not canonical, or if its family has no canonical configs."""
    return int(getattr(cfg, "canonical", 0))


def emulated_arch(cfg: Any) -> int:
    """The architecture for which the emulator runs a config if the caller names none. This is the
    oldest architecture of the config's family. For a canonical config, it is the oldest one whose
    canonical tile has B_c keys. Configs with chunk_warpgroups need sm_90. Canonical configs with
    wide rows need it too, because all other kernels that compute such rows do."""
    oldest = int(cfg.OLDEST_ARCH)
    is_of_oldest = not version_of(cfg) or cfg.B_c == tile_of(cfg, oldest)
    is_wide = bool(version_of(cfg)) and cfg.d_head > _MOST_COLUMNS
    if getattr(cfg, "chunk_warpgroups", 0) or is_wide:
        return _HOPPER
    return oldest if is_of_oldest else _HOPPER


def canonical_knob() -> Any:
    """Declares the knob `canonical`. Its value is the version of the canonical order, or 0 in a
    config that is not canonical."""
    return knob(
        "version of the canonical order of operations that rows' bits keep; 0: an order of its own",
        values=(0, VERSION),
        word="canonical",
        default=0,
        lowest=0,
        effect=_in_words,
        where="CanonicalRows",
    )


def _in_words(cfg: Any) -> str:
    if not cfg.canonical:
        return "a row's bits depend on this config"
    return f"a row has the bits of {ORDER}, whichever config, batch and split computes it"


def canonical_rules(*other: tuple[str, str, Callable[[Any], bool]]) -> tuple[Rule, ...]:
    """The rules for the canonical configs of a family.

    Args:
        other: a tuple for each further knob that could change the order: the knob's name, the rest
            of the reason after 'canonical configs need', and a predicate that returns whether a
            config keeps the order.
    """
    return (
        Rule(
            "canonical_supported",
            f"canonical must be 0 or {VERSION}: there is no other version of the order",
            lambda cfg, device: cfg.canonical in (0, VERSION),
            ("canonical",),
        ),
        Rule(
            "canonical_tile",
            f"B_c must be the tile of {ORDER}: 128 keys up to d_head 128, 64 up to 256, half of "
            "that before sm_90, and 32 above",
            lambda cfg, device: not cfg.canonical or cfg.B_c == tile_of(cfg, device.arch),
            ("canonical", "B_c", "d_head", "d_v"),
        ),
        *(
            Rule(
                f"canonical_{name}",
                f"canonical configs need {reason}",
                _unless_canonical(keeps),
                ("canonical", name),
            )
            for name, reason, keeps in other
        ),
    )


def _unless_canonical(keeps: Callable[[Any], bool]) -> Callable[[Any, DeviceSpec], bool]:
    return lambda cfg, device: not cfg.canonical or keeps(cfg)
