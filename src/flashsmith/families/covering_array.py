"""Covering arrays: a few configs that together contain every pair of knob values of legal
configs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import combinations, product

from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import Family
from flashsmith.families.legal_space import legal_completions

# Two knobs, each with a value.
KnobPair = tuple[tuple[str, object], tuple[str, object]]

# The number of open pairs to try as the seed of the next config; more seeds hardly shrink the set.
_SEEDS = 12


@lru_cache(maxsize=8)
def cover(family: Family, device: DeviceSpec) -> tuple[KernelConfig, ...]:
    """A pairwise covering array over a family's legal knob values, sorted and deterministic.

    Every pair of values of two knobs that occurs in a config legal on `device` occurs in at least
    one of the returned configs. The search is greedy: it starts a config with an open pair, which
    no chosen config contains, then picks each further knob's value to close the most open pairs.
    """
    open_pairs = _legal_pairs(family, device)
    chosen: list[KernelConfig] = []
    while open_pairs:
        seeds = list(open_pairs)[:_SEEDS]
        candidates = [_grow(family, seed, open_pairs, chosen, device) for seed in seeds]
        best = max(candidates, key=lambda cfg: sum(pair in open_pairs for pair in knob_pairs(cfg)))
        chosen.append(best)
        for pair in knob_pairs(best):
            open_pairs.pop(pair, None)
    return tuple(sorted(_without_idle(chosen)))


def _without_idle(chosen: list[KernelConfig]) -> list[KernelConfig]:
    """The configs, without any config whose pairs the other configs contain; the greedy search can
    choose such configs."""
    holders = Counter(pair for cfg in chosen for pair in knob_pairs(cfg))
    kept = []
    for cfg in chosen:
        if all(holders[pair] > 1 for pair in knob_pairs(cfg)):
            holders.subtract(knob_pairs(cfg))
        else:
            kept.append(cfg)
    return kept


def knob_pairs(cfg: KernelConfig) -> list[KnobPair]:
    """All pairs of two knobs with the values they have in `cfg`."""
    return list(combinations([(knob, getattr(cfg, knob)) for knob in cfg.family.knob_values], 2))


def _legal_pairs(family: Family, device: DeviceSpec) -> dict[KnobPair, None]:
    """The pairs that occur in legal configs; a dict, since a set's order differs between runs."""
    pairs: dict[KnobPair, None] = {}
    choices = family.covered_values
    for first, second in combinations(choices, 2):
        for values in product(choices[first], choices[second]):
            pair = ((first, values[0]), (second, values[1]))
            if next(legal_completions(_with(family, pair), (first, second), device), None):
                pairs[pair] = None
    return pairs


def _grow(
    family: Family,
    seed: KnobPair,
    open_pairs: Container[KnobPair],
    chosen: Sequence[KernelConfig],
    device: DeviceSpec,
) -> KernelConfig:
    """A legal config that contains the seed and closes many open pairs."""
    order = {knob: index for index, knob in enumerate(family.covered_values)}

    def pair_of(knob: str, value: object, other: str, other_value: object) -> KnobPair:
        here, there = (knob, value), (other, other_value)
        return (here, there) if order[knob] < order[other] else (there, here)

    def most_gain_first(knob: str, cfg: KernelConfig, settled: Sequence[str]) -> Sequence[object]:
        def rank(value: object) -> tuple[int, int]:
            pairs = (pair_of(knob, value, other, getattr(cfg, other)) for other in settled)
            gain = sum(pair in open_pairs for pair in pairs)
            # Ties go to the value used least so far, for variety beyond the pairs.
            return (-gain, sum(getattr(known, knob) == value for known in chosen))

        return sorted(family.covered_values[knob], key=rank)

    knobs = (seed[0][0], seed[1][0])
    return next(legal_completions(_with(family, seed), knobs, device, most_gain_first))


def _with(family: Family, pair: KnobPair) -> KernelConfig:
    """A config with these two values; its other knobs have placeholder values."""
    values = {knob: choices[0] for knob, choices in family.covered_values.items()} | dict(pair)
    config: KernelConfig = family.config_class(**values)
    return config
