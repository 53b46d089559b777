"""Arithmetic in PTX that names no rounding: such a product and a sum ptxas may fuse, or not."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashsmith.families import KernelConfig, Semantics
from flashsmith.runtime.libraries import loaded_kernels
from ptxlab.ptx import parse

_ARITHMETIC = frozenset(("add", "sub", "mul", "mad", "fma", "div"))
_ROUNDINGS = frozenset(("rn", "rz", "rm", "rp"))
#: Floating-point types of scalars and pairs.
_FLOAT = re.compile(r"b?f(16|32|64)(x2)?")
#: Where it is about how many CTAs take a sequence's keys: no bit of a row depends on that.
_NOT_OF_ROWS = ("mma_sync_decode/split.cuh",)


def unrounded(ptx: str, entry: str) -> Iterator[str]:
    """Each such instruction of a kernel: its line in the PTX, its text, and its place in the
    sources."""
    lines = ptx.splitlines()
    for block in parse(ptx).entry(entry).blocks:
        for i in block.instructions:
            floats = any(_FLOAT.fullmatch(modifier) for modifier in i.modifiers)
            if i.opcode not in _ARITHMETIC or not floats or _ROUNDINGS & set(i.modifiers):
                continue
            if not i.source.startswith(_NOT_OF_ROWS):
                yield f"line {i.ptx_line}: {lines[i.ptx_line - 1].strip()} ({i.source})"


def unrounded_of(cfg: KernelConfig, arch: int, semantics: Semantics) -> list[str]:
    """The same of all kernels that a config launches."""
    kernel = loaded_kernels.get(cfg, arch, semantics)
    entries = (kernel.entry.ptx_entry, *(one.ptx_entry for one in kernel.entry.beside))
    return [found for entry in entries for found in unrounded(kernel.modules[entry], entry)]
