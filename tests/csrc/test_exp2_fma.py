"""2^x on the FMA pipe, the kernels' own function, run by the emulator on every kind of x."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from flashsmith.builder.sources import package_sources
from flashsmith.builder.toolchain import find_toolchain
from ptxlab.execute import emulate
from ptxlab.machine.memory import GlobalMemory

SOURCE = """
#include "sm90_forward/exp2_fma.cuh"
extern "C" __global__ void exponentials(const float* x, float* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = flashsmith::exp2_fma(x[i]);
}
extern "C" __global__ void shares(const float* x, float* y) {
#pragma unroll
    for (int i = 0; i < 100; ++i) y[i] = flashsmith::exp2_shared_out<30>(i, x[i]);
}
"""
THREADS = 256


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    tools = find_toolchain()
    folder: Path = tmp_path_factory.mktemp("exp2_fma")
    (folder / "kernel.cu").write_text(SOURCE)
    headers = [f"-I{path}" for path in (*tools.include_dirs, package_sources())]
    command = [str(tools.nvcc), "-std=c++20", "-O3", "-arch=compute_90a", "-ptx", *headers]
    subprocess.run([*command, "-o", "kernel.ptx", "kernel.cu"], check=True, cwd=folder)
    return (folder / "kernel.ptx").read_text()


def run(ptx: str, entry: str, x: np.ndarray, threads: int = THREADS) -> np.ndarray:
    y, memory = np.full_like(x, np.nan), GlobalMemory()
    source = memory.register("x", x, writable=False)
    target = memory.register("y", y, writable=True)
    emulate(
        ptx,
        entry,
        grid=(max(1, x.size // THREADS), 1, 1),
        block=(threads, 1, 1),
        smem_bytes=0,
        argument_bytes=struct.pack("<QQ", source, target),
        memory=memory,
    )
    return y


def test_its_error_is_below_a_16_bit_rounding(ptx: str) -> None:
    x = np.linspace(-125.0, 9.0, 64 * THREADS).astype(np.float32)
    error = run(ptx, "exponentials", x) / np.exp2(x.astype(np.float64)) - 1
    assert np.abs(error).max() < 1.03e-4 < 0.5 * 2.0**-11


def test_whole_numbers_are_exact(ptx: str) -> None:
    x = np.resize(np.arange(-126, 9, dtype=np.float32), THREADS)
    assert np.array_equal(run(ptx, "exponentials", x), np.exp2(x))


def test_what_is_masked_is_nothing_at_all(ptx: str) -> None:
    x = np.resize(np.array([-np.inf, -3e38, -1e30, -1000.0, -127.0], np.float32), THREADS)
    assert not run(ptx, "exponentials", x).any()
    near = np.linspace(-127.0, -126.0, THREADS).astype(np.float32)
    assert (run(ptx, "exponentials", near) < 2.4e-38).all()


def test_nan_is_passed_on(ptx: str) -> None:
    """Whatever its sign and its bits."""
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0x7F800001, 0xFFBFFFFF], np.uint32)
    assert np.isnan(run(ptx, "exponentials", np.resize(bits, THREADS).view(np.float32))).all()


def test_the_share_is_spread_evenly(ptx: str) -> None:
    """At half-way points the cubic is off and the unit is not: who computed what can be told."""
    y = run(ptx, "shares", np.full(100, 0.5, np.float32), threads=1)
    by_fma = np.abs(y / np.sqrt(2.0) - 1) > 2e-5
    assert by_fma.sum() == 30
    assert {int(by_fma[i : i + 10].sum()) for i in range(0, 100, 10)} == {3}
