"""atom and red: against one thread after the other in plain Python, whatever the addresses; and the
order in which fp32 sums come together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ptx_programs import aligned, program, run

from ptxlab.checks import Bounds, Races
from ptxlab.errors import EmulatorError

THREADS, CELLS = 96, 5
Number = int | float
Operation = Callable[[Number, Number], Number]


def wrapped(bits: int) -> Callable[[Number], Number]:
    return lambda x: int(x) % 2**bits


# By mnemonic: the type of a cell, and what becomes of it and a thread's value.
OPERATIONS: dict[str, tuple[str, Operation]] = {
    "add.u32": ("u4", lambda a, b: wrapped(32)(a + b)),
    "add.s32": ("i4", lambda a, b: a + b),
    "add.u64": ("u8", lambda a, b: wrapped(64)(a + b)),
    "add.f32": ("f4", lambda a, b: float(np.float32(np.float32(a) + np.float32(b)))),
    "add.f64": ("f8", lambda a, b: a + b),
    "min.s32": ("i4", min),
    "max.u32": ("u4", max),
    "and.b32": ("u4", lambda a, b: int(a) & int(b)),
    "or.b32": ("u4", lambda a, b: int(a) | int(b)),
    "xor.b32": ("u4", lambda a, b: int(a) ^ int(b)),
    "exch.b32": ("u4", lambda a, b: b),
    "inc.u32": ("u4", lambda a, b: 0 if a >= b else a + 1),
    "dec.u32": ("u4", lambda a, b: b if a == 0 or a > b else a - 1),
}


def values_of(dtype: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype[0] == "f":
        return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(dtype)
    return rng.integers(0, 50, count).astype(dtype)


def body(mnemonic: str, size: int, *, space: str = "global", returns: bool = True) -> str:
    """Thread t works on cell t % CELLS of %rd2 with its value of %rd3; %rd1 takes the old one."""
    kind = "b64" if size == 8 else "b32"
    register = "%rd9" if size == 8 else "%r9"
    old = "%rd8" if size == 8 else "%r8"
    if mnemonic.endswith(("f32", "f64")):
        register, old = ("%f1", "%f2") if size == 4 else ("%fd1", "%fd2")
        kind = mnemonic[-3:]
    name = f"atom.{space}.{mnemonic} {old}," if returns else f"red.{space}.{mnemonic}"
    store = f"st.global.{kind} [%rd4], {old};" if returns else ""
    return f"""
    rem.u32 %r1, %r0, {CELLS}; mul.wide.u32 %rd4, %r1, {size}; add.s64 %rd5, %rd2, %rd4;
    mul.wide.u32 %rd4, %r0, {size}; add.s64 %rd6, %rd3, %rd4; add.s64 %rd4, %rd1, %rd4;
    ld.global.{kind} {register}, [%rd6];
    {name} [%rd5], {register};
    {store}
    """


def launch(text: str, arrays: list[np.ndarray], **options: object) -> None:
    declared = ".reg .f64 %fd<4>;\n"
    run(
        program(text + "ret;", 3, declared),
        [(arrays[0], True), (arrays[1], True), (arrays[2], False)],
        threads=THREADS,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("mnemonic", OPERATIONS)
@pytest.mark.parametrize("returns", [True, False], ids=["atom", "red"])
def test_one_thread_after_the_other(mnemonic: str, returns: bool) -> None:
    dtype, operation = OPERATIONS[mnemonic]
    cells, values = values_of(dtype, CELLS, 1), values_of(dtype, THREADS, 2)
    old = np.zeros(THREADS, dtype)
    expected, expected_old = cells.tolist(), np.zeros(THREADS, dtype)
    for thread, value in enumerate(values.tolist()):
        expected_old[thread] = expected[thread % CELLS]
        expected[thread % CELLS] = operation(expected[thread % CELLS], value)
    launch(body(mnemonic, cells.itemsize, returns=returns), [old, cells, values])
    np.testing.assert_array_equal(cells, np.array(expected, dtype))
    if returns:
        np.testing.assert_array_equal(old, expected_old)


def test_compare_and_swap() -> None:
    """Each thread of a cell in turn finds what the one before has put there."""
    old, cells = np.zeros(THREADS, np.uint32), np.zeros(CELLS, np.uint32)
    text = f"""
    rem.u32 %r1, %r0, {CELLS}; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd5, %rd2, %rd4;
    div.u32 %r2, %r0, {CELLS}; add.u32 %r3, %r2, 1;
    atom.global.cas.b32 %r4, [%rd5], %r2, %r3;
    add.s64 %rd4, %rd1, %rd0; st.global.u32 [%rd4], %r4;
    """
    launch(text, [old, cells, np.zeros(1, np.uint32)])
    assert old.tolist() == [t // CELLS for t in range(THREADS)]
    assert cells.tolist() == [len(range(cell, THREADS, CELLS)) for cell in range(CELLS)]


def test_threads_that_are_off_add_nothing_and_distinct_cells_go_together() -> None:
    cells, values = np.zeros(THREADS, np.float32), values_of("f4", THREADS, 3)
    text = """
    setp.lt.u32 %p1, %r0, 40; add.s64 %rd5, %rd2, %rd0; add.s64 %rd6, %rd3, %rd0;
    ld.global.f32 %f1, [%rd6]; @%p1 red.global.add.f32 [%rd5], %f1;
    @%p1 red.global.add.f32 [%rd5], %f1;
    """
    launch(text, [np.zeros(1, np.float32), cells, values])
    np.testing.assert_array_equal(cells[:40], values[:40] * 2)
    assert not cells[40:].any()


@pytest.mark.parametrize("kind", ["f16", "f16x2", "bf16", "bf16x2"])
def test_sums_of_short_floats(kind: str) -> None:
    """Whole numbers, of which both formats hold these; the last thread's value is found by none."""
    size, pairs = (4, 2) if kind.endswith("x2") else (2, 1)
    numbers = (np.arange(THREADS * pairs) % 7 - 3).astype(np.float32)
    if kind.startswith("bf"):
        values = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    else:
        values = numbers.astype(np.float16).view(np.uint16)
    register, old, width = ("%r9", "%r8", "b32") if size == 4 else ("%h1", "%h2", "b16")
    text = f"""
    .reg .b16 %h<4>;
    mul.wide.u32 %rd4, %r0, {size}; add.s64 %rd6, %rd3, %rd4; add.s64 %rd4, %rd1, %rd4;
    ld.global.{width} {register}, [%rd6];
    atom.global.add.noftz.{kind} {old}, [%rd2], {register};
    st.global.{width} [%rd4], {old};
    """
    before, cell = np.zeros(THREADS * pairs, np.uint16), np.zeros(2, np.uint16)
    launch(text, [before, cell, values])

    def decoded(bits: np.ndarray) -> np.ndarray:
        if kind.startswith("bf"):
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(np.float16).astype(np.float32)

    sums = numbers.reshape(THREADS, pairs).cumsum(axis=0)
    assert decoded(cell)[:pairs].tolist() == sums[-1].tolist()
    assert decoded(before).reshape(THREADS, pairs)[1:].tolist() == sums[:-1].tolist()


