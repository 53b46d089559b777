#!/usr/bin/env python3
"""Records ex2.approx.ftz.f32 of a GPU as a table, and checks that the table predicts all results.

    python tools/gpu/ex2_bits.py rows.csv --table ex2_sm90.npz
    python tools/gpu/ex2_bits.py --build ex2_bits.cubin
    python tools/gpu/ex2_bits.py rows.csv --table ex2_sm90.npz --cubin ex2_bits.cubin

The unit splits x into an integer and a fraction with a fixed number of bits, and only evaluates the
fraction. So 2^x should follow from a table of 2^f for all multiples f of 2^-24, which float32
represents exactly. The unknown part is how x is rounded: x or its magnitude, down or to the
nearest, to 22, 23 or 24 bits. Each of these rules is tried on a sample of all floats. The best rule
is compared on every float from 2^-30 to 256 and on a sample of the rest.

A CSV row has a sign, an exponent, and the number of results that differ from the rule's results.
The exit status is 1 if a result differs. For each fraction the table stores the difference between
the result and the nearest float, in units in the last place. These small numbers compress well.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from gpu_kernels import GpuKernels, compiled

from flashsmith.runtime.driver import current_gpu

SOURCE = Path(__file__).with_suffix(".cu")

#: Bits of a fraction in the table.
BITS = 24
#: Number of floats with one sign and exponent.
MANTISSAS = 1 << 23
EXPONENTS = range(-149, 128)
#: Exponents for which every float is compared. Other exponents give 1 or a neighbour of 1, 0 or
#: infinity.
VARIED = range(-30, 8)
#: Stride of the sample for other exponents and for the comparison of rules.
STRIDE = 1024
#: Floats that are compared together, few enough for the processor's cache.
PART = 1 << 14
BLOCKS, THREADS = 1056, 256

f4, f8, i4, i8, u4 = np.float32, np.float64, np.int32, np.int64, np.uint32

#: Computes 2^x of at most MANTISSAS floats.
Function = Callable[[np.ndarray], np.ndarray]


class Rule(NamedTuple):
    """A rule that rounds x to a multiple of 2^-bits."""

    rounding: str
    bits: int

    def __str__(self) -> str:
        return f"{self.rounding} to {self.bits} bits"

    def fixed(self, x: np.ndarray) -> np.ndarray:
        """x in units of 2^-24, int64; clipped far outside the range."""
        scaled = np.clip(x.astype(f8), -1e4, 1e4) * 2.0**self.bits
        return ROUNDINGS[self.rounding](scaled).astype(i8) << (BITS - self.bits)


ROUNDINGS = {"down": np.floor, "nearest": np.rint, "towards zero": np.trunc}
RULES = [Rule(how, BITS - less) for less in range(3) for how in ROUNDINGS]


def fractions() -> np.ndarray:
    """All multiples of 2^-24 in [0, 1)."""
    return np.arange(1 << BITS, dtype=i4).astype(f4) * f4(2.0**-BITS)


def recorded(function: Function) -> np.ndarray:
    """The bits of 2^f for all fractions f, int32."""
    x = fractions()
    parts = [function(x[at : at + MANTISSAS]) for at in range(0, x.size, MANTISSAS)]
    return np.concatenate(parts).view(i4)


def by_table(table: np.ndarray, x: np.ndarray, rule: Rule) -> np.ndarray:
    """The bits of 2^x by a table and a rule; subnormal results are 0, too large ones infinity."""
    fixed = rule.fixed(np.where(np.abs(x) < f4(2.0**-126), f4(0), x))
    whole, fraction = fixed >> BITS, fixed & ((1 << BITS) - 1)
    bits = table[fraction].astype(i8) + (whole << 23)
    found = np.where(whole < -126, 0, np.where(bits >= 0x7F800000, 0x7F800000, bits))
    return found.astype(u4)


def floats(sign: int, exponent: int, stride: int = 1) -> np.ndarray:
    """All floats of a sign and an exponent, or every ``stride``-th.

    The exponent of a subnormal float is the exponent of its first bit.
    """
    if exponent >= -126:
        words = np.arange(0, MANTISSAS, stride, dtype=u4) | u4((exponent + 127) << 23)
    else:
        first = 1 << (exponent + 149)
        words = np.arange(first, 2 * first, stride, dtype=u4)
    return (words | u4(sign << 31)).view(f4)


class Row(NamedTuple):
    """A line of the CSV file."""

    rule: str
    sign: int
    exponent: int
    compared: int
    differing: int


def compare(function: Function, table: np.ndarray, rule: Rule, stride: int) -> Iterator[Row]:
    """Compares a rule on every ``stride``-th float where results vary, and on fewer elsewhere."""
    for sign in (0, 1):
        for exponent in EXPONENTS:
            x = floats(sign, exponent, stride if exponent in VARIED else max(stride, STRIDE))
            found, parts = function(x).view(u4), range(0, x.size, PART)
            differing = sum(
                int((found[at : at + PART] != by_table(table, x[at : at + PART], rule)).sum())
                for at in parts
            )
            yield Row(str(rule), sign, exponent, x.size, differing)


def deviations(table: np.ndarray) -> np.ndarray:
    """Each entry's difference from the nearest float in last bits; int8 if it fits."""
    nearest = np.exp2(fractions().astype(f8)).astype(f4).view(i4)
    found = table - nearest
    return found.astype(np.int8) if np.abs(found).max() < 128 else found


