"""wmma: D = A B + C of 16 x 16 matrices, whatever the layouts and formats."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from ptx_programs import aligned, program, run

from ptxlab.checks import all_checks
from ptxlab.errors import EmulatorError

LAYOUTS = ("row", "col")
STRIDE = 24  # elements, more than a row has


def vector(prefix: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{first + k}" for k in range(count)) + "}"


def wmma(kind: str, a: str, b: str, c: str, sums: str, space: str) -> str:
    """Loads the fragments from %rd2 to %rd4, multiplies, and stores to %rd1."""
    count = 8 if kind == "f16" else 4
    operands = f".{kind}.{kind}" if kind == "bf16" else ""
    sum_of = f".f32{operands}.f32" if sums == "f32" else ".f16.f16"
    register, n_sums = ("f", 8) if sums == "f32" else ("r", 4)
    first_c, first_d = (0, 8) if sums == "f32" else (40, 50)
    A, B = vector("r", 1, count), vector("r", 20, count)
    C, D = (vector(register, first, n_sums) for first in (first_c, first_d))
    load = "wmma.load.{0}.sync.aligned.{1}.m16n16k16{2}.{3}"
    return f"""
    mov.u32 %r15, {STRIDE};
    {load.format("a", a, space, kind)} {A}, [%rd2], %r15;
    {load.format("b", b, space, kind)} {B}, [%rd3], %r15;
    {load.format("c", c, space, sums)} {C}, [%rd4], %r15;
    wmma.mma.sync.aligned.{a}.{b}.m16n16k16{sum_of} {D}, {A}, {B}, {C};
    wmma.store.d.sync.aligned.{c}.m16n16k16{space}.{sums} [%rd1], {D}, {STRIDE};
    """


def encoded(matrix: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f32":
        return matrix.astype(np.float32)
    if kind == "f16":
        return matrix.astype(np.float16)
    return (matrix.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def stored(matrix: np.ndarray, kind: str, layout: str) -> np.ndarray:
    """In memory, with gaps between the rows or columns."""
    bits = encoded(matrix if layout == "row" else matrix.T, kind)
    memory = aligned((16, STRIDE), bits.dtype)
    memory[:, :16] = bits
    return memory


def drawn(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(-4, 5, (16, 16)).astype(np.float64) for _ in range(3)]


def launch(body: str, arrays: list[np.ndarray], **options: Any) -> Any:
    tensors = [(array, number == 0) for number, array in enumerate(arrays)]
    return run(program(body + "ret;", 4), tensors, observers=all_checks(), **options)


@pytest.mark.parametrize(("kind", "sums"), [("f16", "f32"), ("f16", "f16"), ("bf16", "f32")])
@pytest.mark.parametrize("space", ["", ".global"])
def test_products_in_every_layout(kind: str, sums: str, space: str) -> None:
    for seed, (a, b, c) in enumerate(product(LAYOUTS, repeat=3)):
        A, B, C = drawn(seed)
        out = stored(np.zeros((16, 16)), sums, c)
        given = [stored(A, kind, a), stored(B, kind, b), stored(C, sums, c)]
        result = launch(wmma(kind, a, b, c, sums, space), [out, *given])
        assert result.findings == []
        found = out[:, :16] if c == "row" else out[:, :16].T
        assert np.array_equal(found, A @ B + C), (a, b, c)
        assert not out[:, 16:].any()


def test_shared_memory_and_the_stride_that_is_left_out() -> None:
    A, _, _ = drawn(1)
    out, given = aligned((16, 16), np.float16), encoded(A, "f16")
    body = f"""
    .shared .align 16 .b8 tile[512];
    mov.u32 %r40, tile; shl.b32 %r41, %r60, 4; cvt.u64.u32 %rd5, %r41; add.s64 %rd6, %rd2, %rd5;
    ld.global.v4.u32 {{%r42, %r43, %r44, %r45}}, [%rd6]; add.u32 %r46, %r40, %r41;
    st.shared.v4.u32 [%r46], {{%r42, %r43, %r44, %r45}};
    bar.warp.sync 0xffffffff;
    wmma.load.c.sync.aligned.row.m16n16k16.shared.f16 {vector("r", 1, 4)}, [%r40];
    wmma.store.d.sync.aligned.col.m16n16k16.global.f16 [%rd1], {vector("r", 1, 4)};
    """
    result = launch(body, [out, given, given, given])
    assert result.findings == []
    assert np.array_equal(out, A.T)


def test_a_matrix_that_is_too_small_is_found() -> None:
    A, B, C = drawn(2)
    out = stored(np.zeros((16, 16)), "f32", "row")
    given = [stored(A, "f16", "row"), stored(B, "f16", "row")[:15], stored(C, "f32", "row")]
    findings = launch(wmma("f16", "row", "row", "row", "f32", ".global"), [out, *given]).findings
    assert {finding.kind for finding in findings} == {"out-of-bounds"}
    assert all("wmma.load.b" in str(finding) for finding in findings)


def test_half_a_warp_cannot() -> None:
    body = "setp.lt.u32 %p1, %r60, 16; @%p1 bra SKIP;"
    body += wmma("f16", "row", "row", "row", "f32", ".global") + "SKIP:"
    with pytest.raises(EmulatorError, match=r"wmma\.load is executed by part of a warp"):
        launch(body, [aligned((16, STRIDE), np.float32)] * 4)


@pytest.mark.parametrize(
    ("instruction", "said"),
    [
        ("wmma.load.a.sync.aligned.row.m32n8k16.global.f16 {%r1}, [%rd1];", "is not supported"),
        ("wmma.load.a.sync.aligned.row.m16n16k16.global.s8 {%r1}, [%rd1];", "is not supported"),
        ("wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1}, [%rd1];",
            "4 or 8 registers expected, got 1"),
        ("@%p1 wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1}, [%rd1];", "under a guard"),
    ],
)  # fmt: skip
def test_other_forms_are_errors(instruction: str, said: str) -> None:
    with pytest.raises(EmulatorError, match=said):
        launch(instruction, [aligned((16, STRIDE), np.float32)] * 4)
