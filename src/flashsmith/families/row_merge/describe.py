"""Describes the kernels of the row_merge family, for reports."""

from __future__ import annotations


def registers_in_words(registers: int) -> str:
    """The number of registers per thread, as words for a report."""
    return f"{registers} of 255, most of them for parts in flight"
