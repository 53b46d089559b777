"""The timing protocol: the order of launches, the events around them, and the clock.

Kernels are timed with CUDA events on the stream that they run on, after a warm-up. Before each
launch the L2 is overwritten. Problems with a small cache use CUDA graphs instead, whose calls
rotate through more tensors than the L2 holds. Implementations are interleaved or timed one by one.
All timing in flashsmith is done here.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, get_args
from typing import Protocol as Interface

import numpy as np

from flashsmith.benchmark.environment import Environment, Telemetry
from flashsmith.errors import ArgumentError, LaunchError
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.device_array import DeviceArray

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

    order: 'interleaved' launches each implementation once per round, in an order that changes from
    round to round. A drifting clock then affects all implementations equally, and no implementation
    always follows the same other one. 'one_by_one' finishes an implementation before the next.
    flush_l2: whether the L2 is overwritten before every timed launch.
    in_graphs: whether a launch is a Replay of a graph. The graph's calls rotate through sets of
    tensors, so that SETS_BYTES of other sets are read before a set is read again.
    num_warmups, runs: the minimum numbers of untimed and timed launches of an implementation.
    warmup_ms, measure_ms: the minimum total times of those launches, so that short kernels are
    launched more often. 0 does not change the numbers of launches. With 'interleaved' they refer to
    the mean time of the implementations.
    num_estimates: the number of launches from which the time of one launch is estimated.

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
        """The protocol with that order; a given number is used exactly.

        Raises ArgumentError for an unknown order or an invalid number.
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
        """The protocol for calls that read a cache of ``nbytes``. Small caches are timed in graphs,
        because a call takes about as long as its launch. For large caches the protocol is
        unchanged."""
        if nbytes > LARGEST_IN_GRAPHS:
            return self
        return replace(self, flush_l2=False, in_graphs=True)

    def launches(self, estimate_ms: float) -> tuple[int, int]:
        """The numbers of untimed and timed launches, for implementations with this launch time."""
        return (
            _enough(self.num_warmups, self.warmup_ms, estimate_ms),
            _enough(self.runs, self.measure_ms, estimate_ms),
        )

    def __str__(self) -> str:
        if self.in_graphs:
            return f"{self.order}, {IN_GRAPHS}"
        return self.order if self.flush_l2 else f"{self.order}, warm L2"


def _enough(least: int, milliseconds: float, each: float) -> int:
    # Event timestamps have a resolution of half a microsecond.
    return max(least, int(milliseconds / max(each, 5e-4)))


def _listed() -> str:
    return ", ".join(get_args(Order))


# Caches of up to LARGEST_IN_GRAPHS bytes are timed in CUDA graphs of at least CALLS_IN_GRAPH calls.
# The gap between two launches and the resolution of an event then cost less than 0.1 us per call.
# The graph rotates through sets of tensors of at least SETS_BYTES together, since an L2 holds about
# 50 MB.
LARGEST_IN_GRAPHS = 40_000_000
SETS_BYTES = 240_000_000
CALLS_IN_GRAPH = 48
IN_GRAPHS = "in graphs"

INTERLEAVED = Protocol()
# The protocol of Triton's do_bench, so that results are comparable with it.
ONE_BY_ONE = Protocol("one_by_one", num_warmups=1, runs=1, warmup_ms=25.0, measure_ms=200.0)
_NAMED = {INTERLEAVED.order: INTERLEAVED, ONE_BY_ONE.order: ONE_BY_ONE}


@dataclass(frozen=True)
class Samples:
    """The times of one implementation's timed launches, at least one, in the order they ran.

    sm_clock_mhz and power_w are medians of the readings during the timed part, None if NVML gave
    none. Interleaved implementations run within milliseconds of each other and share their
    readings.
    """

    times_ms: tuple[float, ...]
    sm_clock_mhz: float | None = None
    power_w: float | None = None

    @property
    def median_ms(self) -> float:
        """The median time, from which all figures are derived."""
        return statistics.median(self.times_ms)

    @property
    def best_ms(self) -> float:
        """The shortest time."""
        return min(self.times_ms)

    @property
    def spread(self) -> float:
        """The interquartile range over the median; 0 for a single time."""
        if len(self.times_ms) < 2 or not self.median_ms:
            return 0.0
        lower, _, upper = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return (upper - lower) / self.median_ms


