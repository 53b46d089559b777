"""Calls the CUDA driver for GPUs and their memory, without any kernel library.

The calls go through ctypes, so they need neither PyTorch nor a compiled library.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

from flashsmith.errors import ArgumentError, LaunchError
from flashsmith.families import DeviceSpec
from flashsmith.runtime import process_forks

# CUdevice_attribute codes (cuda.h).
_SM_COUNT = 16
_L2_BYTES = 38
_THREADS_PER_SM = 39
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_SMEM_PER_SM = 81
_REGISTERS_PER_SM = 82
_SMEM_PER_BLOCK_OPTIN = 97
_CTAS_PER_SM = 106

# CUresult codes that mean 'no GPU'. The toolkit's stub library, which has no driver behind it,
# returns the first; the second means that there is no device.
_NO_GPU = (34, 100)
_NO_CONTEXT = 201
_NOT_READY = 600
# In this mode a graph capture by another thread does not restrict this thread's calls.
_RELAXED_CAPTURE = 2
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says which memory it is
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
# CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU that is served.
_LONGEST_STEP = (1 << 31) - 1
_WORD = (1 << 32) - 1  # the largest 32-bit word

# For each CUDA major version, the oldest driver that runs programs linked with that version.
_OLDEST_DRIVERS = {12: 525, 13: 580}
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    """Returns the initialised libcuda; None without a driver or a GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    process_forks.check_not_forked()
    status = library.cuInit(0)
    if status in _NO_GPU:
        return None
    _check(library, status, "cuInit")
    process_forks.note_cuda_use()
    return library


def _check(library: ctypes.CDLL, status: int, what: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorString(status, ctypes.byref(text))
    words = text.value.decode() if text.value else "unknown error"
    raise LaunchError(f"{what}: CUDA error {status}: {words}")


def call(what: str, *args: object) -> None:
    """Calls one driver function and checks its status.

    Raises LaunchError, with CUDA's message, if the call fails, and also when there is no driver or
    GPU.
    """
    process_forks.check_not_forked()
    library = _load()
    if library is None:
        raise LaunchError(f"{what}: no NVIDIA driver or GPU on this machine")
    _check(library, getattr(library, what)(*args), what)


def fill(address: int, byte: int, nbytes: int, ordinal: int, stream: int) -> None:
    """Sets memory of GPU ``ordinal`` to ``byte``, in stream order."""
    with current_gpu(ordinal):
        call(
            "cuMemsetD8Async",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(byte),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )


def copy(to: int, source: int, nbytes: int, ordinal: int, stream: int) -> None:
    """Copies memory within GPU ``ordinal``, or between it and another GPU, in stream order."""
    # These lines are repeated in each such function, because a shared helper would add as much time
    # as the driver call takes.
    if status := _function_on_stream("cuMemcpyAsync")(to, source, nbytes, stream):
        _again(status, "cuMemcpyAsync", ordinal, to, source, nbytes, stream)


def copy_rows(
    to: int, to_step: int, source: int, step: int, width: int, rows: int, ordinal: int, stream: int
) -> None:
    """Copies ``rows`` rows of ``width`` bytes, as copy() does.

    Rows begin ``to_step`` bytes apart at the target, and ``step`` bytes apart at the source.
    """
    if rows < 2 or max(to_step, step) > _LONGEST_STEP:
        for row in range(rows if width else 0):
            copy(to + row * to_step, source + row * step, width, ordinal, stream)
        return
    place, other = (0, 0, _UNIFIED, 0, source, 0, step), (0, 0, _UNIFIED, 0, to, 0, to_step)
    described = _ROWS.pack(*place, *other, width, rows)
    if status := _function_on_stream("cuMemcpy2DAsync_v2")(described, stream):
        _again(status, "cuMemcpy2DAsync_v2", ordinal, described, stream)


def words(
    written: Sequence[tuple[int, int]],
    awaited: Sequence[tuple[int, int]],
    ordinal: int,
    stream: int,
) -> None:
    """Enqueues writes of 32-bit words of any GPU, and then a wait until each awaited word of GPU
    ``ordinal`` has reached its value. Words are (address, value). The comparison is modulo 2^32, so
    0 counts as larger than the largest word. A single driver call does all of this."""
    steps = [_STEP.pack(_WRITE, address, value & _WORD, 0, 0) for address, value in written]
    steps += [_STEP.pack(_WAIT, address, value & _WORD, _AT_LEAST, 0) for address, value in awaited]
    if not steps:
        return
    asked = stream, len(steps), b"".join(steps), 0
    if status := _function_on_stream("cuStreamBatchMemOp_v2")(*asked):
        _again(status, "cuStreamBatchMemOp_v2", ordinal, *asked)


def is_reached(event: int, ordinal: int) -> bool:
    """Whether GPU ``ordinal`` has completed the work before an event's latest record. Safe to call
    from any thread; the GIL is not held while the driver blocks."""
    library = _load()
    if library is None:
        raise LaunchError("cuEventQuery: no NVIDIA driver or GPU on this machine")
    with current_gpu(ordinal):
        mode = ctypes.c_int(_RELAXED_CAPTURE)
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        status = library.cuEventQuery(ctypes.c_void_p(event))
    if status != _NOT_READY:
        _check(library, status, "cuEventQuery")
    return status == 0


# CUDA_MEMCPY2D of cuda.h. The source and then the target each have x, y, the kind of memory, a host
# address, a GPU address, an array and a pitch; the width and the number of rows follow.
_ROWS = struct.Struct(2 * "NNiPPPN" + "NN")
# CUstreamBatchMemOpParams of cuda.h: the operation, an address, a value, flags, and a word of the
# driver's; the union is as long as 6 words of 64 bits.
_STEP = struct.Struct("I4xQQI4xQ8x")
_WAIT, _WRITE = 1, 2
_SIZE, _STREAM, _NUMBER = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint32
_ADDRESS = ctypes.c_uint64
# The argument types of the functions that take a stream, by the function's name.
_ON_STREAM: dict[str, tuple[type, ...]] = {
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _STREAM),
    "cuMemcpy2DAsync_v2": (_STREAM, _STREAM),
    "cuStreamBatchMemOp_v2": (_STREAM, _NUMBER, _STREAM, _NUMBER),
}


