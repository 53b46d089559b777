"""The timing protocol: the order of launches, the events around them, and the clock.

CUDA events on the stream that the kernels run on; warm-up; the L2 overwritten between repeats, or
graphs of calls on sets of tensors that the L2 does not hold; implementations in turn, or one after
the other. All timing in flashsmith is done here.
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

    order: 'interleaved' launches each once a round, in an order that changes from round to round,
    so that a drifting clock affects all equally and none always follows the same one; 'one_by_one'
    finishes an implementation before the next.
    flush_l2: whether the L2 is overwritten before every timed launch.
    in_graphs: whether a launch is a Replay of a graph, whose calls read one set of tensors after
    another, none of them again before SETS_BYTES of others.
    num_warmups, runs: how many launches an implementation gets untimed and timed, at least.
    warmup_ms, measure_ms: how long, at least, those take together; short kernels are launched more
    often. 0 leaves the count as it is. Interleaved, they hold for the implementations' mean.
    num_estimates: launches from which the time of one is estimated.

    Raises ArgumentError for an unknown order, or a number below its least.
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

    def over_cache(self, nbytes: int) -> Protocol:
        """The protocol for calls that read a cache of so many bytes: this one where it is large, in
        graphs where a call takes about as long as a launch."""
        if nbytes > LARGEST_IN_GRAPHS:
            return self
        return replace(self, flush_l2=False, in_graphs=True)

    def launches(self, estimate_ms: float) -> tuple[int, int]:
        """The numbers of untimed and timed launches for implementations with these launch times."""
        return (
            _enough(self.num_warmups, self.warmup_ms, estimate_ms),
            _enough(self.runs, self.measure_ms, estimate_ms),
        )

    def __str__(self) -> str:
        if self.in_graphs:
            return f"{self.order}, {IN_GRAPHS}"
        return self.order if self.flush_l2 else f"{self.order}, warm L2"


def _enough(least: int, milliseconds: float, each: float) -> int:
    # The resolution of an event is half a microsecond.
    return max(least, int(milliseconds / max(each, 5e-4)))


def _listed() -> str:
    return ", ".join(get_args(Order))


# A cache up to this size is measured in graphs, over sets of tensors of together at least so many
# bytes (an L2 has some 50 MB), with at least so many calls in a graph: the gap between two launches
# and the resolution of an event are then below a tenth of a microsecond a call.
LARGEST_IN_GRAPHS = 40_000_000
SETS_BYTES = 240_000_000
CALLS_IN_GRAPH = 48
IN_GRAPHS = "in graphs"

INTERLEAVED = Protocol()
# As Triton's do_bench does it, so that figures compare with those taken by it.
ONE_BY_ONE = Protocol("one_by_one", num_warmups=1, runs=1, warmup_ms=25.0, measure_ms=200.0)
_NAMED = {INTERLEAVED.order: INTERLEAVED, ONE_BY_ONE.order: ONE_BY_ONE}


@dataclass(frozen=True)
class Samples:
    """The times of one implementation's timed launches, at least one, in the order they ran.

    sm_clock_mhz and power_w are medians over the readings during the timed part, None where NVML
    gave none. Interleaved implementations run within milliseconds of each other and share theirs.
    """

    times_ms: tuple[float, ...]
    sm_clock_mhz: float | None = None
    power_w: float | None = None

    @property
    def median_ms(self) -> float:
        """The time that figures are made of."""
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
    """A stream of work whose progress can be marked. Everything in it runs in order."""

    def running(self) -> AbstractContextManager[None]:
        """Around all of the other calls, and around the launches between them."""

    def events(self, count: int) -> list[Any]:
        """``count`` marks, made before anything is timed."""

    def record(self, event: Any) -> None:
        """Sets a mark behind everything enqueued so far; does not wait."""

    def flush(self) -> None:
        """Enqueues what drives everything out of the L2; does not wait."""

    def synchronize(self) -> None:
        """Waits for everything enqueued so far. Raises LaunchError when some of it failed."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks that the work has passed."""

    @property
    def can_capture(self) -> bool:
        """Whether calls can be captured in a graph."""

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """What enqueues all of the calls at once, captured after each was made once. Raises what
        they and capturing raise."""


# What Triton's do_bench overwrites; on a GPU whose L2 comes near to it, twice the L2.
FLUSHED_BYTES = 256_000_000


