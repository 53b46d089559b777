"""The GPU path: the tensors' device, the caller's stream, a checked launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from flashsmith.runtime.call import ForwardCall
from flashsmith.runtime.frameworks import FRAMEWORKS
from flashsmith.runtime.libraries import LoadedKernel
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
    return int(_torch_stream_getter()(view.device.ordinal))


@cache
def _torch_stream_getter() -> Callable[[int], int]:
    """From a GPU's ordinal to the handle of PyTorch's current stream there."""
    import torch

    # Without the Stream object around it: a tenth of the time.
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream)


def run_on_gpu(
    kernel: LoadedKernel, call: ForwardCall, q: TensorView, *, timed: bool
) -> float | None:
    """Launches ``call`` where ``q`` lives. ``timed`` waits and returns milliseconds, else None.

    Raises LaunchError with CUDA's words when the launch is refused.
    """
    stream = current_stream(q)
    if timed:
        return kernel.launch_timed(call, q.device.ordinal, stream)
    kernel.launch(call, q.device.ordinal, stream)
    if q.framework in FRAMEWORKS:
        FRAMEWORKS[q.framework].finish(q.device.ordinal)
    return None
