"""The clock of measurements: events on a CUDA stream, between which the GPU's time is taken."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any
from typing import Protocol as Interface

import numpy as np

from flashsmith.errors import LaunchError
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.device_array import DeviceArray


class Clock(Interface):
    """A stream that executes work in order, with events that mark times."""

    def running(self) -> AbstractContextManager[None]:
        """The context in which all other methods are called and all launches are made."""

    def events(self, count: int) -> list[Any]:
        """Creates ``count`` events, before anything is timed."""

    def record(self, event: Any) -> None:
        """Records an event after all work enqueued so far; does not wait."""

    def flush(self) -> None:
        """Enqueues work that evicts everything from the L2; does not wait."""

    def synchronize(self) -> None:
        """Waits for all work enqueued so far. Raises LaunchError if some of it failed."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """The milliseconds between two events, which must have completed."""

    @property
    def can_capture(self) -> bool:
        """Whether calls can be captured in a CUDA graph."""

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """Captures the calls in a graph, after one warm-up of each.

        Returns a function that launches the graph. Raises any error that a call or the capture
        raises.
        """


# Triton's do_bench overwrites this many bytes; we overwrite as many, or twice the size of the L2 if
# that is more.
FLUSHED_BYTES = 256_000_000


class CudaEvents:
    """CUDA events on one stream of GPU ``ordinal``.

    ``stream`` is the handle of a stream. None stands for PyTorch's current stream if PyTorch uses
    the GPU, otherwise for the default stream. Events are valid until the next call of events().

    Raises LaunchError if there is no such GPU.
    """

    def __init__(self, ordinal: int = 0, stream: int | None = None) -> None:
        count = driver.gpu_count()
        if ordinal >= count:
            seen = f"sees {count}, but GPU {ordinal} was requested" if count else "sees none"
            raise LaunchError(
                f"timing needs an NVIDIA GPU, and this process {seen}; without one "
                "'flashsmith run' proves kernels in the emulator and counts what they do"
            )
        self.ordinal = ordinal
        self._wanted = stream
        self._stream = ctypes.c_void_p(stream)
        self._pool: list[ctypes.c_void_p] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes the GPU current and finds the stream."""
        stream = _current_stream(self.ordinal) if self._wanted is None else self._wanted
        self._stream = ctypes.c_void_p(stream)
        with driver.current_gpu(self.ordinal):
            try:
                yield
            finally:
                self._destroy_events()

    def events(self, count: int) -> list[ctypes.c_void_p]:
        """Events that record times; they can be recorded again."""
        while len(self._pool) < count:
            event = ctypes.c_void_p()
            driver.call("cuEventCreate", ctypes.byref(event), 0)
            self._pool.append(event)
        return self._pool[:count]

    def record(self, event: ctypes.c_void_p) -> None:
        """Records an event on the stream; does not wait."""
        driver.call("cuEventRecord", event, self._stream)

    def flush(self) -> None:
        """Overwrites more bytes than the L2 holds; does not wait."""
        buffer = self._buffer
        words = ctypes.c_size_t(buffer.nbytes // 4)
        driver.call("cuMemsetD32Async", ctypes.c_uint64(buffer.address), 0, words, self._stream)

    def synchronize(self) -> None:
        """Waits for the stream."""
        driver.call("cuStreamSynchronize", self._stream)

    def elapsed_ms(self, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """The milliseconds between two completed events; the resolution is half a microsecond at
        best."""
        milliseconds = ctypes.c_float()
        driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value

    @property
    def can_capture(self) -> bool:
        """Whether PyTorch uses the GPU, because calls in a graph need its memory pool."""
        return _torch_on_gpu() is not None

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """Captures the calls in a CUDA graph by PyTorch. Returns the function that replays it."""
        torch = _torch_on_gpu()
        assert torch is not None
        # The default stream cannot be captured. The calls run once on the new stream before the
        # capture, so that first allocations, loading of modules and choice of kernels are not in
        # the graph.
        stream = torch.cuda.Stream(self.ordinal)
        stream.wait_stream(torch.cuda.current_stream(self.ordinal))
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        return partial(_replay, graph, tuple(calls))

    @cached_property
    def _buffer(self) -> DeviceArray:
        size = max(FLUSHED_BYTES, 2 * driver.query_gpu(self.ordinal).l2_bytes)
        return DeviceArray.empty((size // 4,), np.dtype(np.uint32), self.ordinal)

    def _destroy_events(self) -> None:
        # After a kernel has failed, events cannot be destroyed. The failure is reported elsewhere.
        pool, self._pool = self._pool, []
        for event in pool:
            try:
                driver.call("cuEventDestroy_v2", event)
            except LaunchError:
                return


def _replay(graph: Any, calls: tuple[Callable[[], Any], ...]) -> None:
    """Replays the graph. ``calls`` is unused; it keeps the graph's tensors alive."""
    graph.replay()


def _torch_on_gpu() -> Any:
    """The module torch if PyTorch has already initialised the GPU, otherwise None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _current_stream(ordinal: int) -> int:
    """PyTorch's current stream if PyTorch uses the GPU, otherwise the default stream."""
    torch = _torch_on_gpu()
    if torch is None:
        return 0
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def require_usable_gpu(clock: Clock, culprit: str) -> None:
    """Raises LaunchError, which names `culprit`, if a failure has left the GPU unusable: all
    further launches of this process would fail."""
    try:
        with clock.running():
            clock.synchronize()
    except LaunchError as error:
        raise LaunchError(
            f"{culprit} left the GPU unusable to this process ({error}); leave it out and run again"
        ) from None
