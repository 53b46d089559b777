"""canonical: the knob for kernels in which every row has the bits of one fixed order of operations.

docs/bits.md specifies the order, and csrc/common/canonical.cuh has the code that the kernels share.
The tile of keys and the chunk depend on the head dimension and the architecture; B_c must be that
tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashsmith.families.device import DeviceSpec
from flashsmith.families.knob import knob
from flashsmith.families.rule import Rule

# The version of the order, and its name in errors, tables and `flashsmith choose`.
VERSION = 1
ORDER = f"canonical-{VERSION}"
# The number of keys in a chunk; csrc/common/canonical_sizes.cuh has the same value.
CHUNK = 4096
_HOPPER = 90
# With more columns, a tile has the same keys on all GPUs: two longer ones do not fit in shared
# memory.
_MOST_COLUMNS, _SHORTEST = 256, 32


def canonical_tile(d: int, arch: int, d_v: int = 0) -> int:
    """The number of keys in a tile, by the call's head dimension d, the architecture (90 for 9.0)
    and the head dimension of v (0: the same as d).

    If the widths of q and v differ, the tile must be the one that the kernels use, which also
    depends on the narrower width.
    """
    if max(d, d_v) > _MOST_COLUMNS:
        return _SHORTEST
    differ = d_v not in (0, d)
    tile = 64 if max(d, d_v) <= 128 and (not differ or min(d, d_v) <= 64) else 32
    return 2 * tile if arch >= _HOPPER else tile


def tile_of(cfg: Any, arch: int) -> int:
    """The canonical tile of a config's kernel on an architecture."""
    return canonical_tile(cfg.d_head, arch, getattr(cfg, "d_v", 0))


def version_of(cfg: Any) -> int:
    """The version of the canonical order in which kernels of a config compute rows; 0 if the config
    is not canonical or has no such knob."""
    return int(getattr(cfg, "canonical", 0))


def emulated_arch(cfg: Any) -> int:
    """The architecture that the emulator uses for a config if none is given: the oldest of its
    family or, if the config is canonical, the oldest on which the canonical tile is its B_c.
    Configs with chunk_warpgroups need sm_90, and so do the other kernels of a canonical row if it
    is wide."""
    oldest = int(cfg.OLDEST_ARCH)
    is_of_oldest = not version_of(cfg) or cfg.B_c == tile_of(cfg, oldest)
    is_wide = bool(version_of(cfg)) and cfg.d_head > _MOST_COLUMNS
    if getattr(cfg, "chunk_warpgroups", 0) or is_wide:
        return _HOPPER
    return oldest if is_of_oldest else _HOPPER


def canonical_knob() -> Any:
    """The knob. Its value is the version of the canonical order; 0: not canonical."""
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
        other: for each further knob that could change the order: its name, the reason, and a
            predicate that says whether a config keeps the order.
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
