"""The GPU path: the tensors' device, the caller's stream, a checked launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from flashsmith.runtime.call import ForwardCall
from flashsmith.runtime.frameworks import FRAMEWORKS
from flashsmith.runtime.tensors import TensorView

_DEFAULT_STREAM = 0


def current_stream(view: TensorView) -> int:
    """Handle of the stream that the tensor's framework would use on the tensor's own device.

    Asked of the framework for every call: which device is current does not matter then, and no
    environment has to hand the stream over.
    """
    if view.framework in FRAMEWORKS:
        return FRAMEWORKS[view.framework].current_stream(view.device.ordinal)
    if view.framework != "torch":
        return _DEFAULT_STREAM
    return int(torch_stream_getter()(view.device.ordinal))


@cache
def torch_stream_getter() -> Callable[[int], int]:
    """From a GPU's ordinal to the handle of PyTorch's current stream there."""
    import torch

    # Without the Stream object around it: a tenth of the time.
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream)


def run_on_gpu(launch: Callable[..., Any], call: ForwardCall, q: TensorView) -> Any:
    """Launches ``call`` where ``q`` lives, by what its kernel prepared for it.

    Returns milliseconds if prepared so, else None. Raises LaunchError when the launch is refused.
    """
    result = launch(current_stream(q), *call.addresses)
    if q.framework in FRAMEWORKS:
        FRAMEWORKS[q.framework].finish(q.device.ordinal)
    return result
