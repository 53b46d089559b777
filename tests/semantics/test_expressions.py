"""An expression has one meaning: as numbers, as arrays, as C++ and in its derivative."""

from __future__ import annotations

import ctypes
import math
import pickle
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashsmith.errors import ArgumentError
from flashsmith.semantics import PLAIN, SOFTCAP, Score
from flashsmith.semantics.expression import (
    Expression,
    constant,
    exp,
    maximum,
    minimum,
    symbol,
    tanh,
    where,
)
from flashsmith.semantics.score import SCORE

X, Y = symbol("x"), symbol("y")
SMOOTH = {
    "polynomial": 3 * X * X - X / 2 + Y,
    "quotient": (1 - X) / (2 + Y * Y),
    "softcap": Y * tanh(X / Y),
    "sigmoid": 1 / (1 + exp(-X)),
    "nested": exp(tanh(X * Y)) - tanh(exp(-(X * X))),
    "kinks": maximum(X, Y) + minimum(2 * X, Y - 1),
    "choice": where(X <= Y, X * X, Y * X),
}


def random_expression(draw: random.Random, depth: int) -> Expression:
    """Of x and y, without poles."""
    if depth == 0:
        return draw.choice([X, Y, constant(draw.randint(-3, 3)), constant(draw.uniform(-2, 2))])
    one, other = (random_expression(draw, depth - 1) for _ in range(2))
    return draw.choice(
        [
            lambda: one + other,
            lambda: one - other,
            lambda: one * other,
            lambda: one / (2 + tanh(other)),
            lambda: -one,
            lambda: minimum(one, other),
            lambda: maximum(one, other),
            lambda: where(one >= other, one, X),
            lambda: exp(tanh(one)),
        ]
    )()


@pytest.mark.parametrize("name", SMOOTH)
def test_the_derivative_is_what_differences_say(name: str) -> None:
    value, step = SMOOTH[name], 1e-6
    slope = value.derivative("x")
    for x, y in np.random.default_rng(1).uniform(0.3, 3.0, (50, 2)):
        above, below = (value.evaluate({"x": x + h, "y": y}) for h in (step, -step))
        assert slope.evaluate({"x": x, "y": y}) == pytest.approx(
            (above - below) / (2 * step), rel=1e-6, abs=1e-7
        )


def test_numbers_arrays_and_compiled_code_agree(tmp_path: Path) -> None:
    """C++ as kernels are given it, compiled by the host's compiler."""
    draw = random.Random(7)
    trees = [*SMOOTH.values(), *(random_expression(draw, 4) for _ in range(60))]
    functions = [
        f'extern "C" float f{i}(float x, float y) {{ return {it.cpp({"x": "x", "y": "y"})}; }}'
        for i, it in enumerate(trees)
    ]
    source, library = tmp_path / "trees.cc", tmp_path / "trees.so"
    source.write_text(
        "#include <cmath>\n"
        "static float min(float a, float b) { return a <= b ? a : b; }\n"
        "static float max(float a, float b) { return b <= a ? a : b; }\n" + "\n".join(functions)
    )
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    compiled = ctypes.CDLL(str(library))
    x, y = np.random.default_rng(2).uniform(-2.0, 2.0, (2, 40)).astype(np.float32)
    for i, tree in enumerate(trees):
        arrays = np.broadcast_to(tree.evaluate({"x": x, "y": y}, np), x.shape)
        function = getattr(compiled, f"f{i}")
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float] * 2
        for j in range(x.size):
            number = tree.evaluate({"x": float(x[j]), "y": float(y[j])})
            assert arrays[j] == pytest.approx(number, rel=1e-3, abs=1e-4), str(tree)
            assert function(x[j], y[j]) == pytest.approx(number, rel=1e-3, abs=1e-4), str(tree)


def test_pytorch_computes_the_same() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    x, y = np.random.default_rng(3).uniform(0.3, 3.0, (2, 5, 7))
    for tree in (*SMOOTH.values(), *(it.derivative("x") for it in SMOOTH.values())):
        found: Any = tree.evaluate({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, torch)
        expected = tree.evaluate({"x": x, "y": y}, np)
        assert np.allclose(np.broadcast_to(found, x.shape), expected, rtol=1e-12)


def test_what_is_known_is_simplified() -> None:
    assert X + 0 == X == 1 * X == X / 1 == X - 0
    assert X * 0 == constant(0) == 0 / X
    assert constant(2) * 3 == constant(6)
    assert where(X <= Y, Y, Y) == Y
    assert (X * X + Y).derivative("z") == constant(0)
    assert str(3 * X - tanh(Y)) == "((3 * x) - tanhf(y))"
    assert (X + 0.1).cpp({"x": "s"}) == "(s + 0.1f)"
    assert (X * Y + X).symbols() == ("x", "y")
    assert pickle.loads(pickle.dumps(SMOOTH["nested"])) == SMOOTH["nested"]


def test_mistakes_are_named() -> None:
    with pytest.raises(ArgumentError, match="no value for 'y'; given are x"):
        (X + Y).evaluate({"x": 1})
    with pytest.raises(ArgumentError, match=r"write where\(condition, a, b\)"):
        bool(X <= Y)
    for value in (True, "1", math.nan, math.inf, None):
        with pytest.raises(ArgumentError, match="give a finite int or float"):
            X + value  # type: ignore[operator]
    with pytest.raises(ArgumentError, match="score odd: z is unknown here; name it in numbers"):
        Score("odd", SCORE + symbol("z"))


def test_a_softcap_is_a_value() -> None:
    scores, numbers = np.linspace(-90, 90, 61), {"softcap": 30.0}
    assert np.array_equal(SOFTCAP.apply(scores, numbers, np), 30.0 * np.tanh(scores / 30.0))
    at = {"score": scores, **numbers}
    assert np.allclose(SOFTCAP.slope.evaluate(at, np), 1 - np.tanh(scores / 30.0) ** 2)
    # What a kernel multiplies once, and what it computes of each score.
    assert SOFTCAP.factor.evaluate(numbers) == 30.0
    assert np.array_equal(SOFTCAP.body.evaluate(at, np), np.tanh(scores / 30.0))
    assert PLAIN.is_plain
    assert not SOFTCAP.is_plain
    assert np.array_equal(PLAIN.apply(scores, {}, np), scores)
    assert PLAIN.factor.evaluate({}) == 1.0
    assert (PLAIN.body, PLAIN.slope) == (SCORE, constant(1))
