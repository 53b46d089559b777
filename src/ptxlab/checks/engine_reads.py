"""Records which engines read each cell of shared memory, and the clock of each engine's last
read."""

from __future__ import annotations

import numpy as np

from ptxlab.checks.shadow import Shadow
from ptxlab.interface import Engine

_INTEGER = np.dtype(np.int32)
_MORE = 4


class EngineReads:
    """The engine reads of each cell.

    A cell has one column for each engine that can read it: the column is given by the engine's
    kind, its number, and the distance from the CTA that owns the memory to the engine's CTA. The
    distance is 0 unless the engine copies between CTAs.
    """

    def __init__(self, banks: int, size: int, granule: int) -> None:
        self._banks, self._size = banks, size
        self._columns: dict[tuple[str, int, int], int] = {}
        self._shadow = self._empty(_MORE)
        if granule == 1:
            self.refine()

    def _empty(self, width: int) -> Shadow:
        fields = {"clock": (_INTEGER, 0), "site": (_INTEGER, 0)}
        return Shadow(self._banks, self._size, fields, width=width)

    def refine(self) -> None:
        """Switches to one cell per byte."""
        self._shadow.refine()

    def record(self, cells: np.ndarray, engine: Engine, cta: int, clock: int, site: int) -> None:
        """Records an engine's read of a CTA's memory when the read is issued.

        An engine executes its work in order.
        """
        key = (engine.kind, engine.number, engine.cta - cta)
        column = self._columns.setdefault(key, len(self._columns))
        fields = self._shadow.fields
        if column >= fields["clock"].shape[1]:
            for name, values in fields.items():
                fields[name] = np.pad(values, ((0, 0), (0, _MORE)))
        fields["clock"][cells, column] = clock
        fields["site"][cells, column] = site

    def forget(self, cells: np.ndarray) -> None:
        """Forgets the reads of cells that were overwritten."""
        self._shadow["clock"][cells] = 0

    def of(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns every recorded read of the cells, as arrays: index into ``cells``, column, clock,
        site."""
        clocks = self._shadow["clock"][cells]
        index, columns = np.nonzero(clocks)
        return index, columns, clocks[index, columns], self._shadow["site"][cells[index], columns]

    def engine(self, column: int, cta: int) -> Engine:
        """Returns the engine that a column represents in the memory of ``cta``."""
        kind, number, away = next(key for key, place in self._columns.items() if place == column)
        return Engine(kind, cta + away, number)
