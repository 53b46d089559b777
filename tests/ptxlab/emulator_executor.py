"""Runs a micro kernel in the emulator: the Executor of the tests that need no GPU."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from micro_kernels import as_array

from ptxlab.execute import emulate
from ptxlab.interface import Observer
from ptxlab.machine.memory import GlobalMemory


def execute(
    ptx: str,
    entry: str,
    threads: int,
    inputs: Sequence[bytes],
    output_sizes: Sequence[int],
    observers: Sequence[Observer] = (),
) -> list[bytes]:
    """One CTA of ``threads`` threads; the entry takes the input and output pointers in order."""
    memory = GlobalMemory()
    sources = [as_array(data) for data in inputs]
    targets = [as_array(bytes(size)) for size in output_sizes]
    pointers = [memory.register(f"in{i}", a, writable=False) for i, a in enumerate(sources)]
    pointers += [memory.register(f"out{i}", a, writable=True) for i, a in enumerate(targets)]
    emulate(
        ptx,
        entry,
        grid=(1, 1, 1),
        block=(threads, 1, 1),
        smem_bytes=0,
        argument_bytes=struct.pack(f"<{len(pointers)}Q", *pointers),
        memory=memory,
        observers=observers,
    )
    return [target.tobytes() for target in targets]