# --- clocks ---


class Clock(Interface):
    """A stream of work, executed in order, on which events mark the progress."""

    def running(self) -> AbstractContextManager[None]:
        """The context in which all other methods are called and implementations are launched."""

    def events(self, count: int) -> list[Any]:
        """``count`` events, created before anything is timed."""

    def record(self, event: Any) -> None:
        """Records an event after everything enqueued so far; does not wait."""

    def flush(self) -> None:
        """Enqueues an operation that evicts everything from the L2; does not wait."""

    def synchronize(self) -> None:
        """Waits for everything enqueued so far. Raises LaunchError if some of this work failed."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two events that have completed."""

    @property
    def can_capture(self) -> bool:
        """Whether calls can be captured in a graph."""

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """Captures the calls in a graph, after a warm-up call of each, and returns a function that
        launches it. Raises any error of the calls and of capturing."""


# As many bytes as Triton's do_bench overwrites; twice the L2 if that is more.
FLUSHED_BYTES = 256_000_000


class CudaEvents:
    """Events on one stream of GPU ``ordinal``.

    ``stream`` is a handle; None means PyTorch's current stream if PyTorch uses the GPU, otherwise
    the default stream. Events are valid until the next call of events().

    Raises LaunchError if there is no such GPU.
    """

    def __init__(self, ordinal: int = 0, stream: int | None = None) -> None:
        count = driver.gpu_count()
        if ordinal >= count:
            seen = f"sees {count}, but GPU {ordinal} was requested" if count else "sees none"
            raise LaunchError(
                f"timing needs an NVIDIA GPU, and this process {seen}; without one "
                "'flashsmith run' proves kernels in the emulator and counts what they do"
            )
        self.ordinal = ordinal
        self._wanted = stream
        self._stream = ctypes.c_void_p(stream)
        self._pool: list[ctypes.c_void_p] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes the GPU current and determines the stream."""
        stream = _current_stream(self.ordinal) if self._wanted is None else self._wanted
        self._stream = ctypes.c_void_p(stream)
        with driver.current_gpu(self.ordinal):
            try:
                yield
            finally:
                self._destroy_events()

    def events(self, count: int) -> list[ctypes.c_void_p]:
        """Events with timing enabled, which may be recorded again."""
        while len(self._pool) < count:
            event = ctypes.c_void_p()
            driver.call("cuEventCreate", ctypes.byref(event), 0)
            self._pool.append(event)
        return self._pool[:count]

    def record(self, event: ctypes.c_void_p) -> None:
        """Records an event on the stream; does not wait."""
        driver.call("cuEventRecord", event, self._stream)

    def flush(self) -> None:
        """Overwrites more memory than the L2 holds; does not wait."""
        buffer = self._buffer
        words = ctypes.c_size_t(buffer.nbytes // 4)
        driver.call("cuMemsetD32Async", ctypes.c_uint64(buffer.address), 0, words, self._stream)

    def synchronize(self) -> None:
        """Waits for the stream."""
        driver.call("cuStreamSynchronize", self._stream)

    def elapsed_ms(self, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Milliseconds between two completed events, with a resolution of half a microsecond at
        best."""
        milliseconds = ctypes.c_float()
        driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value

    @property
    def can_capture(self) -> bool:
        """Whether PyTorch uses the GPU; calls in a graph need PyTorch's memory pool."""
        return _torch_on_gpu() is not None

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """Captures the calls in a CUDA graph with PyTorch, and returns its replay."""
        torch = _torch_on_gpu()
        assert torch is not None
        # The default stream cannot be captured. Calls on the new stream before the capture keep
        # first-call allocations, module loading and kernel choice out of the graph.
        stream = torch.cuda.Stream(self.ordinal)
        stream.wait_stream(torch.cuda.current_stream(self.ordinal))
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        return partial(_replay, graph, tuple(calls))

    @cached_property
    def _buffer(self) -> DeviceArray:
        size = max(FLUSHED_BYTES, 2 * driver.query_gpu(self.ordinal).l2_bytes)
        return DeviceArray.empty((size // 4,), np.dtype(np.uint32), self.ordinal)

    def _destroy_events(self) -> None:
        # After a kernel has failed, events can no longer be destroyed. The failure itself is
        # reported elsewhere.
        pool, self._pool = self._pool, []
        for event in pool:
            try:
                driver.call("cuEventDestroy_v2", event)
            except LaunchError:
                return


def _replay(graph: Any, calls: tuple[Callable[[], Any], ...]) -> None:
    """Replays the graph. ``calls`` is unused; holding it keeps the graph's tensors alive."""
    graph.replay()


def _torch_on_gpu() -> Any:
    """PyTorch, if it uses the GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _current_stream(ordinal: int) -> int:
    """PyTorch's current stream, if it uses the GPU; the default stream otherwise."""
    torch = _torch_on_gpu()
    if torch is None:
        return 0
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def require_usable_gpu(clock: Clock, culprit: str) -> None:
    """Raises LaunchError, which names `culprit`, if a failure has left the GPU unusable, so that
    every further launch of this process would fail."""
    try:
        with clock.running():
            clock.synchronize()
    except LaunchError as error:
        raise LaunchError(
            f"{culprit} left the GPU unusable to this process ({error}); leave it out and run again"
        ) from None


# --- measuring ---


class Implementation(Interface):
    """An implementation to time; names must be unique."""

    @property
    def name(self) -> str:
        """The name in tables and messages."""

    def launch(self) -> Any:
        """Enqueues exactly one call on the current stream; does not wait."""


@dataclass(frozen=True)
class Replay:
    """Calls of one implementation captured in a graph. A launch runs all of these calls, and the
    launch's time is reported per call."""

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
        """A graph that cycles through ``calls``, each on its own tensors, until it has at least
        ``least`` calls (default CALLS_IN_GRAPH).

        Raises any error of the calls and of capturing.
        """
        every = [*calls] * -(-(least or CALLS_IN_GRAPH) // len(calls))
        with clock.running():
            return cls(name, clock.capture(every), len(every))

    def launch(self) -> Any:
        """Enqueues the graph."""
        return self.replay()


def num_sets(nbytes: int) -> int:
    """The number of tensor sets, of ``nbytes`` each, that a graph's calls rotate through."""
    return max(2, -(-SETS_BYTES // max(1, nbytes)))


def measure(
    implementations: Sequence[Implementation],
    protocol: Protocol = INTERLEAVED,
    *,
    clock: Clock | None = None,
    telemetry: Telemetry | None = None,
) -> dict[str, Samples]:
    """The samples of every implementation by name, in the order given. A Replay's samples are per
    call.

    Launches follow each other without a wait, since an idle GPU raises its clock above what it can
    sustain under load. ``clock`` None is the current stream of GPU 0, and ``telemetry`` None reads
    that GPU's clock and power.

    Raises ArgumentError if two implementations share a name, LaunchError if there is no GPU or a
    launch fails, and any error of an implementation.
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
        """Times one implementation, or several interleaved."""
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
        """The milliseconds of a launch, including the flush before it."""
        implementation.launch()  # may compile, choose a kernel or load a module
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
            # The flush also keeps the GPU busy while the host prepares the launch.
            self.clock.flush()
        self.clock.record(begin)
        implementation.launch()
        self.clock.record(end)


def _turns(group: Sequence[Implementation], rounds: int) -> Iterator[Implementation]:
    """Every implementation once per round: a shuffled order, then its reverse, then another
    shuffle.

    The orders are the same in every run. The orders within a run vary because the previous kernel
    leaves the GPU warmer or cooler, so no implementation may always have the same neighbour.
    """
    orders = random.Random(0)
    order = list(group)
    for turn in range(rounds):
        if turn % 2:
            order.reverse()
        else:
            orders.shuffle(order)
        yield from order
