"""Labels: texts of files made fit for a picture, and places where none covers another."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.printable import printable

# A longer one leaves no room for the chart; the knobs of every config that ships have fewer.
MOST_CHARACTERS = 105


def label(text: str) -> str:
    """A text of a file as a picture can show it: no formula, no control character, not too long."""
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS - 1]}…"
    # Two dollars would make a formula of what stands between them.
    return printable(text, lines=True).replace("$", r"\$")


def spread_out(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions near the wanted ones, in their order, at least `gap` apart.

    Labels that would overlap move apart as a block around the mean of where they belong.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[tuple[float, int]] = []  # (middle, labels)
    for index in order:
        blocks.append((wanted[index], 1))
        while len(blocks) > 1 and _overlap(blocks[-2], blocks[-1], gap):
            (upper, n_upper), (lower, n_lower) = blocks.pop(), blocks.pop()
            count = n_upper + n_lower
            blocks.append(((upper * n_upper + lower * n_lower) / count, count))
    positions = [
        middle + (place - (count - 1) / 2) * gap
        for middle, count in blocks
        for place in range(count)
    ]
    spread = [0.0] * len(wanted)
    for index, position in zip(order, positions, strict=True):
        spread[index] = position
    return spread


def _overlap(below: tuple[float, int], above: tuple[float, int], gap: float) -> bool:
    return above[0] - below[0] < gap * (below[1] + above[1]) / 2
