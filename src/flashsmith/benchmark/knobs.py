"""What each knob's value does in the kernel, in words, and where in the source it acts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

from flashsmith.families import KernelConfig


@dataclass(frozen=True)
class KnobEffect:
    """One field of a config: its value, what that value does, and where (a name in csrc/)."""

    knob: str
    value: str
    effect: str
    where: str


def knob_effects(cfg: KernelConfig) -> tuple[KnobEffect, ...]:
    """Every field of `cfg` in order."""
    effects = []
    for knob in fields(cfg):
        declared, value = knob.metadata, getattr(cfg, knob.name)
        text = value.name if isinstance(value, IntEnum) else _plain(value)
        words = declared["effect"](cfg) if declared["effect"] else declared["meaning"]
        effects.append(KnobEffect(knob.name, text, words, declared["where"]))
    return tuple(effects)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
