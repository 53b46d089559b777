"""Labels: texts of files made fit for a picture."""

from __future__ import annotations

from flashsmith.printable import printable

# A longer one leaves no room for the chart; the knobs of every config that ships have fewer.
MOST_CHARACTERS = 105


def label(text: str) -> str:
    """A text of a file as a picture can show it: no formula, no control character, not too long."""
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS - 1]}…"
    # Two dollars would make a formula of what stands between them.
    return printable(text, lines=True).replace("$", r"\$")
