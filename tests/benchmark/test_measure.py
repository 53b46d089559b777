"""The timing protocol on a pretended clock: what is launched when, and what comes out."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import PretendedClock, PretendedImplementation

from flashsmith.benchmark.environment import Telemetry
from flashsmith.benchmark.timing import (
    INTERLEAVED,
    ONE_BY_ONE,
    Protocol,
    Replay,
    Samples,
    measure,
    num_sets,
)
from flashsmith.errors import ArgumentError, LaunchError
from flashsmith.runtime import driver

SILENT = Telemetry(sensor=lambda: (None, None))
EXACT = Protocol(num_warmups=2, runs=3, warmup_ms=0, measure_ms=0, num_estimates=1)


def run(clock: PretendedClock, costs: dict[str, float], protocol: Protocol) -> dict[str, Samples]:
    implementations = [PretendedImplementation(name, ms, clock) for name, ms in costs.items()]
    return measure(implementations, protocol, clock=clock, telemetry=SILENT)


def timed_part(clock: PretendedClock) -> list[str]:
    """What was enqueued after the last events were made: the last timed part."""
    after = len(clock.log) - clock.log[::-1].index("events")
    return clock.log[after:]


def rounds(runs: int) -> list[str]:
    """The orders in which three implementations were timed, as 'bca'."""
    clock = PretendedClock()
    run(clock, dict.fromkeys("abc", 1.0), Protocol.named("interleaved", 2, runs))
    launched = "".join(word for word in timed_part(clock) if word in "abc")
    return [launched[begin : begin + 3] for begin in range(0, len(launched), 3)]


def test_a_round_launches_each_once_and_the_next_reverses_it() -> None:
    orders = rounds(40)
    assert len(orders) == 40
    assert {frozenset(order) for order in orders} == {frozenset("abc")}
    assert len(set(orders)) == 6
    assert all(
        second == first[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True)
    )
    assert orders == rounds(40)


def test_no_implementation_always_follows_the_same_one() -> None:
    clock = PretendedClock()

    def lower(now: float) -> float:
        """What runs behind the hot one finds a lower clock."""
        launched = [word for word in clock.log if word in "abc"]
        return 1.05 if launched[-2:-1] == ["a"] else 1.0

    clock.slowdown = lower
    samples = run(clock, dict.fromkeys("abc", 1.0), Protocol.named("interleaved", 1, 30))
    assert [s.median_ms for s in samples.values()] == pytest.approx([1.0] * 3)


def test_a_launch_stands_between_its_marks_and_behind_a_flush() -> None:
    clock = PretendedClock()
    run(clock, {"a": 1, "b": 1}, EXACT)
    part = timed_part(clock)
    assert part[:8] == ["flush", "|", "a", "|", "flush", "|", "b", "|"]
    # The GPU is waited for once, at the end.
    assert part.count("wait") == 1
    assert part[-2:] == ["wait", "end"]


def test_without_flushing_the_l2_stays_warm() -> None:
    clock = PretendedClock()
    run(clock, {"a": 1}, Protocol(flush_l2=False))
    assert "flush" not in clock.log


def test_what_is_given_as_a_number_is_exact() -> None:
    clock = PretendedClock()
    samples = run(clock, {"a": 0.001}, Protocol.named("interleaved", num_warmups=4, runs=7))
    assert len(samples["a"].times_ms) == 7
    first = clock.log.index("|")
    warm_ups = clock.log[clock.log.index("wait", first) + 1 : clock.log.index("events", first)]
    assert warm_ups == ["a"] * 4


def test_one_by_one_is_do_benchs_protocol() -> None:
    clock = PretendedClock(flush_ms=0.25)
    samples = run(clock, {"a": 0.25, "b": 9.75}, ONE_BY_ONE)
    # 200 ms of flush and launch.
    assert [len(s.times_ms) for s in samples.values()] == [400, 20]
    launched = [word for word in clock.log if word in "ab"]
    assert [name for name, _ in itertools.groupby(launched)] == ["a", "b"]
    # One launch of grace, five to estimate, 25 ms of warm-up, and the timed ones.
    assert Counter(launched) == {"a": 1 + 5 + 50 + 400, "b": 1 + 5 + 2 + 20}


def test_a_long_kernel_is_timed_at_least_once() -> None:
    samples = run(PretendedClock(), {"a": 1000.0}, ONE_BY_ONE)
    assert len(samples["a"].times_ms) == 1
    samples = run(PretendedClock(), {"a": 1000.0}, INTERLEAVED)
    assert len(samples["a"].times_ms) == INTERLEAVED.runs


@given(
    st.dictionaries(st.text(min_size=1), st.floats(1e-3, 50), min_size=1, max_size=5),
    st.sampled_from(["interleaved", "one_by_one"]),
    st.integers(1, 9),
)
def test_samples_are_of_one_implementation(costs: dict[str, float], order: str, runs: int) -> None:
    clock = PretendedClock()
    samples = run(clock, costs, Protocol.named(order, num_warmups=0, runs=runs))
    assert list(samples) == list(costs)
    for name, ms in costs.items():
        assert samples[name].times_ms == pytest.approx([ms] * runs)
        assert samples[name].median_ms == pytest.approx(ms)


def test_a_drifting_clock_hits_all_alike_when_interleaved() -> None:
    def drift(now: float) -> float:
        return 1 + now / 1000

    ratios = {}
    for protocol in (INTERLEAVED, ONE_BY_ONE):
        samples = run(PretendedClock(slowdown=drift), {"a": 1.0, "b": 1.0}, protocol)
        ratios[protocol.order] = samples["b"].median_ms / samples["a"].median_ms
    assert ratios["interleaved"] == pytest.approx(1, abs=0.002)
    assert ratios["one_by_one"] > 1.1


def test_median_best_and_spread() -> None:
    samples = Samples((4.0, 1.0, 2.0, 3.0, 100.0))
    assert samples.median_ms == 3.0
    assert samples.best_ms == 1.0
    assert samples.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert Samples((5.0,)).spread == 0.0


def test_two_implementations_of_one_name_are_refused() -> None:
    clock = PretendedClock()
    with pytest.raises(ArgumentError, match="names must differ, got a, a"):
        measure([PretendedImplementation("a", 1, clock)] * 2, clock=clock, telemetry=SILENT)
    assert clock.log == []


def test_nobody_is_measured_in_no_time() -> None:
    assert measure([], clock=PretendedClock(), telemetry=SILENT) == {}


def test_a_failed_launch_leaves_the_clock_in_order() -> None:
    class Broken(PretendedImplementation):
        def launch(self) -> None:
            raise LaunchError("illegal address")

    clock = PretendedClock()
    with pytest.raises(LaunchError, match="illegal address"):
        measure([Broken("a", 1, clock)], clock=clock, telemetry=SILENT)
    assert clock.log == ["begin", "end"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"order": "backwards"}, "protocol='backwards': allowed are interleaved, one_by_one"),
        ({"runs": 0}, "runs=0: give at least 1"),
        ({"num_warmups": -1}, "num_warmups=-1: give at least 0"),
        ({"measure_ms": float("nan")}, "measure_ms=nan"),
    ],
)
def test_a_protocol_that_makes_no_sense_is_refused(wrong: dict, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        Protocol(**wrong)


def test_an_unknown_protocol_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="allowed are interleaved, one_by_one"):
        Protocol.named("do_bench")


class Sensor:
    """Says 1500 MHz and 100 W more every time an implementation is measured."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.watts = 0.0

    def __call__(self) -> tuple[float, float]:
        self.threads.add(threading.current_thread().name)
        return 1500.0, self.watts


