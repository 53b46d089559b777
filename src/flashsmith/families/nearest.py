"""The error for an illegal config: every broken rule, and the nearest legal configs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log2

from flashsmith.errors import IllegalConfigError
from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec, default_device
from flashsmith.families.family import families
from flashsmith.families.legal_space import AnyConfig, rules_due, with_knob
from flashsmith.families.legality import broken_rules
from flashsmith.families.rule import LegalSpace

# The changes to a config: the changed knobs with their new values.
Changes = frozenset[tuple[str, object]]
# The search stops after this many configs; a config that breaks many rules has too many neighbours.
_MOST_COMPARED = 5000


def nearest_legal(
    cfg: AnyConfig, device: DeviceSpec | None = None, count: int = 3
) -> list[AnyConfig]:
    """Up to `count` legal configs of the family of `cfg`, fewest changes first.

    Configs with equally many changes are grouped by the changed knobs: the nearest config of each
    group comes first, then the second nearest of each. For a legal config the result is the config
    itself. Every listed change is necessary: undoing a part of the change would make the config
    illegal. d_head changes only if no kernel has the given value, since the problem sets it.
    `device` None is the family's default device.
    """
    device = device or default_device(cfg.OLDEST_ARCH)
    space = cfg.family.legal_space
    if not all(rule.predicate(cfg, device) for rule in space.rules if not rule.knobs):
        return []  # the broken rule depends on no knob
    fixed = _fixed_knobs(cfg, space, device)
    search = _Search(space, device)
    found: list[tuple[Changes, AnyConfig]] = []
    for n_changes in range(len(space.values) - len(fixed) + 1):
        known = [changes for changes, _ in found]
        legal = search.with_changes(cfg, frozenset(fixed), frozenset(), n_changes, known)
        compared = islice(legal, _MOST_COMPARED)
        found += _varied(sorted(compared, key=lambda pair: _distance(cfg, pair[1])))
        # For a legal config the result is the config itself.
        if len(found) >= count or n_changes == 0 < len(found):
            break
    return [candidate for _, candidate in found[:count]]


@dataclass(frozen=True)
class _Search:
    """A walk through a family's space for one device."""

    space: LegalSpace
    device: DeviceSpec

    def with_changes(
        self,
        cfg: AnyConfig,
        settled: frozenset[str],
        made: Changes,
        left: int,
        known: Sequence[Changes],
    ) -> Iterator[tuple[Changes, AnyConfig]]:
        """The legal configs that differ from `cfg` in `left` of the unsettled knobs.

        `made` holds the changes so far. Supersets of `known` changes are not listed.
        """
        values = self.space.values
        unsettled = [knob for knob in self.space.order if knob not in settled]
        impossible = sum(getattr(cfg, knob) not in values[knob] for knob in unsettled)
        if not impossible <= left <= len(unsettled) or any(changes <= made for changes in known):
            return
        if not unsettled:
            yield made, cfg
            return
        knob, old = unsettled[0], getattr(cfg, unsettled[0])
        due = rules_due(self.space, settled, knob)
        for value in (old, *self.space.replacements(knob, old)):
            changed = value != old
            candidate = with_knob(cfg, knob, value) if changed else cfg
            if all(rule.predicate(candidate, self.device) for rule in due):
                now_made = made | {(knob, value)} if changed else made
                yield from self.with_changes(
                    candidate, settled | {knob}, now_made, left - changed, known
                )


def _varied(nearest: list[tuple[Changes, AnyConfig]]) -> list[tuple[Changes, AnyConfig]]:
    """The nearest config of each set of changed knobs, then the second nearest of each, and so
    on."""
    seen: Counter[frozenset[str]] = Counter()
    ranks = []
    for changes, _ in nearest:
        knobs = frozenset(knob for knob, _ in changes)
        ranks.append(seen[knobs])
        seen[knobs] += 1
    return [nearest[i] for i in sorted(range(len(nearest)), key=ranks.__getitem__)]


def check_legal(cfg: KernelConfig, device: DeviceSpec | None = None) -> None:
    """Return if a kernel can be built for `cfg`; device None is the default device of its family.

    Raises:
        IllegalConfigError: `cfg` breaks rules; the message lists all of these and the nearest legal
            configs.
    """
    device = device or default_device(cfg.OLDEST_ARCH)
    broken = broken_rules(cfg, device)
    if not broken:
        return
    lines = [f"config {cfg} is illegal:"]
    lines += [f"  - {rule.message} [{rule.name}]" for rule in broken]
    nearest = nearest_legal(cfg, device)
    if nearest:
        lines.append("nearest legal configs:")
        lines += [f"  {candidate}" for candidate in nearest]
    else:
        way_out = _way_out(cfg, device)
        lines.append(f"no change of its knobs makes it legal on {device.name}{way_out}")
    raise IllegalConfigError("\n".join(lines))


def _way_out(cfg: KernelConfig, device: DeviceSpec) -> str:
    """For the message: a family that runs on the device, if the config's own family does not run
    there."""
    if device.arch == cfg.OLDEST_ARCH:
        return ""
    others = [
        other.name
        for other in families(cfg.family.operation)
        if other.name != cfg.FAMILY and other.oldest_arch < min(cfg.OLDEST_ARCH, device.arch + 1)
    ]
    return f"; the {others[0]} family has kernels for it" if others else ""


def _fixed_knobs(cfg: KernelConfig, space: LegalSpace, device: DeviceSpec) -> list[str]:
    """The knobs that a correction must not change: d_head if kernels exist for its value, and knobs
    that no chain of rules connects to a broken rule."""
    touched: set[str] = set()
    grown = {knob for rule in space.rules if not rule.predicate(cfg, device) for knob in rule.knobs}
    while grown - touched:
        touched |= grown
        grown = {k for rule in space.rules if touched & set(rule.knobs) for k in rule.knobs}
    fixed = [knob for knob in space.values if knob not in touched]
    has_kernels = cfg.d_head in space.values["d_head"] and "d_head" in touched
    return fixed + ["d_head"] * has_kernels


def _distance(cfg: KernelConfig, other: KernelConfig) -> tuple[object, ...]:
    pairs = list(zip(cfg.to_ints(), other.to_ints(), strict=True))
    n_changes = sum(before != after for before, after in pairs)
    # Sizes double from one value to the next; + 1 because load counts begin at 0.
    steps = sum(abs(log2(after + 1) - log2(before + 1)) for before, after in pairs)
    return (n_changes, steps, other.to_ints())
