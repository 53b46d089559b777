"""Runs a micro kernel on the present NVIDIA GPU through the driver API: PTX in, bytes out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache


@cache
def _driver() -> ctypes.CDLL:
    """libcuda with a current context on the first GPU."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "the context")
    _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return driver


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")


def execute(
    ptx: str,
    entry: str,
    threads: int,
    inputs: Sequence[bytes],
    output_sizes: Sequence[int],
    ctas: int = 1,
) -> list[bytes]:
    """``ctas`` CTAs of ``threads`` threads; the entry takes the input and output pointers in
    order."""
    driver = _driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), ptx.encode() + b"\0"), "loading the PTX")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), "lookup")
    pointers = []
    for size in [*map(len, inputs), *output_sizes]:
        pointer = ctypes.c_uint64()
        _check(driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)), "cuMemAlloc")
        pointers.append(pointer)
    for pointer, data in zip(pointers, inputs, strict=False):
        _check(driver.cuMemcpyHtoD_v2(pointer, data, ctypes.c_size_t(len(data))), "copy in")
    arguments = (ctypes.c_void_p * len(pointers))(
        *(ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p) for pointer in pointers)
    )
    _check(
        driver.cuLaunchKernel(function, ctas, 1, 1, threads, 1, 1, 0, None, arguments, None),
        "launch",
    )
    _check(driver.cuCtxSynchronize(), "the kernel")
    results = []
    for pointer, size in zip(pointers[len(inputs) :], output_sizes, strict=True):
        buffer = ctypes.create_string_buffer(size)
        _check(driver.cuMemcpyDtoH_v2(buffer, pointer, ctypes.c_size_t(size)), "copy out")
        results.append(buffer.raw)
    for pointer in pointers:
        driver.cuMemFree_v2(pointer)
    driver.cuModuleUnload(module)
    return results