class Gpu:
    """The function on the first GPU."""

    def __init__(self, image: bytes) -> None:
        self.kernels = GpuKernels(image)
        for name in ("x", "y"):
            self.kernels.allocate(name, 4 * MANTISSAS)
        self.room = np.zeros(MANTISSAS, f4)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.room[: x.size] = x
        self.kernels.put("x", self.room)
        self.kernels.launch("exp2_each", BLOCKS, THREADS, "x", "y", x.size)
        return self.kernels.fetch("y", np.empty_like(x))


def examine(function: Function, rows_file: Path, table_file: Path | None, stride: int) -> int:
    """Records the table, compares the rules and writes the rows; returns the exit status."""
    begin = time.perf_counter()
    table = recorded(function)
    off = deviations(table)
    counts = Counter(dict(zip(*np.unique(off, return_counts=True), strict=True)))
    print("errors in last bits:", ", ".join(f"{k}: {n}" for k, n in sorted(counts.items())))
    print(f"odd entries equal to the previous entry: {_repeated(table)} of {table.size // 2}")
    if table_file:
        np.savez_compressed(table_file, deviations=off)
        print(f"{table_file}: {table_file.stat().st_size} bytes")
    tried = {
        rule: sum(row.differing for row in compare(function, table, rule, max(stride, STRIDE)))
        for rule in RULES
    }
    for rule, differing in tried.items():
        print(f"{rule}: {differing} floats of the sample differ")
    best = min(tried, key=lambda rule: tried[rule])
    rows = list(compare(function, table, best, stride))
    with rows_file.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)
    for row in rows:
        if row.differing:
            print(*row[:3], f"{row.differing} of {row.compared} differ", sep=", ")
    wrong = sum(row.differing for row in rows)
    print(f"{best}: {wrong} of {sum(row.compared for row in rows)} floats differ")
    print(f"{time.perf_counter() - begin:.1f} s")
    return int(wrong > 0)


def _repeated(table: np.ndarray) -> int:
    """The number of odd entries equal to the previous one; all of them, if 23 bits are used."""
    return int((table[1::2] == table[::2]).sum())


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="?", type=Path, help="the CSV file to write")
    parser.add_argument("--table", type=Path, help="write the table to this file (.npz)")
    parser.add_argument("--stride", type=int, default=1, help="compare every n-th float (1)")
    parser.add_argument("--cubin", type=Path, help="the kernel, compiled elsewhere")
    parser.add_argument("--build", type=Path, help="only compile the kernel to this file")
    given = parser.parse_args(arguments)
    if (given.rows is None) == (given.build is None):
        parser.error("give the CSV file to write, or --build FILE")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parse_arguments(arguments)
    if given.build:
        given.build.write_bytes(compiled(SOURCE))
        return 0
    image = given.cubin.read_bytes() if given.cubin else compiled(SOURCE)
    with current_gpu(0):
        return examine(Gpu(image), given.rows, given.table, given.stride)


if __name__ == "__main__":
    sys.exit(main())