def test_compare_and_swap_of_16_bits() -> None:
    cells = np.array([7, 0, 9, 9], np.uint16)
    text = """
    .reg .b16 %h<4>;
    cvt.u16.u32 %h1, %r0; add.u16 %h2, %h1, 1;
    atom.global.cas.b16 %h3, [%rd2+2], %h1, %h2;
    """
    launch(text, [np.zeros(1, np.uint32), cells, np.zeros(1, np.uint32)])
    assert cells.tolist() == [7, THREADS, 9, 9]


def test_shared_memory_is_each_ctas_own() -> None:
    out, declared = np.zeros(2 * THREADS, np.uint32), ".shared .align 4 .b8 s[4];\n"
    text = """
    mov.u32 %r1, s; mov.u32 %r2, 0; st.shared.u32 [%r1], %r2; bar.sync 0;
    add.u32 %r3, %r61, 1; red.shared.add.u32 [%r1], %r3; bar.sync 0;
    ld.shared.u32 %r4, [%r1]; add.s64 %rd4, %rd1, %rd0; st.global.u32 [%rd4], %r4; ret;
    """
    run(program(text, 1, declared), [(out, True)], threads=THREADS, ctas=2)
    assert out.tolist() == [THREADS] * THREADS + [2 * THREADS] * THREADS


