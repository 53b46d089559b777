"""Whether a CUDA graph is being captured: then nothing may wait for the device, or take seconds."""

from __future__ import annotations

import sys

from flashsmith.runtime.frameworks import FRAMEWORKS


def is_capturing(framework: str, ordinal: int) -> bool:
    """Whether the framework's current stream on GPU ``ordinal`` captures what it is given."""
    if framework in FRAMEWORKS:
        return FRAMEWORKS[framework].is_capturing(ordinal)
    torch = sys.modules.get("torch")
    if framework != "torch" or torch is None:
        return False
    with torch.cuda.device(ordinal):
        return bool(torch.cuda.is_current_stream_capturing())
