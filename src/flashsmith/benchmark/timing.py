"""The timing protocol: in which order implementations are launched, and where events are recorded.

Kernels are timed by CUDA events on their stream, after a warm-up. Before each launch the L2 is
overwritten. For problems with a small cache, calls are captured in CUDA graphs instead, and rotate
through more tensors than the L2 can hold. Implementations are interleaved, or timed one by one. All
timing of flashsmith is done here.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from typing import Protocol as Interface

from flashsmith.benchmark.clock import Clock, CudaEvents, require_usable_gpu
from flashsmith.benchmark.environment import Environment, Telemetry
from flashsmith.errors import ArgumentError

__all__ = [
    "INTERLEAVED",
    "ONE_BY_ONE",
    "Clock",
    "CudaEvents",
    "Environment",
    "Implementation",
    "Protocol",
    "Replay",
    "Samples",
    "Telemetry",
    "measure",
    "num_sets",
    "require_usable_gpu",
]

Order = Literal["interleaved", "one_by_one"]


@dataclass(frozen=True)
class Protocol:
    """How implementations are timed.

    order: 'interleaved' launches each implementation once per round, in an order that differs
    between rounds. If the clock drifts, all implementations are then affected equally, and no
    implementation always runs after the same other one. 'one_by_one' finishes one implementation
    before the next begins.
    flush_l2: whether the L2 is overwritten before every timed launch.
    in_graphs: whether each launch replays a graph. The calls of a graph rotate through sets of
    tensors: before a set is read again, SETS_BYTES of other sets are read.
    num_warmups, runs: the least numbers of untimed and of timed launches of an implementation.
    warmup_ms, measure_ms: the least total times of these launches, so that short kernels are
    launched more often. With 0, the numbers of launches are num_warmups and runs. With
    'interleaved', they are computed from the mean time of the implementations.
    num_estimates: how many launches are used to estimate the time of one.

    Raises ArgumentError for an unknown order, or a number below its minimum.
    """

    order: Order = "interleaved"
    flush_l2: bool = True
    num_warmups: int = 3
    runs: int = 20
    warmup_ms: float = 25.0
    measure_ms: float = 100.0
    num_estimates: int = 5
    in_graphs: bool = False

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ArgumentError(f"protocol={self.order!r}: allowed are {_listed()}")
        least = {"num_warmups": 0, "runs": 1, "warmup_ms": 0, "measure_ms": 0, "num_estimates": 1}
        for name, lowest in least.items():
            if not getattr(self, name) >= lowest:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: give at least {lowest}")

    @classmethod
    def named(cls, order: str, num_warmups: int | None = None, runs: int | None = None) -> Protocol:
        """The protocol with this order. If a number of launches is given, exactly that many are
        made.

        Raises ArgumentError if the order is unknown or a number is invalid.
        """
        if order not in _NAMED:
            raise ArgumentError(f"protocol={order!r}: allowed are {_listed()}")
        protocol = _NAMED[order]
        if num_warmups is not None:
            protocol = replace(protocol, num_warmups=num_warmups, warmup_ms=0.0)
        if runs is not None:
            protocol = replace(protocol, runs=runs, measure_ms=0.0)
        return protocol

    def over_cache(self, nbytes: int) -> Protocol:
        """The protocol for calls that read a cache of ``nbytes`` bytes.

        Calls on a small cache take about as long as their launch, so they are timed in graphs. For
        large caches, the given protocol is returned unchanged.
        """
        if nbytes > LARGEST_IN_GRAPHS:
            return self
        return replace(self, flush_l2=False, in_graphs=True)

    def launches(self, estimate_ms: float) -> tuple[int, int]:
        """How many untimed and how many timed launches to make if a launch takes
        ``estimate_ms``."""
        return (
            _enough(self.num_warmups, self.warmup_ms, estimate_ms),
            _enough(self.runs, self.measure_ms, estimate_ms),
        )

    def __str__(self) -> str:
        if self.in_graphs:
            return f"{self.order}, {IN_GRAPHS}"
        return self.order if self.flush_l2 else f"{self.order}, warm L2"


def _enough(least: int, milliseconds: float, each: float) -> int:
    # The timestamps of events have a resolution of half a microsecond.
    return max(least, int(milliseconds / max(each, 5e-4)))


def _listed() -> str:
    return ", ".join(get_args(Order))


# Caches of up to LARGEST_IN_GRAPHS bytes are timed in CUDA graphs of at least CALLS_IN_GRAPH calls.
# With this many calls, the time between two launches and the resolution of events add less than 0.1
# us per call. All sets of tensors together have at least SETS_BYTES, since an L2 holds about 50 MB.
LARGEST_IN_GRAPHS = 40_000_000
SETS_BYTES = 240_000_000
CALLS_IN_GRAPH = 48
IN_GRAPHS = "in graphs"

INTERLEAVED = Protocol()
# The protocol of Triton's do_bench, so that results are comparable with do_bench's.
ONE_BY_ONE = Protocol("one_by_one", num_warmups=1, runs=1, warmup_ms=25.0, measure_ms=200.0)
_NAMED = {INTERLEAVED.order: INTERLEAVED, ONE_BY_ONE.order: ONE_BY_ONE}


@dataclass(frozen=True)
class Samples:
    """The times of one implementation's timed launches, in order; there is at least one.

    sm_clock_mhz and power_w are medians of readings during these launches; None if NVML returned no
    readings. Implementations that are interleaved run within milliseconds of each other, so they
    have the same readings.
    """

    times_ms: tuple[float, ...]
    sm_clock_mhz: float | None = None
    power_w: float | None = None

    @property
    def median_ms(self) -> float:
        """The median time, from which all other figures are computed."""
        return statistics.median(self.times_ms)

    @property
    def best_ms(self) -> float:
        """The shortest time."""
        return min(self.times_ms)

    @property
    def spread(self) -> float:
        """The interquartile range divided by the median; 0 if there is only one time."""
        if len(self.times_ms) < 2 or not self.median_ms:
            return 0.0
        lower, _, upper = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return (upper - lower) / self.median_ms


class Implementation(Interface):
    """An implementation that can be timed. Names must be unique."""

    @property
    def name(self) -> str:
        """The name in tables and messages."""

    def launch(self) -> Any:
        """Enqueues exactly one call on the current stream; does not wait."""


@dataclass(frozen=True)
class Replay:
    """Several calls of one implementation, captured in a graph.

    A launch runs all of them; the reported time is the time of one call.
    """

    name: str
    replay: Callable[[], Any]
    calls: int

    @classmethod
    def of(
        cls,
        name: str,
        calls: Sequence[Callable[[], Any]],
        clock: Clock,
        least: int | None = None,
    ) -> Replay:
        """Captures ``calls``, each of which has its own tensors, in a graph.

        The calls are repeated until the graph has at least ``least`` of them (default:
        CALLS_IN_GRAPH).

        Raises any error that a call or the capture raises.
        """
        every = [*calls] * -(-(least or CALLS_IN_GRAPH) // len(calls))
        with clock.running():
            return cls(name, clock.capture(every), len(every))

    def launch(self) -> Any:
        """Enqueues the graph."""
        return self.replay()


def num_sets(nbytes: int) -> int:
    """The number of sets of tensors, of ``nbytes`` each, through which a graph's calls rotate."""
    return max(2, -(-SETS_BYTES // max(1, nbytes)))


def measure(
    implementations: Sequence[Implementation],
    protocol: Protocol = INTERLEAVED,
    *,
    clock: Clock | None = None,
    telemetry: Telemetry | None = None,
) -> dict[str, Samples]:
    """Times all implementations.

    Returns the samples by name, in the given order. For a Replay, the samples are times per call,
    not per launch of the graph.

    Launches are enqueued one after another without waiting, since an idle GPU raises its clock
    above the one it can keep under load. If ``clock`` is None, it is the current stream of GPU 0;
    if ``telemetry`` is None, that GPU's clock and power are read.

    Raises ArgumentError if two implementations have the same name, LaunchError if there is no GPU
    or a launch fails, and any error of an implementation.
    """
    names = [implementation.name for implementation in implementations]
    if len(set(names)) < len(names):
        raise ArgumentError(f"implementations: names must differ, got {', '.join(names)}")
    clock = clock or CudaEvents()
    bench = _Bench(clock, protocol, telemetry or Telemetry())
    groups = (
        [list(implementations)]
        if protocol.order == "interleaved"
        else [[c] for c in implementations]
    )
    measured: dict[str, Samples] = {}
    with clock.running():
        for group in groups:
            if group:
                measured |= bench.time(group)
    return measured


@dataclass
class _Bench:
    clock: Clock
    protocol: Protocol
    telemetry: Telemetry

    def time(self, group: list[Implementation]) -> dict[str, Samples]:
        """Times one implementation, or several that are interleaved."""
        num_warmups, runs = self.protocol.launches(statistics.fmean(map(self._estimate, group)))
        for implementation in itertools.chain.from_iterable(itertools.repeat(group, num_warmups)):
            implementation.launch()
        events = iter(self.clock.events(2 * runs * len(group)))
        marks: dict[str, list[tuple[Any, Any]]] = {c.name: [] for c in group}
        with self.telemetry.reading() as reading:
            for implementation in _turns(group, runs):
                begin, end = next(events), next(events)
                self._launch(implementation, begin, end)
                marks[implementation.name].append((begin, end))
            self.clock.synchronize()
        calls = {c.name: c.calls if isinstance(c, Replay) else 1 for c in group}
        return {
            name: Samples(
                tuple(self.clock.elapsed_ms(*pair) / calls[name] for pair in pairs),
                reading.sm_clock_mhz,
                reading.power_w,
            )
            for name, pairs in marks.items()
        }

    def _estimate(self, implementation: Implementation) -> float:
        """The milliseconds that a launch takes, including the flush before it."""
        implementation.launch()  # May compile, choose a kernel or load a module
        self.clock.synchronize()
        begin, end = self.clock.events(2)
        self.clock.record(begin)
        for _ in range(self.protocol.num_estimates):
            if self.protocol.flush_l2:
                self.clock.flush()
            implementation.launch()
        self.clock.record(end)
        self.clock.synchronize()
        return self.clock.elapsed_ms(begin, end) / self.protocol.num_estimates

    def _launch(self, implementation: Implementation, begin: Any, end: Any) -> None:
        if self.protocol.flush_l2:
            # The flush also keeps the GPU busy while the host prepares the next launch.
            self.clock.flush()
        self.clock.record(begin)
        implementation.launch()
        self.clock.record(end)


def _turns(group: Sequence[Implementation], rounds: int) -> Iterator[Implementation]:
    """Yields every implementation once per round: in a shuffled order, then in its reverse, then in
    another shuffled order.

    The orders are the same in every run. They vary within a run: a kernel leaves the GPU warmer or
    cooler, so no implementation may always run after the same other one.
    """
    orders = random.Random(0)
    order = list(group)
    for turn in range(rounds):
        if turn % 2:
            order.reverse()
        else:
            orders.shuffle(order)
        yield from order
