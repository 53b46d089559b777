"""The public attention(): eager calls go straight to the kernels, traced calls become a custom op
of PyTorch that a compiler can put into a graph."""

from __future__ import annotations

import functools
import sys
from typing import Any

from flashsmith import chooser

# PyTorch once the process has it. A name of this module and no look at sys.modules at every call:
# Dynamo iterates over dictionaries that it reads, and another thread may be importing.
_torch: Any = sys.modules.get("torch")


def is_tracing() -> bool:
    """Whether torch.compile or torch.export is running the caller; never imports torch."""
    torch = _torch or _find_torch()
    return torch is not None and bool(torch.compiler.is_compiling())


def _find_torch() -> Any:
    global _torch
    _torch = sys.modules.get("torch")
    return _torch


@functools.wraps(chooser.attention)
def attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    if is_tracing():
        # Imported only while tracing, when torch is imported already.
        from flashsmith.integrations.torch_ops import traced_attention

        return traced_attention(q, k, v, **keywords)
    return chooser.attention(q, k, v, **keywords)
