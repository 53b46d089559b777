"""CudaEvents: the clock of a real GPU, through the driver, so that neither PyTorch nor a compiled
library need be there."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from flashsmith.errors import LaunchError
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.device_array import DeviceArray

# What Triton's do_bench overwrites; on a GPU whose L2 comes near to it, twice the L2.
FLUSHED_BYTES = 256_000_000


class CudaEvents:
    """Events on one stream of GPU ``ordinal``.

    ``stream`` is a handle; None means PyTorch's current stream where PyTorch is at work, else the
    default stream: where the contenders' kernels go. Events may be used until more are asked for.

    Raises LaunchError where there is no such GPU.
    """

    def __init__(self, ordinal: int = 0, stream: int | None = None) -> None:
        count = driver.gpu_count()
        if ordinal >= count:
            seen = f"sees {count}, and GPU {ordinal} is asked for" if count else "sees none"
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
        """Makes the GPU current, and settles which stream is meant."""
        stream = _current_stream(self.ordinal) if self._wanted is None else self._wanted
        self._stream = ctypes.c_void_p(stream)
        with driver.current_gpu(self.ordinal):
            try:
                yield
            finally:
                self._destroy_events()

    def events(self, count: int) -> list[ctypes.c_void_p]:
        """Events with timing, unrecorded or free to be recorded anew."""
        while len(self._pool) < count:
            event = ctypes.c_void_p()
            driver.call("cuEventCreate", ctypes.byref(event), 0)
            self._pool.append(event)
        return self._pool[:count]

    def record(self, event: ctypes.c_void_p) -> None:
        """Sets a mark on the stream; does not wait."""
        driver.call("cuEventRecord", event, self._stream)

    def flush(self) -> None:
        """Overwrites more memory than the L2 holds; does not wait."""
        buffer = self._buffer
        words = ctypes.c_size_t(buffer.nbytes // 4)
        driver.call("cuMemsetD32Async", ctypes.c_uint64(buffer.address), 0, words, self._stream)

    def synchronize(self) -> None:
        """Waits for the stream."""
        driver.call("cuStreamSynchronize", self._stream)

    def elapsed_ms(self, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Milliseconds between two events that have happened, half a microsecond apart at best."""
        milliseconds = ctypes.c_float()
        driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value

    @cached_property
    def _buffer(self) -> DeviceArray:
        size = max(FLUSHED_BYTES, 2 * driver.query_gpu(self.ordinal).l2_bytes)
        return DeviceArray.empty((size // 4,), np.dtype(np.uint32), self.ordinal)

    def _destroy_events(self) -> None:
        # After a kernel failed nothing can be destroyed any more, and that it failed is known.
        pool, self._pool = self._pool, []
        for event in pool:
            try:
                driver.call("cuEventDestroy_v2", event)
            except LaunchError:
                return


def _current_stream(ordinal: int) -> int:
    """PyTorch's current stream, if it uses the GPU; the default stream otherwise."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(ordinal).cuda_stream)