def _again(status: int, what: str, ordinal: int, *arguments: int | bytes) -> None:
    """Repeats a call that failed because the thread has no context yet; raises the error for any
    other status."""
    if status == _NO_CONTEXT:
        with current_gpu(ordinal):
            status = _function_on_stream(what)(*arguments)
    if status:
        library = _load()
        assert library is not None
        _check(library, status, what)


@cache
def _function_on_stream(what: str) -> Callable[..., int]:
    # With declared argument types a call takes only 3 us.
    library = _load()
    if library is None:
        raise LaunchError(f"{what}: no NVIDIA driver or GPU on this machine")
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *_ON_STREAM[what])
    return kind((what, library))


def gpu_count() -> int:
    """Returns the number of GPUs that CUDA_VISIBLE_DEVICES leaves to this process; 0 without a
    driver."""
    if _load() is None:
        return 0
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def _attribute(device: int, attribute: int) -> int:
    value = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    return value.value


def driver_version() -> str:
    """Returns the version of NVIDIA's kernel module, such as '550.54.15'; '' if it is unknown."""
    try:
        words = _KERNEL_MODULE.read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def cuda_version() -> tuple[int, int]:
    """Returns the newest CUDA version that the driver supports. Raises LaunchError without a
    driver."""
    version = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def check_runs(linked: str) -> None:
    """Raises LaunchError if the driver is too old for a library linked with CUDA release
    ``linked``.

    A driver runs libraries linked with any CUDA release (such as '13.0.88') of its own or an older
    major version. Does nothing without a driver.
    """
    if _load() is None:
        return
    needed = int(linked.partition(".")[0])
    major, minor = cuda_version()
    if major >= needed:
        return
    release, oldest = driver_version(), _OLDEST_DRIVERS.get(needed)
    raise LaunchError(
        f"the NVIDIA driver {release + ' ' if release else ''}runs CUDA {major}.{minor} and older, "
        f"and this kernel library links CUDA {'.'.join(linked.split('.')[:2])}, which needs "
        f"{f'driver {oldest} or newer' if oldest else 'a newer driver'}: update the driver. Or "
        f"build with an older CUDA: point CUDA_HOME at a CUDA {major} toolkit and run "
        "'flashsmith cache clear'"
    )


@cache
def query_gpu(ordinal: int) -> DeviceSpec:
    """Returns the limits of GPU ``ordinal``, queried once.

    Raises ArgumentError when there is no such GPU.
    """
    count = gpu_count()
    if not 0 <= ordinal < count:
        raise ArgumentError(f"device: GPU {ordinal} does not exist; this process sees {count}")
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(256)
    call("cuDeviceGetName", name, len(name), device)
    handle = device.value
    major, minor = _attribute(handle, _CAPABILITY_MAJOR), _attribute(handle, _CAPABILITY_MINOR)
    return DeviceSpec(
        name=name.value.decode(),
        arch=10 * major + minor,
        sm_count=_attribute(handle, _SM_COUNT),
        max_smem_per_block=_attribute(handle, _SMEM_PER_BLOCK_OPTIN),
        max_smem_per_sm=_attribute(handle, _SMEM_PER_SM),
        max_threads_per_sm=_attribute(handle, _THREADS_PER_SM),
        max_ctas_per_sm=_attribute(handle, _CTAS_PER_SM),
        l2_bytes=_attribute(handle, _L2_BYTES),
        registers_per_sm=_attribute(handle, _REGISTERS_PER_SM),
    )


@cache
def _primary_context(ordinal: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def current_gpu(ordinal: int) -> Iterator[None]:
    """Makes GPU ``ordinal`` current for the driver calls in the block; restores the previous GPU
    afterwards."""
    call("cuCtxPushCurrent_v2", _primary_context(ordinal))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
