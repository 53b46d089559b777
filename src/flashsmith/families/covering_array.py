"""Covering arrays: small sets of configs that together contain every pair of knob values that
occurs in a legal config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import combinations, product

from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import Family
from flashsmith.families.legal_space import legal_completions

# Two knobs, each with one of its values.
KnobPair = tuple[tuple[str, object], tuple[str, object]]

# The number of uncovered pairs with which the search tries to begin its next config. With more, the
# covering array would hardly become smaller.
_SEEDS = 12


@lru_cache(maxsize=8)
def cover(family: Family, device: DeviceSpec) -> tuple[KernelConfig, ...]:
    """Returns a covering array for the pairs of a family's knob values.

    The array is sorted, and it is the same in every run.

    Each pair of values of two knobs that occurs in any config that is legal on `device` occurs in
    one of the returned configs. The search is greedy: it begins a config with a pair that is not
    covered yet, and then chooses the value of each further knob so that the most such pairs are
    covered.
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
    """Removes each config whose pairs all occur in other configs; the greedy search may choose such
    redundant configs."""
    holders = Counter(pair for cfg in chosen for pair in knob_pairs(cfg))
    kept = []
    for cfg in chosen:
        if all(holders[pair] > 1 for pair in knob_pairs(cfg)):
            holders.subtract(knob_pairs(cfg))
        else:
            kept.append(cfg)
    return kept


def knob_pairs(cfg: KernelConfig) -> list[KnobPair]:
    """All pairs of two knobs, with the values that these have in `cfg`."""
    return list(combinations([(knob, getattr(cfg, knob)) for knob in cfg.family.knob_values], 2))


def _legal_pairs(family: Family, device: DeviceSpec) -> dict[KnobPair, None]:
    """The pairs that occur in legal configs.

    Returns a dict, because the order of a set differs between runs.
    """
    pairs: dict[KnobPair, None] = {}
    choices = family.covered_values

    def covered(knob: str, _base: KernelConfig, _settled: Sequence[str]) -> Sequence[object]:
        return choices[knob]

    for first, second in combinations(choices, 2):
        for values in product(choices[first], choices[second]):
            pair = ((first, values[0]), (second, values[1]))
            found = legal_completions(_with(family, pair), (first, second), device, covered)
            if next(found, None):
                pairs[pair] = None
    return pairs


def _grow(
    family: Family,
    seed: KnobPair,
    open_pairs: Container[KnobPair],
    chosen: Sequence[KernelConfig],
    device: DeviceSpec,
) -> KernelConfig:
    """A legal config that contains the pair ``seed`` and covers many of ``open_pairs``."""
    order = {knob: index for index, knob in enumerate(family.covered_values)}

    def pair_of(knob: str, value: object, other: str, other_value: object) -> KnobPair:
        here, there = (knob, value), (other, other_value)
        return (here, there) if order[knob] < order[other] else (there, here)

    def most_gain_first(knob: str, cfg: KernelConfig, settled: Sequence[str]) -> Sequence[object]:
        def rank(value: object) -> tuple[int, int]:
            pairs = (pair_of(knob, value, other, getattr(cfg, other)) for other in settled)
            gain = sum(pair in open_pairs for pair in pairs)
            # Among values that cover equally many pairs, the value that the fewest chosen configs
            # have comes first, for variety.
            return (-gain, sum(getattr(known, knob) == value for known in chosen))

        return sorted(family.covered_values[knob], key=rank)

    knobs = (seed[0][0], seed[1][0])
    return next(legal_completions(_with(family, seed), knobs, device, most_gain_first))


def _with(family: Family, pair: KnobPair) -> KernelConfig:
    """A config in which two knobs have the values of `pair`. The other knobs have arbitrary values,
    which the search replaces."""
    values = {knob: choices[0] for knob, choices in family.covered_values.items()} | dict(pair)
    config: KernelConfig = family.config_class(**values)
    return config
