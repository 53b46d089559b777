"""Settings for all tests: the two sizes of the suite, and the reasons for which a test may skip.

A plain ``pytest`` leaves out the tests that are marked ``full``; ``pytest -m full`` runs all tests.
``pytest --shard K/N`` runs one of N parts of the tests that a plain run leaves out (shards.py).
With CI=true a skip for a reason that is not in ALLOWED_SKIPS fails the run, because tests that are
skipped unnoticed prove nothing.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# What several folders' tests share.
sys.path.insert(0, str(Path(__file__).parent))

import shards

NO_GPU = "needs an NVIDIA GPU: none is usable here"
NO_TORCH = "needs PyTorch: it is not installed"

# Patterns, matched from the beginning of the reason. No package is among them that the extra
# 'test-all' brings: a test that is skipped for want of one tests nothing.
ALLOWED_SKIPS = (
    re.escape(NO_GPU),
    r"needs \d+ NVIDIA GPUs",
    r"needs a GPU of compute capability \d+\.\d",
    r"needs an ordinary user: root may write everywhere",
    r"needs root: gives files to another user",
    r"needs a machine without a GPU: this one has one",
    # Of the operating system; .ci/run installs it.
    r"needs qemu-user and g\+\+-aarch64-linux-gnu",
    # No JAX of the versions that are supported runs on Python 3.10.
    *((r"needs JAX: it is not installed",) if sys.version_info < (3, 11) else ()),
)

_refused_skips: Counter[str] = Counter()


@pytest.fixture
def load_tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a fresh copy of a script of tools/, whose names a test may then replace."""

    def load(path: str) -> ModuleType:
        tool = Path(__file__).parents[1] / "tools" / path
        spec = importlib.util.spec_from_file_location(tool.stem, tool)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up there.
        monkeypatch.setitem(sys.modules, tool.stem, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(autouse=True)
def wide_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests read whole lines and tables; those about narrow pages say how wide theirs are."""
    monkeypatch.setenv("COLUMNS", "400")


@functools.cache
def gpu_count() -> int:
    """How many GPUs the CUDA driver offers; 0 without a driver. Needs no CUDA library of ours."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashsmith")
    group.addoption(
        "--shard",
        type=shards.shard_option,
        metavar="K/N",
        help="run shard K of N (K from 0) of the tests that are marked full",
    )
    group.addoption(
        "--log-durations",
        type=Path,
        metavar="FILE",
        help="append how long each test took as it ends, for tests/shards.py --record",
    )


#: Tests make hundreds of thousands of objects that stay: with Python's own thresholds, collections
#: that find nothing take one second in fifteen of an emulated test.
GC_THRESHOLDS = 20_000, 10, 10


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(*GC_THRESHOLDS)
    worker: dict[str, int] | None = getattr(config, "workerinput", None)
    if worker is not None:
        # The cores are shared, and each compiler more reads the headers once more. Threads of
        # PyTorch and NumPy that find no core free spin until they do: small gradients take 20
        # times as long.
        share = str(max(1, len(os.sched_getaffinity(0)) // worker["workercount"]))
        os.environ.setdefault("FLASHSMITH_JOBS", share)
        os.environ.setdefault("OMP_NUM_THREADS", share)
    # Where workers run the tests, their reports come to the others.
    elif config.option.log_durations:
        config.pluginmanager.register(DurationsLog(config.option.log_durations))


class DurationsLog:
    """A line for each test that has ended, with its seconds, and those of the processor: what is
    written survives a run that is cut off."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            seconds = self.seconds.pop(report.nodeid), getattr(report, "cpu_seconds", 0.0)
            line = json.dumps([report.nodeid, *(round(each, 3) for each in seconds)])
            print(line, file=self.file, flush=True)


_CPU_BEFORE = pytest.StashKey[float]()


def _cpu_seconds() -> float:
    """Of this process, and of children that have ended: compilers."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    item.stash[_CPU_BEFORE] = _cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "teardown":
        # Workers send what reports hold.
        report.cpu_seconds = _cpu_seconds() - item.stash[_CPU_BEFORE]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """The modules and items of all tests live until the end: the garbage collector would look at
    their millions of objects again and again, which takes it a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    expression = config.option.markexpr
    full = [item for item in items if item.get_closest_marker("full")]
    if expression == "full":
        config.option.markexpr = ""
    if config.option.shard:
        shard, count = config.option.shard
        places = shards.shards_of([item.nodeid for item in full], count, shards.recorded())
        _keep([item for item, place in zip(full, places, strict=True) if place == shard], items)
    elif "full" not in expression and not _names_one_test(config):
        _keep([item for item in items if not item.get_closest_marker("full")], items)
    for item in items:
        if item.get_closest_marker("gpu") and gpu_count() == 0:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
            item.add_marker(pytest.mark.skip(reason=NO_TORCH))


def _keep(kept: list[pytest.Item], items: list[pytest.Item]) -> None:
    """Deselects all other items."""
    wanted = set(kept)
    left_out = [item for item in items if item not in wanted]
    if left_out:
        left_out[0].config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _names_one_test(config: pytest.Config) -> bool:
    """Whether the command line names single tests, which are then always run."""
    return bool(config.args) and all("::" in argument for argument in config.args)


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not any(re.match(pattern, reason) for pattern in ALLOWED_SKIPS):
        _refused_skips[reason] += 1


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _in_ci() and _refused_skips and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not (_in_ci() and _refused_skips):
        return
    terminalreporter.section("skips that CI does not accept", red=True)
    terminalreporter.line("pip install '.[test-all]' brings every package that a test needs")
    for reason, count in _refused_skips.most_common():
        terminalreporter.line(f"{count} x {reason}")
