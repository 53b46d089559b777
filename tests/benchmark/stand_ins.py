"""Stand-ins for a GPU: a clock that only moves when work is enqueued, tensors on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashsmith.families import DType
from flashsmith.runtime.frameworks.base import NUMPY_DTYPES
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.verify.proof_inputs import numpy_dtype


@dataclass
class Mark:
    at: float | None = None


@dataclass
class PretendedClock:
    """``log`` tells what was asked for, in order; a flush takes ``flush_ms``.

    ``slowdown`` stretches what begins at a moment: a clock that drifts. ``tick`` passes between two
    marks even if nothing that the clock knows of does.
    """

    flush_ms: float = 0.1
    slowdown: Callable[[float], float] = lambda now: 1.0
    now: float = 0.0
    tick: float = 0.0
    log: list[str] = field(default_factory=list)
    can_capture: bool = True

    @contextmanager
    def running(self) -> Iterator[None]:
        self.log.append("begin")
        try:
            yield
        finally:
            self.log.append("end")

    def work(self, name: str, ms: float) -> None:
        self.log.append(name)
        self.now += ms * self.slowdown(self.now)

    def events(self, count: int) -> list[Mark]:
        self.log.append("events")
        return [Mark() for _ in range(count)]

    def record(self, event: Mark) -> None:
        self.log.append("|")
        event.at = self.now
        self.now += self.tick

    def flush(self) -> None:
        self.work("flush", self.flush_ms)

    def synchronize(self) -> None:
        self.log.append("wait")

    def elapsed_ms(self, begin: Mark, end: Mark) -> float:
        assert begin.at is not None
        assert end.at is not None
        assert self.log[-1] == "wait", "read before the work was waited for"
        return end.at - begin.at

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """Its replay logs 'graph', and what the calls do."""
        self.log.append("capture")

        def replay() -> None:
            self.log.append("graph")
            for call in calls:
                call()

        return replay


@dataclass
class PretendedImplementation:
    name: str
    ms: float
    clock: PretendedClock

    def launch(self) -> None:
        self.clock.work(self.name, self.ms)


class HostMemory:
    """NumPy's arrays in a GPU's place: kernels run in the emulator on them."""

    def draw(
        self, shape: tuple[int, ...], dtype: DType, seed: int, cache: Any = CacheFormat.PLAIN
    ) -> np.ndarray:
        numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        drawn = numbers.astype(numpy_dtype(dtype))
        return drawn.astype(NUMPY_DTYPES[cache.numpy_name]) if cache.is_8bit else drawn

    def put(self, array: np.ndarray) -> np.ndarray:
        return array

    def fetch(self, tensor: np.ndarray) -> np.ndarray:
        return tensor

    def poison(self, tensor: Any) -> None:
        tensor.fill(math.nan)

    def nonfinite(self, tensor: Any) -> int:
        return int((~np.isfinite(self.fetch(tensor).astype(np.float32))).sum())

    def head(self, tensor: Any, at: tuple[int | slice, ...], head: int) -> np.ndarray:
        return np.asarray(tensor[at][..., head, :])
