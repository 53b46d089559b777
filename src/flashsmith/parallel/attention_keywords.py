"""The keywords of flashsmith.parallel.attention() that do not affect the type of the result.

Only type checkers need this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import torch


class ParallelKeywords(TypedDict, total=False):
    """The keywords that all overloads share."""

    group: Any
    schedule: str
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float
    scale: float | None
    sinks: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    out: torch.Tensor | None
    config: Any
    backward_config: Any
    deterministic: bool | None
    emulate: bool
    bits: str | None
