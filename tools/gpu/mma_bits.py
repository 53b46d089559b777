#!/usr/bin/env python3
"""Compares the bits of mma.sync, wgmma and the emulator's tensor core on a GPU of sm_90.

    python tools/gpu/mma_bits.py rows.csv --model --sample sample.npz
    python tools/gpu/mma_bits.py --build mma_bits.cubin   # on a machine with a compiler
    python tools/gpu/mma_bits.py rows.csv --model --cubin mma_bits.cubin
    python tools/gpu/mma_bits.py --check sample.npz       # the model alone, without a GPU

Both instructions get the same operands: float16 and bfloat16 values of many kinds, in chains of 1
to 64 steps of 16, with many kinds of accumulators at the beginning. Each form of wgmma that kernels
use is compared with mma.sync on the GPU: with 8 to 256 columns, A in shared memory or registers, B
K-major or MN-major. With --model, the emulator (exact_mma of ptxlab) also computes a part of each
case.

A row of the CSV file has a case, with what mma.sync is compared, the number of accumulators, and
how many differ. NaN are compared by their bits too. The exit status is 1 if an accumulator differs.
The sample has operands and results of short chains, with which the model can be tested without a
GPU.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from gpu_kernels import GpuKernels, compiled

from flashsmith.runtime.driver import current_gpu
from ptxlab.machine.tensor_cores import OPERAND_TYPES, TENSOR_CORES

SOURCE = Path(__file__).with_suffix(".cu")

#: The rows of a tile of A and the columns of a tile of B, as in mma_bits.cu, and the largest k.
ROWS, COLUMNS, DEPTH = 64, 256, 1024
STEP = 16
THREADS = 128
#: The lengths of chains: whole tiles in shared memory (multiples of 4 steps), parts of tiles, and
#: both.
STEPS = (1, 3, 4, 7, 64)
#: How many columns of each case the emulator computes.
MODEL_COLUMNS = 64
#: The rows, columns and steps in the sample.
SAMPLE_ROWS, SAMPLE_COLUMNS, SAMPLE_STEPS = 16, 32, (1, 3, 4)

KINDS = ("f16", "bf16")
FORMS = [
    f"n{n}_{a}_{b}" for n in (8, 64, 128, 256) for a in ("shared", "registers") for b in ("k", "mn")
]
#: The kind of start for which C must be ignored.
PREDICATE_0 = "predicate 0"

f4, u2, u4 = np.float32, np.uint16, np.uint32


# Operands ----------------------------------------------------------------------------------------

Shape = tuple[int, ...]
Operands = tuple[np.ndarray, np.ndarray]


class Draw:
    """Draws float32 numbers with small and large exponents that suit the type ``kind``."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.rng = kind, np.random.default_rng((KINDS.index(kind), seed))

    def normal(self, shape: Shape, exponent: int = 0) -> np.ndarray:
        return np.ldexp(self.rng.standard_normal(shape, f4), exponent)

    def sign(self, shape: Shape) -> np.ndarray:
        return np.where(self.rng.random(shape, f4) < 0.5, f4(-1), f4(1))

    def chosen(self, shape: Shape, share: float) -> np.ndarray:
        return self.rng.random(shape, f4) < share

    def octaves(self, shape: Shape, count: int = 24) -> np.ndarray:
        return self.sign(shape) * np.exp2(f4(-count) * self.rng.random(shape, f4))

    def words(self, shape: Shape) -> np.ndarray:
        return self.rng.integers(0, 1 << 16, shape, u2)

    def of(self, half: int, bfloat: int) -> int:
        """The exponent for the type."""
        return half if self.kind == "f16" else bfloat


def _near_two(draw: Draw, shape: Shape) -> np.ndarray:
    return draw.sign(shape[:1])[:, None] * (2 - np.exp2(-draw.rng.integers(3, 9, shape)))


def _cancelling(draw: Draw, a: Shape, b: Shape) -> Operands:
    """Operands with groups of four products: two cancel, and two are much smaller."""
    x, y = draw.normal(a), draw.normal(b)
    x[:, 1::4], y[:, 1::4] = -x[:, ::4], y[:, ::4]
    x[:, 2::4] *= f4(2.0**-9)
    y[:, 2::4] *= f4(2.0**-9)
    x[:, 3::4] *= f4(2.0**-12)
    y[:, 3::4] *= f4(2.0**-12)
    return x, y


