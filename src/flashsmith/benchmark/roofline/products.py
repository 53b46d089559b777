"""Matrix products in registers and shared memory alone: mma.sync and wgmma, fed in several ways."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import numpy as np

from flashsmith.benchmark.roofline.microbenchmark import (
    Machine,
    Microbenchmark,
    Running,
    check_error,
)
from flashsmith.families import DType
from flashsmith.verify.proof_inputs import numpy_dtype

# Sums of a few hundred products in fp32, which tensor cores do not even round to nearest.
_ERROR_BOUND = 1e-4
_CHECKED_TURNS = 6
_SEED = 20


@dataclass(frozen=True)
class ProductShape:
    """One kernel's product, as csrc/roofline/<source>.cu has it.

    groups: warps or warpgroups of a CTA, each of which multiplies rows x depth elements of its own
    by cols x depth ones. tiles: those second operands, taken in turn. own_b: whether a group has
    one of its own instead. passes: products of one turn.
    """

    source: str
    kernel: str
    groups: int
    rows: int
    cols: int
    depth: int
    tiles: int = 1
    own_b: bool = False
    passes: int = 1
    in_shared: bool = False

    @property
    def flop(self) -> int:
        """Of one turn of one CTA."""
        return 2 * self.groups * self.rows * self.cols * self.depth * self.passes

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: both operands, or none."""
        elements = (self.groups * self.rows + self.cols) * self.depth
        return 2 * elements if self.in_shared else 0


THREADS = 256
REGISTERS = ProductShape("mma_registers", "mma_registers", 8, 64, 32, 16, own_b=True, passes=4)
SHARED_16 = ProductShape("mma_shared", "mma_shared_16_rows", 8, 16, 64, 64, tiles=4)
SHARED_32 = ProductShape("mma_shared", "mma_shared_32_rows", 8, 32, 64, 64, tiles=4)
WGMMA_128 = ProductShape("wgmma", "wgmma_n128", 2, 64, 128, 128, in_shared=True)
WGMMA_256 = ProductShape("wgmma", "wgmma_n256", 2, 64, 256, 128, in_shared=True)
SHAPES = (REGISTERS, SHARED_16, SHARED_32, WGMMA_128, WGMMA_256)


class Product(Running):
    """A product's kernel, one CTA on every SM, with random operands.

    Random, because constant ones switch fewer transistors: they draw less power and run at a clock
    that no real product sees.
    """

    def __init__(self, shape: ProductShape, dtype: DType, machine: Machine) -> None:
        self.shape = shape
        self.ctas = machine.device.sm_count
        self.work = shape.flop * self.ctas
        rng = np.random.default_rng(_SEED)

        def random(*sizes: int) -> np.ndarray:
            return rng.standard_normal(sizes, dtype=np.float32).astype(numpy_dtype(dtype))

        b_count = shape.groups if shape.own_b else shape.tiles
        self.a = random(shape.groups, shape.rows, shape.depth)
        self.b = random(b_count, shape.cols, shape.depth)
        c = np.full((self.ctas, shape.groups, shape.rows, shape.cols), np.nan, np.float32)
        self._arrays = [machine.array(array.view(np.uint16)) for array in (self.a, self.b)]
        self._arrays.append(machine.array(c))
        name = f"{shape.kernel}_{dtype.name.lower()}"
        self._kernel = machine.kernel(shape.source, name, shape.smem_bytes)

    def launch(self, turns: int) -> None:
        self._kernel.launch(self.ctas, THREADS, *self._arrays, ctypes.c_int(turns))

    def check(self) -> float:
        self.launch(_CHECKED_TURNS)
        expected = self.expected(_CHECKED_TURNS)
        found = self._arrays[2].to_host()
        scale = float(np.sqrt(np.mean(expected**2)))
        return check_error(float(np.max(np.abs(found - expected))) / scale, _ERROR_BOUND)

    def expected(self, turns: int) -> np.ndarray:
        """What every CTA's output is after so many turns, (groups, rows, cols), in float64."""
        a, b = self.a.astype(np.float64), self.b.astype(np.float64)
        if self.shape.own_b:
            return turns * self.shape.passes * (a @ np.swapaxes(b, 1, 2))
        # How often each tile's turn has come.
        counts = np.bincount(np.arange(turns) % self.shape.tiles, minlength=self.shape.tiles)
        total = np.tensordot(counts.astype(np.float64), b, axes=1)
        return a @ total.T


PRODUCTS = tuple(
    Microbenchmark(
        f"{shape.kernel}_{dtype.name.lower()}",
        "TFLOP/s",
        shape.source,
        partial(Product, shape, dtype),
        archs=(90,) if shape.source == "wgmma" else (),
    )
    for shape in SHAPES
    for dtype in (DType.FP16, DType.BF16)
)
