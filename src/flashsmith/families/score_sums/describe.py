"""Describes the kernels of the score_sums family, for reports."""

from __future__ import annotations


def registers_in_words(registers: int) -> str:
    """The number of registers per thread, as words for a report."""
    return f"{registers} of 255, of which 96 are S, dP and the sums of a tile"
