"""Tensor-core fragments: executes ldmatrix, stmatrix and mma.sync for all warps of a group at once.

A register is an array over ``32 * warps`` threads, warp by warp: uint32 (pairs of 16-bit elements)
or float32. In the layouts below ``g = lane // 4`` and ``t = lane % 4``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ptxlab.machine.numeric import u2, u4
from ptxlab.machine.tensor_cores import OperandType, TensorCore


def _stack(values: Sequence[Any], threads: int, dtype: Any) -> np.ndarray:
    """Stacks registers as rows of an array; uniform registers are broadcast over the threads."""
    if all(value.ndim for value in values):
        return np.concatenate(values).reshape(len(values), threads)
    rows: np.ndarray = np.empty((len(values), threads), dtype)
    for row, value in zip(rows, values, strict=True):
        row[...] = value
    return rows


def matrix_rows_to_registers(rows: np.ndarray, count: int, transpose: bool) -> np.ndarray:
    """ldmatrix: turns 16-byte rows, ordered (warp, matrix, row), into uint32 registers (matrix,
    thread).

    Thread (g, t) holds a pair of 16-bit elements: row g, columns 2t and 2t + 1. Transposed, these
    are rows 2t and 2t + 1 of column g.
    """
    if transpose:
        elements = rows.view(u2).reshape(-1, count, 8, 8)
        return elements.transpose(1, 0, 3, 2).copy().view(u4).reshape(count, -1)
    words = rows.view(u4).reshape(-1, count, 32)
    return words.transpose(1, 0, 2).reshape(count, -1)


def registers_to_matrix_rows(values: Sequence[Any], threads: int, transpose: bool) -> np.ndarray:
    """stmatrix: turns registers (matrix, thread) into 16-byte rows (complex128), ordered (warp,
    matrix, row)."""
    count = len(values)
    words = _stack(values, threads, u4).reshape(count, -1, 32)
    if not transpose:
        return words.transpose(1, 0, 2).copy().view(np.complex128).reshape(-1)
    elements = words.view(u2).reshape(count, -1, 8, 8).transpose(1, 0, 3, 2)
    return elements.copy().view(np.complex128).reshape(-1)


def matrix_multiply(
    kind: OperandType,
    a: Sequence[Any],
    b: Sequence[Any],
    c: Sequence[Any],
    shape: tuple[int, int, int, int],
    threads: int,
    core: TensorCore | None,
) -> np.ndarray:
    """Computes ``m`` x ``n`` tiles of chains of ``k`` mma.sync with float32 accumulators.

    ``shape`` is (m, n, k, chunks). ``chunks`` is the number of 8-column chunks of A: 2 for
    m16n8k16, 1 for m16n8k8. With tf32, which has one element per register, it is 2 for m16n8k8 and
    1 for m16n8k4. Registers are ordered a[m][k][2 * chunks], b[n][k][chunks], c[m][n][4]. The
    result has one float32 row per accumulator register, in the order of c. The registers of a
    fragment hold these elements:
      a register r, half h: row g + 8 (r % 2), column 8 (r // 2) + 2t + h (tf32: 4 (r // 2) + t).
      b register r, half h: row 8r + 2t + h (tf32: 4r + t), column g.
      c register r:         row g + 8 (r // 2), column 2t + r % 2.
    Sums are rounded as ``core`` rounds them; if it is None, they are float32 sums in any order.
    """
    m, n, k, chunks = shape
    warps = threads // 32
    left = _stack(a, threads, u4).reshape(m, k, chunks, 2, warps, 8, 4)
    left = np.ascontiguousarray(left.transpose(4, 0, 3, 5, 1, 2, 6))
    right = _stack(b, threads, u4).reshape(n, k, chunks, warps, 8, 4)
    right = np.ascontiguousarray(right.transpose(3, 0, 4, 1, 2, 5))
    rows = kind.floats(left).reshape(warps, m * 16, -1)
    columns = kind.floats(right).reshape(warps, n * 8, -1).transpose(0, 2, 1)
    if core is not None:
        before = _stack(c, threads, np.float32).reshape(m, n, 2, 2, warps, 8, 4)
        tiles = before.transpose(4, 0, 2, 5, 1, 6, 3).reshape(warps, m * 16, n * 8)
        depth = rows.shape[2] // k
        return _to_registers(core.multiply_add(rows, columns, tiles, kind, depth), shape, threads)
    product = _to_registers(np.matmul(rows, columns), shape, threads)
    if all(value.ndim == 0 and value == 0 for value in c):
        return product
    product += _stack(c, threads, np.float32)
    return product


def _to_registers(tiles: np.ndarray, shape: tuple[int, ...], threads: int) -> np.ndarray:
    """Converts tiles (warps, 16 m, 8 n) to rows of registers c[m][n][4]."""
    m, n = shape[:2]
    parts = tiles.reshape(-1, m, 2, 8, n, 4, 2).transpose(1, 4, 2, 6, 0, 3, 5)
    return np.ascontiguousarray(parts).reshape(m * n * 4, threads)
