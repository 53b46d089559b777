"""The implementations that are timed: attention(), attention_with_cache(), flashsmith's kernels by
config, and peers."""

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
)
from flashsmith.chooser import attention, attention_with_cache
from flashsmith.families import KernelConfig

OURS = "ours"
# attention_with_cache(split='free').
OURS_FREE = "ours_free"


class ProvableImplementation(Implementation, Protocol):
    """An implementation that can be timed and whose output can be compared."""

    def output(self) -> Any:
        """The output of one launch, in q's layout. Elements that flashsmith did not write are
        NaN."""

    def result(self, returned: Any) -> Any:
        """The output of a launch in q's layout, from the value that the launch returned."""


@dataclass(frozen=True)
class KernelImplementation:
    """A flashsmith kernel on one workload, whose output tensors it writes.

    ``note`` says how the kernel is called, unless attention() or forward() calls it.
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
        """The workload's output, filled with NaN before one call writes it."""
        self.workload.poison()
        return self.result(self.call())

    def result(self, returned: Any) -> Any:
        """The workload's output; the returned value is ignored."""
        return self.workload.output


@dataclass(frozen=True)
class GradientImplementation(KernelImplementation):
    """Backward kernels as called by PyTorch's autograd, which allocates the gradients."""

    def output(self) -> dict[str, Any]:
        """The gradients by name, from memory that is allocated as NaN."""
        with _empty_memory_is_nan():
            return self.result(self.call())

    def result(self, returned: Any) -> dict[str, Any]:
        """The gradients by name."""
        assert isinstance(self.workload, BackwardWorkload)
        return self.workload.by_name(returned)


def kernel_implementation(config: KernelConfig, workload: AnyWorkload) -> KernelImplementation:
    """All launches of one call of the kernel that ``config`` names."""
    prepared = isinstance(workload, (BackwardWorkload, DecodeWorkload))
    note = "prepared call" if prepared else ""
    return KernelImplementation(str(config), config, workload, workload.call(config), note)


def attention_implementation(
    config: KernelConfig, workload: Any, name: str = OURS
) -> KernelImplementation:
    """attention() or attention_with_cache(), which choose a kernel at each call; ``config`` is that
    choice. The name OURS_FREE means split='free'.

    This calls the chooser's own function, because `flashsmith.attention` takes another 0.5 us to
    ask PyTorch whether it is tracing.
    """
    w = workload
    if isinstance(w, DecodeWorkload):
        split = "free" if name == OURS_FREE else "invariant"
        tensors, options = (w.q, w.k_cache, w.v_cache), {**w.options, "split": split}
        call = partial(attention_with_cache, *tensors, out=w.o, **options)
    else:
        call = partial(attention, w.q, w.k, w.v, out=w.o, **w.options)
    return KernelImplementation(name, config, w, call)


def gradient_implementation(
    name: str, config: KernelConfig, workload: BackwardWorkload, backward_config: Any = None
) -> GradientImplementation:
    """The gradients of `flashsmith.attention` on PyTorch tensors, computed through autograd as for
    peers.

    With ``backward_config`` None, the call chooses the backward kernel, which is ``config``.
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
    """The graph of an implementation's calls on several sets of tensors, made by Replay.of(), and
    the output that one replay writes.

    The output comes from the first set's call. Its tensors are filled with NaN before the replay.

    Raises any error of the calls and of capturing.
    """
    returned: list[Any] = [None]

    def launch() -> Any:
        # On replay, a graph writes the same tensors that its calls returned during capture.
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
    """Makes PyTorch fill newly allocated memory with NaN. Otherwise an unwritten gradient could
    reuse an earlier gradient's memory, with correct contents."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
