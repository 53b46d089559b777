"""What to say of an illegal config: every broken rule, and the nearest configs that break none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log2

from flashsmith.configs.config import FlashForwardKernelConfig
from flashsmith.configs.device_spec import DEFAULT_DEVICE, DeviceSpec, default_device
from flashsmith.configs.families import KernelConfig
from flashsmith.configs.hopper.config import HopperForwardKernelConfig
from flashsmith.configs.legal_space import KNOB_VALUES, SETTLING_ORDER, rules_due, with_knob
from flashsmith.configs.rules import RULES, broken_rules
from flashsmith.errors import IllegalConfigError

# What was changed in a config: knobs with their new values.
Changes = frozenset[tuple[str, object]]


def nearest_legal(
    cfg: FlashForwardKernelConfig, device: DeviceSpec | None = None, count: int = 3
) -> list[FlashForwardKernelConfig]:
    """Up to `count` legal configs, the fewest and smallest changes from `cfg` first.

    A legal config is its own nearest. No listed change is idle: undoing a part of it would make
    the config illegal again. d_head changes only when no kernel has it, since the problem sets it.
    """
    device = device or DEFAULT_DEVICE
    fixed = _fixed_knobs(cfg)
    found: list[tuple[Changes, FlashForwardKernelConfig]] = []
    for n_changes in range(len(KNOB_VALUES) - len(fixed) + 1):
        known = [changes for changes, _ in found]
        legal = _with_changes(cfg, frozenset(fixed), frozenset(), n_changes, known, device)
        found += sorted(legal, key=lambda pair: _distance(cfg, pair[1]))
        # Nothing is nearer than a legal config itself.
        if len(found) >= count or n_changes == 0 < len(found):
            break
    return [candidate for _, candidate in found[:count]]


def _with_changes(
    cfg: FlashForwardKernelConfig,
    settled: frozenset[str],
    made: Changes,
    left: int,
    known: Sequence[Changes],
    device: DeviceSpec,
) -> Iterator[tuple[Changes, FlashForwardKernelConfig]]:
    """The legal configs that differ from `cfg` in `left` of the knobs that are not settled yet.

    `made` is what was changed so far; one of the `known` changes and more is not worth listing.
    """
    unsettled = [knob for knob in SETTLING_ORDER if knob not in settled]
    impossible = sum(getattr(cfg, knob) not in KNOB_VALUES[knob] for knob in unsettled)
    if not impossible <= left <= len(unsettled) or any(changes <= made for changes in known):
        return
    if not unsettled:
        yield made, cfg
        return
    knob, old = unsettled[0], getattr(cfg, unsettled[0])
    due = rules_due(settled, knob)
    for value in (old, *(new for new in KNOB_VALUES[knob] if new != old)):
        changed = value != old
        candidate = with_knob(cfg, knob, value) if changed else cfg
        if all(rule.predicate(candidate, device) for rule in due):
            now_made = made | {(knob, value)} if changed else made
            yield from _with_changes(
                candidate, settled | {knob}, now_made, left - changed, known, device
            )


def check_legal(cfg: KernelConfig, device: DeviceSpec | None = None) -> None:
    """Return if a kernel can be built for `cfg` on `device` (None: its family's first).

    Raises:
        IllegalConfigError: it breaks rules; the message has every one, and the nearest legal
            configs.
    """
    device = device or default_device(cfg.OLDEST_ARCH)
    broken = broken_rules(cfg, device)
    if not broken:
        return
    lines = [f"config {cfg} is illegal:"]
    lines += [f"  - {rule.message} [{rule.name}]" for rule in broken]
    nearest = [] if isinstance(cfg, HopperForwardKernelConfig) else nearest_legal(cfg, device)
    if nearest:
        lines.append("nearest legal configs:")
        lines += [f"  {candidate}" for candidate in nearest]
    elif not isinstance(cfg, HopperForwardKernelConfig):
        lines.append(f"no change of its knobs makes it legal on {device.name}")
    raise IllegalConfigError("\n".join(lines))


def _fixed_knobs(cfg: FlashForwardKernelConfig) -> list[str]:
    """Knobs that no repair touches: those no rule reads, and a d_head that has kernels."""
    read = {knob for rule in RULES for knob in rule.knobs}
    fixed = [knob for knob in KNOB_VALUES if knob not in read]
    return fixed + ["d_head"] * (cfg.d_head in KNOB_VALUES["d_head"])


def _distance(cfg: FlashForwardKernelConfig, other: FlashForwardKernelConfig) -> tuple[object, ...]:
    pairs = list(zip(cfg.to_ints(), other.to_ints(), strict=True))
    n_changes = sum(before != after for before, after in pairs)
    # Sizes double from one to the next; +1 because load counts begin at 0.
    steps = sum(abs(log2(after + 1) - log2(before + 1)) for before, after in pairs)
    return (n_changes, steps, other)
