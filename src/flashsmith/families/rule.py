"""Rules: conditions that a config must fulfil, each with its reason; and the space of all legal
configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flashsmith.families.device import DeviceSpec

# A function that takes a config of the rule's family and a device.
Predicate = Callable[[Any, DeviceSpec], bool]

# For a knob whose rules depend on no other knob, the number of other values that are tried.
_LONE_REPAIRS = 3


@dataclass(frozen=True)
class Rule:
    """A condition that a config must fulfil.

    name: the rule's name.
    reason: the sentence that messages show to users.
    predicate: a function that returns whether a config fulfils the rule on a device.
    knobs: the names of exactly the fields that the predicate uses.
    figures: a function that returns further numbers for the message, as a string.
    """

    name: str
    reason: str
    predicate: Predicate
    knobs: tuple[str, ...]
    figures: Callable[[Any, DeviceSpec], str] | None = None

    def values(self, cfg: Any, device: DeviceSpec) -> str:
        """The knobs and figures that the rule uses, with their values for `cfg`, as a string."""
        values = [f"{knob}={getattr(cfg, knob)}" for knob in self.knobs]
        if self.figures:
            values.append(self.figures(cfg, device))
        return ", ".join(values)

    def message(self, cfg: Any, device: DeviceSpec) -> str:
        """The rule's reason, followed by the values of its knobs and figures."""
        return f"{self.reason} (here {self.values(cfg, device)})"


def supported(
    config_class: Any,
    knob: str,
    must_be: str = "{}: there are kernels for these only",
    name: str = "",
) -> Rule:
    """Returns the rule that a knob must have one of the values in its declaration.

    Args:
        must_be: the words that follow 'must be' in the reason; the list of values replaces {}.
        name: the name of the rule; '' stands for the name of the knob followed by '_supported'.
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
    """A rule that a config breaks; `message` is the rule's reason with the values of the config."""

    name: str
    message: str


@dataclass(frozen=True, eq=False)
class LegalSpace:
    """The rules of a family, and the values that its knobs have in legal configs.

    first: the knobs for which values are chosen first.
    repairs: for some knobs, the only values that are tried to correct a config; of all other knobs,
        every value is tried.
    """

    rules: tuple[Rule, ...]
    values: Mapping[str, tuple[Any, ...]]
    first: tuple[str, ...] = ()
    repairs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The knobs, in the order in which values are chosen for them."""
        return (*self.first, *(knob for knob in self.values if knob not in self.first))

    @cached_property
    def rules_of(self) -> Mapping[str, tuple[Rule, ...]]:
        """For each knob, the rules that depend on it."""
        return {
            knob: tuple(rule for rule in self.rules if knob in rule.knobs) for knob in self.values
        }

    @cached_property
    def lone(self) -> frozenset[str]:
        """The knobs whose rules depend on no other knob."""
        bound = {knob for rule in self.rules if len(rule.knobs) > 1 for knob in rule.knobs}
        return frozenset(self.values) - bound

    def replacements(self, knob: str, old: Any) -> Sequence[Any]:
        """The values of a knob that are tried in the place of `old`."""
        others = [new for new in self.repairs.get(knob, self.values[knob]) if new != old]
        if knob not in self.lone:
            return others
        return sorted(others, key=lambda new: abs(int(new) - int(old)))[:_LONE_REPAIRS]
