"""The search space of the score_sums family."""

from __future__ import annotations

from flashsmith.families.score_sums.config import ScoreSumsKernelConfig
from flashsmith.semantics.dtype import DType


def search_space(dtype: DType, d_head: int) -> list[ScoreSumsKernelConfig]:
    """Returns the only config for d_head."""
    return [ScoreSumsKernelConfig(dtype, d_head)]
