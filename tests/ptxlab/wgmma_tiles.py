"""Operands of wgmma as images of shared memory, one element at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

SPANS = (0, 32, 64, 128)
_MODES = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Tile:
    """A matrix of ``rows`` x ``depth`` 16-bit words; ``k_major`` as wgmma means it."""

    rows: int
    depth: int
    k_major: bool
    span: int

    def plain(self, row: int, k: int) -> int:
        """Byte offset of an element before the swizzle."""
        if not self.span:
            # Core matrices of 8 x 8, 128 bytes each, those along the tile's major side adjacent.
            core = (
                row // 8 * (self.depth // 8) + k // 8
                if self.k_major
                else k // 8 * (self.rows // 8) + row // 8
            )
            inner = row % 8 * 16 + k % 8 * 2 if self.k_major else k % 8 * 16 + row % 8 * 2
            return core * 128 + inner
        # Panels as TMA brings them: lines of ``span`` bytes, one below the other.
        wide = self.span // 2
        line, place, lines = (row, k, self.rows) if self.k_major else (k, row, self.depth)
        return place // wide * lines * self.span + line * self.span + place % wide * 2

    def offset(self, row: int, k: int) -> int:
        """Byte offset of an element: pieces of 16 bytes are exchanged within each 128."""
        line, byte = divmod(self.plain(row, k), 128)
        mask = self.span // 16 - 1 if self.span else 0
        return line * 128 + ((byte // 16) ^ (line & mask)) * 16 + byte % 16

    @cached_property
    def size(self) -> int:
        """Bytes of the image, whole kilobytes."""
        across = self.rows if not self.k_major else self.depth
        wide = self.span // 2 if self.span else 8
        panels, lines = -(-across // wide), self.depth if not self.k_major else self.rows
        return -(-panels * lines * (self.span or 16) // 1024) * 1024

    def image(self, words: np.ndarray) -> np.ndarray:
        """Shared memory (uint8) holding ``words`` (rows x depth, uint16)."""
        found = np.zeros(self.size, np.uint8)
        for row in range(self.rows):
            for k in range(self.depth):
                at = self.offset(row, k)
                found[at : at + 2] = np.array([words[row, k]], np.uint16).view(np.uint8)
        return found

    def descriptor(self, start: int, base: int = 0) -> int:
        """The descriptor of a start address (bytes)."""
        if self.span:
            stride = 8 * self.span
            leading = 16 if self.k_major else self.depth * self.span
        elif self.k_major:
            leading, stride = 128, self.depth // 8 * 128
        else:
            leading, stride = self.rows // 8 * 128, 128
        fields = (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32
        return fields | base << 49 | _MODES[self.span] << 62

    def steps(self, start: int, base: int = 0) -> Iterator[int]:
        """Descriptors of the steps of 16 along k."""
        for k in range(0, self.depth, 16):
            yield self.descriptor(start + self.plain(0, k), base)


def floats(words: np.ndarray, kind: str) -> np.ndarray:
    """float64 of 16-bit words."""
    if kind == "f16":
        return words.view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def words_of(values: np.ndarray, kind: str) -> np.ndarray:
    """16-bit words of floats."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def accumulators(tile: np.ndarray) -> np.ndarray:
    """A 64 x n result as (register, thread), element by element."""
    n = tile.shape[1]
    found = np.zeros((n // 2, 128), np.float32)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for register in range(n // 2):
            row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
            column = 8 * (register // 4) + 2 * (lane % 4) + register % 2
            found[register, thread] = tile[row, column]
    return found


def fragments(a: np.ndarray) -> np.ndarray:
    """A 64 x 16 operand as uint32 registers (4, thread)."""
    found = np.zeros((4, 128), np.uint32)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for register in range(4):
            row = 16 * warp + lane // 4 + 8 * (register % 2)
            column = 8 * (register // 2) + 2 * (lane % 4)
            found[register, thread] = int(a[row, column]) | int(a[row, column + 1]) << 16
    return found
