"""merge_attention(): parts in their order, sinks once, one rounding; and the kernels' proofs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashsmith
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, parse_kernel_name_into_config
from flashsmith.verify import prove
from flashsmith.verify.merge_reference import merged

SHAPE, ROWS = (2, 5, 3, 40), (2, 3, 5)


def parts(count: int, dtype: Any = np.float32, packed: bool = False) -> tuple[list, list]:
    rng = np.random.default_rng(count)
    outs = [rng.standard_normal(SHAPE).astype(dtype) for _ in range(count)]
    lses = [rng.normal(3, 2, ROWS).astype(np.float32) for _ in range(count)]
    if not packed:
        return outs, lses
    rows = [lse.transpose(1, 0, 2).reshape(3, 10).copy() for lse in lses]
    return [out.reshape(10, 3, 40) for out in outs], rows


@pytest.mark.parametrize("inputs", ["random", "nonfinite"])
@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ("(FP16, 64, 4): merge", "b2 s5:3 h3 d64 fp16 merge"),
        ("(FP16, 64, 4): merge", "b2 s5:8 h3 d40 fp16 merge"),
        ("(BF16, 64, 4): merge", "b1 s9:1 h4 d64 bf16 merge"),
        ("(FP16, 64, 4): merge", "b2 s5:2 h3 d64 fp16 merge+packed"),
    ],
)
def test_a_kernel_is_proven(form: str, problem: str, inputs: str) -> None:
    config = parse_kernel_name_into_config(form)
    for options in ({}, {"dtype": "float32"}):
        verdict = prove(config, Problem.parse(problem), options=options, inputs=inputs, checks=True)
        assert verdict.ok, verdict


@pytest.mark.parametrize("count", [1, 2, 8, 9, 16])
def test_any_number_of_parts(count: int) -> None:
    outs, lses = parts(count)
    o, lse = flashsmith.merge_attention(outs, lses)
    exact, exact_lse = merged(outs, lses, None, np.float64)
    assert o.dtype == np.float32
    assert np.abs(o - exact).max() < 1e-6
    assert np.abs(lse - exact_lse).max() < 1e-5


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float16, "float16"),
        (np.dtype("float16"), "float16"),
        ("fp16", "float16"),
        (flashsmith.DType.FP16, "float16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (np.float32, "float32"),
    ],
    ids=str,
)
def test_the_outputs_dtype_in_any_words(dtype: Any, name: str) -> None:
    outs, lses = parts(2)
    for given in (dtype, name, dtype):
        o, _ = flashsmith.merge_attention(outs, lses, dtype=given)
        assert o.dtype == np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.torch
def test_the_outputs_dtype_in_pytorchs_words() -> None:
    import torch

    outs, lses = ([torch.from_numpy(one) for one in some] for some in parts(2))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, None):
        o, _ = flashsmith.merge_attention(outs, lses, dtype=dtype)
        assert o.dtype == (dtype or torch.float32)


@pytest.mark.parametrize("dtype", [np.float64, "float64", 3, object(), np.zeros(1)])
def test_another_dtype_of_the_output_is_refused(dtype: Any) -> None:
    outs, lses = parts(2)
    with pytest.raises(ArgumentError, match=r"^dtype=.*: allowed are .*float32"):
        flashsmith.merge_attention(outs, lses, dtype=dtype)


@pytest.mark.parametrize("count", [2, 9])
def test_parts_of_16_bits_are_merged_in_fp32(count: int) -> None:
    outs, lses = parts(count, np.float16)
    exact, _ = merged(outs, lses, None, np.float64)
    o, _ = flashsmith.merge_attention(outs, lses, dtype="float32")
    assert np.abs(o - exact).max() < 1e-6
    rounded, _ = flashsmith.merge_attention(outs, lses)
    assert np.array_equal(rounded, o.astype(np.float16))
    short, _ = flashsmith.merge_attention(*parts(count), dtype="bfloat16")
    assert short.dtype == ml_dtypes.bfloat16


def test_the_bits_are_the_orders() -> None:
    outs, lses = parts(3)
    o, lse = flashsmith.merge_attention(outs, lses)
    again, again_lse = flashsmith.merge_attention(tuple(outs), tuple(lses))
    assert np.array_equal(o, again)
    assert np.array_equal(lse, again_lse)
    of_one, lse_of_one = flashsmith.merge_attention(outs[:1], lses[:1])
    assert np.array_equal(of_one, outs[0])
    assert np.array_equal(lse_of_one, lses[0])


@pytest.mark.parametrize("count", [2, 9])
def test_sinks_count_once(count: int) -> None:
    outs, lses = parts(count)
    sinks = np.array([2.5, -np.inf, np.inf], np.float32)
    o, lse = flashsmith.merge_attention(outs, lses, sinks)
    plain, plain_lse = flashsmith.merge_attention(outs, lses)
    exact, exact_lse = merged(outs, lses, sinks, np.float64)
    assert np.abs(o - exact).max() < 1e-6
    assert np.abs(lse[:, 0] - exact_lse[:, 0]).max() < 1e-5
    assert np.array_equal(o[:, :, 1], plain[:, :, 1])
    assert np.array_equal(lse[:, 1], plain_lse[:, 1])
    assert not o[:, :, 2].any()
    assert (lse[:, 2] == np.inf).all()


@pytest.mark.parametrize("count", [1, 3, 9])
def test_rows_without_a_key(count: int) -> None:
    outs, lses = parts(count)
    for out, lse in zip(outs, lses, strict=True):
        lse[0, 1, 2] = lse[1, 2, 3] = -np.inf
        out[0, 2, 1] = np.nan  # of no key: whatever stands there
    sinks = np.array([0.0, -np.inf, 1.5], np.float32)
    for sink, of_second in ((None, -np.inf), (sinks, 1.5)):
        o, lse = flashsmith.merge_attention(outs, lses, sink)
        assert not o[0, 2, 1].any()
        assert not o[1, 3, 2].any()
        assert lse[0, 1, 2] == -np.inf
        assert lse[1, 2, 3] == of_second
        assert np.isfinite(o).all()


def test_nan_is_nan_as_in_one_kernel() -> None:
    for first in (0, 1):
        for value in (np.nan, np.inf):
            outs, lses = parts(2)
            lses[first][0, 0, 0] = value
            o, lse = flashsmith.merge_attention(outs, lses)
            assert np.isnan(lse[0, 0, 0])
            assert np.isnan(o[0, 0, 0]).all()
            assert np.isnan(o).sum() == SHAPE[-1]
    outs, lses = parts(2)
    outs[1][0, 0, 0, 7] = np.nan
    sinks = np.array([1.0, np.nan, 1.0], np.float32)
    o, lse = flashsmith.merge_attention(outs, lses, sinks)
    assert np.isnan(o[0, 0, 0, 7])
    assert np.isnan(o[:, :, 1]).all()
    assert np.isnan(lse[:, 1]).all()
    assert np.isfinite(lse[:, 0]).all()


def test_packed_rows_and_other_layouts() -> None:
    o, lse = flashsmith.merge_attention(*parts(2))
    packed, packed_lse = flashsmith.merge_attention(*parts(2, packed=True))
    assert np.array_equal(packed.reshape(SHAPE), o)
    assert np.array_equal(packed_lse.reshape(3, 2, 5).transpose(1, 0, 2), lse)
    outs, lses = parts(2)
    strided = [np.stack([out, out], 2)[:, :, 1] for out in outs]
    assert not strided[0].flags.c_contiguous
    assert np.array_equal(flashsmith.merge_attention(strided, lses)[0], o)


def test_without_rows() -> None:
    o, lse = flashsmith.merge_attention(
        [np.zeros((2, 0, 3, 40), np.float32)], [np.zeros((2, 3, 0), np.float32)]
    )
    assert (o.shape, lse.shape) == ((2, 0, 3, 40), (2, 3, 0))


@pytest.mark.torch
def test_tensors_of_pytorch() -> None:
    import torch

    outs, lses = parts(3)
    given = [[torch.from_numpy(x) for x in of] for of in (outs, lses)]
    o, lse = flashsmith.merge_attention(*given, dtype="bfloat16")
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    expected, _ = flashsmith.merge_attention(outs, lses, dtype="bfloat16")
    assert np.array_equal(o.float().numpy(), expected.astype(np.float32))
    given[0][0].requires_grad_()
    with pytest.raises(ArgumentError, match=r"^outs\[0\]: requires grad"):
        flashsmith.merge_attention(*given)


OUTS, LSES = parts(2)
WRONG: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("outs: got ndarray", OUTS[0], LSES, {}),
    ("lses: 1 for 2 outs", OUTS, LSES[:1], {}),
    ("lses: 0 for 0 outs", [], [], {}),
    (r"outs\[0\]: dtype int32", [OUTS[0].astype(np.int32)], LSES[:1], {}),
    (r"outs\[1\]: dtype float16", [OUTS[0], OUTS[1].astype(np.float16)], LSES, {}),
    (r"outs\[1\]: shape \(2, 4, 3, 40\)", [OUTS[0], OUTS[1][:, :4]], LSES, {}),
    (r"lses\[1\]: shape", OUTS, [LSES[0], LSES[1][:1]], {}),
    (r"outs\[0\]: rank 2", [OUTS[0][0, 0]], LSES[:1], {}),
    (r"outs\[0\]: shape .*multiple of 8", [OUTS[0][..., :39]], LSES[:1], {}),
    ("dtype='float64': allowed are float32", OUTS, LSES, {"dtype": "float64"}),
    (
        "dtype='bfloat16': outs are float16",
        [OUTS[0].astype(np.float16)],
        LSES[:1],
        {"dtype": "bfloat16"},
    ),
    ("sinks: shape", OUTS, LSES, {"sinks": np.zeros(2, np.float32)}),
    ("config: got str", OUTS, LSES, {"config": "(FP16, 64, 4): merge"}),
]


@pytest.mark.parametrize(("message", "outs", "lses", "keywords"), WRONG)
def test_what_is_refused(message: str, outs: Any, lses: Any, keywords: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=message):
        flashsmith.merge_attention(outs, lses, **keywords)
