"""Sharing of memory between strided tensors is decided exactly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsmith.errors import ArgumentError
from flashsmith.runtime.frameworks.base import HOST, Device, TensorView
from flashsmith.runtime.frameworks.numpy import NumpyArrays
from flashsmith.runtime.tensors import (
    byte_range,
    check_output_distinct,
    share_memory,
    view_tensor,
)


def view_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], device: Device = HOST
) -> TensorView:
    return TensorView("t", NumpyArrays(), "float16", shape, strides, address, device, True, None)


def touched_bytes(view: TensorView) -> set[int]:
    touched = set()
    for index in itertools.product(*map(range, view.shape)):
        offset = sum(i * stride for i, stride in zip(index, view.strides, strict=True))
        first = view.address + 2 * offset
        touched |= {first, first + 1}
    return touched


views = st.builds(
    lambda address, dims: view_at(
        1 << 20 | address, tuple(n for n, _ in dims), tuple(s for _, s in dims)
    ),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 9)), min_size=4, max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(views, views)
def test_sharing_agrees_with_listing_every_byte(a: TensorView, b: TensorView) -> None:
    assert share_memory(a, b) is not touched_bytes(a).isdisjoint(touched_bytes(b))


@settings(max_examples=100, deadline=None)
@given(views)
def test_byte_range_is_the_hull_of_the_touched_bytes(view: TensorView) -> None:
    touched = touched_bytes(view)
    assert byte_range(view) == (min(touched), max(touched) + 1)


def overlaps_itself(view: TensorView) -> bool:
    """Whether it touches fewer bytes than its elements have."""
    return len(touched_bytes(view)) < 2 * math.prod(view.shape)


@settings(max_examples=300, deadline=None)
@given(views.filter(overlaps_itself))
def test_an_output_that_overlaps_itself_is_always_refused(view: TensorView) -> None:
    with pytest.raises(ArgumentError, match="t: strides"):
        check_output_distinct(view, ())


@pytest.mark.parametrize(
    "o",
    [
        np.zeros((2, 64, 3, 64), np.float16),
        np.zeros((2, 3, 64, 64), np.float16).transpose(0, 2, 1, 3),
        np.zeros((2, 64, 4, 3, 64), np.float16)[:, :, 3],
        np.zeros((2, 64, 3, 128), np.float16)[..., 64:],
        np.zeros((2, 64, 3, 64), np.float16)[::-1, ::2],
        np.zeros((1, 64, 1, 64), np.float16),
    ],
    ids=["dense", "heads outside", "packed", "half of the columns", "reversed", "single"],
)
def test_views_of_dense_tensors_do_not_overlap_themselves(o: np.ndarray) -> None:
    check_output_distinct(view_tensor("o", o), ())


def test_equal_addresses_on_two_devices_do_not_share() -> None:
    one = view_at(1 << 20, (2, 2, 2, 8), (32, 16, 8, 1), Device("cuda", 0))
    other = view_at(1 << 20, (2, 2, 2, 8), (32, 16, 8, 1), Device("cuda", 1))
    assert not share_memory(one, other)
    assert share_memory(one, one)


def test_deciding_about_a_large_packed_tensor_is_quick() -> None:
    """16 x 16k tokens x 16 heads, q, k, v and o packed; the addresses are unmapped."""
    packed = [
        view_at((1 << 44) + 2 * part * 2048, (16, 16384, 16, 128), (16384 * 8192, 8192, 128, 1))
        for part in range(4)
    ]
    for a, b in itertools.combinations(packed, 2):
        assert not share_memory(a, b)
