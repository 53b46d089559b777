"""The C++ of every operator and of random programs, run by the emulator on many values."""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashsmith.builder.sources import package_sources
from flashsmith.builder.toolchain import find_toolchain
from flashsmith.semantics.derivatives import power
from flashsmith.semantics.program import SCORE, K, Program, Q, program_of
from flashsmith.semantics.program_cuda import INCLUDE, program_struct
from flashsmith.semantics.typed import FLOAT, INT, Typed, apply, cast, read, typed_symbol, where
from ptxlab.execute import emulate
from ptxlab.machine.memory import GlobalMemory

THREADS, BLOCKS = 128, 4
N = THREADS * BLOCKS
SMALL = typed_symbol("small", INT)
FACTOR = typed_symbol("factor", FLOAT)
TABLE = read("table", "float32", K)
WIDE = read("wide", "int64", Q)
NUMBERS: Mapping[str, float] = {"small": 7, "factor": 0.75}
POSITIVE = apply("abs", SCORE) + 0.125
CONDITION = Q < K

OPERATORS: dict[str, Typed] = {
    **{
        name: apply(name, SCORE)
        for name in ("negative", "abs", "exp", "exp2", "tanh", "sigmoid", "sin", "cos", "erf")
    },
    **{name: apply(name, SCORE * 3.0) for name in ("floor", "ceil", "round", "trunc")},
    **{name: apply(name, POSITIVE) for name in ("log", "log2", "log1p", "sqrt", "rsqrt")},
    **{
        f"float {name}": apply(name, SCORE, TABLE)
        for name in ("add", "subtract", "multiply", "minimum", "maximum")
    },
    **{
        f"float {name}": cast(apply(name, apply("round", SCORE), apply("round", TABLE)), FLOAT)
        for name in ("less", "less_equal", "equal", "not_equal")
    },
    "divide": SCORE / (POSITIVE + TABLE * TABLE),
    "divide by a number": SCORE / FACTOR,
    "divide by a constant": SCORE / 3.0,
    # Halves and quarters: no rounding decides a quotient.
    "float floor_divide": apply("round", SCORE * 4.0) // (apply("round", TABLE * 2.0) + 0.5),
    "float remainder": apply("round", SCORE * 4.0) % (apply("round", TABLE * 2.0) + 0.5),
    **{
        f"int {name}": cast(apply(name, Q - K, SMALL - (K & 15)), FLOAT)
        for name in ("floor_divide", "remainder", "minimum", "maximum", "xor", "and", "or")
    },
    **{
        f"long {name}": cast(apply(name, WIDE - K, WIDE - Q) % 1000, FLOAT)
        for name in ("floor_divide", "remainder", "add", "subtract", "multiply", "minimum", "and")
    },
    **{
        f"int {name}": cast(apply(name, Q * 70001, K * 12345), FLOAT)
        for name in ("add", "subtract", "multiply")
    },
    "shifts": cast(apply("left_shift", Q, K & 7) + apply("right_shift", Q - K, K & 3), FLOAT),
    "int negative": cast(-(Q - K) + apply("abs", K - Q) + ~Q, FLOAT),
    "bool": cast((CONDITION & (K < 40)) ^ ~(Q < 9) | (CONDITION.equals(K < 100)), FLOAT),
    "where": where(CONDITION, SCORE, TABLE),
    "casts": cast(cast(SCORE * 100.0, INT), FLOAT) + cast(cast(WIDE, INT), FLOAT),
    "long to int": cast(cast(WIDE * WIDE * WIDE, INT), FLOAT),
    "powers": power(SCORE, 5) + power(POSITIVE, 0.7) + power(POSITIVE, -2),
    "wrapped index": read("table", "float32", K - 400),
    "clamped index": read("table", "float32", K * 3) + read("table", "float32", WIDE * 99999999),
}
_SMOOTH = ("tanh", "sigmoid", "sin", "cos", "erf")


def random_float(draw: random.Random, depth: int) -> Typed:
    """A smooth expression: no rounding decides a choice."""
    if depth == 0:
        return draw.choice([SCORE, TABLE, FACTOR, cast((Q - K) % 5, FLOAT)])
    one, other = (random_float(draw, depth - 1) for _ in range(2))
    kind = draw.randrange(6)
    if kind == 0:
        return apply(draw.choice(_SMOOTH), one)
    if kind == 1:
        return where(random_bool(draw, depth - 1), one, other)
    if kind == 2:
        return one / (other * other + 1.0)
    return apply(draw.choice(["add", "subtract", "multiply", "minimum", "maximum"]), one, other)


def random_int(draw: random.Random, depth: int) -> Typed:
    if depth == 0:
        return draw.choice([Q, K, SMALL, Q - K, WIDE, cast(WIDE, INT)])
    one, other = (random_int(draw, depth - 1) for _ in range(2))
    if draw.randrange(5) == 0:
        return where(random_bool(draw, depth - 1), one, other)
    names = ("add", "subtract", "multiply", "floor_divide", "remainder", "minimum", "xor", "and")
    return apply(draw.choice(names), one, other)


def random_bool(draw: random.Random, depth: int) -> Typed:
    if depth == 0:
        return draw.choice([Q < K, K < SMALL, (Q % 3).equals(K % 4)])
    kind = draw.randrange(3)
    if kind == 0:
        name = draw.choice(["less", "less_equal", "equal", "not_equal"])
        return apply(name, random_int(draw, depth - 1), random_int(draw, depth - 1))
    if kind == 1:
        return ~random_bool(draw, depth - 1)
    name = draw.choice(["and", "or", "xor"])
    return apply(name, random_bool(draw, depth - 1), random_bool(draw, depth - 1))


