"""What changed from one step of the ladder to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashsmith.benchmark.progression.ladder import Step

Costs = Mapping[str, float | None]
Pair = tuple[float | None, float | None]


@dataclass(frozen=True)
class Change:
    """The differences of two steps; what stayed the same is left out.

    `conflicts` and `costs` (registers, spilled bytes, ...) are pairs (before, after);
    `instructions` are executed warp instructions by class, after minus before. `speedup` is
    the time before over the time after, None unless both were timed.
    """

    instructions: dict[str, int]
    instructions_ratio: float | None
    conflicts: dict[str, Pair]
    costs: dict[str, Pair]
    speedup: float | None


COSTS = {
    "registers": "registers",
    "spill_store_bytes": "spilled bytes",
    "smem_bytes": "smem bytes",
    "ctas_per_sm": "CTAs/SM",
}


def change_between(before: Step, after: Step) -> Change:
    """The Change that leads from one step to another; instructions of two lengths are not
    compared."""
    same_length = before.counted_seq == after.counted_seq
    return Change(
        instructions=_differences(before.instructions, after.instructions)
        if before.instructions and after.instructions and same_length
        else {},
        instructions_ratio=_ratio(after.total_instructions, before.total_instructions)
        if same_length
        else None,
        conflicts=_pairs(_rounded(before.conflicts), _rounded(after.conflicts)),
        costs=_pairs(
            {text: getattr(before, name) for name, text in COSTS.items()},
            {text: getattr(after, name) for name, text in COSTS.items()},
        ),
        speedup=before.time.ms / after.time.ms if before.time and after.time else None,
    )


def _pairs(before: Costs, after: Costs) -> dict[str, Pair]:
    names = [*before, *(name for name in after if name not in before)]
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _rounded(conflicts: dict[str, float | None]) -> dict[str, float | None]:
    # Tables show one digit; a difference below it would read '1.0 -> 1.0'.
    return {use: None if factor is None else round(factor, 1) for use, factor in conflicts.items()}


def _differences(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """By class, the largest change first; classes that stayed the same are left out."""
    classes = {**before, **after}
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in classes}
    changed = [(name, count) for name, count in counts.items() if count]
    return dict(sorted(changed, key=lambda item: (-abs(item[1]), item[0])))


def _ratio(after: int | None, before: int | None) -> float | None:
    return after / before if after is not None and before else None