class CudaEvents:
    """Events on one stream of GPU ``ordinal``.

    ``stream`` is a handle; None means PyTorch's current stream if PyTorch uses the GPU, else the
    default stream. Events may be used until new ones are requested.

    Raises LaunchError where there is no such GPU.
    """

    def __init__(self, ordinal: int = 0, stream: int | None = None) -> None:
        count = driver.gpu_count()
        if ordinal >= count:
            seen = f"sees {count}, and GPU {ordinal} is asked for" if count else "sees none"
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
        """Makes the GPU current, and determines the stream."""
        stream = _current_stream(self.ordinal) if self._wanted is None else self._wanted
        self._stream = ctypes.c_void_p(stream)
        with driver.current_gpu(self.ordinal):
            try:
                yield
            finally:
                self._destroy_events()

    def events(self, count: int) -> list[ctypes.c_void_p]:
        """Events with timing, unrecorded or free to be recorded again."""
        while len(self._pool) < count:
            event = ctypes.c_void_p()
            driver.call("cuEventCreate", ctypes.byref(event), 0)
            self._pool.append(event)
        return self._pool[:count]

    def record(self, event: ctypes.c_void_p) -> None:
        """Sets a mark on the stream; does not wait."""
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
        """Milliseconds between two events that have happened, half a microsecond apart at best."""
        milliseconds = ctypes.c_float()
        driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value

    @property
    def can_capture(self) -> bool:
        """Whether PyTorch uses the GPU: its memory is what a graph's calls allocate."""
        return _torch_on_gpu() is not None

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """The replay of a CUDA graph of the calls, by PyTorch."""
        torch = _torch_on_gpu()
        assert torch is not None
        # Not the default stream, which cannot be captured. What a first call there allocates, loads
        # or chooses is no part of the graph.
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
        # After a kernel failed nothing can be destroyed any more; the failure is reported
        # elsewhere.
        pool, self._pool = self._pool, []
        for event in pool:
            try:
                driver.call("cuEventDestroy_v2", event)
            except LaunchError:
                return


def _replay(graph: Any, calls: tuple[Callable[[], Any], ...]) -> None:
    """``calls`` are the graph's, held because it reads and writes their tensors."""
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
    """Raises LaunchError, naming `culprit`, when the failure has made the GPU unusable: every
    further launch of this process would fail."""
    try:
        with clock.running():
            clock.synchronize()
    except LaunchError as error:
        raise LaunchError(
            f"{culprit} left the GPU unusable to this process ({error}); leave it out and start "
            "again"
        ) from None


# --- measuring ---


class Implementation(Interface):
    """An implementation to time; names must be unique."""

    @property
    def name(self) -> str:
        """For tables and messages."""

    def launch(self) -> Any:
        """Enqueues exactly one call on the current stream; does not wait."""


@dataclass(frozen=True)
class Replay:
    """Calls of one implementation captured in a graph: a launch is all of them, its time that of
    one call."""

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
        """The graph of calls, each on tensors of its own: of all in turn, until they are enough, by
        default CALLS_IN_GRAPH.

        Raises what the calls and capturing raise.
        """
        every = [*calls] * -(-(least or CALLS_IN_GRAPH) // len(calls))
        with clock.running():
            return cls(name, clock.capture(every), len(every))

    def launch(self) -> Any:
        """Enqueues the graph."""
        return self.replay()


def num_sets(nbytes: int) -> int:
    """How many sets of tensors, so large each, a graph's calls read in turn."""
    return max(2, -(-SETS_BYTES // max(1, nbytes)))


def measure(
    implementations: Sequence[Implementation],
    protocol: Protocol = INTERLEAVED,
    *,
    clock: Clock | None = None,
    telemetry: Telemetry | None = None,
) -> dict[str, Samples]:
    """The samples of every implementation, by name, in the order given; of a Replay those of one
    of its calls.

    Launches follow each other without waiting in between: a GPU that idled between repeats would
    run at a clock that it does not keep under load. ``clock`` None is the current stream of GPU 0,
    and ``telemetry`` None reads that GPU's clock and power.

    Raises ArgumentError when two have one name, LaunchError when there is no GPU or a launch fails,
    and what an implementation raises.
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
        """Implementations in turn, or a single one."""
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
        """Milliseconds of a launch together with the flush before it."""
        implementation.launch()  # may compile, choose or load
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
            # It also keeps the GPU busy while the host prepares the launch.
            self.clock.flush()
        self.clock.record(begin)
        implementation.launch()
        self.clock.record(end)


def _turns(group: Sequence[Implementation], rounds: int) -> Iterator[Implementation]:
    """Each once a round: a shuffled order, then its reverse, then another.

    The same orders every time. The previous kernel leaves the GPU warmer or cooler, so no
    implementation may always have the same neighbour.
    """
    orders = random.Random(0)
    order = list(group)
    for turn in range(rounds):
        if turn % 2:
            order.reverse()
        else:
            orders.shuffle(order)
        yield from order
