"""Matrix descriptors of wgmma: where the 16-byte pieces of an operand lie in shared memory.

An operand is ``rows`` x 16 elements of 2 bytes, the 16 being k. K-major, a piece holds 8 elements
along k of one row; MN-major, 8 rows of one k. Eight pieces one below the other form a core matrix;
with a swizzle, core matrices stand side by side in lines of its 32, 64 or 128 bytes.

The two offsets of a descriptor, by layout:
  K-major, no swizzle    leading: between the two core matrices along k; stride: every 8 rows
  K-major, swizzled      leading: not used; stride: every 8 rows
  MN-major, no swizzle   leading: every 8 k; stride: every 8 rows
  MN-major, swizzled     leading: every line's worth of rows; stride: every 8 k
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_FIELD = 0x3FFF
_SPANS = (0, 128, 64, 32)
_BITS = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}
_PIECE = 16


@dataclass(frozen=True)
class Layout:
    """A descriptor without its start: offsets and swizzle in bytes, base offset in lines of 128."""

    leading: int
    stride: int
    base: int
    swizzle: int

    @staticmethod
    def of(descriptor: int) -> Layout:
        """The layout that a 64-bit descriptor describes."""
        return Layout(
            (descriptor >> 16 & _FIELD) << 4,
            (descriptor >> 32 & _FIELD) << 4,
            descriptor >> 49 & 7,
            _SPANS[descriptor >> 62 & 3],
        )

    def addresses(self, starts: np.ndarray, rows: int, *, k_major: bool) -> np.ndarray:
        """Shared addresses of an operand's pieces, for each of several start addresses.

        Two axes more than ``starts``: (rows, 2) K-major, (16, rows / 8) MN-major.
        """
        plain = starts[..., None, None] + _offsets(self, rows, k_major)
        return plain ^ (((plain - (self.base << 7)) >> 3) & _BITS[self.swizzle])


def starts_of(descriptors: np.ndarray) -> np.ndarray:
    """Start addresses (bytes, int64) of descriptors (uint64)."""
    return (descriptors & np.uint64(_FIELD)).astype(np.int64) << 4


@lru_cache(maxsize=256)
def _offsets(layout: Layout, rows: int, k_major: bool) -> np.ndarray:
    line = layout.swizzle or _PIECE
    if k_major:
        row, piece = np.arange(rows, dtype=np.int64)[:, None], np.arange(2, dtype=np.int64)
        along = _PIECE if layout.swizzle else layout.leading
        return row % 8 * line + row // 8 * layout.stride + piece * along
    k, piece = np.arange(16, dtype=np.int64)[:, None], np.arange(rows // 8, dtype=np.int64)
    if not layout.swizzle:
        return k % 8 * line + k // 8 * layout.leading + piece * layout.stride
    per_line = line // _PIECE
    across = piece % per_line * _PIECE + piece // per_line * layout.leading
    return k % 8 * line + k // 8 * layout.stride + across
