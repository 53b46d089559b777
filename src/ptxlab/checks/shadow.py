"""Shadow memory: per-cell fields, and the cells that an access touches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ptxlab.interface import MemoryRange

_WORD = 4


@dataclass(frozen=True, slots=True)
class Touched:
    """The cells that one event touches.

    ``rows[i]`` is the index of the thread that touches cell i.
    """

    cells: np.ndarray
    rows: np.ndarray


class Shadow:
    """Named arrays with one entry per cell, over ``banks`` memories of ``size`` bytes each (for
    example one per CTA).

    Initially, a cell is a 4-byte word. From the first access that covers only part of a word on, a
    cell is a byte. This distinguishes the bytes of a word, and costs nothing in launches that
    access only whole words.
    """

    def __init__(
        self, banks: int, size: int, fields: Mapping[str, tuple[np.dtype, object]], width: int = 0
    ) -> None:
        """``fields`` maps a name to (dtype, initial value).

        If ``width`` > 0, the arrays have a second axis of this length.
        """
        self.granule = _WORD
        self._banks, self._size = banks, size
        cells = banks * self.cells_per_bank
        self.fields = {
            name: np.full((cells, width) if width else cells, initial, dtype)
            for name, (dtype, initial) in fields.items()
        }

    @property
    def cells_per_bank(self) -> int:
        """Cells of one memory, at the current cell size."""
        return -(-self._size // self.granule)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.fields[name]

    def locate(
        self, banks: np.ndarray | int, addresses: np.ndarray, sizes: int | np.ndarray
    ) -> Touched:
        """Returns the cells in each thread's ``[address, address + size)``; cells outside the
        memory are left out."""
        if self.granule > 1 and not _whole_words(addresses, sizes):
            self.refine()
        if isinstance(sizes, int) and self._all_inside(addresses, sizes):
            first = addresses // self.granule + banks * self.cells_per_bank
            count = sizes // self.granule
            cells = (first[:, None] + np.arange(count)).ravel()
            return Touched(cells, np.repeat(np.arange(addresses.size), count))
        return self._locate_some(banks, addresses, sizes)

    def _all_inside(self, addresses: np.ndarray, size: int) -> bool:
        if not addresses.size:
            return True
        return int(addresses.min()) >= 0 and int(addresses.max()) + size <= self._size

    def _locate_some(
        self, banks: np.ndarray | int, addresses: np.ndarray, sizes: int | np.ndarray
    ) -> Touched:
        widest = int(np.max(sizes, initial=0))
        steps = np.arange(0, widest, self.granule)
        offsets = addresses[:, None] + steps
        inside = (offsets >= 0) & (offsets < self._size)
        if isinstance(sizes, np.ndarray):
            inside &= steps < sizes[:, None]
        cells = offsets // self.granule + np.reshape(banks, (-1, 1)) * self.cells_per_bank
        rows = np.broadcast_to(np.arange(addresses.size)[:, None], cells.shape)
        return Touched(cells[inside], rows[inside])

    def address(self, cell: int) -> int:
        """Returns the byte address of a cell within its memory."""
        return int(cell) % self.cells_per_bank * self.granule

    def refine(self) -> None:
        """Switches to one cell per byte."""
        if self.granule == 1:
            return
        words = self.cells_per_bank
        self.granule = 1
        for name, values in self.fields.items():
            spread = np.repeat(values.reshape(self._banks, words, -1), _WORD, axis=1)
            spread = spread[:, : self._size]
            shape = (-1,) if values.ndim == 1 else (-1, values.shape[1])
            self.fields[name] = np.ascontiguousarray(spread).reshape(shape)


def _whole_words(addresses: np.ndarray, sizes: int | np.ndarray) -> bool:
    bits = np.bitwise_or.reduce(addresses) | np.bitwise_or.reduce(np.atleast_1d(sizes))
    return int(bits) % _WORD == 0


class Ranges:
    """The registered ranges of global memory.

    They may overlap, for example if q, k and v are packed in one tensor.
    """

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        self.ranges = tuple(ranges)

    def find(self, addresses: np.ndarray, sizes: int | np.ndarray) -> np.ndarray:
        """Returns, for each access, the index of a range in ``ranges`` that contains all of it, or
        -1."""
        index = np.full(addresses.shape, -1)
        for i, known in enumerate(self.ranges):
            index[(addresses >= known.begin) & (addresses + sizes <= known.end)] = i
        return index

    def nearest(self, address: int) -> MemoryRange | None:
        """Returns the range whose start or end is closest to an address that is in no range."""
        return min(
            self.ranges,
            key=lambda r: min(abs(address - r.begin), abs(address - r.end)),
            default=None,
        )
