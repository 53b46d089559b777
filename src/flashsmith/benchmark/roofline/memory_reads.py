"""How fast a GPU reads its L2 and its DRAM."""

from __future__ import annotations

import ctypes

import numpy as np

from flashsmith.benchmark.roofline.microbenchmark import (
    Absent,
    Machine,
    Microbenchmark,
    Running,
    Wrong,
)

# As csrc/roofline/memory_read.cu has them.
THREADS = 512
SPAN_BYTES = THREADS * 8 * 16
PERIOD = 1 << 20

_MIB = 2**20
_DRAM_BYTES = 4096 * _MIB
# So much of what is read must not fit into the L2, or part of it would come from there.
_TIMES_L2 = 16
# Of the L2, which also holds other things, and of which an SM reaches one half faster than the
# other.
_L2_SHARE = 0.4


class MemoryRead(Running):
    """Every SM reads its part of a buffer, 16 bytes a load and many in flight."""

    first_turns = 1

    def __init__(self, size: int, machine: Machine) -> None:
        device = machine.device
        self.ctas = device.sm_count * (device.max_threads_per_sm // THREADS)
        self.bytes = size // SPAN_BYTES * SPAN_BYTES
        self.work = self.bytes
        self._words = machine.empty((self.bytes // 4,), np.dtype(np.uint32))
        self._sums = machine.array(np.zeros(self.ctas * THREADS, np.uint32))
        self._vectors = ctypes.c_int64(self.bytes // 16)
        machine.kernel("memory_read", "fill_words").launch(
            self.ctas, THREADS, self._words, self._vectors
        )
        self._kernel = machine.kernel("memory_read", "read_words")

    def launch(self, turns: int) -> None:
        self._kernel.launch(
            self.ctas, THREADS, self._words, self._sums, self._vectors, ctypes.c_int(turns)
        )

    def check(self) -> float:
        """Reads all of the buffer once; the sum of its words is exact or Wrong."""
        self.launch(1)
        found = int(self._sums.to_host().sum(dtype=np.uint64)) % 2**32
        expected = sum_of_words(self.bytes // 4)
        if found != expected:
            raise Wrong(f"the words it read add up to {found}, not to {expected}")
        return 0.0


def words(count: int) -> np.ndarray:
    """The first words of the buffer, at most PERIOD, as fill_words writes them."""
    x = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def sum_of_words(count: int) -> int:
    """Of all words of a buffer of `count`, modulo 2^32."""
    period = words(PERIOD)
    whole = int(period.sum(dtype=np.uint64)) * (count // PERIOD)
    return (whole + int(period[: count % PERIOD].sum(dtype=np.uint64))) % 2**32


def start_l2(machine: Machine) -> MemoryRead:
    """A buffer that stays in the L2."""
    return MemoryRead(int(machine.device.l2_bytes * _L2_SHARE), machine)


def start_dram(machine: Machine) -> MemoryRead:
    """A buffer of which next to nothing is in the L2.

    Raises Absent when there is no room for one.
    """
    size, least = min(_DRAM_BYTES, machine.free_bytes() // 2), _TIMES_L2 * machine.device.l2_bytes
    if size < least:
        raise Absent(
            f"needs {2 * least // _MIB} MiB of free GPU memory, there are "
            f"{machine.free_bytes() // _MIB}"
        )
    return MemoryRead(size, machine)


MEMORY_READS = (
    Microbenchmark("l2_read", "TB/s", "memory_read", start_l2),
    Microbenchmark("dram_read", "TB/s", "memory_read", start_dram),
)
