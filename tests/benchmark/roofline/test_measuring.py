"""How a ceiling is measured: checked first, long enough, and gaps and failures kept apart."""

from __future__ import annotations

import pytest
from emulated_machine import EmulatedMachine

from flashsmith.benchmark.roofline import measuring
from flashsmith.benchmark.roofline.measuring import (
    MICROBENCHMARKS,
    PROTOCOL,
    measure_ceiling,
    measure_roofline,
)
from flashsmith.benchmark.roofline.microbenchmarks import (
    CeilingUnavailable,
    Microbenchmark,
    PreparedMicrobenchmark,
    WrongOutput,
)
from flashsmith.benchmark.roofline.roofline_table import describe
from flashsmith.benchmark.timing import Samples
from flashsmith.errors import ArgumentError, LaunchError


class Fake(PreparedMicrobenchmark):
    """A turn takes a microsecond, and a launch twenty more."""

    work = 1e9
    first_turns = 10

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.done: list[str] = []

    def launch(self, turns: int) -> None:
        self.done.append(f"launch {turns}")

    def check(self) -> float:
        self.done.append("check")
        if self.failure:
            raise self.failure
        return 2e-6


def timer(launches, protocol) -> Samples:
    launches.launch()
    ms = 0.02 + 1e-3 * launches.turns
    return Samples((ms,) * protocol.runs, sm_clock_mhz=1500.0, power_w=600.0)


def ceiling(running: Fake, unit="TFLOP/s", **options):
    bench = Microbenchmark("fake", unit, "fake", lambda _: running, **options)
    return measure_ceiling(bench, EmulatedMachine(), 50.0, timer)


def test_the_check_comes_first_and_the_launch_takes_the_time_asked_for() -> None:
    running = Fake()
    found = ceiling(running)
    assert running.done[0] == "check"
    assert len(running.done) == 4
    assert found.ms == pytest.approx(50, rel=0.05)
    # 1e9 FLOP a microsecond, less what the launch costs.
    assert found.rate == pytest.approx(1000, rel=0.02)
    assert found.per_sm_clock == pytest.approx(1e15 / 1.5e9, rel=0.02)
    assert (found.error, found.spread, found.power_w) == (2e-6, 0.0, 600.0)
    assert not found.wrong


def test_units() -> None:
    assert ceiling(Fake(), "Gop/s").rate == pytest.approx(1e6, rel=0.02)


@pytest.mark.parametrize("failure", [WrongOutput("it lies"), LaunchError("it crashed")])
def test_a_failure_is_marked_and_never_timed(failure) -> None:
    running = Fake(failure)
    found = ceiling(running)
    assert (found.rate, found.wrong, found.note) == (None, True, str(failure))
    assert running.done == ["check"]


def test_a_gap_is_no_failure() -> None:
    found = ceiling(Fake(CeilingUnavailable("no such library")))
    assert (found.rate, found.wrong, found.note) == (None, False, "no such library")


def test_what_the_architecture_lacks_is_not_started() -> None:
    running = Fake()
    found = ceiling(running, archs=(90,))
    assert found.note == "fake is an instruction of sm_90a, and this is sm_80"
    assert running.done == []


def test_keys_are_unique_and_described() -> None:
    keys = [bench.key for bench in MICROBENCHMARKS]
    assert len(set(keys)) == len(keys) == 15
    assert all(describe(key) for key in keys)


def test_caches_stay_warm() -> None:
    assert not PROTOCOL.flush_l2
    assert PROTOCOL.runs >= 5


@pytest.mark.parametrize("ms", [0, 0.5, 5000, float("nan")])
def test_a_bad_duration_is_refused(ms: float) -> None:
    with pytest.raises(ArgumentError, match="ms="):
        measure_roofline(ms)


def test_without_a_gpu_the_error_says_so(monkeypatch) -> None:
    monkeypatch.setattr(measuring.driver, "gpu_count", lambda: 0)
    with pytest.raises(LaunchError, match="but none was found"):
        measure_roofline()


@pytest.mark.gpu
def test_every_microbenchmark_is_right_on_this_gpu() -> None:
    said: list[str] = []
    found = measure_roofline(2.0, lambda what, done, total: said.append(what))
    assert said == ["compiling", *(bench.key for bench in MICROBENCHMARKS)]
    assert found.ok, [ceiling for ceiling in found.ceilings if ceiling.wrong]
    unmeasured = {c.key for c in found.ceilings if c.rate is None}
    assert all(key.startswith(("matmul", "wgmma", "dram")) for key in unmeasured)
    if found.arch == 90:
        assert not any(key.startswith("wgmma") for key in unmeasured)