def sums(seed: int | None) -> np.ndarray:
    cells, values = np.zeros(CELLS, np.float32), values_of("f4", THREADS, 4)
    arrays = [np.zeros(1, np.float32), cells, values]
    launch(body("add.f32", 4, returns=False), arrays, seed=seed)
    return cells


def test_the_seed_decides_the_order_of_sums() -> None:
    """A sum that depends on time has other bits under another schedule, and is the same sum."""
    found = {seed: sums(seed) for seed in (None, *range(6))}
    values = values_of("f4", THREADS, 4).astype(np.float64)
    exact = np.array([values[cell::CELLS].sum() for cell in range(CELLS)])
    bound = np.array([np.abs(values[cell::CELLS]).sum() for cell in range(CELLS)]) * 2e-6
    for cells in found.values():
        assert (np.abs(cells - exact) <= bound).all()
    assert len({cells.tobytes() for cells in found.values()}) > 3
    for seed, cells in found.items():
        np.testing.assert_array_equal(cells, sums(seed))


# Vectors -------------------------------------------------------------------------------------


def vector_body(count: int, *, returns: bool = True, space: str = ".global") -> str:
    """Thread t adds its ``count`` values of %rd3 to vector t % CELLS of %rd2; %rd1 takes the old
    ones."""
    size = 4 * count
    given = "{" + ", ".join(f"%f{1 + k}" for k in range(count)) + "}"
    old = "{" + ", ".join(f"%f{11 + k}" for k in range(count)) + "}"
    name = f"atom{space}.add.v{count}.f32 {old}," if returns else f"red{space}.add.v{count}.f32"
    store = f"st.global.v{count}.f32 [%rd4], {old};" if returns else ""
    return f"""
    rem.u32 %r1, %r0, {CELLS}; mul.wide.u32 %rd4, %r1, {size}; add.s64 %rd5, %rd2, %rd4;
    mul.wide.u32 %rd4, %r0, {size}; add.s64 %rd6, %rd3, %rd4; add.s64 %rd4, %rd1, %rd4;
    ld.global.v{count}.f32 {given}, [%rd6];
    {name} [%rd5], {given};
    {store}
    """


