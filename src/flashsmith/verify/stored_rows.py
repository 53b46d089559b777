"""How references write and read the rows of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsmith.families import Problem
from flashsmith.runtime.frameworks.base import NUMPY_DTYPES
from flashsmith.semantics.cache_format import CacheFormat

_LARGEST = {CacheFormat.E4M3: 448.0, CacheFormat.E5M2: 57344.0}
# The scales of caches in proofs and measurements. Neither is a power of two.
TYPICAL_SCALES = {"k_scale_value": 0.75, "v_scale_value": 1.1}


def scales_of(problem: Problem, options: Mapping[str, Any]) -> tuple[float, float]:
    """The scales of keys and values."""
    typical = TYPICAL_SCALES if problem.cache else dict.fromkeys(TYPICAL_SCALES, 1.0)
    k_scale, v_scale = (options.get(name, value) for name, value in typical.items())
    return k_scale, v_scale


def stored(rows: np.ndarray, scale: float, cache: CacheFormat) -> np.ndarray:
    """Rows of 16-bit floats as a cache of this format holds them: quotients by the scale, rounded
    to nearest even. 8-bit floats saturate."""
    if not cache:
        return rows
    with np.errstate(invalid="ignore", over="ignore"):
        quotients = rows.astype(np.float32) / np.float32(scale)
        if not cache.is_8bit:
            return quotients.astype(rows.dtype)
        largest = _LARGEST[cache]
        codes: np.ndarray = np.clip(quotients, -largest, largest).astype(
            NUMPY_DTYPES[cache.numpy_name]
        )
    return codes
