"""Finds the legal configs of a family that have given values of some knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec
from flashsmith.families.rule import LegalSpace, Rule

# The config class of any family, for functions whose result has the same class as an argument.
AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)
ValueOrder = Callable[[str, Any, Sequence[str]], Sequence[object]]


def with_knob(cfg: AnyConfig, knob: str, value: object) -> AnyConfig:
    """Returns `cfg` with a new value of one knob. Does not make the checks that dataclasses.replace
    would make.

    This is 100 times as fast, and a search makes a million such configs.
    """
    changed = object.__new__(type(cfg))
    changed.__dict__.update(cfg.__dict__)
    changed.__dict__[knob] = value
    return changed


def legal_completions(
    base: AnyConfig,
    settled: Sequence[str],
    device: DeviceSpec,
    value_order: ValueOrder | None = None,
) -> Iterator[AnyConfig]:
    """Yields the legal configs in which the `settled` knobs have the values of `base`, depth first.

    value_order(knob, config so far, settled knobs) returns a knob's values in the order in which
    the search tries them; None means the declared order. Each rule is checked as soon as all its
    knobs are settled, so that the search leaves dead ends early.
    """
    space, known = base.family.legal_space, set(settled)
    if all(rule.predicate(base, device) for rule in space.rules if set(rule.knobs) <= known):
        yield from _complete(space, base, tuple(settled), device, value_order)


@cache
def rules_due(space: LegalSpace, settled: frozenset[str], knob: str) -> tuple[Rule, ...]:
    """The rules that become checkable when `knob` is settled in addition to the `settled` knobs."""
    now = settled | {knob}
    return tuple(rule for rule in space.rules if knob in rule.knobs and set(rule.knobs) <= now)


def _complete(
    space: LegalSpace,
    base: AnyConfig,
    settled: tuple[str, ...],
    device: DeviceSpec,
    value_order: ValueOrder | None,
) -> Iterator[AnyConfig]:
    knob = next((name for name in space.order if name not in settled), None)
    if knob is None:
        yield base
        return
    due = rules_due(space, frozenset(settled), knob)
    for value in value_order(knob, base, settled) if value_order else space.values[knob]:
        cfg = with_knob(base, knob, value)
        if all(rule.predicate(cfg, device) for rule in due):
            yield from _complete(space, cfg, (*settled, knob), device, value_order)
