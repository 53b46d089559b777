"""A child forked after CUDA was initialised gets an error before anything uses the GPU."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from flashsmith.errors import LaunchError
from flashsmith.families import DType, FlashForwardKernelConfig
from flashsmith.runtime import cached_calls, driver, forward, process_forks
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.runtime.libraries import loaded_kernels

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CFG = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4)


def in_child(check: Callable[[], bool]) -> bool:
    """Whether ``check`` returned True in a forked child."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def forward_is_refused() -> bool:
    arrays = [DeviceArray((1, 64, 1, 64), np.dtype(np.float16), 0, i << 20) for i in (1, 2, 3, 4)]
    try:
        forward(CFG, *arrays)
    except LaunchError as error:
        return "forked after CUDA had been initialised" in str(error) and "spawn" in str(error)
    return False


def test_forward_after_a_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_forks, "_cuda_used", True)
    assert in_child(forward_is_refused)


def test_a_grandchild_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_forks, "_cuda_used", True)
    assert in_child(lambda: in_child(forward_is_refused))


def test_driver_calls_after_a_fork_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_forks, "_cuda_used", True)

    def allocation_is_refused() -> bool:
        try:
            driver.call("cuDeviceGetCount")
        except LaunchError as error:
            return "fork" in str(error)
        return False

    assert in_child(allocation_is_refused)


def test_forking_before_cuda_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_forks, "_cuda_used", False)

    def nothing_is_raised() -> bool:
        process_forks.check_not_forked()
        return True

    assert in_child(nothing_is_raised)


def test_the_parent_itself_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_forks, "_cuda_used", True)
    assert in_child(lambda: True)
    process_forks.check_not_forked()


@pytest.mark.parametrize("used", [False, True])
def test_cuda_that_pytorch_initialised_counts(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_forks, "_cuda_used", False)
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: used))

    def is_refused() -> bool:
        try:
            process_forks.check_not_forked()
        except LaunchError:
            return True
        return False

    assert in_child(is_refused) == used


@pytest.mark.gpu
@pytest.mark.torch
def test_a_fork_after_pytorch_initialised_cuda_is_refused() -> None:
    import torch

    torch.cuda.init()
    assert in_child(forward_is_refused)


def test_a_child_does_not_wait_for_its_parents_threads() -> None:
    """Only the thread that forks goes on in the child; what others held stays held there."""
    with cached_calls._lock:
        assert in_child(lambda: cached_calls._lock.acquire(blocking=False))


def test_a_child_looks_for_kernels_while_its_parent_builds_one() -> None:
    held, done = threading.Event(), threading.Event()

    def build() -> None:
        with loaded_kernels.lock:
            held.set()
            done.wait()

    builder = threading.Thread(target=build)
    builder.start()
    held.wait()
    try:
        assert in_child(lambda: loaded_kernels.lock.acquire(blocking=False))
    finally:
        done.set()
        builder.join()