def vectors_of(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Old values, cells and values, a row a vector."""
    old, cells, values = (aligned((n, count), np.float32) for n in (THREADS, CELLS, THREADS))
    cells[...] = values_of("f4", cells.size, 5).reshape(cells.shape)
    values[...] = values_of("f4", values.size, 6).reshape(values.shape)
    return old, cells, values


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("space", ["", ".global", ".relaxed.gpu.global"])
@pytest.mark.parametrize("returns", [True, False], ids=["atom", "red"])
def test_vectors_are_added_element_by_element(count: int, space: str, returns: bool) -> None:
    old, cells, values = vectors_of(count)
    expected, expected_old = cells.copy(), np.zeros_like(old)
    for thread in range(THREADS):
        for element in range(count):
            cell = thread % CELLS, element
            expected_old[thread, element] = expected[cell]
            expected[cell] = np.float32(expected[cell] + values[thread, element])
    launch(vector_body(count, returns=returns, space=space), [old, cells, values])
    np.testing.assert_array_equal(cells, expected)
    if returns:
        np.testing.assert_array_equal(old, expected_old)


def test_the_seed_decides_the_order_of_every_element() -> None:
    """A vector is no atom: its elements are added in orders of their own, as those of scalars."""
    found = {}
    for seed in (None, *range(6)):
        old, cells, values = vectors_of(4)
        # The same numbers in all elements, which the same order would give the same bits.
        cells[...], values[...] = cells[:, :1].copy(), values[:, :1].copy()
        exact = cells.astype(np.float64)
        for thread in range(THREADS):
            exact[thread % CELLS] += values[thread]
        launch(vector_body(4, returns=False), [old, cells, values], seed=seed)
        assert (np.abs(cells - exact) <= np.abs(values).sum() * 2e-6).all()
        found[seed] = cells
    assert (found[None] == found[None][:, :1]).all()
    assert len({cells.tobytes() for cells in found.values()}) > 3
    assert any((cells != cells[:, :1]).any() for cells in found.values())


def test_vectors_of_threads_that_are_off() -> None:
    old, _, values = vectors_of(4)
    wide = aligned((THREADS, 4), np.float32)
    text = """
    setp.lt.u32 %p1, %r0, 40; shl.b64 %rd4, %rd0, 2; add.s64 %rd5, %rd2, %rd4;
    add.s64 %rd6, %rd3, %rd4; ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd6];
    mov.f32 %f5, %f1; @%p1 atom.global.add.v4.f32 {%f1, _, %f3, %f4}, [%rd5], {%f1, %f2, %f3, %f4};
    @%p1 red.global.add.v2.f32 [%rd5+8], {%f3, %f5};
    """
    launch(text, [old, wide, values])
    want = np.zeros_like(wide)
    # The vector's third element comes back as 0, its old value.
    want[:40] = values[:40]
    want[:40, 3] += values[:40, 0]
    np.testing.assert_array_equal(wide, want)


@pytest.mark.parametrize(
    ("shift", "kinds"), [(-8, {"misaligned", "out-of-bounds"}), (16, {"out-of-bounds"})]
)
def test_a_vector_lies_at_a_multiple_of_its_size_and_inside(shift: int, kinds: set[str]) -> None:
    old, cells, values = vectors_of(4)
    text = vector_body(4, returns=False).replace("[%rd5]", f"[%rd5{shift:+}]")
    with pytest.raises(EmulatorError, match=r"misaligned|outside every tensor"):
        launch(text, [old, cells, values])
    bounds, before = Bounds(), cells.copy()
    launch(text, [old, cells, values], observers=[bounds])
    assert {finding.kind for finding in bounds.findings} == kinds
    np.testing.assert_array_equal(cells[0], before[0])


@pytest.mark.parametrize(
    "name", ["red.shared.add.v4.f32", "red.global.max.v4.f32", "red.global.add.v4.u32"]
)
def test_vectors_of_other_kinds_are_refused(name: str) -> None:
    text = vector_body(4, returns=False).replace("red.global.add.v4.f32", name)
    with pytest.raises(EmulatorError, match="is not supported"):
        launch(text, list(vectors_of(4)))


@pytest.mark.parametrize(
    ("other", "kinds"),
    [
        ("red.global.add.f32 [%rd1], %f1;", set()),
        ("red.global.add.v2.f32 [%rd1], {%f1, %f1};", set()),
        ("ld.global.f32 %f2, [%rd1];", {"race-raw", "race-war"}),
        ("st.global.f32 [%rd1], %f1;", {"race-waw", "race-raw", "race-war"}),
    ],
    ids=["atomic", "vector", "read", "write"],
)
@pytest.mark.parametrize(
    "add",
    ["red.global.add.f32 [%rd1], %f1;", "red.global.add.v4.f32 [%rd1], {%f1, %f1, %f1, %f1};"],
    ids=["scalar", "vector"],
)
def test_only_atomics_may_meet_atomics(add: str, other: str, kinds: set[str]) -> None:
    """Two CTAs, nothing between them: one adds, the other adds, reads or writes."""
    cell, races = aligned((4,), np.float32), Races()
    text = f"""
    mov.f32 %f1, 0f3F800000; setp.eq.u32 %p1, %r61, 0; setp.eq.u32 %p2, %r60, 0;
    @!%p2 bra DONE; @!%p1 bra OTHER;
    {add} bra DONE;
    OTHER: {other}
    DONE: ret;
    """
    run(program(text), [(cell, True)], ctas=2, observers=[races])
    found = {finding.kind for finding in races.findings}
    assert found <= kinds
    assert bool(found) == bool(kinds)
