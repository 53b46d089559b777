"""split_keys, the knob of forward kernels whose tiles may be computed in parts of their keys.

Where the tiles of a call leave SMs idle, several CTAs compute a tile, each a share of the K/V
blocks that it sees, and a second launch merges the parts (csrc/common/split_keys.cuh).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Parts of a tile; 0: tiles are computed whole.
SPLIT_KEYS = (0, 2, 4, 8)


def split_in_words(cfg: Any) -> str:
    """What the knob's value does, for `flashsmith explain`."""
    if cfg.split_keys == 0:
        return "a CTA goes through all keys that its tile sees"
    return (
        f"tiles that would leave SMs idle are computed in {cfg.split_keys} parts of their keys, "
        "which a second launch merges"
    )


def with_merge(templates: Mapping[str, str], split_keys: int, merge: str) -> Mapping[str, str]:
    """A family's kernel templates with that of the merge where the config splits keys."""
    return {**templates, "merge": merge} if split_keys else templates