def _zero_times_large(draw: Draw, a: Shape, b: Shape) -> Operands:
    """Operands with zeros times large factors, among small products."""
    x, y = draw.normal(a, -9), draw.normal(b, -9)
    x[:, ::2] = 0 * draw.sign((a[0], a[1] // 2))
    y[:, ::2] = np.ldexp(y[:, ::2], draw.of(22, 129))
    return x, y


def _special(draw: Draw, shape: Shape) -> np.ndarray:
    x = draw.normal(shape)
    values = np.array([np.inf, -np.inf, np.nan, 0.0], f4)
    return np.where(draw.chosen(shape, 0.02), values[draw.rng.integers(0, 4, shape)], x)


def _each(one: Callable[[Draw, Shape], np.ndarray]) -> Callable[[Draw, Shape, Shape], Operands]:
    """Draws A and B in the same way."""
    return lambda draw, a, b: (one(draw, a), one(draw, b))


#: Functions that draw A and B, as float32 or as 16-bit words.
VALUES: dict[str, Callable[[Draw, Shape, Shape], Operands]] = {
    "normal": _each(Draw.normal),
    "probabilities": lambda draw, a, b: (np.abs(draw.normal(a)) * f4(0.1), draw.normal(b)),
    "24 octaves": _each(Draw.octaves),
    "outliers": _each(
        lambda draw, shape: draw.normal(shape) * np.where(draw.chosen(shape, 1 / 16), f4(999), 1)
    ),
    "near 2": _each(_near_two),
    "cancelling": _cancelling,
    "zeros": _each(
        lambda draw, shape: np.where(
            draw.chosen(shape, 0.2), draw.normal(shape), draw.sign(shape) * 0
        )
    ),
    "minus zero": lambda draw, a, b: (np.full(a, -0.0, f4), np.abs(draw.normal(b))),
    "zero times large": _zero_times_large,
    "subnormal": lambda draw, a, b: (draw.normal(a, draw.of(-17, -128)), draw.normal(b, 3)),
    "small products": _each(lambda draw, shape: draw.normal(shape, draw.of(-12, -73))),
    "large": _each(lambda draw, shape: draw.normal(shape, draw.of(13, 63))),
    "infinity and NaN": _each(_special),
    "any bits": _each(Draw.words),
    "any finite bits": _each(lambda draw, shape: draw.words(shape) & u2(0xBFFF)),
}


def words_of(values: np.ndarray, kind: str) -> np.ndarray:
    """Converts float32 values to 16-bit words (for bfloat16 by truncation); words are returned as
    they are."""
    if values.dtype == u2:
        return values
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).view(u2)
    return halves if kind == "f16" else (values.astype(f4).view(u4) >> u4(16)).astype(u2)


def floats_of(words: np.ndarray, kind: str) -> np.ndarray:
    """Converts 16-bit words to float32."""
    return OPERAND_TYPES[kind].floats(np.ascontiguousarray(words).view(u4))


def operands(values: str, kind: str, tiles: int, seed: int) -> Operands:
    """The words of A (64 rows per tile) and B (256 rows per tile), with 1024 elements per row."""
    draw = Draw(kind, seed)
    a, b = VALUES[values](draw, (tiles * ROWS, DEPTH), (tiles * COLUMNS, DEPTH))
    return words_of(a, kind), words_of(b, kind)


class Case(NamedTuple):
    """The operands of a sum: A and B as words, with k along the rows of both, and C in float32."""

    kind: str
    values: str
    start: str
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray

    @property
    def accumulate(self) -> bool:
        """Whether C is added; if not, the first step starts with zero."""
        return self.start != PREDICATE_0

    def corner(self, rows: int, columns: int, k: int = DEPTH) -> Case:
        """The part of the case with the first rows, the first columns and the first ``k`` elements
        of k."""
        a, b, c = self.a[:rows, :k], self.b[:columns, :k], self.c[:rows, :columns]
        return self._replace(a=a, b=b, c=c)

    def by_model(self, steps: int) -> np.ndarray:
        """The bits that the emulator computes."""
        k, kind = STEP * steps, OPERAND_TYPES[self.kind]
        left, right = floats_of(self.a[:, :k], self.kind), floats_of(self.b[:, :k], self.kind)
        c = self.c if self.accumulate else np.zeros_like(self.c)
        core = TENSOR_CORES[90]
        return core.multiply_add(left[None], right.T[None], c[None], kind, STEP)[0].view(u4)


def cases(tiles: int, seed: int) -> Iterator[Case]:
    """All cases. Yields all cases; C has the rows of A, and 256 columns."""
    for number, (kind, values) in enumerate((k, v) for k in KINDS for v in VALUES):
        a, b = operands(values, kind, tiles, seed + number)
        shape, draw = (a.shape[0], COLUMNS), Draw(kind, seed + number)
        size = sum(_size(floats_of(x[:ROWS, :64], kind)) for x in (a, b))
        with np.errstate(over="ignore", under="ignore"):
            near = np.ldexp(4 * draw.octaves(shape), size)
        any_bits = draw.rng.integers(0, 1 << 32, shape, u4).view(f4)
        starts = {
            PREDICATE_0: any_bits,
            "zero": np.zeros(shape, f4),
            "minus zero": np.full(shape, -0.0, f4),
            "near the products": near,
            "any bits": any_bits,
        }
        for start, c in starts.items():
            yield Case(kind, values, start, a, b, c)


def _size(x: np.ndarray) -> int:
    """The exponent of the median magnitude, over values that are finite and not zero."""
    sizes = np.abs(x[np.isfinite(x) & (x != 0)])
    return int(np.frexp(np.median(sizes))[1]) if sizes.size else 0


# Devices -----------------------------------------------------------------------------------------


class Device(Protocol):
    """Runs the kernels in mma_bits.cu on arrays, which it keeps by name."""

    def put(self, name: str, array: np.ndarray) -> None:
        """Copies an array to the device."""

    def sums(self, kernel: str, into: str, tiles: int, steps: int, accumulate: bool) -> None:
        """Computes ``into`` = C + A B for all pairs of tiles in the arrays a, b and c."""

    def differing(self, one: str, other: str) -> int:
        """How many accumulators in two arrays have different bits."""

    def first(self, name: str) -> np.ndarray:
        """The accumulators for the first tile of A and the first tile of B."""


class Gpu:
    """The first GPU."""

    def __init__(self, image: bytes, tiles: int) -> None:
        self.kernels, self.count = GpuKernels(image), tiles * tiles * ROWS * COLUMNS
        self.put = self.kernels.put
        for name in ("mma", "wgmma"):
            self.kernels.allocate(name, 4 * self.count)

    def sums(self, kernel: str, into: str, tiles: int, steps: int, accumulate: bool) -> None:
        numbers = (steps, DEPTH, tiles, int(accumulate))
        self.kernels.launch(kernel, tiles * tiles, THREADS, "a", "b", "c", into, *numbers)

    def differing(self, one: str, other: str) -> int:
        found = np.zeros(1, np.uint64)
        self.put("differing", found)
        arguments = (one, other, self.count, "differing")
        self.kernels.launch("count_differences", 264, THREADS, *arguments)
        return int(self.kernels.fetch("differing", found)[0])

    def first(self, name: str) -> np.ndarray:
        return self.kernels.fetch(name, np.empty((ROWS, COLUMNS), f4))


# The comparison ----------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the CSV file."""

    dtype: str
    values: str
    start: str
    steps: int
    against: str
    compared: int
    differing: int


#: Arrays by name: operands, and results for numbers of steps.
Sample = dict[str, np.ndarray]


def compare(
    device: Device,
    *,
    tiles: int,
    steps: Sequence[int],
    forms: Sequence[str],
    model: bool = False,
    sample: Sample | None = None,
    seed: int = 0,
) -> Iterator[Row]:
    """Compares all cases. Adds a corner of each, with its results, to ``sample``."""
    for case in cases(tiles, seed):
        for name in ("a", "b", "c"):
            device.put(name, getattr(case, name))
        for count in steps:
            device.sums(f"mma_{case.kind}", "mma", tiles, count, case.accumulate)
            for form in forms:
                kernel = f"wgmma_{case.kind}_{form}"
                device.sums(kernel, "wgmma", tiles, count, case.accumulate)
                differing = device.differing("mma", "wgmma")
                compared = tiles * tiles * ROWS * COLUMNS
                yield Row(*case[:3], count, f"wgmma {form}", compared, differing)
            if model or sample is not None:
                found = device.first("mma").view(u4)
            if model:
                yield against_model(case.corner(ROWS, MODEL_COLUMNS), count, found)
            if sample is not None and count in SAMPLE_STEPS:
                add_to(sample, case, count, found)


def against_model(case: Case, steps: int, found: np.ndarray) -> Row:
    """Compares the bits of the emulator for a case with the part of ``found`` that it computes."""
    want = case.by_model(steps)
    differing = int((want != found[: want.shape[0], : want.shape[1]]).sum())
    return Row(*case[:3], steps, "model", want.size, differing)


def add_to(sample: Sample, case: Case, steps: int, found: np.ndarray) -> None:
    """Adds a corner of a case, with its bits, to a sample."""
    corner = case.corner(SAMPLE_ROWS, SAMPLE_COLUMNS, STEP * max(SAMPLE_STEPS))
    where = f"{case.kind}/{case.values}"
    sample[f"{where}/a"], sample[f"{where}/b"] = corner.a, corner.b
    sample[f"{where}/{case.start}/c"] = corner.c.view(u4)
    sample[f"{where}/{case.start}/{steps}"] = found[:SAMPLE_ROWS, :SAMPLE_COLUMNS]


def check(sample: Sample) -> Iterator[Row]:
    """Compares the emulator with the results in a sample."""
    for key, found in sample.items():
        kind, values, *rest = key.split("/")
        if len(rest) == 2 and rest[1].isdigit():
            a, b = (sample[f"{kind}/{values}/{name}"] for name in "ab")
            c = sample[f"{kind}/{values}/{rest[0]}/c"].view(f4)
            yield against_model(Case(kind, values, rest[0], a, b, c), int(rest[1]), found)


# The program -------------------------------------------------------------------------------------


def summary(rows: list[Row]) -> int:
    """Prints the cases that differ, and totals. Returns the exit status."""
    compared: Counter[str] = Counter()
    differing: Counter[str] = Counter()
    for row in rows:
        compared[row.against] += row.compared
        differing[row.against] += row.differing
        if row.differing:
            print(*row[:5], f"{row.differing} of {row.compared} differ", sep=", ")
    for against, count in compared.items():
        print(f"mma.sync against {against}: {differing[against]} of {count} accumulators differ")
    return int(any(differing.values()))


@contextmanager
def timed(what: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - begin:.1f} s", flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="?", type=Path, help="the CSV file to write")
    parser.add_argument("--model", action="store_true", help="also compare the emulator's sums")
    parser.add_argument("--sample", type=Path, help="write operands and results here (.npz)")
    parser.add_argument("--tiles", type=int, default=12, help="number of tiles of A and of B (12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cubin", type=Path, help="the kernels, compiled elsewhere")
    parser.add_argument("--build", type=Path, help="only compile the kernels to this file")
    parser.add_argument("--check", type=Path, help="only compare the emulator with this sample")
    given = parser.parse_args(arguments)
    if (given.rows is None) == (given.build is None and given.check is None):
        parser.error("give the CSV file to write, or --build FILE, or --check FILE")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parse_arguments(arguments)
    if given.build:
        given.build.write_bytes(compiled(SOURCE))
        return 0
    if given.check:
        return summary(list(check(dict(np.load(given.check)))))
    with timed("compiler"):
        image = given.cubin.read_bytes() if given.cubin else compiled(SOURCE)
    sample: Sample | None = {} if given.sample else None
    rows: list[Row] = []
    with current_gpu(0), timed("comparison"), given.rows.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        device = Gpu(image, given.tiles)
        how = {"model": given.model, "sample": sample, "seed": given.seed}
        for row in compare(device, tiles=given.tiles, steps=STEPS, forms=FORMS, **how):
            writer.writerow(row)
            file.flush()
            rows.append(row)
    if sample is not None:
        np.savez_compressed(given.sample, **sample)
    return summary(rows)


if __name__ == "__main__":
    sys.exit(main())