def random_score(seed: int) -> Typed:
    draw = random.Random(seed)
    return random_float(draw, 4) + cast(random_bool(draw, 4), FLOAT) + SCORE


PROGRAMS = {
    **{name: SCORE * 0.0 + it if SCORE not in it.parts() else it for name, it in OPERATORS.items()},
    **{f"random {seed}": random_score(seed) for seed in range(24)},
}


def kernel(i: int, program: Program) -> str:
    return f"""
namespace flashsmith::p{i} {{
{program_struct(program)}
}}
extern "C" __global__ void kernel_{i}(flashsmith::ProgramArgs args, const float* x, const int* q,
                                      const int* k, float* change, float* slope) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    change[i] = flashsmith::p{i}::Program::change(args, x[i], 1, 2, q[i], k[i], 300, 400);
    slope[i] = flashsmith::p{i}::Program::slope(args, x[i], 1, 2, q[i], k[i], 300, 400);
}}
"""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    tools = find_toolchain()
    folder: Path = tmp_path_factory.mktemp("programs")
    kernels = [kernel(i, program_of(it, None).program) for i, it in enumerate(PROGRAMS.values())]
    (folder / "kernel.cu").write_text(INCLUDE + "".join(kernels))
    headers = [f"-I{path}" for path in (*tools.include_dirs, package_sources())]
    command = [str(tools.nvcc), "-std=c++20", "-O3", "-arch=compute_80", "-ptx", *headers]
    subprocess.run([*command, "-o", "kernel.ptx", "kernel.cu"], check=True, cwd=folder)
    return (folder / "kernel.ptx").read_text()


def inputs() -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return {
        "score": draw.uniform(-3, 3, N).astype(np.float32),
        "q": draw.integers(0, 300, N).astype(np.int32),
        "k": draw.integers(0, 400, N).astype(np.int32),
        "table": draw.uniform(-2, 2, 400).astype(np.float32),
        "wide": draw.integers(-(2**40), 2**40, 300),
    }


def arguments(program: Any, given: Mapping[str, Any], memory: GlobalMemory) -> bytes:
    """ProgramArgs of the tensors and numbers."""
    reads = b""
    for name in program.reads:
        array = given[name]
        address = memory.register(name, array, writable=False)
        reads += struct.pack("<Q4q4i", address, 1, 0, 0, 0, len(array), 1, 1, 1)
    numbers = b"".join(
        struct.pack("<i" if name == "small" else "<f", NUMBERS[name]) for name in program.numbers
    )
    return reads.ljust(8 * 56, b"\0") + numbers.ljust(64, b"\0") + struct.pack("<fxxxxQ", 1.0, 0)


def run(ptx: str, name: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    given, memory = inputs(), GlobalMemory()
    change, slope = np.full(N, np.nan, np.float32), np.full(N, np.nan, np.float32)
    packed = arguments(program_of(PROGRAMS[name], None), given, memory)
    for key in ("score", "q", "k"):
        packed += struct.pack("<Q", memory.register(f"{key} in", given[key], writable=False))
    for key, array in (("change", change), ("slope", slope)):
        packed += struct.pack("<Q", memory.register(key, array, writable=True))
    emulate(
        ptx,
        f"kernel_{list(PROGRAMS).index(name)}",
        grid=(BLOCKS, 1, 1),
        block=(THREADS, 1, 1),
        smem_bytes=0,
        argument_bytes=packed,
        memory=memory,
    )
    return change, slope, given


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_slopes(ptx: str, name: str) -> None:
    change, slope, given = run(ptx, name)
    values = {**{key: given[key] for key in ("score", "q", "k")}, **NUMBERS}
    program = program_of(PROGRAMS[name], None).program
    tensors = {key: given[key] for key in ("table", "wide")}
    expected = PROGRAMS[name].evaluate(values, tensors)
    np.testing.assert_allclose(change, np.broadcast_to(expected, N), rtol=3e-6, atol=2e-6)
    assert program.slope is not None
    renamed = program_of(PROGRAMS[name], None)
    values |= {f"number{i}": NUMBERS[it] for i, it in enumerate(renamed.numbers)}
    tensors = {f"read{i}": given[it] for i, it in enumerate(renamed.reads)}
    expected = np.broadcast_to(program.slope.evaluate(values, tensors), N)
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-5)


def test_slopes_are_the_derivatives() -> None:
    """Finite differences of float64."""
    given = inputs()
    values = {key: given[key] for key in ("q", "k")} | NUMBERS
    tensors = {key: given[key] for key in ("table", "wide")}
    steps = ("floor", "ceil", "round", "trunc", "float less", "float equal", "casts")
    for name, expression in PROGRAMS.items():
        if name.startswith(steps) or "divide" in name or "remainder" in name:
            continue
        program, reads, numbers = program_of(expression, None)
        score = given["score"].astype(np.float64)
        near = [expression.evaluate({**values, "score": score + h}, tensors) for h in (-1e-6, 1e-6)]
        by = {f"number{i}": NUMBERS[it] for i, it in enumerate(numbers)}
        of = {f"read{i}": given[it] for i, it in enumerate(reads)}
        assert program.slope is not None
        found = program.slope.evaluate({**values, **by, "score": score}, of)
        difference = (near[1] - near[0]) / 2e-6
        # A minimum or a choice may change within the step.
        wrong = ~np.isclose(np.broadcast_to(found, N), difference, rtol=1e-4, atol=1e-4)
        assert wrong.sum() <= 2, name
