"""Rules: conditions on a config, with reasons, and the space of configs that satisfies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flashsmith.families.device import DeviceSpec

# A predicate of a config of the rule's family and a device.
Predicate = Callable[[Any, DeviceSpec], bool]

# The number of replacement values to try for a knob that shares no rule with another knob.
_LONE_REPAIRS = 3


@dataclass(frozen=True)
class Rule:
    """One condition on a config.

    name: the rule's name. reason: the sentence a user reads. predicate: whether a config on a
    device satisfies the rule. knobs: exactly the fields that the predicate reads. figures: further
    figures for the message.
    """

    name: str
    reason: str
    predicate: Predicate
    knobs: tuple[str, ...]
    figures: Callable[[Any, DeviceSpec], str] | None = None

    def values(self, cfg: Any, device: DeviceSpec) -> str:
        """The knobs and figures that the rule reads, with their values in `cfg`."""
        values = [f"{knob}={getattr(cfg, knob)}" for knob in self.knobs]
        if self.figures:
            values.append(self.figures(cfg, device))
        return ", ".join(values)

    def message(self, cfg: Any, device: DeviceSpec) -> str:
        """The reason, with the values in `cfg`."""
        return f"{self.reason} (here {self.values(cfg, device)})"


def supported(
    config_class: Any,
    knob: str,
    must_be: str = "{}: there are kernels for these only",
    name: str = "",
) -> Rule:
    """The rule that a knob must have one of its declared values.

    Args:
        must_be: the text after '... must be'; {} is replaced by the list of values.
        name: the rule's name; '' stands for the knob's name plus '_supported'.
    """
    allowed = config_class.__dataclass_fields__[knob].metadata["values"]
    *others, last = map(str, allowed)
    values = f"{', '.join(others)} or {last}" if others else last
    return Rule(
        name or f"{knob}_supported",
        f"{knob} must be {must_be.replace('{}', values)}",
        lambda cfg, device: getattr(cfg, knob) in allowed,
        (knob,),
    )


@dataclass(frozen=True)
class BrokenRule:
    """A rule that a config breaks; message is the rule's reason plus the config's values."""

    name: str
    message: str


@dataclass(frozen=True, eq=False)
class LegalSpace:
    """A family's rules and the values that its knobs have in legal configs.

    first: the knobs to settle first. repairs: for some knobs, the values to try when a config is
    corrected; the other knobs try all their values.
    """

    rules: tuple[Rule, ...]
    values: Mapping[str, tuple[Any, ...]]
    first: tuple[str, ...] = ()
    repairs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The knobs in the order in which they are settled."""
        return (*self.first, *(knob for knob in self.values if knob not in self.first))

    @cached_property
    def lone(self) -> frozenset[str]:
        """The knobs whose rules read no other knob."""
        bound = {knob for rule in self.rules if len(rule.knobs) > 1 for knob in rule.knobs}
        return frozenset(self.values) - bound

    def replacements(self, knob: str, old: Any) -> Sequence[Any]:
        """The values to try in place of `old`."""
        others = [new for new in self.repairs.get(knob, self.values[knob]) if new != old]
        if knob not in self.lone:
            return others
        return sorted(others, key=lambda new: abs(int(new) - int(old)))[:_LONE_REPAIRS]
