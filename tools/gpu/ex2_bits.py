#!/usr/bin/env python3
"""Records the results of ex2.approx.ftz.f32 on a GPU as a table, and checks that all results follow
from it.

    python tools/gpu/ex2_bits.py rows.csv --table ex2_sm90.npz
    python tools/gpu/ex2_bits.py --build ex2_bits.cubin
    python tools/gpu/ex2_bits.py rows.csv --table ex2_sm90.npz --cubin ex2_bits.cubin

The instruction splits x into an integer and a fraction with a fixed number of bits; only the
fraction is evaluated. So 2^x should follow from a table of 2^f for all f that are multiples of
2^-24, which are exact in float32. It is unknown how x is rounded: x itself or its magnitude, down
or to nearest, to 22, 23 or 24 bits. Each of these rules is tried on a sample of all floats. The
best one is checked on all floats from 2^-30 to 256, and on a sample of the others.

A row of the CSV file has a sign, an exponent, and how many results differ from those of the rule.
The exit status is 1 if a result differs. For each fraction, the table has the difference between
the result and the nearest float, in units of the last place. These are small numbers, which can be
compressed well.
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

#: Bits that a fraction has in the table.
BITS = 24
#: How many floats have the same sign and exponent.
MANTISSAS = 1 << 23
EXPONENTS = range(-149, 128)
#: Exponents for which all floats are compared. For others, the result is 1 or next to 1, 0 or
#: infinity.
VARIED = range(-30, 8)
#: For other exponents, and to compare rules, only each STRIDE-th float is used.
STRIDE = 1024
#: How many floats are compared at once; they are few enough for the processor's cache.
PART = 1 << 14
BLOCKS, THREADS = 1056, 256

f4, f8, i4, i8, u4 = np.float32, np.float64, np.int32, np.int64, np.uint32

#: Computes 2^x for at most MANTISSAS floats.
Function = Callable[[np.ndarray], np.ndarray]


class Rule(NamedTuple):
    """A rule by which x is rounded to a multiple of 2^-bits."""

    rounding: str
    bits: int

    def __str__(self) -> str:
        return f"{self.rounding} to {self.bits} bits"

    def fixed(self, x: np.ndarray) -> np.ndarray:
        """x in units of 2^-24 (int64), clipped if it is far out of range."""
        scaled = np.clip(x.astype(f8), -1e4, 1e4) * 2.0**self.bits
        return ROUNDINGS[self.rounding](scaled).astype(i8) << (BITS - self.bits)


ROUNDINGS = {"down": np.floor, "nearest": np.rint, "towards zero": np.trunc}
RULES = [Rule(how, BITS - less) for less in range(3) for how in ROUNDINGS]


def fractions() -> np.ndarray:
    """All multiples of 2^-24 in [0, 1)."""
    return np.arange(1 << BITS, dtype=i4).astype(f4) * f4(2.0**-BITS)


def recorded(function: Function) -> np.ndarray:
    """The bits of 2^f for all fractions f (int32)."""
    x = fractions()
    parts = [function(x[at : at + MANTISSAS]) for at in range(0, x.size, MANTISSAS)]
    return np.concatenate(parts).view(i4)


def by_table(table: np.ndarray, x: np.ndarray, rule: Rule) -> np.ndarray:
    """The bits of 2^x according to a table and a rule.

    A subnormal result is 0, and one that is too large is infinity.
    """
    fixed = rule.fixed(np.where(np.abs(x) < f4(2.0**-126), f4(0), x))
    whole, fraction = fixed >> BITS, fixed & ((1 << BITS) - 1)
    bits = table[fraction].astype(i8) + (whole << 23)
    found = np.where(whole < -126, 0, np.where(bits >= 0x7F800000, 0x7F800000, bits))
    return found.astype(u4)


def floats(sign: int, exponent: int, stride: int = 1) -> np.ndarray:
    """All floats with this sign and exponent, or each ``stride``-th of them.

    For a subnormal float, the exponent is that of its first bit.
    """
    if exponent >= -126:
        words = np.arange(0, MANTISSAS, stride, dtype=u4) | u4((exponent + 127) << 23)
    else:
        first = 1 << (exponent + 149)
        words = np.arange(first, 2 * first, stride, dtype=u4)
    return (words | u4(sign << 31)).view(f4)


class Row(NamedTuple):
    """A row of the CSV file."""

    rule: str
    sign: int
    exponent: int
    compared: int
    differing: int


def compare(function: Function, table: np.ndarray, rule: Rule, stride: int) -> Iterator[Row]:
    """Compares a rule on each ``stride``-th float where results vary, and on fewer floats
    elsewhere."""
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
    """By how much each entry differs from the nearest float, in units of the last place; int8 if
    possible."""
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
    """Records the table, compares the rules and writes the rows. Returns the exit status."""
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
    """How many odd entries equal the one before; if 23 bits are used, all do."""
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
