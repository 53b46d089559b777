"""Layouts do not matter: any strides of any tensor give the same bits as dense ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from built_kernels import SEMANTICS, marked
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Run, keywords, run_for

from flashsmith.families import Semantics
from flashsmith.runtime import run_forward
from ptxlab.checks import Bounds

LAID_OUT = [Semantics(), *(semantics for semantics in SEMANTICS if semantics.uneven)]


def laid_out(array: np.ndarray, order: tuple[int, ...], gaps: tuple[int, ...]) -> np.ndarray:
    """A copy whose dimensions lie in memory in ``order``, the last innermost, each with room for
    ``gaps`` more rows; columns stay innermost and are followed by room for 8 gaps more."""
    *rows, d = array.shape
    shape = [rows[axis] + gap for axis, gap in zip(order, gaps, strict=False)]
    room = np.full((*shape, d + 8 * gaps[-1]), math.nan, array.dtype)
    view = np.moveaxis(room, range(len(order)), order)
    view = view[tuple(slice(0, n) for n in rows)][..., :d]
    view[...] = array
    return view


def run_with(run: Run, tensors: dict[str, np.ndarray]) -> np.ndarray:
    bounds = Bounds()
    o = run_forward(run.config, **tensors, **keywords(run), observers=[bounds]).o
    assert bounds.findings == []
    return o


@pytest.mark.parametrize("semantics", marked(LAID_OUT), ids=str)
def test_any_strides_give_the_same_bits(semantics: Semantics) -> None:
    run = run_for(semantics)
    expected = run()["o"].tobytes()
    rank = run.inputs.q.ndim - 1
    layouts = st.tuples(
        st.permutations(range(rank)).map(tuple), st.tuples(*[st.integers(0, 3)] * (rank + 1))
    )

    @settings(max_examples=4, deadline=None, derandomize=True, database=None)
    @given(st.tuples(*[layouts] * 4))
    def check(chosen: Any) -> None:
        arrays = {name: getattr(run.inputs, name) for name in "qkv"}
        arrays["o"] = np.full_like(run.inputs.q, math.nan)
        pairs = zip(arrays.items(), chosen, strict=True)
        tensors = {name: laid_out(array, *layout) for (name, array), layout in pairs}
        assert run_with(run, tensors).tobytes() == expected

    check()


def broadcast_heads(array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array[..., :1, :], array.shape)


def broadcast_batch(array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array[:1], array.shape)


def broadcast_rows(array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array[..., :1, :, :], array.shape)


def backwards(array: np.ndarray) -> np.ndarray:
    return np.array(array[..., ::-1, ::-1, :])[..., ::-1, ::-1, :]


@pytest.mark.parametrize("view", [broadcast_heads, broadcast_batch, broadcast_rows, backwards])
@pytest.mark.parametrize("packed", [False, True])
def test_views_of_k_and_v_are_not_copied(
    view: Callable[[np.ndarray], np.ndarray], packed: bool
) -> None:
    """Steps of 0, and backward ones."""
    run = run_for(Semantics("causal", packed=packed, uneven=True))
    tensors = {name: np.array(getattr(run.inputs, name)) for name in "qkv"}
    tensors |= {name: view(tensors[name]) for name in "kv"}
    assert any(step <= 0 for step in tensors["k"].strides)
    dense = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    assert run_with(run, tensors).tobytes() == run_with(run, dense).tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_q_k_and_v_of_one_tensor(packed: bool) -> None:
    """The layouts of a fused projection: q, k, v next to each other, or interleaved."""
    run = run_for(Semantics("none", packed=packed, uneven=True))
    q = run.inputs.q
    rows, (heads, d) = q.shape[:-2], q.shape[-2:]
    rng = np.random.default_rng(3)
    for shape, axis in (((*rows, 3, heads, d), -3), ((*rows, heads, 3, d), -2)):
        together = rng.standard_normal(shape).astype(q.dtype)
        views = dict(zip("qkv", np.moveaxis(together, axis, 0), strict=True))
        if packed:
            run = Run(run.config, run.semantics, run.inputs, run.lens_q, run.lens_q)
        dense = {name: np.ascontiguousarray(view) for name, view in views.items()}
        assert run_with(run, views).tobytes() == run_with(run, dense).tobytes()


def test_the_layouts_differ() -> None:
    array = np.arange(2 * 3 * 4 * 8, dtype=np.float16).reshape(2, 3, 4, 8)
    strides = set()
    for order, gaps in product([(0, 1, 2), (2, 0, 1), (1, 2, 0)], [(0, 0, 0, 0), (1, 2, 3, 1)]):
        view = laid_out(array, order, gaps)
        np.testing.assert_array_equal(view, array)
        strides.add(view.strides)
    assert len(strides) == 6
