"""Libraries of a package that are built at the same time. No kernel is compiled here."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashsmith.builder import package_build
from flashsmith.builder.build_progress import BuildEvent
from flashsmith.builder.package_build import build_package, library_groups
from flashsmith.builder.processes import Command, run_all
from flashsmith.errors import ArgumentError, CompileError
from flashsmith.families import Semantics, get_kernel_configs

KERNELS = {
    Semantics(): get_kernel_configs("backward"),
    Semantics("causal"): get_kernel_configs("prog-all"),
    Semantics("causal", uneven=True): get_kernel_configs("prog-all"),
    Semantics("window"): get_kernel_configs("prog-all")[:2],
}
GROUPS = library_groups(KERNELS)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Replaces the build of one library by a function of its semantics, configs and options."""

    def replace(build: Any) -> None:
        def build_from(csrc: Path, configs: Any, *, semantics: Semantics, **options: Any) -> Any:
            return build(semantics, configs, options)

        monkeypatch.setattr(package_build, "build_from", build_from)

    return replace


@pytest.mark.parametrize(("jobs", "at_once", "each"), [(1, 1, 1), (7, 1, 7), (8, 2, 4), (13, 3, 4)])
def test_many_jobs_build_several_libraries_at_a_time(
    jobs: int, at_once: int, each: int, built: Any
) -> None:
    running: list[int] = []
    started: list[int] = []
    given: set[int] = set()
    lock, together = threading.Lock(), threading.Barrier(at_once)

    def build(semantics: Semantics, configs: Any, options: Any) -> Any:
        with lock:
            started.append(len(started))
            running.append(0)
            assert len(running) <= at_once
            given.add(options["jobs"])
            first = len(started) <= at_once
        if first:
            together.wait(timeout=20)  # all of these run at the same time
        with lock:
            running.pop()
        return semantics, configs

    built(build)
    assert len(GROUPS) > 3
    assert build_package(KERNELS, arch=90, jobs=jobs) == GROUPS
    assert given == {each}


def test_progress_counts_the_kernels_of_all_libraries(built: Any) -> None:
    seen: list[int] = []

    def build(semantics: Semantics, configs: Any, options: Any) -> Any:
        report = options["progress"]
        report(BuildEvent("compile", "begin", 0, len(configs) + 2))
        for number, _ in enumerate(configs):
            entry: Any = object()
            report(BuildEvent("compile", "kernel", number, len(configs) + 2, entry))
        report(BuildEvent("done", "done", len(configs) + 2, len(configs) + 2))
        return semantics, configs

    built(build)
    build_package(KERNELS, arch=90, jobs=8, progress=lambda count, event: seen.append(count))
    assert seen == sorted(seen)
    assert seen[-1] == sum(len(configs) for _, configs in GROUPS)


def test_a_failure_ends_the_compilers_of_the_others(built: Any, tmp_path: Path) -> None:
    started = threading.Event()
    ended: list[BaseException] = []

    def build(semantics: Semantics, configs: Any, options: Any) -> Any:
        folder = tmp_path / f"{threading.get_ident()}"
        folder.mkdir(exist_ok=True)
        if semantics == Semantics("window"):
            assert started.wait(20)
            raise ArgumentError("the reason")
        try:
            sleeps = [Command(f"c{it}", ("/bin/sh", "-c", "sleep 60")) for it in range(2)]
            started.set()
            run_all(sleeps, cwd=folder, jobs=2, finished=lambda done: None)
        except CompileError as error:
            ended.append(error)
            raise

    built(build)
    with pytest.raises(ArgumentError, match="the reason"):
        build_package(KERNELS, arch=90, jobs=4 * len(GROUPS))
    assert len(ended) == len(GROUPS) - 1
    assert all("was killed by signal 9" in str(error) for error in ended)


def test_a_signal_ends_all_compilers(built: Any, tmp_path: Path) -> None:
    """What its handler raises reaches the caller."""
    ended: list[BaseException] = []

    def wake(number: int, frame: Any) -> None:
        raise TimeoutError("the call took too long")

    def build(semantics: Semantics, configs: Any, options: Any) -> Any:
        folder = tmp_path / f"{threading.get_ident()}"
        folder.mkdir()
        sleep = Command("c", ("/bin/sh", "-c", "sleep 60"))
        try:
            run_all([sleep], cwd=folder, jobs=1, finished=lambda done: None)
        except CompileError as error:
            ended.append(error)
            raise

    built(build)
    former = signal.signal(signal.SIGUSR1, wake)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(TimeoutError, match="the call took too long"):
            build_package(KERNELS, arch=90, jobs=8)
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, former)
    assert len(ended) == 2  # the others had not begun
    assert all("was killed by signal 9" in str(error) for error in ended)


def test_no_jobs_are_refused() -> None:
    with pytest.raises(ArgumentError, match="jobs=0: give at least 1"):
        build_package(KERNELS, arch=90, jobs=0)
