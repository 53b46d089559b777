"""Which calls of scaled_dot_product_attention the kernels serve, and why not the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsmith.integrations.sdpa_problem import (
    MASK_DTYPES,
    SdpaProblem,
    TensorFacts,
    mask_arguments,
    why_not,
    why_not_mask,
)


def tensor(
    *shape: int, dtype: str = "float16", device: str = "cuda:0", **facts: Any
) -> TensorFacts:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return TensorFacts(shape, tuple(facts.pop("strides", strides)), dtype, device, **facts)


QUERY = tensor(2, 4, 100, 64)
SERVED = SdpaProblem(QUERY, QUERY, QUERY)


def call_of(*shape: int, **facts: Any) -> SdpaProblem:
    """A call whose three tensors are of one shape."""
    return SdpaProblem(*[tensor(*shape, **facts)] * 3)


def with_keys(*shape: int, **arguments: Any) -> SdpaProblem:
    return SERVED._replace(key=tensor(*shape), value=tensor(*shape), **arguments)


@pytest.mark.parametrize(
    "problem",
    [
        SERVED,
        SERVED._replace(is_causal=True),
        SERVED._replace(scale=0.3),
        SERVED._replace(dropout_p=0),
        call_of(4, 100, 64, dtype="bfloat16"),
        call_of(100, 64, device="cpu"),
        call_of(2, 4, 100, 8),
        call_of(2, 4, 100, 256),
        call_of(2, 4, 100, 512),
        call_of(0, 4, 100, 64),
        call_of(2, 4, 1, 64, strides=(256, 64, 3, 1)),
        call_of(2, 4, 100, 64, strides=(0, 0, 64, 1)),
        call_of(2, 4, 100, 64, strides=(25600, 64, 256, 1)),
        with_keys(2, 4, 0, 64),
        with_keys(2, 4, 7, 64),
        with_keys(1, 4, 7, 64),
        with_keys(2, 1, 100, 64),
        with_keys(2, 2, 100, 64, enable_gqa=True),
    ],
    ids=str,
)
def test_served(problem: SdpaProblem) -> None:
    assert why_not(problem) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"has_mask": True}, "attn_mask: a mask tensor"),
        ({"dropout_p": 0.1}, "dropout_p: 0.1"),
        ({"key": QUERY._replace(kind="DTensor")}, "key: a DTensor"),
        ({"query": QUERY._replace(dtype="float32")}, "query: dtype float32"),
        ({"key": QUERY._replace(dtype="bfloat16")}, "key: dtype bfloat16, and query's is float16"),
        ({"value": QUERY._replace(device="cuda:1")}, "value: on cuda:1, and query on cuda:0"),
        (
            dict.fromkeys(("query", "key", "value"), QUERY._replace(device="xpu:0")),
            "query: on xpu:0",
        ),
        (dict.fromkeys(("query", "key", "value"), tensor(1, 2, 4, 100, 64)), "query: shape"),
        ({"key": tensor(4, 100, 64)}, "key: shape"),
        (dict.fromkeys(("query", "key", "value"), tensor(2, 4, 100, 520)), "query: d 520"),
        (dict.fromkeys(("query", "key", "value"), tensor(2, 4, 100, 59)), "query: d 59"),
        (dict.fromkeys(("query", "key", "value"), tensor(2, 4, 100, 0)), "query: d 0"),
        ({"key": tensor(2, 4, 100, 32)}, "key: d 32, and query's is 64"),
        ({"value": tensor(2, 4, 100, 36)}, "value: d 36; the kernels take multiples of 8"),
        ({"value": tensor(2, 4, 100, 520)}, "value: d 520"),
        ({"value": tensor(2, 4, 100, 264)}, "value: d 264, and query's is 64; above 256"),
        ({"value": tensor(2, 4, 99, 64)}, "value: shape"),
        (dict.fromkeys(("key", "value"), tensor(3, 4, 100, 64)), "key: batch 3, and query's is 2"),
        (dict.fromkeys(("key", "value"), tensor(2, 2, 100, 64)), "key: 2 heads, and query has 4"),
        (
            {"enable_gqa": True, **dict.fromkeys(("key", "value"), tensor(2, 3, 100, 64))},
            "key: 3 heads, and query has 4",
        ),
        (dict.fromkeys(("query", "key", "value"), tensor(2, 0, 100, 64)), "query: no heads"),
        ({"scale": 0.0}, "scale: 0.0"),
        ({"scale": -1.0}, "scale: -1.0"),
        ({"scale": math.inf}, "scale: inf"),
        ({"scale": math.nan}, "scale: nan"),
        ({"scale": 1e-40}, "scale: 1e-40"),
        ({"key": QUERY._replace(strides=(25600, 6400, 1, 100))}, "key: stride 100 of the last"),
        ({"value": QUERY._replace(strides=(25608, 6402, 64, 1))}, "value: stride 6402"),
        ({"key": QUERY._replace(aligned=False)}, "key: address not a multiple of 16"),
    ],
    ids=str,
)
def test_not_served(changes: dict[str, Any], reason: str) -> None:
    assert str(why_not(SERVED._replace(**changes))).startswith(reason)


@given(st.integers(1, 40), st.integers(1, 40))
def test_causal_means_what_pytorch_means(length_q: int, length_k: int) -> None:
    causal, (left, right) = mask_arguments(True, length_q, length_k)
    keys = min(length_k, length_q)
    for query in range(length_q):
        last = query + keys - length_q if causal else query + keys - length_q + right
        seen = [key for key in range(keys) if key <= last]
        assert seen == [key for key in range(length_k) if key <= query]
    assert left is None


def test_without_causality_nothing_is_hidden() -> None:
    assert mask_arguments(False, 3, 9) == (False, (None, None))


MASK_SHAPES = [(20, 20), (1, 20), (20, 1), (1, 1, 20, 20), (2, 1, 1, 20), (2, 3, 20, 20), (20,), ()]


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_masks_that_broadcast_are_served(shape: tuple[int, ...], dtype: str) -> None:
    mask = tensor(*shape, dtype=dtype)
    assert why_not_mask(mask, call_of(2, 3, 20, 32), needs_grad=False) is None


@pytest.mark.parametrize(
    ("shape", "changes", "needs_grad", "reason"),
    [
        ((20, 19), {}, False, "attn_mask: shape"),
        ((3, 1, 20, 20), {}, False, "attn_mask: shape"),
        ((1, 1, 1, 20, 20), {}, False, "attn_mask: shape"),
        ((20, 20), {"dtype": "float64"}, False, "attn_mask: dtype float64"),
        ((20, 20), {"kind": "nested tensor"}, False, "attn_mask: a nested tensor"),
        ((20, 20), {"device": "cuda:3"}, False, "attn_mask: on cuda:3"),
        ((20, 20), {}, True, "attn_mask: a mask tensor that requires grad"),
    ],
)
def test_other_masks_are_left_to_pytorch(
    shape: tuple[int, ...], changes: dict[str, str], needs_grad: bool, reason: str
) -> None:
    mask = tensor(*shape, **{"dtype": "bool", **changes})
    found = why_not_mask(mask, call_of(2, 3, 20, 32), needs_grad=needs_grad)
    assert str(found).startswith(reason)


def test_a_mask_with_is_causal_is_pytorchs_error() -> None:
    problem = call_of(2, 3, 20, 32)._replace(is_causal=True)
    found = why_not_mask(tensor(20, 20, dtype="bool"), problem, needs_grad=False)
    assert str(found).startswith("is_causal: True with a mask tensor")
