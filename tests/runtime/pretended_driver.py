"""A CUDA driver that is not there: one GPU whose memory is the host's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from flashsmith.runtime import driver, query_gpu

# CUdevice_attribute: value, as an H200 answers.
H200 = {
    16: 132,
    38: 60 << 20,
    39: 2048,
    75: 9,
    76: 0,
    81: 233472,
    82: 65536,
    97: 232448,
    106: 32,
}
OUT_OF_MEMORY = 2


class PretendedDriver:
    """``calls`` names what was called, ``streams`` what was allocated and freed in their order."""

    def __init__(self) -> None:
        self.version = 13000
        self.calls: list[str] = []
        self.memory: dict[int, Any] = {}
        self.streams: list[tuple[str, int | None]] = []
        self.current: list[int] = []

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"unexpected driver call {name}")

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 70 + ordinal
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert device == 70
        value._obj.value = H200[attribute]
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = {OUT_OF_MEMORY: b"out of memory"}.get(status)
        return 0 if status == OUT_OF_MEMORY else 1

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 4711
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current.pop()
        return 0

    def cuCtxSynchronize(self) -> int:
        self.calls.append("synchronize")
        return 0

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        assert self.current == [4711]
        if size.value > 1 << 30:
            return OUT_OF_MEMORY
        block = ctypes.create_string_buffer(size.value + 255)
        address._obj.value = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address._obj.value] = block
        return 0

    def cuMemFree_v2(self, address: Any) -> int:
        del self.memory[address.value]
        return 0

    def cuMemAllocAsync(self, address: Any, size: Any, stream: Any) -> int:
        self.streams.append(("allocate", stream.value))
        return self.cuMemAlloc_v2(address, size)

    def cuMemFreeAsync(self, address: Any, stream: Any) -> int:
        self.streams.append(("free", stream.value))
        return self.cuMemFree_v2(address)

    def cuMemsetD8Async(self, to: Any, value: Any, size: Any, stream: Any) -> int:
        assert self.current == [4711]
        self.streams.append(("fill", stream.value))
        ctypes.memset(to.value, value.value, size.value)
        return 0

    def cuMemcpyHtoD_v2(self, to: Any, source: Any, size: Any) -> int:
        ctypes.memmove(to.value, source.value, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, to: Any, source: Any, size: Any) -> int:
        assert self.calls == ["synchronize"]
        ctypes.memmove(to.value, source.value, size.value)
        return 0


@contextmanager
def pretended_driver() -> Iterator[PretendedDriver]:
    """It takes the driver's place until the end of the block."""
    library = PretendedDriver()
    cached = (query_gpu, driver._primary_context)
    with mock.patch.object(driver, "_load", return_value=library):
        for function in cached:
            function.cache_clear()
        try:
            yield library
        finally:
            for function in cached:
                function.cache_clear()
