"""What to say of an illegal config: every broken rule, and the nearest configs that break none."""

from __future__ import annotations

from math import log2

from flashsmith.configs.config import FlashForwardKernelConfig
from flashsmith.configs.device_spec import DEFAULT_DEVICE, DeviceSpec, default_device
from flashsmith.configs.families import KernelConfig
from flashsmith.configs.hopper.config import HopperForwardKernelConfig
from flashsmith.configs.legal_space import KNOB_VALUES, legal_completions
from flashsmith.configs.rules import RULES, broken_rules
from flashsmith.errors import IllegalConfigError


def nearest_legal(
    cfg: FlashForwardKernelConfig, device: DeviceSpec | None = None, count: int = 3
) -> list[FlashForwardKernelConfig]:
    """Up to `count` legal configs, the fewest and smallest changes from `cfg` first.

    A legal config is its own nearest. No listed change is idle: undoing a part of it would make
    the config illegal again. d_head changes only when no kernel has it, since the problem sets it.
    """
    device = device or DEFAULT_DEVICE
    found: list[tuple[frozenset[tuple[str, object]], FlashForwardKernelConfig]] = []
    legal = legal_completions(cfg, _fixed_knobs(cfg), device)
    for candidate in sorted(legal, key=lambda other: _distance(cfg, other)):
        changes = frozenset(
            (knob, getattr(candidate, knob))
            for knob in KNOB_VALUES
            if getattr(candidate, knob) != getattr(cfg, knob)
        )
        if not any(known <= changes for known, _ in found):
            found.append((changes, candidate))
        if len(found) == count:
            break
    return [candidate for _, candidate in found]


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
