"""The GPU's clock and sensors: which driver calls are made, against a pretended driver and NVML."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from flashsmith.benchmark import environment
from flashsmith.benchmark.clock import FLUSHED_BYTES
from flashsmith.benchmark.environment import Environment, Telemetry
from flashsmith.benchmark.timing import (
    INTERLEAVED,
    CudaEvents,
    Protocol,
    measure,
)
from flashsmith.errors import LaunchError
from flashsmith.families import device_spec
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks import device_array


class PretendedDriver:
    """Events are numbered from 1; ``recorded`` says on which stream each was."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.recorded: list[tuple[int, int | None]] = []
        self.events = 0
        self.broken = False

    def call(self, what: str, *args: Any) -> None:
        self.calls.append(what)
        if self.broken:
            raise LaunchError(f"{what}: an illegal memory access")
        if what == "cuEventCreate":
            self.events += 1
            args[0]._obj.value = self.events
        elif what == "cuEventRecord":
            self.recorded.append((args[0].value, args[1].value))
        elif what == "cuEventElapsedTime":
            args[0]._obj.value = 0.25 * (args[2].value - args[1].value)
        elif what == "cuMemAlloc_v2":
            args[0]._obj.value = 4096
        elif what == "cuMemsetD32Async":
            assert args[0].value == 4096
            self.flushed = 4 * args[2].value
        elif what == "cuDeviceGetPCIBusId":
            args[0].value = b"0000:1b:00.0"
        elif what == "cuDriverGetVersion":
            args[0]._obj.value = 13010


@pytest.fixture
def gpu(monkeypatch) -> PretendedDriver:
    pretended = PretendedDriver()

    @contextmanager
    def current_gpu(ordinal: int):
        pretended.calls.append("push")
        yield
        pretended.calls.append("pop")

    monkeypatch.setattr(driver, "call", pretended.call)
    monkeypatch.setattr(driver, "current_gpu", current_gpu)
    monkeypatch.setattr(driver, "gpu_count", lambda: 1)
    monkeypatch.setattr(driver, "query_gpu", lambda ordinal: device_spec("H200"))
    # What is allocated here is no memory that could be freed.
    monkeypatch.setattr(device_array, "_free", lambda ordinal, address: None)
    return pretended


def test_events_are_recorded_on_the_stream_and_read_in_milliseconds(gpu: PretendedDriver) -> None:
    clock = CudaEvents(stream=7)
    with clock.running():
        begin, end = clock.events(2)
        clock.record(begin)
        clock.record(end)
        clock.synchronize()
        assert clock.elapsed_ms(begin, end) == 0.25
    assert gpu.recorded == [(1, 7), (2, 7)]
    assert gpu.calls[0] == "push"
    assert gpu.calls[-1] == "pop"
    assert gpu.calls.count("cuEventDestroy_v2") == 2


def test_events_are_used_again(gpu: PretendedDriver) -> None:
    clock = CudaEvents(stream=0)
    with clock.running():
        assert clock.events(3) == clock.events(2) + clock.events(3)[2:]
    assert gpu.events == 3


@pytest.mark.parametrize(("l2_mib", "flushed"), [(60, 256_000_000), (126, 264_241_152)])
def test_a_flush_overwrites_more_than_the_l2_holds(
    gpu: PretendedDriver, monkeypatch, l2_mib: int, flushed: int
) -> None:
    spec = SimpleNamespace(l2_bytes=l2_mib << 20)
    monkeypatch.setattr(driver, "query_gpu", lambda ordinal: spec)
    clock = CudaEvents()
    with clock.running():
        clock.flush()
        clock.flush()
    assert gpu.flushed == flushed
    assert gpu.calls.count("cuMemAlloc_v2") == 1


def test_pytorchs_current_stream_is_followed(gpu: PretendedDriver, monkeypatch) -> None:
    streams = iter((11, 12))
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda ordinal: SimpleNamespace(cuda_stream=next(streams)),
    )
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(cuda=cuda))
    clock = CudaEvents()
    for _ in range(2):
        with clock.running():
            clock.record(clock.events(1)[0])
    assert [stream for _, stream in gpu.recorded] == [11, 12]
    cuda.is_initialized = lambda: False
    with clock.running():
        clock.record(clock.events(1)[0])
    # The default stream's handle is null.
    assert gpu.recorded[-1][1] is None