def test_clock_and_power_are_read_in_a_thread_of_their_own() -> None:
    sensor = Sensor()
    clock = PretendedClock()

    class Heating(PretendedImplementation):
        def launch(self) -> None:
            super().launch()
            sensor.watts = 100.0 if self.name == "a" else 200.0

    implementations = [Heating("a", 1, clock), Heating("b", 1, clock)]
    telemetry = Telemetry(sensor=sensor)
    samples = measure(implementations, ONE_BY_ONE, clock=clock, telemetry=telemetry)
    assert {s.sm_clock_mhz for s in samples.values()} == {1500.0}
    # One after the other, each has its own.
    assert [s.power_w for s in samples.values()] == [100.0, 200.0]
    assert sensor.threads == {"telemetry"}
    # In turn, they share one.
    samples = measure(implementations, EXACT, clock=clock, telemetry=telemetry)
    assert samples["a"].power_w == samples["b"].power_w


def test_a_sensor_that_knows_one_thing_only() -> None:
    with Telemetry(sensor=lambda: (None, 300.0)).reading() as reading:
        pass
    assert (reading.sm_clock_mhz, reading.power_w) == (None, 300.0)


def test_without_nvml_there_are_no_readings_and_it_says_why(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    telemetry = Telemetry()
    assert "pip install '.[bench]'" in telemetry.absence
    with telemetry.reading() as reading:
        pass
    assert (reading.sm_clock_mhz, reading.power_w) == (None, None)


def test_timing_without_a_gpu_says_what_there_is_instead(monkeypatch) -> None:
    monkeypatch.setattr(driver, "gpu_count", lambda: 0)
    with pytest.raises(LaunchError, match=r"timing needs an NVIDIA GPU.*flashsmith run"):
        measure([])


# --- in graphs -----------------------------------------------------------------------------------


def test_a_small_cache_is_measured_in_graphs_and_a_large_one_is_not() -> None:
    for protocol in (INTERLEAVED, ONE_BY_ONE):
        small = protocol.over_cache(40_000_000)
        assert (small.in_graphs, small.flush_l2) == (True, False)
        assert str(small) == f"{protocol.order}, in graphs"
        assert protocol.over_cache(40_000_001) is protocol
    assert str(INTERLEAVED) == "interleaved"


@given(st.integers(1, 40_000_000))
def test_sets_of_tensors_are_more_than_an_l2_holds(nbytes: int) -> None:
    assert (num_sets(nbytes) - 1) * nbytes < 240_000_000 <= num_sets(nbytes) * nbytes


def test_a_graph_calls_on_all_sets_in_turn_and_its_time_is_a_calls() -> None:
    clock = PretendedClock()

    def call(name: str, ms: float) -> Callable[[], None]:
        return lambda: clock.work(name, ms)

    slow = Replay.of("slow", [call(f"slow {n}", 0.5) for n in range(20)], clock)
    fast = Replay.of("fast", [call(f"fast {n}", 0.25) for n in range(50)], clock)
    assert (slow.calls, fast.calls) == (60, 50)
    protocol = replace(EXACT, flush_l2=False, in_graphs=True)
    samples = measure([slow, fast], protocol, clock=clock, telemetry=SILENT)
    assert samples["slow"].times_ms == pytest.approx([0.5] * 3)
    assert samples["fast"].times_ms == pytest.approx([0.25] * 3)
    assert "flush" not in clock.log
    # Marks are around whole graphs, and every set is read before any again.
    first = timed_part(clock)
    of_slow = first[first.index("slow 0") - 2 :]
    assert of_slow[:2] == ["|", "graph"]
    assert of_slow[2:63] == [*(f"slow {n}" for n in range(20)), *of_slow[22:62], "|"]
    assert of_slow[22:62] == 2 * of_slow[2:22]
