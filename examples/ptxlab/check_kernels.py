#!/usr/bin/env python3
"""Compiles three CUDA kernels to PTX, compares them with NumPy on the CPU, and checks for races.

This needs nvcc (from the extra 'compiler' or CUDA_HOME), but no GPU.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ptxlab
from flashsmith.builder import find_toolchain

HERE = Path(__file__).parent


def compiled(source: Path) -> ptxlab.Module:
    """Compiles a CUDA source to a module; -lineinfo lets findings name lines of the source."""
    tools = find_toolchain()
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        command = [tools.nvcc, "-ptx", "-arch=compute_80", "-lineinfo", "-o", ptx, source]
        subprocess.run([*command, *(f"-I{headers}" for headers in tools.include_dirs)], check=True)
        return ptxlab.load(ptx)


def reduction(module: ptxlab.Module) -> tuple[ptxlab.EmulationResult, np.ndarray, np.ndarray]:
    """Sums 10,000 numbers."""
    x = np.random.default_rng(0).random(10_000, np.float32)
    total = np.zeros(1, np.float32)
    return module.launch("reduction", [x, total, x.size], grid=4, block=256), total, x.sum()


def transpose(module: ptxlab.Module) -> tuple[ptxlab.EmulationResult, np.ndarray, np.ndarray]:
    """Transposes a matrix that does not fill its tiles."""
    rows, columns = 70, 50
    matrix = np.random.default_rng(0).random((rows, columns), np.float32)
    out = np.zeros((columns, rows), np.float32)
    grid = -(-columns // 32), -(-rows // 32)
    result = module.launch("transpose", [matrix, out, rows, columns], grid=grid, block=(32, 8))
    return result, out, matrix.T


def gemm(module: ptxlab.Module) -> tuple[ptxlab.EmulationResult, np.ndarray, np.ndarray]:
    """Multiplies matrices in three steps along k."""
    m, n, k = 32, 64, 48
    random = np.random.default_rng(0)
    A, B = random.random((m, k), np.float32), random.random((k, n), np.float32)
    C = np.zeros((m, n), np.float32)
    result = module.launch("gemm", [A, B, C, n, k], grid=(n // 16, m // 16), block=(16, 16))
    return result, C, A @ B


KERNELS: dict[str, Callable] = {"reduction": reduction, "transpose": transpose, "gemm": gemm}


def main() -> None:
    for name, run in KERNELS.items():
        result, computed, expected = run(compiled(HERE / f"{name}.cu"))
        error = float(np.abs(computed - expected).max() / np.abs(expected).max())
        executed = sum(result.instructions.values())
        print(
            f"{name}: relative error {error:.1e}, {executed:,} warp instructions, "
            f"{len(result.findings)} findings"
        )
        for finding in result.findings:
            print(f"  {finding}")
        assert error < 1e-5
        assert not result.findings


if __name__ == "__main__":
    main()
