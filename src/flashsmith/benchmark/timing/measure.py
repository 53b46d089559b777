"""measure(): launches contenders by a protocol and times each launch."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

from flashsmith.benchmark.timing.clock import Clock
from flashsmith.benchmark.timing.cuda_events import CudaEvents
from flashsmith.benchmark.timing.protocol import INTERLEAVED, Protocol
from flashsmith.benchmark.timing.samples import Samples
from flashsmith.benchmark.timing.telemetry import Telemetry
from flashsmith.errors import ArgumentError


class Contender(Interface):
    """What is timed. Names tell contenders apart."""

    @property
    def name(self) -> str:
        """For tables and messages."""

    def launch(self) -> Any:
        """Enqueues exactly one call on the current stream; does not wait."""


def measure(
    contenders: Sequence[Contender],
    protocol: Protocol = INTERLEAVED,
    *,
    clock: Clock | None = None,
    telemetry: Telemetry | None = None,
) -> dict[str, Samples]:
    """The samples of every contender, by name, in the order given.

    Launches follow each other without waiting in between: a GPU that idled between repeats would
    be timed at a clock that no steady work sees. ``clock`` None is the current stream of GPU 0, and
    ``telemetry`` None reads that GPU's clock and power.

    Raises ArgumentError when two have one name, LaunchError when there is no GPU or a launch fails,
    and what a contender raises.
    """
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise ArgumentError(f"contenders: names must differ, got {', '.join(names)}")
    clock = clock or CudaEvents()
    bench = _Bench(clock, protocol, telemetry or Telemetry())
    groups = [list(contenders)] if protocol.order == "interleaved" else [[c] for c in contenders]
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

    def time(self, group: list[Contender]) -> dict[str, Samples]:
        """Contenders that take turns, or the only one."""
        num_warmups, runs = self.protocol.launches(statistics.fmean(map(self._estimate, group)))
        for contender in itertools.chain.from_iterable(itertools.repeat(group, num_warmups)):
            contender.launch()
        events = iter(self.clock.events(2 * runs * len(group)))
        marks: dict[str, list[tuple[Any, Any]]] = {c.name: [] for c in group}
        with self.telemetry.reading() as reading:
            for contender in _turns(group, runs):
                begin, end = next(events), next(events)
                self._launch(contender, begin, end)
                marks[contender.name].append((begin, end))
            self.clock.synchronize()
        return {
            name: Samples(
                tuple(self.clock.elapsed_ms(*pair) for pair in pairs),
                reading.sm_clock_mhz,
                reading.power_w,
            )
            for name, pairs in marks.items()
        }

    def _estimate(self, contender: Contender) -> float:
        """Milliseconds of a launch together with the flush before it."""
        contender.launch()  # may compile, choose or load
        self.clock.synchronize()
        begin, end = self.clock.events(2)
        self.clock.record(begin)
        for _ in range(self.protocol.num_estimates):
            if self.protocol.flush_l2:
                self.clock.flush()
            contender.launch()
        self.clock.record(end)
        self.clock.synchronize()
        return self.clock.elapsed_ms(begin, end) / self.protocol.num_estimates

    def _launch(self, contender: Contender, begin: Any, end: Any) -> None:
        if self.protocol.flush_l2:
            # It also keeps the GPU busy while the host prepares the launch.
            self.clock.flush()
        self.clock.record(begin)
        contender.launch()
        self.clock.record(end)


def _turns(group: Sequence[Contender], rounds: int) -> Iterator[Contender]:
    """Each once a round: a shuffled order, then its reverse, then another.

    The same orders every time. What runs before a kernel leaves it a warmer or a cooler GPU, so
    that nobody may have one neighbour throughout.
    """
    orders = random.Random(0)
    order = list(group)
    for turn in range(rounds):
        if turn % 2:
            order.reverse()
        else:
            orders.shuffle(order)
        yield from order
