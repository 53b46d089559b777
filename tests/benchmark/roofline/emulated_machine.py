"""A machine for microbenchmarks without a GPU: their PTX in the emulator, on a GPU of one SM."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from flashsmith.benchmark.roofline.measuring import compile_sources
from flashsmith.families import device_spec
from ptxlab.checks import BankConflicts, all_checks
from ptxlab.execute import emulate
from ptxlab.interface import Finding
from ptxlab.machine.memory import GlobalMemory

_FORMATS = {ctypes.c_int: "i", ctypes.c_int64: "q"}


@cache
def ptx(source: str, arch: int = 80) -> str:
    return compile_sources([source], arch, "ptx")[source].decode()


class HostArray:
    """A NumPy array in the place of one on a GPU."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def to_host(self) -> np.ndarray:
        return self.array


class EmulatedKernel:
    def __init__(self, text: str, entry: str, smem_bytes: int) -> None:
        self.text, self.entry, self.smem_bytes = text, entry, smem_bytes
        self.findings: list[Finding] = []
        self.conflicts = BankConflicts()

    def launch(self, ctas: int, threads: int, *arguments: Any) -> None:
        memory, layout, values = GlobalMemory(), "@", []
        for i, argument in enumerate(arguments):
            if isinstance(argument, HostArray):
                layout += "P"
                values.append(memory.register(f"argument {i}", argument.array, writable=True))
            else:
                layout += _FORMATS[type(argument)]
                values.append(argument.value)
        result = emulate(
            self.text,
            self.entry,
            grid=(ctas, 1, 1),
            block=(threads, 1, 1),
            smem_bytes=self.smem_bytes,
            argument_bytes=struct.pack(layout, *values),
            memory=memory,
            observers=[*all_checks(), self.conflicts],
        )
        self.findings += result.findings


class EmulatedMachine:
    """`changed` turns a source's PTX into the one that runs."""

    def __init__(self, changed=lambda text: text) -> None:
        self.device = replace(
            device_spec("A100"), sm_count=1, max_threads_per_sm=512, l2_bytes=5 * 2**17
        )
        self.changed = changed
        self.kernels: list[EmulatedKernel] = []

    def kernel(self, source: str, name: str, smem_bytes: int = 0) -> EmulatedKernel:
        self.kernels.append(EmulatedKernel(self.changed(ptx(source)), name, smem_bytes))
        return self.kernels[-1]

    def array(self, host: np.ndarray) -> HostArray:
        return HostArray(np.ascontiguousarray(host))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        return HostArray(np.full(shape, 0xA5A5A5A5, dtype))

    def free_bytes(self) -> int:
        return 32 * 2**20
