"""The references agree with attention written out in plain Python, and with PyTorch."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from plain_attention import plain_attention, sees

from flashsmith.families import DType
from flashsmith.verify import engine
from flashsmith.verify.attention_semantics import Attention, row_slices
from flashsmith.verify.proof_inputs import Inputs, InputSpec, default_scale, make_inputs
from flashsmith.verify.reference import References, compute_references, inputs_and_references

SCALE = 0.3
WINDOWS = [(None, None), (3, None), (None, 2), (2, 1), (0, 0), (50, 50)]
LENGTHS = [(5, 7), (7, 5), (6, 6), (1, 9), (9, 1), (4, 0), (1, 1)]


def small_inputs(dtype: DType = DType.FP16, **changes: Any) -> Inputs:
    spec = {"seq_q": 5, "seq_k": 7, "heads": 2, "d": 8, "scale": SCALE} | changes
    return make_inputs(InputSpec("random", dtype, 2, **spec))


def assert_plain(drawn: Inputs, references: References, **attention: Any) -> None:
    """Dense: every batch is what the definition says."""
    for b in range(drawn.q.shape[0]):
        o, lse, row_max = plain_attention(
            *(x[b].astype(float) for x in (drawn.q, drawn.k, drawn.v)), SCALE, **attention
        )
        np.testing.assert_allclose(references.o[b], o, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(references.lse[b], lse, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(references.row_max[b], row_max, rtol=1e-12)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_mask_on_every_shape(lengths: tuple[int, int], causal: bool, window: tuple) -> None:
    drawn = small_inputs(seq_q=lengths[0], seq_k=lengths[1])
    attention = {"causal": causal, "window": window}
    assert_plain(
        drawn, compute_references(drawn.q, drawn.k, drawn.v, SCALE, **attention), **attention
    )


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0])
@pytest.mark.parametrize("heads_k", [6, 3, 2, 1])
def test_grouped_heads_softcap_and_sinks(heads_k: int, softcap: float, sinks: bool) -> None:
    drawn = small_inputs(heads=6, heads_k=heads_k, sinks=sinks)
    attention = {"causal": True, "softcap": softcap, "sinks": drawn.sinks}
    assert (drawn.sinks is not None) is sinks
    references = compute_references(drawn.q, drawn.k, drawn.v, SCALE, **attention)
    assert_plain(drawn, references, **attention)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_sees_nothing_is_zero(sinks: bool) -> None:
    drawn = small_inputs(seq_q=6, seq_k=2, sinks=sinks)
    references = compute_references(
        drawn.q, drawn.k, drawn.v, SCALE, causal=True, sinks=drawn.sinks
    )
    assert not references.o[:, :4].any()
    assert not references.same_precision[:, :4].any()
    expected = -math.inf if drawn.sinks is None else drawn.sinks[:, None]
    np.testing.assert_allclose(
        references.lse[:, :, :4], np.broadcast_to(expected, (2, 2, 4)), rtol=1e-15
    )
    assert (references.row_max[:, :, :4] == -math.inf).all()
    assert np.isfinite(references.row_max[:, :, 4:]).all()


LENS_Q, LENS_K = (3, 0, 9, 1, 4), (5, 6, 2, 0, 4)


def test_packed_sequences_are_each_their_own_problem() -> None:
    drawn = small_inputs(heads=4, heads_k=2, sinks=True, lens_q=LENS_Q, lens_k=LENS_K)
    attention = {"window": (2, 1), "softcap": 2.0, "sinks": drawn.sinks}
    found = compute_references(
        drawn.q, drawn.k, drawn.v, SCALE, lens_q=LENS_Q, lens_k=LENS_K, **attention
    )
    assert found.o.shape == drawn.q.shape == (17, 4, 8)
    assert found.lse.shape == found.row_max.shape == (4, 17)
    for rows_q, rows_k in zip(row_slices(LENS_Q), row_slices(LENS_K), strict=True):
        alone = compute_references(
            drawn.q[None, rows_q], drawn.k[None, rows_k], drawn.v[None, rows_k], SCALE, **attention
        )
        np.testing.assert_allclose(found.o[rows_q], alone.o[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(found.lse[:, rows_q], alone.lse[0], rtol=1e-13)
        np.testing.assert_array_equal(found.row_max[:, rows_q], alone.row_max[0])
        np.testing.assert_array_equal(found.same_precision[rows_q], alone.same_precision[0])


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_splitting_rows_into_blocks_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, window: tuple
) -> None:
    drawn = small_inputs(seq_q=9)
    compute = functools.partial(
        compute_references, drawn.q, drawn.k, drawn.v, SCALE, window=window, softcap=3.0
    )
    whole = compute()
    monkeypatch.setattr(engine.NumpyEngine, "score_bytes", 2 * 7 * 8)
    blocked = compute()
    np.testing.assert_allclose(blocked.o, whole.o, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(blocked.lse, whole.lse, rtol=1e-13)
    np.testing.assert_array_equal(blocked.row_max, whole.row_max)


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
    spec = InputSpec("random", DType.FP16, 1, 4, 4, 1, 8, SCALE, sinks=True)
    drawn, references = inputs_and_references(spec)
    for array in (drawn.q, drawn.sinks, references.o, references.row_max):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_cached_references_have_their_mask() -> None:
    spec = InputSpec("random", DType.FP16, 1, 4, 4, 1, 8, SCALE)
    _, full = inputs_and_references(spec)
    _, causal = inputs_and_references(spec, Attention(SCALE, causal=True))
    assert not np.allclose(full.o, causal.o)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("packed", [False, True])
def test_both_engines_agree(monkeypatch: pytest.MonkeyPatch, dtype: DType, packed: bool) -> None:
    """PyTorch computes on the host here: the same code, and the transfers are exercised too."""
    lens = (LENS_Q, LENS_K) if packed else (None, None)
    drawn = small_inputs(dtype, heads=4, heads_k=2, sinks=True, lens_q=lens[0], lens_k=lens[1])
    compute = functools.partial(
        compute_references, drawn.q, drawn.k, drawn.v, SCALE,
        window=(2, 1), softcap=2.0, sinks=drawn.sinks, lens_q=lens[0], lens_k=lens[1],
    )  # fmt: skip
    ours = compute()
    monkeypatch.setattr(engine, "GPU", "cpu")
    theirs = compute(on_gpu=True)
    np.testing.assert_allclose(theirs.o, ours.o, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(theirs.lse, ours.lse, rtol=1e-13)
    np.testing.assert_allclose(theirs.row_max, ours.row_max, rtol=1e-13)
    assert theirs.same_precision.dtype == ours.same_precision.dtype
    np.testing.assert_allclose(
        theirs.same_precision.astype(float), ours.same_precision.astype(float), rtol=0.02
    )


@pytest.mark.torch
def test_the_gpu_engine_needs_a_gpu() -> None:
    import torch

    assert engine.gpu_engine_pays(1 << 30) is torch.cuda.is_available()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pytorch_agrees(dtype: DType, window: tuple) -> None:
    """Grouped heads and every mask, against scaled_dot_product_attention in float64."""
    import torch

    seq_q, seq_k = 9, 13
    drawn = small_inputs(dtype, seq_q=seq_q, seq_k=seq_k, heads=4, heads_k=2)
    q, k, v = (
        torch.from_numpy(array.astype(np.float64)).transpose(1, 2)
        for array in (drawn.q, drawn.k, drawn.v)
    )
    mask = torch.tensor(
        [[sees(i, j, seq_q, seq_k, True, window) for j in range(seq_k)] for i in range(seq_q)]
    )
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True
    )
    ours = compute_references(drawn.q, drawn.k, drawn.v, SCALE, causal=True, window=window)
    np.testing.assert_allclose(ours.o, theirs.transpose(1, 2).numpy(), rtol=1e-10, atol=1e-13)
