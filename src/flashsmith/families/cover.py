"""The set 'cover': few configs in which every pair of knob values meets that can meet at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import combinations, product

from flashsmith.families.device import DEFAULT_DEVICE, DeviceSpec
from flashsmith.families.legal_space import KNOB_VALUES, legal_completions
from flashsmith.families.mma_sync.config import FlashForwardKernelConfig

# Two knobs with a value each.
KnobPair = tuple[tuple[str, object], tuple[str, object]]

# How many open pairs are tried as the seed of the next config; more makes the set hardly smaller.
_SEEDS = 12


def get_cover_configs(device: DeviceSpec | None = None) -> list[FlashForwardKernelConfig]:
    """A pairwise covering array over all legal knob values, sorted; the same on every machine.

    Each pair of values of two knobs that occurs in some config legal on `device` (None: the A100)
    occurs in one of these: cp.async off, eager without async, loads 4 to 16, 8 warps, d_head 64,
    both dtypes.
    """
    return list(_cover(device or DEFAULT_DEVICE))


@lru_cache(maxsize=8)
def _cover(device: DeviceSpec) -> tuple[FlashForwardKernelConfig, ...]:
    """Greedy: seed a config with an open pair, choose each further knob's value for most gain."""
    open_pairs = _legal_pairs(device)
    chosen: list[FlashForwardKernelConfig] = []
    while open_pairs:
        seeds = list(open_pairs)[:_SEEDS]
        candidates = [_grow(seed, open_pairs, chosen, device) for seed in seeds]
        best = max(candidates, key=lambda cfg: sum(pair in open_pairs for pair in knob_pairs(cfg)))
        chosen.append(best)
        for pair in knob_pairs(best):
            open_pairs.pop(pair, None)
    return tuple(sorted(_without_idle(chosen)))


def _without_idle(chosen: list[FlashForwardKernelConfig]) -> list[FlashForwardKernelConfig]:
    """Leaves out configs whose pairs the others hold already: a greedy choice makes such."""
    holders = Counter(pair for cfg in chosen for pair in knob_pairs(cfg))
    kept = []
    for cfg in chosen:
        if all(holders[pair] > 1 for pair in knob_pairs(cfg)):
            holders.subtract(knob_pairs(cfg))
        else:
            kept.append(cfg)
    return kept


def knob_pairs(cfg: FlashForwardKernelConfig) -> list[KnobPair]:
    """All pairs of two knobs with the values they have in `cfg`."""
    return list(combinations([(knob, getattr(cfg, knob)) for knob in KNOB_VALUES], 2))


def _legal_pairs(device: DeviceSpec) -> dict[KnobPair, None]:
    """The pairs that occur in legal configs; a dict, since a set's order differs between runs."""
    pairs: dict[KnobPair, None] = {}
    for first, second in combinations(KNOB_VALUES, 2):
        for values in product(KNOB_VALUES[first], KNOB_VALUES[second]):
            pair = ((first, values[0]), (second, values[1]))
            if next(legal_completions(_with(pair), (first, second), device), None):
                pairs[pair] = None
    return pairs


def _grow(
    seed: KnobPair,
    open_pairs: Container[KnobPair],
    chosen: Sequence[FlashForwardKernelConfig],
    device: DeviceSpec,
) -> FlashForwardKernelConfig:
    """A legal config with the seed in it that closes many open pairs."""

    def most_gain_first(
        knob: str, cfg: FlashForwardKernelConfig, settled: Sequence[str]
    ) -> Sequence[object]:
        def rank(value: object) -> tuple[int, int]:
            pairs = (_pair(knob, value, other, getattr(cfg, other)) for other in settled)
            gain = sum(pair in open_pairs for pair in pairs)
            # Among equals the value seen least, so that the set is varied beyond pairs too.
            return (-gain, sum(getattr(known, knob) == value for known in chosen))

        return sorted(KNOB_VALUES[knob], key=rank)

    knobs = (seed[0][0], seed[1][0])
    return next(legal_completions(_with(seed), knobs, device, most_gain_first))


_KNOB_ORDER = {knob: place for place, knob in enumerate(KNOB_VALUES)}


def _pair(knob: str, value: object, other: str, other_value: object) -> KnobPair:
    here, there = (knob, value), (other, other_value)
    return (here, there) if _KNOB_ORDER[knob] < _KNOB_ORDER[other] else (there, here)


def _with(pair: KnobPair) -> FlashForwardKernelConfig:
    """A config with these two values; its other knobs are to be settled."""
    values = {knob: choices[0] for knob, choices in KNOB_VALUES.items()} | dict(pair)
    return FlashForwardKernelConfig(**values)  # type: ignore[arg-type]
