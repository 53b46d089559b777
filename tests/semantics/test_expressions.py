"""An expression has one meaning: as numbers, as arrays, as C++ and in its derivative."""

from __future__ import annotations

import ctypes
import pickle
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashsmith.errors import ArgumentError
from flashsmith.semantics import PLAIN, SOFTCAP, Score
from flashsmith.semantics.derivatives import derivative
from flashsmith.semantics.program import SCORE
from flashsmith.semantics.score import ARGUMENT
from flashsmith.semantics.typed import (
    FLOAT,
    INT,
    Typed,
    apply,
    cast,
    read,
    typed_constant,
    typed_symbol,
    where,
)
from flashsmith.semantics.typed_cuda import CudaPrinter

X, Y = typed_symbol("x", FLOAT), typed_symbol("y", FLOAT)
M, N = typed_symbol("m", INT), typed_symbol("n", INT)
SMOOTH = {
    "polynomial": 3 * X * X - X / 2 + Y,
    "quotient": (1 - X) / (2 + Y * Y),
    "softcap": Y * apply("tanh", X / Y),
    "sigmoid": 1 / (1 + apply("exp", -X)),
    "nested": apply("exp", apply("tanh", X * Y)) - apply("tanh", apply("exp", -(X * X))),
    "kinks": apply("maximum", X, Y) + apply("minimum", 2 * X, Y - 1),
    "choice": where(X <= Y, X * X, Y * X),
}


def random_int(draw: random.Random, depth: int) -> Typed:
    """Of m and n, with the operators of C++."""
    if depth == 0:
        return draw.choice([M, N, typed_constant(draw.randint(-3, 3))])
    one, other = (random_int(draw, depth - 1) for _ in range(2))
    return draw.choice(
        [
            lambda: one + other,
            lambda: one - other,
            lambda: one * 3,
            lambda: -one,
            lambda: apply("minimum", one, other),
            lambda: apply("maximum", one, other),
            lambda: where(one >= other, one, M),
            lambda: where((one < other) & ~one.equals(M), other, one ^ 5),
        ]
    )()


@pytest.mark.parametrize("name", SMOOTH)
def test_the_derivative_is_what_differences_say(name: str) -> None:
    value, step = SMOOTH[name], 1e-6
    slope = derivative(value, X)
    for x, y in np.random.default_rng(1).uniform(0.3, 3.0, (50, 2)):
        above, below = (value.evaluate({"x": x + h, "y": y}) for h in (step, -step))
        assert slope.evaluate({"x": x, "y": y}) == pytest.approx(
            (above - below) / (2 * step), rel=1e-6, abs=1e-7
        )


def test_numbers_arrays_and_compiled_code_agree(tmp_path: Path) -> None:
    """C++ as masks have it, compiled by the host's compiler."""
    draw = random.Random(7)
    trees = [random_int(draw, 5) for _ in range(60)]
    functions = []
    for i, tree in enumerate(trees):
        lines, value = CudaPrinter().statements(tree)
        body = " ".join([*lines, f"return {value};"])
        functions.append(f'extern "C" int f{i}(int m, int n) {{ {body} }}')
    source, library = tmp_path / "trees.cc", tmp_path / "trees.so"
    source.write_text(
        "#include <algorithm>\nusing std::max, std::min;\n" + "\n".join(functions) + "\n"
    )
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    compiled = ctypes.CDLL(str(library))
    m, n = np.random.default_rng(2).integers(-20, 20, (2, 40))
    for i, tree in enumerate(trees):
        arrays = np.broadcast_to(tree.evaluate({"m": m, "n": n}), m.shape)
        for j in range(m.size):
            given = {"m": int(m[j]), "n": int(n[j])}
            assert arrays[j] == tree.evaluate(given, exact=False), str(tree)
            assert arrays[j] == getattr(compiled, f"f{i}")(*given.values()), str(tree)


def test_a_part_that_is_used_twice_is_computed_once() -> None:
    lines, value = CudaPrinter().statements(where(M + N < 3, M + N, -(M + N)))
    assert lines == ["const int x0 = (m + n);"]
    assert value == "((x0 < 3) ? x0 : (-x0))"


def test_pytorch_computes_the_same() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    x, y = np.random.default_rng(3).uniform(0.3, 3.0, (2, 5, 7))
    for tree in (*SMOOTH.values(), *(derivative(it, X) for it in SMOOTH.values())):
        tensors: dict[str, Any] = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
        found = tree.evaluate(tensors, xp=torch)
        expected = tree.evaluate({"x": x, "y": y})
        assert np.allclose(np.broadcast_to(found, x.shape), expected, rtol=1e-12)
        single = {name: it.float() for name, it in tensors.items()}
        found = tree.evaluate(single, xp=torch, exact=False)
        assert not hasattr(found, "dtype") or found.dtype == torch.float32, str(tree)
        assert np.allclose(np.broadcast_to(found, x.shape), expected, rtol=1e-4, atol=1e-5)


