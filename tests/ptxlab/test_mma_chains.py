"""Deferred and fused mma.sync against the same instructions one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_programs import program, run

from ptxlab.errors import EmulatorError
from ptxlab.translate.translator import translate

DECLARATIONS = ".reg .b32 %a<64>; .reg .b32 %b<64>; .reg .f32 %d<64>; .reg .f32 %e<8>;\n"


def mma(d: int, a: int, b: int, c: int | None = None, *, kind: str = "f16", k: int = 16) -> str:
    """mma with accumulators %d[d..d+3], operands %a[a..], %b[b..], addend %d[c..] (default d)."""
    c = d if c is None else c
    results = ",".join(f"%d{d + i}" for i in range(4))
    left = ",".join(f"%a{a + i}" for i in range(k // 4))
    right = ",".join(f"%b{b + i}" for i in range(k // 8))
    addend = ",".join(f"%d{c + i}" for i in range(4))
    shape = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32"
    return f"{shape} {{{results}}}, {{{left}}}, {{{right}}}, {{{addend}}};\n"


def load(letter: str, first: int, count: int, place: int) -> str:
    """Load operand registers from this thread's words in the source tensor."""
    lines = "mul.wide.u32 %rd4, %r60, 256; add.s64 %rd4, %rd4, %rd2;\n"
    for i in range(count):
        lines += f"ld.global.u32 %{letter}{first + i}, [%rd4+{4 * (place + i)}];\n"
    return lines


def clear(first: int, count: int) -> str:
    return "".join(f"mov.f32 %d{first + i}, 0f00000000;\n" for i in range(count))


def store(first: int, count: int) -> str:
    lines = "mul.wide.u32 %rd5, %r60, 256; add.s64 %rd5, %rd5, %rd1;\n"
    for i in range(count):
        lines += f"st.global.f32 [%rd5+{4 * i}], %d{first + i};\n"
    return lines


def text_of(body: str) -> str:
    return program(body + "ret;", 2, DECLARATIONS)


def result(text: str, kind: str, *, fuse: bool, exact_mma: bool = False) -> np.ndarray:
    rng = np.random.default_rng(7)
    values = rng.standard_normal((64, 128)).astype(np.float32)
    if kind == "f16":
        source = values.astype(np.float16)
    else:
        source = (values.view(np.uint32) >> 16).astype(np.uint16)
    out = np.full((64, 64), np.nan, np.float32)
    run(text, [(out, True), (source, False)], threads=64, fuse=fuse, exact_mma=exact_mma)
    return out


