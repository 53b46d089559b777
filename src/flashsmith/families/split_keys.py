"""split_keys, the knob of forward kernels whose tiles may be computed in parts of their keys.

Where the tiles of a call leave SMs idle, several CTAs compute a tile, each a share of the K/V
blocks that it sees, and a second launch merges the parts (csrc/common/split_keys.cuh).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashsmith.families.knob import knob


def split_keys_knob() -> Any:
    """The knob: parts of a tile; 0: tiles are computed whole."""
    return knob(
        "parts that a tile's keys are split into where tiles leave SMs idle; 0: none",
        values=(0, 2, 4, 8),
        word="split",
        default=0,
        lowest=0,
        effect=_in_words,
        where="part_of",
    )


def _in_words(cfg: Any) -> str:
    if cfg.split_keys == 0:
        return "a CTA goes through all keys that its tile sees"
    return (
        f"tiles that would leave SMs idle are computed in {cfg.split_keys} parts of their keys, "
        "which a second launch merges"
    )


def with_merge(templates: Mapping[str, str], split_keys: int, merge: str) -> Mapping[str, str]:
    """A family's kernel templates with that of the merge where the config splits keys."""
    return {**templates, "merge": merge} if split_keys else templates
