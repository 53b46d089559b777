"""Microbenchmarks: each measures one ceiling with a kernel that does only one thing."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from flashsmith.benchmark.roofline.roofline import Unit
from flashsmith.families import DeviceSpec, DType
from flashsmith.verify.proof_inputs import numpy_dtype


class CeilingUnavailable(Exception):
    """Raised if a ceiling cannot be measured here, which is not a failure. The message is the
    reason."""


class WrongOutput(Exception):
    """The output of a microbenchmark is wrong."""


class LaunchableKernel(Protocol):
    """The interface of a loaded kernel; tests have their own implementation."""

    def launch(self, ctas: int, threads: int, *arguments: Any) -> None:
        """Enqueues the kernel. Arguments are arrays (``Arrays``) or ctypes numbers."""


class DeviceBytes(Protocol):
    """An array in the memory of the machine that runs the kernel."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def to_host(self) -> Any:
        """A copy as a NumPy array; waits for all launches so far."""


class Machine(Protocol):
    """The machine that runs microbenchmarks: a GPU, or the emulator in tests."""

    device: DeviceSpec

    def kernel(self, source: str, name: str, smem_bytes: int = 0) -> LaunchableKernel:
        """The kernel `name` in csrc/roofline/<source>.cu, for launches with `smem_bytes` of dynamic
        shared memory."""

    def array(self, host: Any) -> DeviceBytes:
        """A copy of a NumPy array."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceBytes:
        """Uninitialized memory. Raises LaunchError if there is not enough memory."""

    def free_bytes(self) -> int:
        """How many bytes can be allocated."""


class PreparedMicrobenchmark(ABC):
    """A microbenchmark with its operands in memory.

    work: FLOP, operations or bytes per iteration.
    first_turns: the number of iterations in the first timed launch; the time of that launch
    determines the number in later ones.
    """

    work: float
    first_turns: int = 1000

    @abstractmethod
    def launch(self, turns: int) -> None:
        """Enqueues `turns` iterations; does not wait."""

    @abstractmethod
    def check(self) -> float:
        """Runs a few iterations and compares the result with a reference.

        Returns the largest error, relative to the results.

        Raises WrongOutput if the error is too large.
        """


@dataclass(frozen=True)
class Microbenchmark:
    """The microbenchmark for one ceiling.

    source: the file in csrc/roofline; '' if a library's kernel is used.
    archs: the architectures that have the instructions of the kernel; () for all.

    ``start`` raises CeilingUnavailable if the ceiling cannot be measured here.
    """

    key: str
    unit: Unit
    source: str
    start: Callable[[Machine], PreparedMicrobenchmark]
    archs: tuple[int, ...] = ()

    def absence(self, arch: int) -> str:
        """Why an architecture does not have this ceiling; '' if it has it."""
        if self.archs and arch not in self.archs:
            return f"{self.source} is an instruction of sm_{self.archs[0]}a, and this is sm_{arch}"
        return ""


def check_error(error: float, bound: float) -> float:
    """Returns `error`; raises WrongOutput if it is above `bound` or NaN.

    Raises WrongOutput.
    """
    if not error <= bound:
        raise WrongOutput(f"its output is wrong: relative error {error:.3g}, allowed {bound:.3g}")
    return error


# --- matrix products: mma.sync and wgmma, fed in several ways ---

# Bound for fp32 sums of a few hundred terms; tensor cores do not round to nearest.
_MMA_ERROR_BOUND = 1e-4
_MMA_CHECKED_TURNS = 6
_MMA_SEED = 20


@dataclass(frozen=True)
class ProductShape:
    """The matrix product that a kernel computes, with the sizes in csrc/roofline/<source>.cu.

    groups: warps or warpgroups per CTA. Each of them multiplies its own rows x depth elements with
    cols x depth elements.
    tiles: the number of different second operands, through which the iterations cycle.
    own_b: whether each group has its own second operand; otherwise all groups use the same ones.
    passes: matrix products per iteration.
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
        """FLOP per iteration of one CTA."""
        return 2 * self.groups * self.rows * self.cols * self.depth * self.passes

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory for both operands; 0 if they are not in shared memory."""
        elements = (self.groups * self.rows + self.cols) * self.depth
        return 2 * elements if self.in_shared else 0


MMA_THREADS = 256
REGISTERS = ProductShape("mma_registers", "mma_registers", 8, 64, 32, 16, own_b=True, passes=4)
SHARED_16 = ProductShape("mma_shared", "mma_shared_16_rows", 8, 16, 64, 64, tiles=4)
SHARED_32 = ProductShape("mma_shared", "mma_shared_32_rows", 8, 32, 64, 64, tiles=4)
WGMMA_128 = ProductShape("wgmma", "wgmma_n128", 2, 64, 128, 128, in_shared=True)
WGMMA_256 = ProductShape("wgmma", "wgmma_n256", 2, 64, 256, 128, in_shared=True)
SHAPES = (REGISTERS, SHARED_16, SHARED_32, WGMMA_128, WGMMA_256)


class Product(PreparedMicrobenchmark):
    """A kernel that computes a matrix product of random operands, with one CTA on every SM.

    The operands are random because constant operands make fewer transistors switch, so that the GPU
    draws less power and runs at a higher clock than in real GEMMs.
    """

    def __init__(self, shape: ProductShape, dtype: DType, machine: Machine) -> None:
        self.shape = shape
        self.ctas = machine.device.sm_count
        self.work = shape.flop * self.ctas
        rng = np.random.default_rng(_MMA_SEED)

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
        self._kernel.launch(self.ctas, MMA_THREADS, *self._arrays, ctypes.c_int(turns))

    def check(self) -> float:
        self.launch(_MMA_CHECKED_TURNS)
        expected = self.expected(_MMA_CHECKED_TURNS)
        found = self._arrays[2].to_host()
        scale = float(np.sqrt(np.mean(expected**2)))
        return check_error(float(np.max(np.abs(found - expected))) / scale, _MMA_ERROR_BOUND)

    def expected(self, turns: int) -> np.ndarray:
        """The output of every CTA after ``turns`` iterations in float64: (groups, rows, cols)."""
        a, b = self.a.astype(np.float64), self.b.astype(np.float64)
        if self.shape.own_b:
            return turns * self.shape.passes * (a @ np.swapaxes(b, 1, 2))
        # How often each second operand was used.
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


# --- cuBLAS through PyTorch: the rate that a tuned library reaches ---

MATMUL_SIZE = 8192
_MATMUL_CHECKED_ROWS = (0, 1, MATMUL_SIZE // 2, MATMUL_SIZE - 1)
# The result is rounded to 16 bits, which costs half a unit in the last place, and cuBLAS sums in an
# order of its choice.
_MATMUL_ERROR_BOUND = {DType.FP16: 1e-3, DType.BF16: 8e-3}
_MATMUL_SEED = 22


class LibraryProduct(PreparedMicrobenchmark):
    """A cuBLAS product of matrices of size MATMUL_SIZE; an iteration is one call."""

    first_turns = 2

    def __init__(self, dtype: DType, machine: Machine) -> None:
        self._torch: Any = _torch()
        self.dtype = dtype
        self.work = 2 * MATMUL_SIZE**3
        torch = self._torch
        generator = torch.Generator("cuda").manual_seed(_MATMUL_SEED)
        kind = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[dtype]
        self.a, self.b = (
            torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=kind, device="cuda", generator=generator)
            for _ in range(2)
        )
        self.c = torch.empty_like(self.a)

    def launch(self, turns: int) -> None:
        for _ in range(turns):
            self._torch.matmul(self.a, self.b, out=self.c)

    def check(self) -> float:
        self.c.fill_(float("nan"))
        self.launch(1)
        rows = list(_MATMUL_CHECKED_ROWS)
        expected = self.a[rows].double() @ self.b.double()
        error = (self.c[rows].double() - expected).norm() / expected.norm()
        return check_error(float(error), _MATMUL_ERROR_BOUND[self.dtype])


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise CeilingUnavailable("PyTorch is not installed; cuBLAS is called through it") from None
    if not torch.cuda.is_available():
        raise CeilingUnavailable(
            f"PyTorch {torch.__version__} sees no GPU; cuBLAS is called through it"
        )
    return torch


LIBRARY_PRODUCTS = tuple(
    Microbenchmark(f"matmul_{dtype.name.lower()}", "TFLOP/s", "", partial(LibraryProduct, dtype))
    for dtype in (DType.FP16, DType.BF16)
)


# --- exponentials ---------------------------------------------------------------------------------

# These values must match csrc/roofline/exp2.cu.
EXP2_THREADS = 512
EXP2_CHAINS = 8
EXP2_MIRROR = -8.0

_EXP2_CHECKED_TURNS = 5
_EXP2_ERROR_BOUND = 1e-5  # The error of ex2.approx is at most 2 units in the last place of fp32
_EXP2_SEED = 21


class Exponentials(PreparedMicrobenchmark):
    """ex2.approx on every SM, with as many threads as fit, on operands that occur in a softmax."""

    def __init__(self, machine: Machine) -> None:
        device = machine.device
        self.ctas = device.sm_count * (device.max_threads_per_sm // EXP2_THREADS)
        self.work = self.ctas * EXP2_THREADS * EXP2_CHAINS
        rng = np.random.default_rng(_EXP2_SEED)
        self.x = rng.uniform(EXP2_MIRROR, 0.0, (self.ctas * EXP2_THREADS, EXP2_CHAINS)).astype(
            np.float32
        )
        self._x = machine.array(self.x)
        self._sums = machine.array(np.full_like(self.x, np.nan))
        self._kernel = machine.kernel("exp2", "exp2_rate")

    def launch(self, turns: int) -> None:
        self._kernel.launch(self.ctas, EXP2_THREADS, self._x, self._sums, ctypes.c_int(turns))

    def check(self) -> float:
        self.launch(_EXP2_CHECKED_TURNS)
        x = self.x.astype(np.float64)
        odd = _EXP2_CHECKED_TURNS // 2
        expected = (_EXP2_CHECKED_TURNS - odd) * np.exp2(x) + odd * np.exp2(EXP2_MIRROR - x)
        error = np.abs(self._sums.to_host() - expected) / expected
        return check_error(float(np.max(error)), _EXP2_ERROR_BOUND)


EXPONENTIALS = (Microbenchmark("exp2", "Gop/s", "exp2", Exponentials),)


# --- reads of the L2 and of DRAM ------------------------------------------------------------------

# These values must match csrc/roofline/memory_read.cu.
READ_THREADS = 512
SPAN_BYTES = READ_THREADS * 8 * 16
PERIOD = 1 << 20

_MIB = 2**20
_DRAM_BYTES = 4096 * _MIB
# The buffer is at least this many times as large as the L2, so that almost all reads come from
# DRAM.
_TIMES_L2 = 16
# The size of the buffer relative to the L2. The L2 also holds other data, and an SM reads from one
# half of it faster than from the other.
_L2_SHARE = 0.4


class MemoryRead(PreparedMicrobenchmark):
    """Reads a buffer: each SM reads a part of it, with many 16-byte loads in flight."""

    first_turns = 1

    def __init__(self, size: int, machine: Machine) -> None:
        device = machine.device
        self.ctas = device.sm_count * (device.max_threads_per_sm // READ_THREADS)
        self.bytes = size // SPAN_BYTES * SPAN_BYTES
        self.work = self.bytes
        self._words = machine.empty((self.bytes // 4,), np.dtype(np.uint32))
        self._sums = machine.array(np.zeros(self.ctas * READ_THREADS, np.uint32))
        self._vectors = ctypes.c_int64(self.bytes // 16)
        machine.kernel("memory_read", "fill_words").launch(
            self.ctas, READ_THREADS, self._words, self._vectors
        )
        self._kernel = machine.kernel("memory_read", "read_words")

    def launch(self, turns: int) -> None:
        self._kernel.launch(
            self.ctas, READ_THREADS, self._words, self._sums, self._vectors, ctypes.c_int(turns)
        )

    def check(self) -> float:
        """Reads the whole buffer once.

        Raises WrongOutput unless the sum of its words is exactly the expected one.
        """
        self.launch(1)
        found = int(self._sums.to_host().sum(dtype=np.uint64)) % 2**32
        expected = sum_of_words(self.bytes // 4)
        if found != expected:
            raise WrongOutput(f"the words it read add up to {found}, not to {expected}")
        return 0.0


def words(count: int) -> np.ndarray:
    """The first `count` words that fill_words writes to a buffer; `count` is at most PERIOD."""
    x = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def sum_of_words(count: int) -> int:
    """The sum of the words of a buffer of `count` words, modulo 2^32."""
    period = words(PERIOD)
    whole = int(period.sum(dtype=np.uint64)) * (count // PERIOD)
    return (whole + int(period[: count % PERIOD].sum(dtype=np.uint64))) % 2**32


def start_l2(machine: Machine) -> MemoryRead:
    """Prepares the microbenchmark with a buffer that stays in the L2."""
    return MemoryRead(int(machine.device.l2_bytes * _L2_SHARE), machine)


def start_dram(machine: Machine) -> MemoryRead:
    """Prepares the microbenchmark with a buffer so large that the L2 can hold almost none of it.

    Raises CeilingUnavailable if there is not enough memory for the buffer.
    """
    size, least = min(_DRAM_BYTES, machine.free_bytes() // 2), _TIMES_L2 * machine.device.l2_bytes
    if size < least:
        raise CeilingUnavailable(
            f"needs {2 * least // _MIB} MiB of free GPU memory, found "
            f"{machine.free_bytes() // _MIB}"
        )
    return MemoryRead(size, machine)


MEMORY_READS = (
    Microbenchmark("l2_read", "TB/s", "memory_read", start_l2),
    Microbenchmark("dram_read", "TB/s", "memory_read", start_dram),
)


MICROBENCHMARKS: tuple[Microbenchmark, ...] = (
    *LIBRARY_PRODUCTS,
    *PRODUCTS,
    *EXPONENTIALS,
    *MEMORY_READS,
)
