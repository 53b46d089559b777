"""The search space of `flashsmith tune` for the wgmma_mla family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from flashsmith.families.device import device_spec
from flashsmith.families.head_dims import HeadDims
from flashsmith.families.legality import is_legal
from flashsmith.families.wgmma_mla.config import WgmmaMlaKernelConfig
from flashsmith.families.wgmma_mla.sets import candidates
from flashsmith.semantics.dtype import DType

# Knobs that the search changes.
_SEARCHED = ("min_keys", "most_parts", "rescale_threshold")


def search_space(dtype: DType, widths: HeadDims) -> list[WgmmaMlaKernelConfig]:
    """The first configs of the search: the candidates, and all configs that are one step away from
    them."""
    device = device_spec("H200")
    first = candidates(dtype, widths, device)
    found = dict.fromkeys([*first, *(other for cfg in first for other in moves(cfg))])
    return [cfg for cfg in found if is_legal(cfg, device)]


def moves(cfg: WgmmaMlaKernelConfig) -> Iterator[WgmmaMlaKernelConfig]:
    """The configs in which one knob has another value."""
    for knob in fields(cfg):
        if knob.name in _SEARCHED:
            for value in knob.metadata["values"]:
                yield replace(cfg, **{knob.name: value})
