"""Protocol: how often contenders are launched, in which order, and what lies between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from flashsmith.errors import ArgumentError

Order = Literal["interleaved", "one_by_one"]


@dataclass(frozen=True)
class Protocol:
    """How contenders are timed.

    order: 'interleaved' launches each once a round, in an order that changes from round to round,
    so that a drifting clock hits all alike and nobody always follows the same one; 'one_by_one'
    finishes a contender before the next.
    flush_l2: whether the L2 is overwritten before every timed launch.
    num_warmups, runs: how many launches a contender gets untimed and timed, at least.
    warmup_ms, measure_ms: how long, at least, those take together; short kernels are launched more
    often. 0 leaves the count as it is. Interleaved, they hold for the contenders' mean.
    num_estimates: launches that find out how long one takes.

    Raises ArgumentError for an unknown order, or a number below its least.
    """

    order: Order = "interleaved"
    flush_l2: bool = True
    num_warmups: int = 3
    runs: int = 20
    warmup_ms: float = 25.0
    measure_ms: float = 100.0
    num_estimates: int = 5

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ArgumentError(f"protocol={self.order!r}: allowed are {_listed()}")
        least = {"num_warmups": 0, "runs": 1, "warmup_ms": 0, "measure_ms": 0, "num_estimates": 1}
        for name, lowest in least.items():
            if not getattr(self, name) >= lowest:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: give at least {lowest}")

    @classmethod
    def named(cls, order: str, num_warmups: int | None = None, runs: int | None = None) -> Protocol:
        """The protocol of that order; a number that is given is exact.

        Raises ArgumentError for an unknown order or a bad number.
        """
        if order not in _NAMED:
            raise ArgumentError(f"protocol={order!r}: allowed are {_listed()}")
        protocol = _NAMED[order]
        if num_warmups is not None:
            protocol = replace(protocol, num_warmups=num_warmups, warmup_ms=0.0)
        if runs is not None:
            protocol = replace(protocol, runs=runs, measure_ms=0.0)
        return protocol

    def launches(self, estimate_ms: float) -> tuple[int, int]:
        """How many untimed and timed launches a contender gets whose launch takes that long."""
        return (
            _enough(self.num_warmups, self.warmup_ms, estimate_ms),
            _enough(self.runs, self.measure_ms, estimate_ms),
        )

    def __str__(self) -> str:
        return self.order if self.flush_l2 else f"{self.order}, warm L2"


def _enough(least: int, milliseconds: float, each: float) -> int:
    # An event cannot tell apart less than half a microsecond.
    return max(least, int(milliseconds / max(each, 5e-4)))


def _listed() -> str:
    return ", ".join(get_args(Order))


INTERLEAVED = Protocol()
# As Triton's do_bench does it, so that figures compare with those taken by it.
ONE_BY_ONE = Protocol("one_by_one", num_warmups=1, runs=1, warmup_ms=25.0, measure_ms=200.0)
_NAMED = {INTERLEAVED.order: INTERLEAVED, ONE_BY_ONE.order: ONE_BY_ONE}