class PretendedGraphs:
    """PyTorch's streams and graphs: ``log`` says what is enqueued where."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.current = log, "main"
        owner = self

        class Stream:
            def __init__(self, ordinal: int) -> None:
                self.name = "side"

            def wait_stream(self, other: Any) -> None:
                log.append("side waits")

            def synchronize(self) -> None:
                log.append("side is done")

        class CUDAGraph:
            def replay(self) -> None:
                log.append("replay")

        @contextmanager
        def stream(which: Any):
            owner.current = which.name
            yield
            owner.current = "main"

        @contextmanager
        def graph(captured: Any, stream: Any):
            owner.current = "graph"
            yield
            owner.current = "main"

        self.cuda = SimpleNamespace(
            is_initialized=lambda: True,
            current_stream=lambda ordinal: SimpleNamespace(cuda_stream=0),
            Stream=Stream, CUDAGraph=CUDAGraph, stream=stream, graph=graph,
        )  # fmt: skip


def test_calls_are_captured_by_pytorch_after_one_of_each(gpu: PretendedDriver, monkeypatch) -> None:
    log: list[str] = []
    graphs = PretendedGraphs(log)
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(cuda=graphs.cuda))
    clock = CudaEvents()
    assert clock.can_capture
    calls = [lambda name=name: log.append(f"{name} on {graphs.current}") for name in "ab"]
    replay = clock.capture(calls)
    warm = ["side waits", "a on side", "b on side", "side is done"]
    assert log == [*warm, "a on graph", "b on graph"]
    # PyTorch gives freed memory back when the next graph is captured.
    held = [weakref.ref(call) for call in calls]
    calls.clear()
    gc.collect()
    assert all(call() is not None for call in held)
    replay()
    assert log[-1] == "replay"
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert not clock.can_capture


def test_a_broken_gpu_is_reported_by_what_broke_it(gpu: PretendedDriver) -> None:
    clock = CudaEvents(stream=0)

    def use() -> None:
        with clock.running():
            clock.events(2)
            gpu.broken = True
            clock.synchronize()

    with pytest.raises(LaunchError, match="cuStreamSynchronize"):
        use()


@pytest.mark.parametrize(
    ("count", "ordinal", "seen"),
    [(0, 0, "sees none"), (2, 2, "sees 2, but GPU 2 was requested")],
)
def test_a_missing_gpu_is_named(monkeypatch, count: int, ordinal: int, seen: str) -> None:
    monkeypatch.setattr(driver, "gpu_count", lambda: count)
    with pytest.raises(LaunchError, match=f"timing needs an NVIDIA GPU, and this process {seen}"):
        CudaEvents(ordinal)


# --- NVML -----------------------------------------------------------------------------------------


class PretendedNvml:
    """``instant`` is whether the GPU tells its power at the moment."""

    NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT, NVML_SUCCESS = 1, 186, 0

    class NVMLError(Exception):
        pass

    def __init__(self, instant: bool = True, clock: bool = True) -> None:
        self.instant, self.clock = instant, clock

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> str:
        assert address == b"0000:1b:00.0"
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("handle", 1)
        if not self.clock:
            raise self.NVMLError("Not Supported")
        return 1455

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        return [
            SimpleNamespace(nvmlReturn=3 - 3 * self.instant, value=SimpleNamespace(uiVal=690123))
        ]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 500000

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"


@pytest.fixture
def install(monkeypatch, gpu: PretendedDriver):
    def put(nvml: PretendedNvml) -> None:
        monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)

    return put


@pytest.mark.parametrize(
    ("nvml", "clock", "power"),
    [
        (PretendedNvml(), 1455.0, pytest.approx(690.123)),
        (PretendedNvml(instant=False), 1455.0, pytest.approx(500.0)),
        (PretendedNvml(clock=False), None, pytest.approx(690.123)),
    ],
)
def test_nvml_is_asked_for_the_gpu_by_its_address(install, nvml, clock, power) -> None:
    install(nvml)
    sensors = Telemetry()
    assert sensors.absence == ""
    with sensors.reading() as reading:
        pass
    assert reading.sm_clock_mhz == clock
    assert reading.power_w == power


def test_a_gpu_that_nvml_does_not_know_is_no_failure(install, monkeypatch) -> None:
    nvml = PretendedNvml()
    install(nvml)

    def unknown(address: bytes) -> None:
        raise nvml.NVMLError("Not Found")

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByPciBusId", unknown)
    assert Telemetry().absence == "SM clock and power are not read: Not Found"


def test_nothing_is_ever_set() -> None:
    """Clocks belong to the machine's owner."""
    from pathlib import Path

    source = Path(environment.__file__).read_text()
    assert "nvmlDeviceGet" in source
    for verb in ("Set", "Reset"):
        assert f"nvmlDevice{verb}" not in source


def test_the_environment_names_what_is_there(install) -> None:
    install(PretendedNvml())
    Environment.collect.cache_clear()
    try:
        found = Environment.collect()
    finally:
        Environment.collect.cache_clear()
    assert (found.gpu, found.arch, found.driver, found.cuda) == ("H200", 90, "580.159.04", "13.1")
    assert found.flashsmith
    assert found.revision
    assert found.python.startswith("3.")


def test_without_a_repository_the_sources_are_the_revision(monkeypatch) -> None:
    def absent(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(environment.subprocess, "run", absent)
    assert environment._revision().startswith("csrc ")


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_a_flush_takes_as_long_as_its_bytes_take() -> None:
    class Flush:
        def __init__(self, name: str, clock: CudaEvents) -> None:
            self.name, self.launch = name, clock.flush

    clock = CudaEvents()
    implementations = [Flush(name, clock) for name in "ab"]
    for protocol in (INTERLEAVED, Protocol.named("one_by_one")):
        found = measure(implementations, protocol, clock=clock)
        for samples in found.values():
            terabytes_per_second = FLUSHED_BYTES / samples.median_ms / 1e9
            assert 0.05 < terabytes_per_second < 100
            assert len(samples.times_ms) >= 20
