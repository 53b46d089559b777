"""What is timed: attention(), attention_with_cache(), kernels of ours by their configs, and
peers."""

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
    """What can be timed, and whose output can be compared."""

    def output(self) -> Any:
        """What one launch computes, in q's layout; NaN where ours wrote nothing."""

    def result(self, returned: Any) -> Any:
        """The same of what a launch returned."""


@dataclass(frozen=True)
class KernelImplementation:
    """A kernel of ours on one workload, whose outputs it writes. ``note``: by what means, where
    that is not attention() or forward()."""

    name: str
    config: KernelConfig
    workload: AnyWorkload
    call: Callable[[], Any]
    note: str = ""

    def launch(self) -> Any:
        """Enqueues one call."""
        return self.call()

    def output(self) -> Any:
        """What the workload has for an output, written over NaN."""
        self.workload.poison()
        return self.result(self.call())

    def result(self, returned: Any) -> Any:
        """What the workload has for an output, whatever was returned."""
        return self.workload.output


@dataclass(frozen=True)
class GradientImplementation(KernelImplementation):
    """Kernels of a backward pass as PyTorch's autograd calls them: it has the gradients made."""

    def output(self) -> dict[str, Any]:
        """The gradients by name, allocated as NaN."""
        with _empty_memory_is_nan():
            return self.result(self.call())

    def result(self, returned: Any) -> dict[str, Any]:
        """The gradients by name."""
        assert isinstance(self.workload, BackwardWorkload)
        return self.workload.by_name(returned)


def kernel_implementation(config: KernelConfig, workload: AnyWorkload) -> KernelImplementation:
    """The kernel that ``config`` names, all launches of a call."""
    prepared = isinstance(workload, (BackwardWorkload, DecodeWorkload))
    note = "prepared call" if prepared else ""
    return KernelImplementation(str(config), config, workload, workload.call(config), note)


def attention_implementation(
    config: KernelConfig, workload: Any, name: str = OURS
) -> KernelImplementation:
    """attention(), or attention_with_cache(), which choose the kernel at each call: ``config``'s.
    OURS_FREE splits freely.

    The chooser's own, without the half microsecond in which `flashsmith.attention` asks PyTorch
    whether it is tracing.
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
    """The gradients of `flashsmith.attention` on PyTorch's tensors, by the means that peers are
    timed by; ``backward_config`` None: it chooses ``config``."""
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
    """The graph of an implementation's calls on several sets of tensors, as Replay.of() has it; and
    what a replay writes, over NaN, where the first set's calls wrote their output.

    Raises what the calls and capturing raise.
    """
    returned: list[Any] = [None]

    def launch() -> Any:
        # A graph's calls write again what they returned while they were captured.
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
    """Has PyTorch fill what it allocates: else a gradient that nobody wrote may be an earlier one's
    memory, with its contents."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
