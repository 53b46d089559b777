"""Numbers that JSON lacks, infinities and NaN, as words and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def for_json(value: Any) -> Any:
    """`value` as strict JSON takes it, however deep: 'inf', '-inf' and 'nan' for those numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: for_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(part) for part in value]
    return value


def from_json(value: Any) -> float | None:
    """The number that for_json() was given, or None. Raises ValueError for any other word."""
    return None if value is None else float(value)
