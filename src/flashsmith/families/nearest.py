"""The error for an illegal config, which lists all rules that the config breaks and the nearest
legal configs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log2

from flashsmith.errors import IllegalConfigError
from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec, default_device
from flashsmith.families.family import families
from flashsmith.families.legal_space import AnyConfig, with_knob
from flashsmith.families.legality import broken_rules
from flashsmith.families.rule import LegalSpace, Rule

# The changes that turn one config into another: pairs of a knob's name and the knob's new value.
Changes = frozenset[tuple[str, object]]
# For each number of changes, the search compares only this many configs, because a config that
# breaks many rules has too many neighbours.
_MOST_COMPARED = 5000


def nearest_legal(
    cfg: AnyConfig, device: DeviceSpec | None = None, count: int = 3
) -> list[AnyConfig]:
    """Returns up to `count` legal configs of the family of `cfg`, the ones with the fewest changes
    first.

    Configs with equally many changes are grouped by the knobs that change. The nearest config of
    each group comes first, then the second nearest of each group, and so on. If `cfg` is legal, the
    result is only `cfg`. Every change is necessary: undoing any part of it would make the config
    illegal. d_head and d_v are changed only if no kernel has these widths, since the problem
    determines them. If `device` is None, the default device of the family is used.
    """
    device = device or default_device(cfg.OLDEST_ARCH)
    space = cfg.family.legal_space
    if not all(rule.predicate(cfg, device) for rule in space.rules if not rule.knobs):
        return []  # no change helps: a broken rule depends on no knob
    fixed = _fixed_knobs(cfg, space, device)
    search = _Search(space, device)
    broken, free = search.broken(cfg, space.rules), frozenset(space.values).difference(fixed)
    found: list[tuple[Changes, AnyConfig]] = []
    for n_changes in range(len(free) + 1):
        known = [changes for changes, _ in found]
        legal = search.with_changes(cfg, broken, free, frozenset(), n_changes, known)
        compared = islice(legal, _MOST_COMPARED)
        found += _varied(sorted(compared, key=lambda pair: _distance(cfg, pair[1])))
        # If `cfg` is legal, the result is only this config.
        if len(found) >= count or n_changes == 0 < len(found):
            break
    return [candidate for _, candidate in found[:count]]


@dataclass(frozen=True)
class _Search:
    """The search for legal configs near a config of one family, on one device."""

    space: LegalSpace
    device: DeviceSpec

    def broken(self, cfg: AnyConfig, rules: Iterable[Rule]) -> list[Rule]:
        return [rule for rule in rules if not rule.predicate(cfg, self.device)]

    def with_changes(
        self,
        cfg: AnyConfig,
        broken: Sequence[Rule],
        free: frozenset[str],
        made: Changes,
        left: int,
        known: Sequence[Changes],
    ) -> Iterator[tuple[Changes, AnyConfig]]:
        """Yields the legal configs that differ from `cfg` in `left` knobs among `free`.

        `broken` has the rules that `cfg` breaks, and `made` the changes so far. A set of changes is
        left out if a part of it is already sufficient; `known` has such sufficient sets.
        """
        if any(changes <= made for changes in known):
            return
        if not broken:
            if not left:
                yield made, cfg
            return
        # A legal config must differ from `cfg` in at least one knob of each broken rule.
        ways = [free.intersection(rule.knobs) for rule in broken]
        if _fewest_changes(ways) > left:
            return
        tried = frozenset.intersection(*ways) if left == 1 else min(ways, key=len)
        for knob in sorted(tried, key=self.space.order.index):
            free -= {knob}
            others = [rule for rule in broken if knob not in rule.knobs]
            for value in self.space.replacements(knob, getattr(cfg, knob)):
                changed = with_knob(cfg, knob, value)
                now_broken = others + self.broken(changed, self.space.rules_of[knob])
                now_made = made | {(knob, value)}
                yield from self.with_changes(changed, now_broken, free, now_made, left - 1, known)


def _fewest_changes(ways: Sequence[frozenset[str]]) -> int:
    """A lower bound on the number of changes that repair all broken rules. ``ways`` has, for each
    rule, the knobs that can repair it. Rules that share no knob need one change each."""
    seen: set[str] = set()
    count = 0
    for knobs in sorted(ways, key=len):
        if seen.isdisjoint(knobs):
            count += 1
            seen |= knobs
    return count


def _varied(nearest: list[tuple[Changes, AnyConfig]]) -> list[tuple[Changes, AnyConfig]]:
    """Reorders configs: first the nearest config for each set of changed knobs, then the second
    nearest for each set, and so on."""
    seen: Counter[frozenset[str]] = Counter()
    ranks = []
    for changes, _ in nearest:
        knobs = frozenset(knob for knob, _ in changes)
        ranks.append(seen[knobs])
        seen[knobs] += 1
    return [nearest[i] for i in sorted(range(len(nearest)), key=ranks.__getitem__)]


def check_legal(cfg: KernelConfig, device: DeviceSpec | None = None) -> None:
    """Raises IllegalConfigError unless a kernel can be built for `cfg`.

    If `device` is None, the default device of the family is used.

    Raises:
        IllegalConfigError: `cfg` breaks rules. The message lists all of them and the nearest legal
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
    """Advice for the message: if the config's family does not run on the device, the name of a
    family that does."""
    if device.arch == cfg.OLDEST_ARCH:
        return ""
    others = [
        other.name
        for other in families(cfg.family.operation)
        if other.name != cfg.FAMILY and other.oldest_arch < min(cfg.OLDEST_ARCH, device.arch + 1)
    ]
    return f"; the {others[0]} family has kernels for it" if others else ""


def _fixed_knobs(cfg: KernelConfig, space: LegalSpace, device: DeviceSpec) -> list[str]:
    """The knobs that the search must not change: d_head and d_v if there are kernels for this pair,
    or else d_head if there are kernels for its value; and all knobs that no chain of rules connects
    with a broken rule.

    If there are no kernels for a pair, its two widths must not both be fixed. Changing the other
    knobs would not make the config legal, so the search would try all their values in vain.
    """
    touched: set[str] = set()
    grown = {knob for rule in space.rules if not rule.predicate(cfg, device) for knob in rule.knobs}
    while grown - touched:
        touched |= grown
        grown = {k for rule in space.rules if touched & set(rule.knobs) for k in rule.knobs}
    fixed = [knob for knob in space.values if knob not in touched]
    widths = ["d_head"] * (cfg.d_head in space.values["d_head"])
    if cfg.head_dims in cfg.family.head_dims:
        widths = ["d_head", "d_v"]
    return fixed + [knob for knob in widths if knob in touched]


def _distance(cfg: KernelConfig, other: KernelConfig) -> tuple[object, ...]:
    pairs = list(zip(cfg.to_ints(), other.to_ints(), strict=True))
    n_changes = sum(before != after for before, after in pairs)
    # This uses logarithms, because sizes double from one value to the next, and adds 1, because
    # load counts begin at 0.
    steps = sum(abs(log2(after + 1) - log2(before + 1)) for before, after in pairs)
    return (n_changes, steps, other.to_ints())
