"""ForwardResult: what a forward pass gives back."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashsmith.emulator import EmulationResult


class ForwardResult(NamedTuple):
    """o and, if asked for, lse and row_max in the caller's framework; ms on the GPU if timed.

    What was not asked for is None, and so is ``emulation`` where nothing was emulated.
    """

    o: Any
    lse: Any
    row_max: Any
    ms: float | None
    emulation: EmulationResult | None

    @property
    def outputs(self) -> Any:
        """What forward returns: o, or o and the statistics that were asked for."""
        return outputs_of(self.o, self.lse, self.row_max)


def outputs_of(o: Any, lse: Any, row_max: Any) -> Any:
    """o, or o and those of the statistics that are not None."""
    if row_max is None:
        return o if lse is None else (o, lse)
    return (o, row_max) if lse is None else (o, lse, row_max)
