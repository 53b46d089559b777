"""The tolerance rule passes what is right and fails every kind of wrong output, with its place."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from flashsmith.families import DType, FlashForwardKernelConfig
from flashsmith.verify.proof_inputs import InputSpec, default_scale, make_inputs
from flashsmith.verify.reference import compute_references, inputs_and_references
from flashsmith.verify.tolerance import compare, heads_for_enough_outputs

BATCH, SEQ, HEADS, D = 2, 128, 2, 64
CONFIGS = {dtype: FlashForwardKernelConfig(dtype, D, 64, 32, 4) for dtype in DType}


def spec(dtype: DType, kind: str = "random") -> InputSpec:
    return InputSpec(kind, dtype, BATCH, SEQ, SEQ, HEADS, D, default_scale(D), first_tile=32)


class Case:
    """A right answer to break: o in the dtype and an fp32 LSE, with their references."""

    def __init__(self, dtype: DType, kind: str = "random") -> None:
        self.cfg = CONFIGS[dtype]
        self.inputs, self.references = inputs_and_references(spec(dtype, kind))
        self.o = self.references.o.astype(self.inputs.q.dtype)
        self.lse = self.references.lse.astype(np.float32)
        self.row_max = self.references.row_max.astype(np.float32)

    def check(self):
        return compare(self.cfg, self.o, self.lse, self.references, row_max=self.row_max)


@pytest.fixture(params=list(DType), ids=lambda dtype: dtype.name)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_a_right_answer_passes(case: Case) -> None:
    checked = case.check()
    assert checked.ok
    assert checked.mismatches == 0
    assert checked.first_mismatch is None
    assert checked.outputs == BATCH * SEQ * HEADS * D


def test_the_same_precision_answer_passes(case: Case) -> None:
    case.o = case.references.same_precision.copy()
    checked = case.check()
    assert checked.ok
    assert checked.bound == pytest.approx(2 * checked.max_error + 1e-5)


def test_a_wrong_row_fails_and_is_located(case: Case) -> None:
    case.o[1, 70, 1] = case.o[1, 71, 1]
    checked = case.check()
    assert not checked.ok
    where = checked.first_mismatch
    assert (where.batch, where.row, where.head) == (1, 70, 1)
    assert (where.tile, where.warp) == (1, 0)
    assert 1 <= checked.mismatches <= D
    assert checked.mismatch_share == checked.mismatches / checked.outputs


def test_the_first_of_several_mismatches_is_the_one_reported(case: Case) -> None:
    for row in (127, 40, 90):
        case.o[0, row, 0, 5] += 1
    where = case.check().first_mismatch
    assert (where.batch, where.row, where.head, where.column) == (0, 40, 0, 5)
    assert (where.tile, where.warp) == (0, 2)
    assert where.got == pytest.approx(where.expected + 1, abs=0.02)


def test_a_scaled_output_fails(case: Case) -> None:
    case.o = (case.o.astype(np.float32) * 1.01).astype(case.o.dtype)
    checked = case.check()
    assert any("relative L2" in reason for reason in checked.reasons)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_left_unwritten_or_overflown_fails(case: Case, value: float) -> None:
    case.o[1, 127, 1, 63] = value
    checked = case.check()
    assert checked.reasons[0] == "NaN or inf differ in 1 elements"
    where = checked.first_mismatch
    assert (where.batch, where.row, where.head, where.column) == (1, 127, 1, 63)
    assert (where.tile, where.warp) == (1, 3)
    assert checked.max_error == math.inf
    assert checked.mismatches == 1


def test_an_output_wholly_unwritten_fails(case: Case) -> None:
    case.o[:] = math.nan
    case.lse[:] = math.nan
    checked = case.check()
    assert checked.mismatch_share == 1.0
    assert len(checked.reasons) >= 2


def test_a_finite_value_where_the_reference_is_nan_fails(case: Case) -> None:
    o = case.references.o.copy()
    o[0, 3, 0, 0] = math.nan
    references = replace(case.references, o=o)
    assert not compare(case.cfg, case.o, case.lse, references).ok
    case.o[0, 3, 0, 0] = math.nan
    assert compare(case.cfg, case.o, case.lse, references).ok


def test_infinities_of_opposite_sign_differ(case: Case) -> None:
    o = case.references.o.copy()
    o[0, 0, 0, 0] = math.inf
    references = replace(case.references, o=o)
    case.o[0, 0, 0, 0] = -math.inf
    assert not compare(case.cfg, case.o, case.lse, references).ok
    case.o[0, 0, 0, 0] = math.inf
    assert compare(case.cfg, case.o, case.lse, references).ok


def test_swapped_heads_fail(case: Case) -> None:
    case.o = case.o[:, :, ::-1].copy()
    checked = case.check()
    assert checked.mismatch_share > 0.9


def test_swapped_batches_fail(case: Case) -> None:
    case.o = case.o[::-1].copy()
    assert not case.check().ok


def test_a_wrong_scale_fails(case: Case) -> None:
    q, k, v = case.inputs.q, case.inputs.k, case.inputs.v
    wrong = compute_references(q, k, v, default_scale(D) * 1.05)
    case.o = wrong.o.astype(case.o.dtype)
    assert not case.check().ok


def test_a_missing_tile_of_keys_fails(case: Case) -> None:
    q, k, v = case.inputs.q, case.inputs.k, case.inputs.v
    partial = compute_references(q, k[:, 32:], v[:, 32:], default_scale(D))
    case.o = partial.o.astype(case.o.dtype)
    assert not case.check().ok


def test_a_zero_output_fails_whatever_the_inputs(case: Case) -> None:
    case.o[:] = 0
    assert not case.check().ok


@pytest.mark.parametrize("dtype", list(DType))
def test_small_constant_errors_fail_on_constant_inputs(dtype: DType) -> None:
    """There the same-precision error is tiny, and so is the bound."""
    case = Case(dtype, "constant")
    assert case.check().ok
    case.o[0, 5] = (case.o[0, 5].astype(np.float32) * 1.02).astype(case.o.dtype)
    assert not case.check().ok


def test_a_wrong_lse_fails_and_is_located(case: Case) -> None:
    case.lse[1, 0, 17] += 0.01
    checked = case.check()
    assert checked.reasons == ("LSE wrong in 1 rows, by up to 0.01",)
    where = checked.first_mismatch
    assert (where.batch, where.head, where.row, where.column) == (1, 0, 17, None)
    assert where.warp == 1
    assert "LSE" in str(where)


def test_an_lse_in_base_two_fails(case: Case) -> None:
    case.lse /= np.float32(math.log(2))
    assert not case.check().ok


def test_an_unwritten_lse_row_fails(case: Case) -> None:
    case.lse[0, 1, 127] = math.nan
    assert case.check().reasons == (f"LSE wrong in 1 rows, by up to {case.check().lse_error:.3g}",)


@pytest.mark.parametrize(("factor", "ok"), [(0.9, True), (1.1, False)])
def test_the_lse_tolerance_is_absolute_plus_relative(case: Case, factor: float, ok: bool) -> None:
    lse = case.references.lse + 5000.0
    references = replace(case.references, lse=lse)
    got = lse + factor * (2**-13 + 1e-6 * lse)
    assert compare(case.cfg, case.o, got, references).ok is ok


def test_no_statistic_no_verdict_on_it(case: Case) -> None:
    checked = compare(case.cfg, case.o, None, case.references)
    assert checked.ok
    assert checked.lse_error is None
    assert checked.row_max_error is None


@pytest.mark.parametrize("value", [0.01, math.nan, -math.inf])
def test_a_wrong_row_maximum_fails_and_is_located(case: Case, value: float) -> None:
    case.row_max[1, 0, 17] += value
    checked = case.check()
    assert checked.reasons == (
        f"row maximum wrong in 1 rows, by up to {checked.row_max_error:.3g}",
    )
    where = checked.first_mismatch
    assert (where.batch, where.head, where.row, where.column) == (1, 0, 17, None)
    assert "row maximum" in str(where)


def test_a_row_that_saw_nothing_has_an_lse_of_minus_infinity(case: Case) -> None:
    lse = case.references.lse.copy()
    lse[0, 0, 3] = -math.inf
    references = replace(case.references, lse=lse)
    assert not compare(case.cfg, case.o, case.lse, references).ok
    case.lse[0, 0, 3] = -math.inf
    assert compare(case.cfg, case.o, case.lse, references).ok


def test_an_empty_output_is_right(case: Case) -> None:
    empty = replace(
        case.references,
        o=case.references.o[:, :0],
        lse=case.references.lse[:, :, :0],
        same_precision=case.o[:, :0],
    )
    checked = compare(case.cfg, case.o[:, :0], case.lse[:, :, :0], empty)
    assert checked.ok
    assert (checked.outputs, checked.mismatch_share) == (0, 0.0)


class TestPacked:
    """Sequences of 70, 0 and 58 rows, packed; a mismatch names the sequence it is in."""

    LENS = (70, 0, 58)

    def check(self, case: Case, row: int, statistic: bool = False):
        references = replace(
            case.references,
            o=case.references.o[0],
            lse=case.references.lse[0],
            row_max=case.references.row_max[0],
            same_precision=case.references.same_precision[0],
        )
        o, lse = case.o[0], case.lse[0]
        if statistic:
            lse[1, row] += 1
        else:
            o[row, 1, 5] += 1
        return compare(case.cfg, o, lse, references, lens_q=self.LENS)

    @pytest.mark.parametrize(
        ("row", "sequence", "within", "tile", "warp"),
        [(0, 0, 0, 0, 0), (69, 0, 69, 1, 0), (70, 2, 0, 0, 0), (127, 2, 57, 0, 3)],
    )
    @pytest.mark.parametrize("statistic", [False, True])
    def test_a_mismatch_is_in_its_sequence(
        self, case: Case, row: int, sequence: int, within: int, tile: int, warp: int,
        statistic: bool,
    ) -> None:  # fmt: skip
        where = self.check(case, row, statistic).first_mismatch
        assert (where.batch, where.row, where.packed_row) == (sequence, within, row)
        assert (where.tile, where.warp, where.head) == (tile, warp, 1)
        assert where.column == (None if statistic else 5)
        text = f"sequence {sequence}, row {within} (row {row} of the packed tensor), head 1"
        assert str(where).startswith(text)


def test_an_all_but_zero_reference_has_a_floor_under_the_relative_error(case: Case) -> None:
    zero = np.zeros_like(case.references.o)
    references = replace(case.references, o=zero, same_precision=zero.astype(case.o.dtype))
    case.o[:] = 0
    assert compare(case.cfg, case.o, case.lse, references).rel_l2 == 0.0
    case.o[:] = 1e-5
    checked = compare(case.cfg, case.o, case.lse, references)
    assert checked.rel_l2 == pytest.approx(10.0, rel=0.02)


@pytest.mark.parametrize(
    ("batch", "seq", "heads", "d", "expected"),
    [
        (1, 64, 1, 64, 1),
        (1, 63, 1, 64, 2),
        (1, 1, 1, 64, 64),
        (1, 1, 3, 128, 33),
        (2, 128, 4, 128, 4),
        (1, 0, 3, 128, 3),
        (0, 64, 3, 128, 3),
    ],
)
def test_small_problems_are_repeated_over_heads(
    batch: int, seq: int, heads: int, d: int, expected: int
) -> None:
    repeated = heads_for_enough_outputs(batch, seq, heads, d)
    assert repeated == expected
    assert batch * seq * repeated * d >= 4096 or not batch * seq
    assert repeated % heads == 0


def test_outputs_between_the_smallest_numbers_are_as_near_as_they_can_be() -> None:
    case = Case(DType.FP16)
    truth = np.full_like(case.references.o, 5.2e-6)
    rounded = truth.astype(np.float16)
    references = replace(case.references, o=truth, same_precision=rounded)
    checked = compare(case.cfg, rounded, case.lse, references)
    assert checked.rel_l2 > 1e-3
    assert checked.ok
    two_steps_off = (rounded.astype(np.float64) + 2.0**-23).astype(np.float16)
    assert not compare(case.cfg, two_steps_off, case.lse, references).ok


def test_infinities_of_v_count_where_a_row_sees_them() -> None:
    """Row i of six sees keys up to i: in o of it, and of those behind; before it either will do."""
    spec = InputSpec("random", DType.FP16, 1, 6, 6, 1, 8, 1.0)
    drawn = make_inputs(spec)
    v = np.array(drawn.v)
    v[0, 3, 0, 2], v[0, 4, 0, 2], v[0, 3, 0, 5] = math.inf, -math.inf, math.nan
    found = compute_references(drawn.q, drawn.k, v, 1.0, causal=True)
    expected = np.zeros((6, 8))
    expected[3, 2], expected[4:, 2], expected[3:, 5] = math.inf, math.nan, math.nan
    for o in (found.o, found.same_precision):
        o = o[0, :, 0].astype(float)
        np.testing.assert_array_equal(np.where(np.isfinite(o), 0.0, o), expected)
    assert found.tainted is not None
    tainted = np.zeros((6, 8), bool)
    tainted[:3, [2, 5]], tainted[3, 2] = True, True
    np.testing.assert_array_equal(found.tainted[0, :, 0], tainted)

    right = found.same_precision
    assert compare(DType.FP16, right, None, found).ok
    for row, column, value, ok in (
        (0, 2, math.nan, True),
        (0, 2, math.inf, True),
        (0, 3, math.nan, False),
        (3, 2, 0.0, False),
        (3, 2, -math.inf, True),
        (4, 5, 1.0, False),
        (0, 2, 9.0, False),
    ):
        changed = np.array(right)
        changed[0, row, 0, column] = value
        assert compare(DType.FP16, changed, None, found).ok is ok, (row, column, value)


def test_a_weight_that_rounds_to_0_may_make_inf_nan() -> None:
    """0 x inf in 16 bits, where float64 still has a weight: either is right, a number is not."""
    q, k, v = (np.zeros((1, 2, 1, 8), np.float16) for _ in range(3))
    q[..., 0], k[0, 1, 0, 0], v[0, 0, 0, 1] = 40, -1, math.inf
    k[0, :, 0, 0] = -1, 0
    found = compute_references(q, k, v, 1.0)
    assert found.o[0, 0, 0, 1] == math.inf
    assert np.isnan(found.same_precision[0, 0, 0, 1])
    for value, ok in ((math.inf, True), (math.nan, True), (-math.inf, False), (0.0, False)):
        o = found.same_precision.copy()
        o[0, :, 0, 1] = value
        assert compare(DType.FP16, o, None, found).ok is ok


@pytest.mark.parametrize(
    ("scores", "row_max"),
    [((1.0, math.nan), math.nan), ((math.inf, math.nan), math.inf), ((math.inf, 2.0), math.inf)],
)
def test_statistics_of_rows_that_are_nan(scores: tuple[float, float], row_max: float) -> None:
    q, k = np.zeros((1, 1, 1, 8), np.float16), np.zeros((1, 2, 1, 8), np.float16)
    q[..., 0], k[0, :, 0, 0] = 1, scores
    found = compute_references(q, k, np.ones_like(k), 1.0)
    assert np.isnan(found.o).all()
    assert np.isnan(found.lse).all()
    np.testing.assert_array_equal(found.row_max.ravel(), row_max)


def test_rows_whose_scores_are_all_minus_infinity_are_empty() -> None:
    q, k = np.ones((1, 3, 1, 8), np.float16), np.full((1, 2, 1, 8), -math.inf, np.float16)
    v = np.full_like(k, math.nan)
    for sinks, lse in ((None, -math.inf), (np.array([2.0], np.float32), 2.0)):
        found = compute_references(q, k, v, 1.0, sinks=sinks)
        assert not found.o.any()
        assert not found.same_precision.any()
        np.testing.assert_array_equal(found.lse.ravel(), np.full(3, lse))
        assert (found.row_max == -math.inf).all()
