"""The steps of a search, each from one config to another that differs in a single knob."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec
from flashsmith.families.legality import is_legal

Config = TypeVar("Config", bound=KernelConfig)


def change_one_knob(cfg: Config, fixed: Sequence[str]) -> Iterator[Config]:
    """The configs that differ from `cfg` in one knob; the knobs in `fixed` keep their values."""
    for name, values in cfg.family.knob_values.items():
        if name not in fixed:
            for value in values:
                yield replace(cfg, **{name: value})


def with_neighbours(
    candidates: Sequence[Config], moves: Callable[[Config], Iterable[Config]], device: DeviceSpec
) -> list[Config]:
    """The legal ones among the candidates and among the configs that `moves` derives from the
    candidates."""
    steps = (other for cfg in candidates for other in moves(cfg))
    return [cfg for cfg in dict.fromkeys([*candidates, *steps]) if is_legal(cfg, device)]
