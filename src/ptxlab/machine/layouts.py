"""Where 16-byte pieces lie in shared memory: swizzles, and the matrix descriptors of wgmma.

An operand of wgmma is ``rows`` x 16 elements of 2 bytes, the 16 being k. K-major, a piece holds 8
elements along k of one row; MN-major, 8 rows of one k. Eight pieces one below the other form a core
matrix; with a swizzle, core matrices stand side by side in lines of its 32, 64 or 128 bytes.

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

from ptxlab.errors import EmulatorError

#: Bytes that stay together whatever the layout.
PIECE = 16

_FIELD = 0x3FFF
_SPANS = (0, 128, 64, 32)

#: Bits of a piece's address that are exchanged, by the bytes of the pattern's rows. The patterns
#: repeat every 1024, 512 and 256 bytes.
_BITS = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """Where the pieces at plain addresses (bytes) lie when rows of ``span`` bytes are swizzled.

    Bits 4 and up of an address are xor-ed with bits 7 and up: one for 32 bytes, two for 64, three
    for 128. ``span`` 0 swizzles nothing. Addresses are those within the CTA's shared memory.
    """
    if span not in _BITS:
        raise EmulatorError(f"a swizzle of {span} bytes does not exist")
    return addresses ^ ((addresses >> 3) & _BITS[span])


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
    line = layout.swizzle or PIECE
    if k_major:
        row, piece = np.arange(rows, dtype=np.int64)[:, None], np.arange(2, dtype=np.int64)
        along = PIECE if layout.swizzle else layout.leading
        return row % 8 * line + row // 8 * layout.stride + piece * along
    k, piece = np.arange(16, dtype=np.int64)[:, None], np.arange(rows // 8, dtype=np.int64)
    if not layout.swizzle:
        return k % 8 * line + k // 8 * layout.leading + piece * layout.stride
    per_line = line // PIECE
    across = piece % per_line * PIECE + piece // per_line * layout.leading
    return k % 8 * line + k // 8 * layout.stride + across
