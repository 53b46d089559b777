"""Driver calls, against a pretended driver: what is asked, what is checked, what is said."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pretended_driver import OUT_OF_MEMORY, PretendedDriver, pretended_driver

from flashsmith.errors import ArgumentError, LaunchError
from flashsmith.runtime import driver, gpu_count, query_gpu
from flashsmith.runtime.frameworks.device_array import DeviceArray, DeviceArrays
from flashsmith.runtime.libraries import LoadedKernel


@pytest.fixture
def pretended() -> Iterator[PretendedDriver]:
    with pretended_driver() as library:
        yield library


def test_a_gpus_limits(pretended: PretendedDriver) -> None:
    spec = query_gpu(0)
    assert (spec.name, spec.arch, spec.sm_count) == ("NVIDIA H200", 90, 132)
    assert (spec.max_smem_per_block, spec.max_smem_per_sm) == (232448, 233472)
    assert (spec.registers_per_sm, spec.max_threads_per_sm) == (65536, 2048)
    assert (spec.max_ctas_per_sm, spec.l2_bytes) == (32, 60 << 20)


@pytest.mark.parametrize("ordinal", [-1, 1])
def test_a_gpu_that_does_not_exist(pretended: PretendedDriver, ordinal: int) -> None:
    with pytest.raises(ArgumentError, match=f"GPU {ordinal} does not exist; this process sees 1"):
        query_gpu(ordinal)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_arrays_there_and_back(pretended: PretendedDriver, dtype: Any) -> None:
    array = np.arange(24, dtype=dtype).reshape(2, 3, 4).transpose(2, 0, 1)
    on_gpu = DeviceArray.from_host(array)
    assert (on_gpu.shape, on_gpu.dtype, on_gpu.nbytes) == ((4, 2, 3), array.dtype, array.nbytes)
    np.testing.assert_array_equal(on_gpu.to_host(), array)
    assert pretended.current == []


def test_memory_is_freed_with_the_array(pretended: PretendedDriver) -> None:
    on_gpu = DeviceArray.empty((4,), np.dtype(np.float16))
    assert len(pretended.memory) == 1
    del on_gpu
    assert pretended.memory == {}


def test_a_failure_carries_cudas_words_and_leaves_no_context_behind(
    pretended: PretendedDriver,
) -> None:
    with pytest.raises(LaunchError, match="cuMemAlloc_v2: CUDA error 2: out of memory"):
        DeviceArray.empty((1 << 40,), np.dtype(np.float16))
    assert pretended.current == []


def test_a_failure_cuda_has_no_words_for(
    pretended: PretendedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretended, "cuDeviceGetCount", lambda count: 9999, raising=False)
    with pytest.raises(LaunchError, match="cuDeviceGetCount: CUDA error 9999: unknown error"):
        gpu_count()


class TestNoDriver:
    @pytest.fixture(autouse=True)
    def _none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(driver, "_load", lambda: None)

    def test_there_are_no_gpus(self) -> None:
        assert gpu_count() == 0

    def test_none_can_be_queried(self) -> None:
        query_gpu.cache_clear()
        with pytest.raises(ArgumentError, match="GPU 0 does not exist; this process sees 0"):
            query_gpu(0)

    def test_memory_is_refused(self) -> None:
        driver._primary_context.cache_clear()
        with pytest.raises(LaunchError, match="no NVIDIA driver or GPU on this machine"):
            DeviceArray.empty((4,), np.dtype(np.float16))


@pytest.mark.parametrize(("status", "usable"), [(0, True), (100, False), (34, False)])
def test_loading_distinguishes_no_gpu_from_a_gpu(
    monkeypatch: pytest.MonkeyPatch, status: int, usable: bool
) -> None:
    class Library(PretendedDriver):
        def cuInit(self, flags: int) -> int:
            return status

    library = Library()
    monkeypatch.setattr(driver.process_forks, "_cuda_used", False)
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)
    assert driver._load.__wrapped__() is (library if usable else None)
    assert driver.process_forks._cuda_used is usable


def test_a_broken_driver_is_an_error_and_not_a_missing_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Library(PretendedDriver):
        def cuInit(self, flags: int) -> int:
            return OUT_OF_MEMORY

    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Library())
    with pytest.raises(LaunchError, match="cuInit: CUDA error 2: out of memory"):
        driver._load.__wrapped__()


class TestOldDriver:
    """Libraries link the CUDA of the nvcc that built them."""

    @pytest.fixture(autouse=True)
    def _cuda_12_4(self, pretended: PretendedDriver) -> None:
        pretended.version = 12040

    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "version"
        monkeypatch.setattr(driver, "_KERNEL_MODULE", path)
        return path

    def test_an_older_driver_is_an_error_with_both_versions_and_the_way_out(
        self, module: Path
    ) -> None:
        module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n")
        with pytest.raises(LaunchError) as caught:
            driver.check_runs("13.0.88 (cuda_13.0.r13.0/compiler.36424714_0)")
        text = str(caught.value)
        assert text.startswith("the NVIDIA driver 550.54.15 runs CUDA 12.4 and older, and this")
        assert "links CUDA 13.0, which needs driver 580 or newer: update the driver" in text
        assert "CUDA_HOME at a CUDA 12 toolkit" in text

    def test_a_driver_that_does_not_say_its_version(self, module: Path) -> None:
        with pytest.raises(LaunchError, match=r"the NVIDIA driver runs CUDA 12\.4 and older"):
            driver.check_runs("14.1.0")

    @pytest.mark.parametrize("linked", ["12.0.140", "12.4.131", "12.9.86", "11.8.89"])
    def test_libraries_of_the_same_major_version_and_older_ones_run(self, linked: str) -> None:
        driver.check_runs(linked)

    def test_the_first_call_raises_the_error(self) -> None:
        """Before anything is asked of the library, whose CUDA would only say that it is too old."""
        library = SimpleNamespace(manifest=SimpleNamespace(nvcc_version="13.0.88"))
        kernel = LoadedKernel(None, library, 0, None)  # type: ignore[arg-type]
        with pytest.raises(LaunchError, match="needs driver 580 or newer"):
            kernel.prepare(None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_proofs_workspace_is_full_of_nan_when_the_launch_begins(
    pretended: PretendedDriver, poisoned: bool
) -> None:
    """In the order of the call's stream, and all of the block."""
    nbytes = 1000
    seen: list[bytes] = []

    def launch(stream: int, address: int, block: int) -> None:
        seen.append(ctypes.string_at(block, nbytes))

    library = SimpleNamespace(
        manifest=SimpleNamespace(nvcc_version="13.0.88"),
        entry=lambda config: SimpleNamespace(beside=()),
    )
    functions = SimpleNamespace(prepare=lambda *arguments: (launch, nbytes))
    kernel = LoadedKernel(None, library, 0, functions)  # type: ignore[arg-type]
    call = SimpleNamespace(library_arguments=tuple, addresses=(4096,), problem=None)
    run = kernel.prepare(call, 0, framework=DeviceArrays(), poisoned=poisoned)  # type: ignore[arg-type]
    run(7, 4096)
    assert (set(seen[0]) == {0xFF}) == poisoned
    if poisoned:
        assert np.isnan(np.frombuffer(seen[0], np.float16)).all()
    filled = [("fill", 7)] if poisoned else []
    assert pretended.streams == [("allocate", 7), *filled, ("free", 7)]


def test_without_a_driver_none_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_load", lambda: None)
    driver.check_runs("13.0.88")
