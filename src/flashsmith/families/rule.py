"""Rule: one condition on a config, its reason, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashsmith.families.device import DeviceSpec

# Of a config of the rule's family, on a device.
Predicate = Callable[[Any, DeviceSpec], bool]


@dataclass(frozen=True)
class Rule:
    """One condition on a config.

    name: the C++ predicate's name. reason: the sentence a user reads. predicate: whether a config
    on a device satisfies the rule. knobs: the fields that the predicate reads, and no other.
    figures: what else stands beside the config's values in a message.
    """

    name: str
    reason: str
    predicate: Predicate
    knobs: tuple[str, ...]
    figures: Callable[[Any, DeviceSpec], str] | None = None

    def values(self, cfg: Any, device: DeviceSpec) -> str:
        """What the rule looks at, with the values that `cfg` has."""
        values = [f"{knob}={getattr(cfg, knob)}" for knob in self.knobs]
        if self.figures:
            values.append(self.figures(cfg, device))
        return ", ".join(values)

    def message(self, cfg: Any, device: DeviceSpec) -> str:
        """The reason, with the values that `cfg` has."""
        return f"{self.reason} (here {self.values(cfg, device)})"


@dataclass(frozen=True)
class BrokenRule:
    """A rule that a config breaks; message is the reason with the config's own values."""

    name: str
    message: str
