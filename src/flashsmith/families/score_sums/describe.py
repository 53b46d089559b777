"""Descriptions of the score_sums family for reports."""

from __future__ import annotations


def registers_in_words(registers: int) -> str:
    """The registers per thread as a string."""
    return f"{registers} of 255, of which 96 are S, dP and the sums of a tile"