def test_arrays_keep_their_types_and_numbers_stay_numbers() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    tree = apply("maximum", apply("minimum", X, 2.0), apply("minimum", Y, 1.0)) + Y * Y
    x = np.linspace(-3, 3, 13, dtype=np.float32)
    expected = np.maximum(np.minimum(x, 2), 0.5) + 0.25
    for library, array in ((np, x), (torch, torch.from_numpy(x))):
        found = tree.evaluate({"x": array, "y": 0.5}, xp=library, exact=False)
        assert found.dtype == array.dtype
        assert np.array_equal(np.asarray(found), expected)
        exact = tree.evaluate({"x": array, "y": 0.5}, xp=library)
        assert str(exact.dtype).endswith("float64")
    assert tree.evaluate({"x": 1.5, "y": 0.5}, exact=False) == 1.75
    table, places = np.array([5, 6, 7], np.float32), np.array([2, 9])
    looked_up = read("table", "float32", M - 1) + cast(N, FLOAT)
    found = looked_up.evaluate({"m": places, "n": 1}, {"table": table}, exact=False)
    assert np.array_equal(found, [7, 8])
    constant = read("table", "float32", M).evaluate({"m": 1}, {"table": table}, exact=False)
    assert constant == 6


def test_what_is_known_is_simplified() -> None:
    assert M + 0 is M * 1 is M - 0 is M
    assert M * 0 is typed_constant(0)
    assert typed_constant(2) * 3 is typed_constant(6)
    assert where(X <= Y, Y, Y) is Y
    assert derivative(X * X + Y, typed_symbol("z", FLOAT)) is typed_constant(0.0)
    assert str(3 * X - apply("tanh", Y)) == "(x * 3.0) - tanh(y)"
    assert (X * Y + X).symbols() == ("x", "y")
    assert pickle.loads(pickle.dumps(SMOOTH["nested"])) is SMOOTH["nested"]


def test_mistakes_are_named() -> None:
    for exact in (True, False):
        with pytest.raises(ArgumentError, match="no value for 'y'; given are x: add one"):
            (X + Y).evaluate({"x": 1}, exact=exact)
    with pytest.raises(ArgumentError, match=r"write where\(condition, a, b\)"):
        bool(X <= Y)
    for value in ("1", None):
        with pytest.raises(ArgumentError, match="give a bool, int or float"):
            X + value  # type: ignore[operator]
    with pytest.raises(ArgumentError, match="kernels do not compute 'floor_divide' in masks"):
        CudaPrinter().statements(M // N)
    with pytest.raises(ArgumentError, match="score odd: its function reads argument, x; it may"):
        Score("odd", ARGUMENT + X)
    with pytest.raises(
        ArgumentError, match=r"score odd: its function reads m, t\[m\]; it may read ARGUMENT"
    ):
        Score("odd", read("t", "float32", M))
    with pytest.raises(ArgumentError, match="score odd: factor 'score' is not the same"):
        Score("odd", ARGUMENT, SCORE)


def test_a_softcap_is_a_value() -> None:
    scores, numbers = np.linspace(-90, 90, 61), {"softcap": 30.0}
    assert np.array_equal(SOFTCAP.apply(scores, numbers, np), 30.0 * np.tanh(scores / 30.0))
    single = SOFTCAP.apply(scores.astype(np.float32), numbers, np)
    assert single.dtype == np.float32
    at = {"score": scores, **numbers}
    assert np.allclose(SOFTCAP.slope.evaluate(at), 1 - np.tanh(scores / 30.0) ** 2)
    # What a kernel multiplies once, and what it computes of each score.
    assert SOFTCAP.factor.evaluate(numbers) == 30.0
    assert np.array_equal(SOFTCAP.body.evaluate(at), np.tanh(scores / 30.0))
    assert SOFTCAP.numbers == ("softcap",)
    assert PLAIN.is_plain
    assert not SOFTCAP.is_plain
    assert PLAIN.apply(scores, {}, np) is scores
    assert (PLAIN.value, PLAIN.body) == (SCORE, SCORE)
    assert (PLAIN.factor, PLAIN.slope) == (typed_constant(1.0), typed_constant(1.0))


def test_the_slope_of_a_score_is_its_derivative() -> None:
    """In the slope, the factor and its inverse cancel; the derivative of the value has both."""
    at = {"score": np.linspace(-90, 90, 61), "softcap": 30.0}
    whole = derivative(SOFTCAP.value, SCORE)
    assert np.allclose(SOFTCAP.slope.evaluate(at), whole.evaluate(at), rtol=1e-12)
