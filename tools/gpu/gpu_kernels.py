"""Kernels for tools, on the first GPU: the builder compiles them, and the driver launches them."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import flashsmith
from flashsmith.builder.toolchain import find_toolchain
from flashsmith.runtime.driver import call

CSRC = Path(flashsmith.__file__).parent / "csrc"


def compiled(source: Path, form: str = "cubin", arch: str = "90a") -> bytes:
    """Compiles a source to a cubin, or to PTX if ``form`` is "ptx"; it may include the headers in
    csrc."""
    tools = find_toolchain()
    code = f"code={'compute' if form == 'ptx' else 'sm'}_{arch}"
    headers = [f"-I{folder}" for folder in (*tools.include_dirs, CSRC)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / form
        command = [
            *(str(tools.nvcc), "-std=c++20", "-O3", f"-gencode=arch=compute_{arch},{code}"),
            *(f"-{form}", "-o", str(out), *headers, str(source)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(done.stderr)
        return out.read_bytes()


class GpuKernels:
    """A module, and arrays on the GPU that have names. A context must be current."""

    def __init__(self, image: bytes) -> None:
        self._module = ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(self._module), image)
        self._memory: dict[str, tuple[int, int]] = {}

    def allocate(self, name: str, nbytes: int) -> int:
        """The address of an array; if it exists already, it must have this size."""
        if name not in self._memory:
            pointer = ctypes.c_uint64()
            call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            self._memory[name] = (pointer.value, nbytes)
        address, room = self._memory[name]
        assert nbytes == room, f"{name} has room for {room} bytes, not {nbytes}"
        return address

    def put(self, name: str, array: np.ndarray) -> None:
        """Copies an array to the GPU."""
        whole = np.ascontiguousarray(array)
        address = ctypes.c_uint64(self.allocate(name, whole.nbytes))
        data, size = ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(whole.nbytes)
        call("cuMemcpyHtoD_v2", address, data, size)

    def fetch(self, name: str, array: np.ndarray) -> np.ndarray:
        """Copies from the beginning of an array on the GPU to ``array``."""
        address = ctypes.c_uint64(self._memory[name][0])
        data, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        call("cuMemcpyDtoH_v2", data, address, size)
        return array

    def launch(self, kernel: str, ctas: int, threads: int, *arguments: str | int) -> None:
        """Launches a kernel; arguments are names of arrays, or 32-bit numbers."""
        function = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(function), self._module, kernel.encode())
        values = [
            ctypes.c_uint64(self._memory[x][0]) if isinstance(x, str) else ctypes.c_int(x)
            for x in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        call("cuLaunchKernel", function, ctas, 1, 1, threads, 1, 1, 0, None, pointers, None)
