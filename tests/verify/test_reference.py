"""The references agree with attention written out in plain Python, and with PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashsmith.configs import DType
from flashsmith.verify import reference
from flashsmith.verify.inputs import InputSpec, default_scale, make_inputs
from flashsmith.verify.reference import compute_references, inputs_and_references


def small_inputs(dtype: DType = DType.FP16):
    return make_inputs(InputSpec("random", dtype, 2, 5, 7, 2, 8, 0.3))


def test_float64_reference_is_attention_element_by_element() -> None:
    drawn = small_inputs()
    q, k, v = (array.astype(float) for array in (drawn.q, drawn.k, drawn.v))
    references = compute_references(drawn.q, drawn.k, drawn.v, 0.3)
    for b, i, h in np.ndindex(2, 5, 2):
        scores = [0.3 * sum(q[b, i, h] * k[b, j, h]) for j in range(7)]
        weights = [math.exp(score) for score in scores]
        assert references.lse[b, h, i] == pytest.approx(math.log(sum(weights)), rel=1e-12)
        for c in range(8):
            o = sum(w * v[b, j, h, c] for j, w in enumerate(weights)) / sum(weights)
            assert references.o[b, i, h, c] == pytest.approx(o, rel=1e-10, abs=1e-13)


def test_splitting_rows_into_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = small_inputs()
    whole = compute_references(drawn.q, drawn.k, drawn.v, 0.3)
    monkeypatch.setattr(reference, "_SCORE_BYTES", 2 * 7 * 8)
    blocked = compute_references(drawn.q, drawn.k, drawn.v, 0.3)
    np.testing.assert_allclose(blocked.o, whole.o, rtol=1e-13)
    np.testing.assert_array_equal(blocked.lse, whole.lse)


@pytest.mark.parametrize("dtype", list(DType))
def test_same_precision_errs_as_16_bits_do(dtype: DType) -> None:
    spec = InputSpec("random", dtype, 1, 256, 256, 1, 128, default_scale(128))
    drawn, references = inputs_and_references(spec)
    assert references.same_precision.dtype == drawn.q.dtype
    error = np.abs(references.same_precision.astype(np.float64) - references.o).max()
    half_ulp = {DType.FP16: 2.0**-11, DType.BF16: 2.0**-8}[dtype]
    largest = np.abs(references.o).max()
    assert 0.1 * half_ulp * largest < error < 4 * half_ulp * largest


def test_same_precision_rounds_the_weights_before_the_second_product() -> None:
    """One weight of 1/3 over v = 1, 0, 0: the output shows the weight's own rounding."""
    q = np.zeros((1, 1, 1, 8), np.float16)
    k = np.zeros((1, 3, 1, 8), np.float16)
    v = np.zeros((1, 3, 1, 8), np.float16)
    v[0, :, 0] = np.array([1024, 0, 0])[:, None]
    references = compute_references(q, k, v, 1.0)
    assert references.same_precision[0, 0, 0, 0] == np.float16(np.float32(np.float16(1 / 3)) * 1024)
    assert references.o[0, 0, 0, 0] == pytest.approx(1024 / 3, rel=1e-15)


def test_cached_references_cannot_be_written() -> None:
    drawn, references = inputs_and_references(InputSpec("random", DType.FP16, 1, 4, 4, 1, 8, 0.3))
    for array in (drawn.q, references.o, references.same_precision):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


@pytest.mark.torch
@pytest.mark.parametrize("dtype", list(DType))
def test_pytorch_agrees(dtype: DType) -> None:
    import torch

    drawn = small_inputs(dtype)
    q, k, v = (
        torch.from_numpy(array.astype(np.float64)).transpose(1, 2)
        for array in (drawn.q, drawn.k, drawn.v)
    )
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
    ours = compute_references(drawn.q, drawn.k, drawn.v, 0.3)
    np.testing.assert_allclose(ours.o, theirs.transpose(1, 2).numpy(), rtol=1e-10, atol=1e-13)
