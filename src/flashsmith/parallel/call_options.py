"""The keywords of parallel.attention() in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashsmith.semantics.signature import NO_WINDOW


class CallOptions(NamedTuple):
    """The keywords of parallel.attention()."""

    schedule: Any = "auto"
    causal: Any = False
    window: Any = NO_WINDOW
    softcap: Any = 0.0
    scale: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    out: Any = None
    return_lse: Any = False
    return_row_max: Any = False
    config: Any = None
    backward_config: Any = None
    deterministic: Any = None
    emulate: Any = False
    bits: Any = None
