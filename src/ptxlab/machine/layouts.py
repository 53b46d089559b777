"""Computes the addresses of 16-byte pieces in shared memory, from swizzles and the matrix
descriptors of wgmma.

An operand of wgmma has ``rows`` x 16 elements of 2 bytes each; k is the dimension of size 16. A
piece holds 8 elements: in a K-major operand 8 consecutive k of one row, in an MN-major operand 8
consecutive rows of one k. Eight consecutive pieces form a core matrix of 8 x 8 elements. With a
swizzle of 32, 64 or 128 bytes, core matrices are placed side by side in lines of this many bytes.

The two offsets of a descriptor are distances in bytes, by layout:
  K-major, no swizzle    leading: between the two core matrices along k; stride: every 8 rows.
  K-major, swizzled      leading: not used; stride: every 8 rows.
  MN-major, no swizzle   leading: every 8 k; stride: every 8 rows.
  MN-major, swizzled     leading: every line's worth of rows; stride: every 8 k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptxlab.errors import EmulatorError

#: Size of a piece: the bytes that are contiguous in every layout.
PIECE = 16

_FIELD = 0x3FFF
_SPANS = (0, 128, 64, 32)

#: The bits of a piece's address that a swizzle changes, for each line size of the swizzle in bytes.
#: The patterns for 128, 64 and 32 bytes repeat every 1024, 512 and 256 bytes.
_BITS = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """Swizzles the addresses of pieces, for lines of ``span`` bytes.

    XORs the address bits from bit 4 upwards with the bits from bit 7 upwards: one bit for 32 bytes,
    two for 64, three for 128. If ``span`` is 0, nothing is swizzled. Addresses are relative to the
    CTA's shared memory.
    """
    if span not in _BITS:
        raise EmulatorError(f"there is no swizzle of {span} bytes")
    return addresses ^ ((addresses >> 3) & _BITS[span])


@dataclass(frozen=True)
class Layout:
    """The content of a matrix descriptor without its start address.

    Offsets and swizzle are in bytes; the base offset is in 128-byte lines.
    """

    leading: int
    stride: int
    base: int
    swizzle: int

    @staticmethod
    def of(descriptor: int) -> Layout:
        """Decodes a 64-bit matrix descriptor."""
        return Layout(
            (descriptor >> 16 & _FIELD) << 4,
            (descriptor >> 32 & _FIELD) << 4,
            descriptor >> 49 & 7,
            _SPANS[descriptor >> 62 & 3],
        )

    def addresses(self, starts: np.ndarray, rows: int, *, k_major: bool) -> np.ndarray:
        """Returns the shared addresses of an operand's pieces, for each of several start addresses.

        The result has two more axes than ``starts``: (rows, 2) if the operand is K-major, (16, rows
        / 8) if it is MN-major.
        """
        plain = starts[..., None, None] + _offsets(self, rows, k_major)
        return plain ^ (((plain - (self.base << 7)) >> 3) & _BITS[self.swizzle])


def starts_of(descriptors: np.ndarray) -> np.ndarray:
    """Returns the start addresses (in bytes, int64) in matrix descriptors (uint64)."""
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
