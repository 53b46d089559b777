"""Contenders of ours: attention(), and kernels by their configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from flashsmith.benchmark.timing import Contender
from flashsmith.benchmark.workload import AnyWorkload
from flashsmith.chooser import attention
from flashsmith.families import KernelConfig

OURS = "ours"


class JudgedContender(Contender, Protocol):
    """A contender whose output can be looked at."""

    def output(self) -> Any:
        """What one launch computes, in q's layout; NaN where ours wrote nothing."""


@dataclass(frozen=True)
class KernelContender:
    """A kernel of ours on one workload, whose outputs it writes."""

    name: str
    config: KernelConfig
    workload: AnyWorkload
    call: Callable[[], Any]

    def launch(self) -> Any:
        """Enqueues one call."""
        return self.call()

    def output(self) -> Any:
        """What the workload has for an output, written over NaN."""
        self.workload.poison()
        self.call()
        return self.workload.output


def kernel_contender(config: KernelConfig, workload: AnyWorkload) -> KernelContender:
    """The kernel that ``config`` names."""
    return KernelContender(str(config), config, workload, workload.call(config))


def attention_contender(config: KernelConfig, workload: Any) -> KernelContender:
    """attention(), which chooses the kernel at each call: ``config``'s.

    The chooser's own, without the half microsecond in which `flashsmith.attention` asks PyTorch
    whether it is tracing.
    """
    w = workload
    return KernelContender(OURS, config, w, partial(attention, w.q, w.k, w.v, out=w.o, **w.options))