TILE = load("a", 0, 16, 0) + load("b", 0, 16, 16) + clear(0, 16)
#: Body, accumulators to look at, matrix products that must remain of it.
PROGRAMS = {
    "a chain along k": (TILE + mma(0, 0, 0) + mma(0, 4, 2) + mma(0, 8, 4), 4, 1),
    "tiles along n": (TILE + mma(0, 0, 0) + mma(4, 0, 2) + mma(8, 0, 4), 12, 1),
    "tiles along m": (TILE + mma(0, 0, 0) + mma(4, 4, 0) + mma(8, 8, 0), 12, 1),
    "a block of all three": (
        TILE + "".join(mma(8 * m + 4 * n, 8 * m + 4 * k, 4 * k + 2 * n)
                       for k in (0, 1) for m in (0, 1) for n in (0, 1)), 16, 1,
    ),
    "two blocks of unlike depth": (TILE + mma(0, 0, 0) + mma(0, 4, 2) + mma(4, 0, 0), 8, 2),
    "operands overwritten between": (
        TILE + mma(0, 0, 0) + load("a", 0, 4, 8) + load("b", 0, 2, 20) + mma(0, 0, 0), 4, 1,
    ),
    "accumulators read between": (
        TILE + mma(0, 0, 0) + "mul.f32 %d1, %d1, 0f40000000;\n" + mma(0, 4, 2), 4, 2,
    ),
    "accumulators overwritten between": (
        TILE + mma(0, 0, 0) + "mov.f32 %d2, 0f3F800000;\n" + mma(0, 4, 2), 4, 2,
    ),
    "a chain through new registers": (
        TILE + mma(8, 0, 0, 12) + mma(4, 4, 2, 8) + mma(0, 8, 4, 4), 4, 1,
    ),
    "an inner result used twice": (TILE + mma(8, 0, 0) + mma(4, 4, 2, 8) + mma(0, 8, 4, 8), 8, 3),
    "an accumulator as an operand": (
        TILE + mma(0, 0, 0) + "mov.b32 %a4, %d0;\n" + mma(4, 4, 2), 8, 2,
    ),
    "an addend that is not zero": (
        TILE + "mov.b32 %d3, %a9;\nmov.f32 %d0, 0fC0400000;\n" + mma(0, 0, 0) + mma(0, 4, 2), 4, 1,
    ),
    "partly another chain's addend": (
        TILE + mma(0, 0, 0) + mma(4, 4, 2)
        + mma(8, 0, 0).replace("{%d8,%d9,%d10,%d11};", "{%d0,%d1,%d4,%d5};"), 12, 3,
    ),
    "across a branch": (
        TILE + mma(0, 0, 0)
        + "setp.lt.u32 %p1, %r60, 32;\n@%p1 bra SKIP;\n" + mma(0, 4, 2) + "SKIP:\n"
        + mma(0, 8, 4), 4, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_fused_is_unfused(name: str, kind: str) -> None:
    body, accumulators, _ = PROGRAMS[name]
    text = text_of((body + store(0, accumulators)).replace("f32.f16.f16", f"f32.{kind}.{kind}"))
    plain = result(text, kind, fuse=False)
    fused = result(text, kind, fuse=True)
    written = slice(0, accumulators)
    shown = ~np.isnan(plain[:, written])
    assert shown.mean() > 0.5
    assert np.array_equal(shown, ~np.isnan(fused[:, written]))
    np.testing.assert_allclose(
        fused[:, written][shown], plain[:, written][shown], rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_how_much_is_fused(name: str) -> None:
    body, accumulators, products = PROGRAMS[name]
    text = text_of(body + store(0, accumulators))
    fused, _ = translate(text, "main")
    plain, _ = translate(text, "main", fuse=False)
    assert fused.code.count("matrix_multiply(") == products
    assert plain.code.count("matrix_multiply(") == text.count("mma.sync")


def test_k8_shape() -> None:
    body = load("a", 0, 4, 0) + load("b", 0, 2, 16) + clear(0, 8)
    halves = body + mma(0, 0, 0, k=8) + store(0, 4)
    split = result(text_of(halves), "f16", fuse=True)[:, :4]
    # The same as k16 with the second half of A and B zero.
    zeros = "mov.u32 %a2, 0; mov.u32 %a3, 0; mov.u32 %b1, 0;\n"
    whole = result(text_of(body + zeros + mma(0, 0, 0) + store(0, 4)), "f16", fuse=True)[:, :4]
    np.testing.assert_allclose(split, whole, rtol=1e-6)


def test_against_matrices_laid_out_by_hand() -> None:
    """Rows and columns from the ISA's fragment pictures, written down independently."""
    rng = np.random.default_rng(3)
    a = rng.standard_normal((16, 16)).astype(np.float16)
    b = rng.standard_normal((16, 8)).astype(np.float16)
    source = np.zeros((64, 128), np.float16)
    for lane in range(32):
        group, place = divmod(lane, 4)
        for register in range(4):
            row = group + (8 if register in (1, 3) else 0)
            column = 2 * place + (8 if register >= 2 else 0)
            source[lane, 2 * register : 2 * register + 2] = a[row, column : column + 2]
        for register in range(2):
            first = 2 * place + 8 * register
            pair = b[first : first + 2, group]
            source[lane, 32 + 2 * register : 34 + 2 * register] = pair
    out = np.zeros((64, 64), np.float32)
    text = text_of(
        load("a", 0, 4, 0) + load("b", 0, 2, 16) + clear(0, 4) + mma(0, 0, 0) + store(0, 4)
    )
    run(text, [(out, True), (source, False)])
    product = a.astype(np.float64) @ b.astype(np.float64)
    for lane in range(32):
        group, place = divmod(lane, 4)
        want = [
            product[group, 2 * place], product[group, 2 * place + 1],
            product[group + 8, 2 * place], product[group + 8, 2 * place + 1],
        ]  # fmt: skip
        np.testing.assert_allclose(out[lane, :4], want, rtol=1e-5, atol=1e-6)


def test_mma_in_part_of_a_warp() -> None:
    body = TILE + "setp.lt.u32 %p1, %r60, 3;\n@%p1 bra SKIP;\n" + mma(0, 0, 0) + "SKIP:\n"
    with pytest.raises(EmulatorError, match=r"mma\.sync is executed by part of a warp"):
        result(text_of(body + store(0, 4)), "f16", fuse=True)


def test_mma_under_a_guard() -> None:
    body = TILE + "setp.lt.u32 %p1, %r60, 32;\n@%p1 " + mma(0, 0, 0)
    with pytest.raises(EmulatorError, match="mma under a guard is not supported"):
        result(text_of(body + store(0, 4)), "f16", fuse=True)
