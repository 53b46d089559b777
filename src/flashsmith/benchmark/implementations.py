"""The implementations that can be timed: attention(), attention_with_cache(), the kernels of
flashsmith, each selected by its config, and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import flashsmith
from flashsmith.benchmark.tensor_memory import TensorMemory
from flashsmith.benchmark.timing import Clock, Implementation, Replay
from flashsmith.benchmark.workload import (
    AnyWorkload,
    BackwardWorkload,
    DecodeWorkload,
    LatentDecodeWorkload,
)
from flashsmith.chooser import attention, attention_with_cache
from flashsmith.families import KernelConfig

OURS = "ours"
# The name of attention_with_cache(split='free').
OURS_FREE = "ours_free"


class ProvableImplementation(Implementation, Protocol):
    """An implementation that can be timed and whose output can be compared."""

    def output(self) -> Any:
        """Runs one launch and returns its output in q's layout.

        Elements that flashsmith has not written are NaN.
        """

    def result(self, returned: Any) -> Any:
        """Makes the output, in q's layout, from the value that a launch returned."""


@dataclass(frozen=True)
class KernelImplementation:
    """A kernel of flashsmith with the tensors of one workload. It writes the output tensor of the
    workload.

    ``note`` names the function that calls the kernel if it is neither attention() nor forward().
    """

    name: str
    config: KernelConfig
    workload: AnyWorkload
    call: Callable[[], Any]
    note: str = ""

    def launch(self) -> Any:
        """Enqueues one call."""
        return self.call()

    def output(self) -> Any:
        """Fills the workload's output with NaN, runs one call and returns the output."""
        self.workload.poison()
        return self.result(self.call())

    def result(self, returned: Any) -> Any:
        """Returns the output tensor of the workload; ``returned`` is ignored."""
        return self.workload.output


@dataclass(frozen=True)
class GradientImplementation(KernelImplementation):
    """The gradients as PyTorch's autograd computes them through attention(); autograd allocates
    their memory."""

    def output(self) -> dict[str, Any]:
        """Returns the gradients by name. Their memory is filled with NaN when it is allocated."""
        with _empty_memory_is_nan():
            return self.result(self.call())

    def result(self, returned: Any) -> dict[str, Any]:
        """The gradients by name."""
        assert isinstance(self.workload, BackwardWorkload)
        return self.workload.by_name(returned)


def kernel_implementation(config: KernelConfig, workload: AnyWorkload) -> KernelImplementation:
    """Returns the implementation that directly calls the kernel of ``config``, with all launches of
    the call."""
    prepared = isinstance(workload, (BackwardWorkload, DecodeWorkload))
    note = "prepared call" if prepared else ""
    return KernelImplementation(str(config), config, workload, workload.call(config), note)


def attention_implementation(
    config: KernelConfig, workload: Any, name: str = OURS
) -> KernelImplementation:
    """Returns the implementation that calls attention() or attention_with_cache(), which choose a
    kernel at each call.

    ``config`` is the config that the function chooses. The name OURS_FREE stands for split='free'.

    The implementation calls the function that `flashsmith.attention` wraps, because the wrapper
    takes 0.5 us to find out whether PyTorch is tracing.
    """
    w = workload
    split = "free" if name == OURS_FREE else "invariant"
    if isinstance(w, DecodeWorkload):
        caches = [w.k_cache] if isinstance(w, LatentDecodeWorkload) else [w.k_cache, w.v_cache]
        options = {**w.options, "split": split}
        call = partial(attention_with_cache, w.q, *caches, out=w.o, **options)
    else:
        call = partial(attention, w.q, w.k, w.v, out=w.o, **w.options)
    return KernelImplementation(name, config, w, call)


def gradient_implementation(
    name: str, config: KernelConfig, workload: BackwardWorkload, backward_config: Any = None
) -> GradientImplementation:
    """Returns the implementation that computes the gradients of `flashsmith.attention` on PyTorch
    tensors by autograd, as peers do.

    If ``backward_config`` is None, the call chooses the backward kernel itself. ``config`` is the
    config of the backward kernel in either case.
    """
    forward = partial(flashsmith.attention, **workload.options, backward_config=backward_config)
    call = workload.differentiated(forward)
    return GradientImplementation(name, config, workload, call, "torch.autograd.grad")


def captured(
    name: str,
    implementations: Sequence[ProvableImplementation],
    clock: Clock,
    memory: TensorMemory,
    least: int | None = None,
) -> tuple[Replay, Any]:
    """Captures the calls of an implementation on several sets of tensors in a graph, by
    Replay.of().

    Returns the graph and the output of one replay.

    The output belongs to the first set of tensors. It is filled with NaN before the replay.

    Raises any error that a call or the capture raises.
    """
    returned: list[Any] = [None]

    def launch() -> Any:
        # A replay writes to the tensors that the calls returned during the capture.
        returned[0] = implementations[0].launch()
        return returned[0]

    calls = [launch, *(it.launch for it in implementations[1:])]
    replay = Replay.of(name, calls, clock, least)
    with clock.running():
        output = implementations[0].result(returned[0])
        for tensor in output.values() if isinstance(output, Mapping) else (output,):
            memory.poison(tensor)
        replay.launch()
        clock.synchronize()
    return replay, implementations[0].result(returned[0])


@contextmanager
def _empty_memory_is_nan() -> Iterator[None]:
    """Makes PyTorch fill the memory that it allocates with NaN.

    Otherwise a gradient that was not written could reuse the memory of an earlier gradient, which
    had the correct values.
    """
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
