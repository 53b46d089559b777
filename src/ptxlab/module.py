"""load(): a PTX module whose kernels run on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab.arguments import pack_arguments
from ptxlab.checks import all_checks
from ptxlab.errors import ArgumentError
from ptxlab.execute import emulate
from ptxlab.interface import EmulationResult, Observer
from ptxlab.machine.memory import GlobalMemory
from ptxlab.ptx import Entry, ParsedModule, parse

Extent = int | tuple[int, ...]

_GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
_BLOCK_LIMITS = (1024, 1024, 64)
_MOST_THREADS = 1024
#: The largest shared memory of a CTA in KiB, for each compute capability.
_SHARED_KIB = {70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 120: 99, 121: 99}
_MOST_SHARED_KIB = 227


def load(source: str | bytes | os.PathLike[str]) -> Module:
    """Loads a PTX module, as ``nvcc -ptx`` or NVRTC writes it.

    Args:
        source: the PTX as text or bytes, or the path of a file. Text without a line break is taken
            as a path.

    Returns:
        The module. Kernels are translated at their first launch.

    Raises:
        PtxlabError: the file cannot be read or is not PTX, or one of its lines cannot be parsed.
    """
    text = _text_of(source)
    if text.startswith("\x7fELF"):
        raise ArgumentError(
            "source: a cubin holds machine code; give PTX, such as nvcc -ptx writes"
        )
    if ".version" not in text:
        raise ArgumentError(
            "source: not PTX: it has no .version; compile CUDA C++ with nvcc -ptx -lineinfo"
        )
    return Module(parse(text))


def _text_of(source: str | bytes | os.PathLike[str]) -> str:
    if isinstance(source, bytes):
        return source.decode("utf-8", errors="replace").rstrip("\0")
    if isinstance(source, str) and "\n" in source:
        return source
    if not isinstance(source, str | os.PathLike):
        raise ArgumentError(
            f"source: got {type(source).__name__}; give PTX as text or bytes, or a file's path"
        )
    try:
        return Path(source).read_bytes().decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(
            f"source: cannot read the file {os.fspath(source)!r}: {reason}"
        ) from error


class Module:
    """A PTX module, as ``load`` returns it. ``kernels`` has the names of the module's kernels."""

    def __init__(self, parsed: ParsedModule) -> None:
        self._parsed = parsed
        self.kernels: tuple[str, ...] = parsed.entry_names

    def __repr__(self) -> str:
        return (
            f"<ptxlab.Module for {self._parsed.target}: {', '.join(self.kernels) or 'no kernels'}>"
        )

    def launch(
        self,
        kernel: str,
        arguments: Sequence[Any],
        *,
        grid: Extent,
        block: Extent,
        cluster: Extent = 1,
        shared_bytes: int = 0,
        variables: Mapping[str, np.ndarray] | None = None,
        checks: bool = True,
        observers: Sequence[Observer] = (),
        seed: int | None = None,
        sm_count: int | None = None,
        exact_mma: bool = False,
    ) -> EmulationResult:
        """Runs a kernel and waits for it to finish.

        Args:
            kernel: the kernel's name in the PTX. With ``extern "C"`` this is its name in the
                source.
            arguments: one for each parameter of the kernel. For a pointer, give a C-contiguous
                NumPy array of any shape and dtype, which the kernel accesses in place, or None for
                null. If the array is not ``writeable``, the kernel may only read it. For a number,
                give a Python or NumPy scalar that fits. For a struct by value, give bytes or a
                NumPy scalar of its size.
            grid, block: the CTAs of the grid and the threads of a CTA. Each is an int or a tuple of
                up to three, x first.
            cluster: the CTAs of a cluster, as an int or a tuple, for kernels of sm_90 and later.
            shared_bytes: bytes of dynamic shared memory per CTA.
            variables: arrays that replace ``__device__`` and ``__constant__`` variables of the
                module, by their names in the PTX. An array has the size of its variable in
                bytes and is used in place. Other variables begin each launch with their initial
                values.
            checks: whether to look for races, out-of-bounds accesses, reads of memory that was
                never written, and uses of copies that have not arrived. The launch then takes about
                twice as long.
            observers: further observers, such as ``ptxlab.checks.BankConflicts()``.
            seed: a number selects a random schedule of the threads; None selects the fixed
                schedule.
            sm_count: the number of SMs of the GPU, for kernels whose CTAs wait for each other;
                None: as many as all CTAs need.
            exact_mma: whether mma, wgmma and wmma give exactly the bits of the target's tensor
                cores (sm_80 and later). By default they give float32 sums in any order. A kernel
                that mainly multiplies then takes two to four times as long.

        Returns: The result. Its ``findings`` come from the checks, and its ``instructions`` count
        how many warps executed each instruction.

        Raises:
            PtxlabError: an argument is wrong and nothing was run. The error is also a ValueError.
                Also raised if the kernel uses an unknown instruction, deadlocks, traps, or, without
                checks, accesses an address outside its memory. The error is then also a
                RuntimeError. A message about an instruction names its PTX line, and also its source
                line if the PTX was compiled with ``-lineinfo``.
        """
        entry = self._entry(kernel)
        memory = GlobalMemory()
        packed = pack_arguments(entry, _sequence("arguments", arguments), memory)
        sizes = _extent("grid", grid, _GRID_LIMITS), _extent("block", block, _BLOCK_LIMITS)
        _check_threads(block, sizes[1])
        self._check_shared(entry, shared_bytes)
        return emulate(
            self._parsed.text,
            kernel,
            grid=sizes[0],
            block=sizes[1],
            cluster=_extent("cluster", cluster, (16, 16, 16)),
            smem_bytes=shared_bytes,
            argument_bytes=packed,
            memory=memory,
            variables=variables or {},
            observers=[*(all_checks() if checks else ()), *observers],
            seed=seed,
            sm_count=sm_count,
            exact_mma=exact_mma,
        )

    def _entry(self, kernel: str) -> Entry:
        if kernel not in self.kernels:
            known = ", ".join(self.kernels) or "none"
            mangled = any(name.startswith("_Z") for name in self.kernels)
            hint = '; extern "C" keeps the name that a kernel has in the source' if mangled else ""
            raise ArgumentError(f"kernel: there is no {kernel!r}; the module has: {known}{hint}")
        return self._parsed.entry(kernel)

    def _check_shared(self, entry: Entry, shared_bytes: int) -> None:
        if isinstance(shared_bytes, bool) or not isinstance(shared_bytes, int | np.integer):
            raise ArgumentError(f"shared_bytes: got {shared_bytes!r}; give a number of bytes")
        static = sum(v.size for v in entry.variables if v.space == "shared")
        most = 1024 * _SHARED_KIB.get(self._parsed.arch, _MOST_SHARED_KIB)
        if not 0 <= shared_bytes <= most - static:
            beside = f" in addition to {static} static ones" if static else ""
            raise ArgumentError(
                f"shared_bytes: {shared_bytes}; a CTA of {self._parsed.target} may have 0 to "
                f"{most - static} bytes{beside}"
            )


def _sequence(name: str, values: Sequence[Any]) -> Sequence[Any]:
    if not isinstance(values, list | tuple):
        raise ArgumentError(f"{name}: got {type(values).__name__}; give a list or a tuple")
    return values


def _extent(name: str, value: Extent, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    given = value if isinstance(value, tuple | list) else (value,)
    whole = all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in given)
    if not whole or not 1 <= len(given) <= 3:
        raise ArgumentError(f"{name}: got {value!r}; give an int, or a tuple of up to three")
    x, y, z = (*map(int, given), 1, 1)[:3]
    for extent, most, axis in zip((x, y, z), limits, "xyz", strict=True):
        if not 1 <= extent <= most:
            raise ArgumentError(f"{name}: {value!r}: {axis} must be from 1 to {most}")
    return x, y, z


def _check_threads(block: Extent, sizes: tuple[int, int, int]) -> None:
    threads = sizes[0] * sizes[1] * sizes[2]
    if threads > _MOST_THREADS:
        raise ArgumentError(
            f"block: {block!r} has {threads} threads; at most {_MOST_THREADS} are allowed"
        )
