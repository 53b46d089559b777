"""canonical: the knob of kernels whose rows have the bits of one fixed order of operations.

docs/bits.md is the specification, and csrc/common/canonical.cuh is the kernels' common part. The
head dimension and the architecture determine the tile of keys and the chunk, and B_c must be that
tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashsmith.families.device import DeviceSpec
from flashsmith.families.knob import knob
from flashsmith.families.rule import Rule

# The version that the kernels implement, and its name in errors, tables and `flashsmith choose`.
VERSION = 1
ORDER = f"canonical-{VERSION}"
# Keys per chunk; csrc/common/canonical_sizes.cuh has the same value.
CHUNK = 4096
_HOPPER = 90


def canonical_tile(d: int, arch: int) -> int:
    """Keys per tile, by the head dimension of the call and the architecture (90 for 9.0)."""
    tile = 64 if d <= 128 else 32
    return 2 * tile if arch >= _HOPPER else tile


def version_of(cfg: Any) -> int:
    """The version of the canonical order in which a config computes rows; 0 if it is not canonical
    or lacks the knob."""
    return int(getattr(cfg, "canonical", 0))


def emulated_arch(cfg: Any) -> int:
    """The architecture for which the emulator runs a config by default: the oldest of its family
    or, for a canonical config, the oldest whose canonical tile is the config's B_c. Configs with
    chunk_warpgroups need sm_90."""
    oldest = int(cfg.OLDEST_ARCH)
    is_of_oldest = not version_of(cfg) or cfg.B_c == canonical_tile(cfg.d_head, oldest)
    if getattr(cfg, "chunk_warpgroups", 0):
        return _HOPPER
    return oldest if is_of_oldest else _HOPPER


def canonical_knob() -> Any:
    """The knob: the version of the canonical order; 0: not canonical."""
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
    """The rules of a family's canonical configs.

    Args:
        other: for each knob that changes the order: its name, its reason, and whether a config's
            value keeps the order.
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
            f"B_c must be the tile of {ORDER}: 128 keys up to d_head 128, 64 above; half of that "
            "before sm_90",
            lambda cfg, device: (
                not cfg.canonical or cfg.B_c == canonical_tile(cfg.d_head, device.arch)
            ),
            ("canonical", "B_c", "d_head"),
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
