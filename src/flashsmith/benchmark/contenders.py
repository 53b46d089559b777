"""Contenders of ours: attention(), and kernels by their configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from flashsmith.benchmark.timing import Contender
from flashsmith.benchmark.workload import Workload
from flashsmith.chooser import attention
from flashsmith.families import KernelConfig
from flashsmith.runtime import forward

OURS = "ours"


class JudgedContender(Contender, Protocol):
    """A contender whose output can be looked at."""

    def output(self) -> Any:
        """What one launch computes, in q's layout; NaN where ours wrote nothing."""


@dataclass(frozen=True)
class KernelContender:
    """A kernel of ours on one workload, whose o it writes."""

    name: str
    config: KernelConfig
    workload: Workload
    call: Callable[[], Any]

    def launch(self) -> Any:
        """Enqueues one call."""
        return self.call()

    def output(self) -> Any:
        """The workload's o, written over NaN."""
        self.workload.place.poison(self.workload.o)
        self.call()
        return self.workload.o


def kernel_contender(config: KernelConfig, workload: Workload) -> KernelContender:
    """The kernel that ``config`` names."""
    w = workload
    call = partial(forward, config, w.q, w.k, w.v, w.o, **w.options)
    return KernelContender(str(config), config, w, call)


def attention_contender(config: KernelConfig, workload: Workload) -> KernelContender:
    """attention(), which chooses the kernel at each call: ``config``'s.

    The chooser's own, without the half microsecond in which `flashsmith.attention` asks PyTorch
    whether it is tracing.
    """
    w = workload
    return KernelContender(OURS, config, w, partial(attention, w.q, w.k, w.v, out=w.o, **w.options))
