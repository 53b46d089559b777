"""A ladder's steps and changes in words, for tables and pictures."""

from __future__ import annotations

import re
from itertools import pairwise

from flashsmith.benchmark.progression.change import Change, Pair
from flashsmith.benchmark.progression.ladder import Ladder, Step

# Classes named one by one in a change; the rest is added up.
_CLASSES_NAMED = 4


def step_names(ladder: Ladder) -> list[str]:
    """A short name for each step: the first one's short form, then what became different in it."""
    configs = [step.config for step in ladder.steps]
    return configs[:1] + [
        config_words(before, after) or after for before, after in pairwise(configs)
    ]


def config_words(before: str, after: str) -> str:
    """What differs in two short forms: '+ swizzled', '- buffer', 'stages_2 -> stages_3'.

    A word that took the place of another of the same knob (same letters before its first digit)
    is shown with it. Empty when nothing differs.
    """
    (old_tile, old), (new_tile, new) = _parts(before), _parts(after)
    phrases = [f"{old_tile} -> {new_tile}"] if old_tile != new_tile else []
    gone = {_stem(word): word for word in old if word not in new}
    for word in new:
        if word not in old:
            was = gone.pop(_stem(word), None)
            phrases.append(f"+ {word}" if was is None else f"{was} -> {word}")
    return ", ".join(phrases + [f"- {word}" for word in gone.values()])


def _parts(config: str) -> tuple[str, list[str]]:
    """A short form's tile and its words."""
    tile, _, words = config.rpartition(": ")
    return tile, words.split("+")


def _stem(word: str) -> str:
    return re.match(r"\D*", word).group()  # type: ignore[union-attr]


def change_words(change: Change) -> list[str]:
    """One phrase for the time and for each kind of difference; empty when nothing changed."""
    phrases = []
    if change.speedup is not None:
        phrases.append(f"time x {1 / change.speedup:.2f}")
    phrases += [f"{name} {_arrow(pair)}" for name, pair in change.costs.items()]
    phrases += [f"{use} conflicts {_arrow(pair)}" for use, pair in change.conflicts.items()]
    if change.instructions:
        phrases.append(_instructions(change))
    return phrases


def _instructions(change: Change) -> str:
    total = sum(change.instructions.values())
    share = "" if change.instructions_ratio is None else f" ({change.instructions_ratio - 1:+.1%})"
    named = list(change.instructions.items())
    rest = sum(count for _, count in named[_CLASSES_NAMED:])
    parts = [f"{name} {count:+,}" for name, count in named[:_CLASSES_NAMED]]
    if len(named) > _CLASSES_NAMED:
        parts.append(f"others {rest:+,}")
    return f"instructions {total:+,}{share}: {', '.join(parts)}"


def _arrow(pair: Pair) -> str:
    before, after = pair
    return f"{_plain(before)} -> {_plain(after)}"


def _plain(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def conflict_words(step: Step) -> str:
    """The uses of shared memory with conflicts: 'ldmatrix x8, O st x8', or 'none'."""
    found = [f"{use} x{factor:.3g}" for use, factor in step.conflicts.items() if _bad(factor)]
    return ", ".join(found) or "none"


def _bad(factor: float | None) -> bool:
    return factor is not None and factor > 1.05
