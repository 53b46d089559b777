"""The inputs are reproducible and have the property their kind is named after."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import DType
from flashsmith.verify.proof_inputs import (
    FAR_SCORE,
    INPUT_KINDS,
    LARGE_SCORE,
    TILE_GAP,
    TILE_KINDS,
    Inputs,
    InputSpec,
    default_scale,
    make_inputs,
)
from flashsmith.verify.reference import inputs_and_references

D, FIRST = 128, 32


def spec(
    kind: str, dtype: DType = DType.FP16, seed: int = 0, scale: float | None = None
) -> InputSpec:
    return InputSpec(
        kind, dtype, 2, 128, 96, 3, D, default_scale(D) if scale is None else scale, seed, FIRST
    )


def scaled_scores(inputs: Inputs, scale: float) -> np.ndarray:
    """(batch, head, query, key)."""
    q, k = (array.astype(np.float64).transpose(0, 2, 1, 3) for array in (inputs.q, inputs.k))
    return scale * (q @ k.swapaxes(-1, -2))


# Tensors that hold NaN or inf.
INFINITE = {"nonfinite": "qv", "lost_keys": "k"}


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_every_kind_is_reproducible_and_shaped(kind: str, dtype: DType) -> None:
    first, again = make_inputs(spec(kind, dtype)), make_inputs(spec(kind, dtype))
    other = make_inputs(spec(kind, dtype, seed=1))
    for name in ("q", "k", "v"):
        array = getattr(first, name)
        assert array.dtype.name == dtype.numpy_name
        assert array.shape == (2, 128 if name == "q" else 96, 3, D)
        assert np.isfinite(array.astype(np.float32)).all() == (name not in INFINITE.get(kind, ""))
        assert array.tobytes() == getattr(again, name).tobytes()
    assert first.v.tobytes() != other.v.tobytes()


def test_what_is_not_finite_lies_amid_nan_with_strides_of_its_own() -> None:
    inputs = make_inputs(spec("nonfinite"))
    for array in (inputs.q, inputs.k, inputs.v):
        assert array.base is not None
        assert np.isnan(array.base[..., array.shape[-1] :]).all()
        assert np.isnan(array.base[:, array.shape[1] :]).all()
    for axis in range(3):
        assert len({array.strides[axis] for array in (inputs.q, inputs.k, inputs.v)}) == 3


def test_lost_keys_have_scores_of_minus_infinity_where_blocks_are_visited_first() -> None:
    scores = scaled_scores(make_inputs(spec("lost_keys")), 1.0)
    lost = scores == -np.inf
    assert not np.isnan(scores).any()
    assert (lost == lost[:, :1, :1]).all()
    assert lost[0, 0, 0, -1]
    assert lost[0, 0, 0].any()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("scale", [default_scale(D), 0.01, 2.0])
def test_far_scores_lie_far_apart_and_below_the_limit(scale: float, dtype: DType) -> None:
    scores = scaled_scores(make_inputs(spec("far_scores", dtype, scale=scale)), scale)
    assert FAR_SCORE / 5 < scores.max() <= FAR_SCORE < 2**14
    best, second = np.sort(scores, axis=-1)[..., -1], np.sort(scores, axis=-1)[..., -2]
    assert ((best == second) | (best - second > 30)).all()


@pytest.mark.parametrize("dtype", list(DType))
def test_huge_values_have_scores_that_are_not(dtype: DType) -> None:
    inputs = make_inputs(spec("huge", dtype))
    assert np.abs(inputs.q.astype(np.float64)).max() > 2e4
    assert np.abs(inputs.v.astype(np.float64)).max() > 2e4
    assert np.abs(scaled_scores(inputs, default_scale(D))).max() < 10


@pytest.mark.parametrize("scale", [default_scale(D), 0.5])
@pytest.mark.parametrize("dtype", list(DType))
def test_large_scores_reach_both_ends_and_stay_within_1000(dtype: DType, scale: float) -> None:
    scores = scaled_scores(make_inputs(spec("large_scores", dtype, scale=scale)), scale)
    assert np.abs(scores).max() <= 1000
    assert scores.max() > 0.98 * LARGE_SCORE
    assert scores.min() < -0.98 * LARGE_SCORE


def test_constant_inputs_differ_between_heads() -> None:
    inputs = make_inputs(spec("constant"))
    for array in (inputs.q, inputs.k, inputs.v):
        assert (array == array[:, :1, :, :1]).all()
    per_head = inputs.v[:, 0, :, 0].ravel()
    assert len(set(per_head.tolist())) > 1


def test_one_hot_rows_see_one_key_each() -> None:
    inputs, references = inputs_and_references(spec("one_hot"))
    scores = scaled_scores(inputs, default_scale(D))
    chosen = scores.argmax(axis=-1)
    runner_up = np.sort(scores, axis=-1)[..., -2]
    assert (scores.max(axis=-1) - runner_up).min() > 20
    assert set(chosen[0, 0].tolist()) == set(range(96))
    expected = inputs.v[1, chosen[1, 2], 2].astype(np.float64)
    np.testing.assert_allclose(references.o[1, :, 2], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("kind", "sign"), [("low_first_tile", -1), ("high_first_tile", 1)])
def test_the_first_tile_stands_200_apart(kind: str, sign: int, dtype: DType) -> None:
    scores = scaled_scores(make_inputs(spec(kind, dtype)), default_scale(D))
    gap = scores[..., :FIRST].mean() - scores[..., FIRST:].mean()
    assert gap == pytest.approx(sign * TILE_GAP, rel=0.02)
    apart = sign * (scores[..., :FIRST].mean(axis=-1) - scores[..., FIRST:].mean(axis=-1))
    assert apart.min() > 0.9 * TILE_GAP


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("tile", "octaves"), [(32, 1.0), (64, 2.0), (80, 2.32), (128, 3.0)])
def test_growing_maxima_grow_from_every_tile_to_the_one_before(
    tile: int, octaves: float, dtype: DType
) -> None:
    """By 1.5 to 2.2 octaves where tiles have about 64 keys; the last tile may be short."""
    growing = replace(
        spec("growing_maxima", dtype, scale=0.3), seq_k=12 * tile - 5, first_tile=tile
    )
    scores = scaled_scores(make_inputs(growing), 0.3) / np.log(2.0)
    keys = np.array_split(scores, range(tile, growing.seq_k, tile), axis=-1)
    maxima = np.stack([of_tile.max(axis=-1) for of_tile in keys])
    growth = maxima[:-1] - maxima[1:]
    assert growth.mean() == pytest.approx(0.85 * octaves, rel=0.03)
    assert 0.6 * octaves - 0.5 < growth.min() < growth.max() < octaves + 0.4
    # Nearly all keys of a tile weigh as much as its first.
    assert all(of_tile.std(axis=-1).max() < 0.3 for of_tile in keys)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="inputs='gaussian': allowed are random, large_scores"):
        make_inputs(spec("gaussian"))


@pytest.mark.parametrize("first_tile", [0, 96, 128])
def test_a_first_tile_that_leaves_no_later_one_is_refused(first_tile: int) -> None:
    narrow = InputSpec("low_first_tile", DType.FP16, 1, 64, 96, 1, D, 0.1, first_tile=first_tile)
    with pytest.raises(ArgumentError, match="at least two key tiles"):
        make_inputs(narrow)


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_grouped_heads_have_the_property_too(kind: str) -> None:
    grouped = replace(spec(kind), heads=6, heads_k=2)
    inputs = make_inputs(grouped)
    assert (inputs.q.shape[2], inputs.k.shape[2], inputs.v.shape[2]) == (6, 2, 2)
    expanded = Inputs(inputs.q, np.repeat(inputs.k, 3, axis=2), inputs.v)
    scores = scaled_scores(expanded, default_scale(D))
    if kind == "large_scores":
        assert scores.max() > 0.98 * LARGE_SCORE
        assert scores.min() < -0.98 * LARGE_SCORE
    if kind == "one_hot":
        assert (scores.max(axis=-1) - np.sort(scores, axis=-1)[..., -2]).min() > 20


def test_packed_sequences_are_drawn_like_batches_of_one() -> None:
    lens_q, lens_k = (128, 0, 40), (96, 5, 0)
    packed = replace(spec("large_scores"), batch=1, lens_q=lens_q, lens_k=lens_k)
    inputs = make_inputs(packed)
    assert inputs.q.shape == (168, 3, D)
    assert inputs.k.shape == inputs.v.shape == (101, 3, D)
    first = make_inputs(replace(spec("large_scores"), batch=1))
    assert inputs.q[:128].tobytes() == first.q.tobytes()
    assert inputs.k[:96].tobytes() == first.k.tobytes()
    assert np.isfinite(inputs.k.astype(np.float32)).all()


def test_tile_kinds_need_one_packed_sequence_of_two_tiles() -> None:
    packed = replace(spec("low_first_tile"), lens_q=(9, 9), lens_k=(FIRST, FIRST - 1))
    with pytest.raises(ArgumentError, match=f"{FIRST} of {FIRST} keys"):
        make_inputs(packed)
    make_inputs(replace(packed, lens_k=(FIRST, FIRST + 1)))


@pytest.mark.parametrize("kind", sorted(set(INPUT_KINDS) - set(TILE_KINDS)))
@pytest.mark.parametrize("lengths", [(0, 7), (7, 0), (0, 0)])
def test_empty_problems_have_empty_inputs(kind: str, lengths: tuple[int, int]) -> None:
    inputs = make_inputs(InputSpec(kind, DType.FP16, 2, *lengths, 3, 16, 0.25))
    assert (inputs.q.shape[1], inputs.k.shape[1]) == lengths


def test_sinks_leave_the_other_inputs_as_they_are() -> None:
    plain, with_sinks = spec("random"), replace(spec("random"), sinks=True)
    assert make_inputs(plain).sinks is None
    drawn = make_inputs(with_sinks)
    assert drawn.sinks is not None
    assert (drawn.sinks.shape, drawn.sinks.dtype) == ((3,), np.float32)
    assert len(set(drawn.sinks.tolist())) == 3
    assert drawn.v.tobytes() == make_inputs(plain).v.tobytes()
