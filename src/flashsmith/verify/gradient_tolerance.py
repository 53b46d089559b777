"""The tolerance rule for gradients, which says when dq, dk, dv and dsinks are correct."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from flashsmith.families import DType
from flashsmith.verify.tolerance import (
    MAX_ERROR_FACTOR,
    MAX_ERROR_SLACK,
    RELATIVE_L2_BOUND,
    Comparison,
    ExpectedOutputs,
    OutputVerdict,
    comparison_of,
    expected_outputs,
)

# The unit roundoff: half of the distance between neighbouring numbers from 1 to 2. Rounding o or do
# to the dtype causes at most this relative error in a product.
UNIT_ROUNDOFF = {DType.FP16: 2.0**-11, DType.BF16: 2.0**-8}


@dataclass(frozen=True)
class ExpectedGradients(ExpectedOutputs):
    """The expected gradients by name.

    ``exact`` is NaN where no kernel can return a finite number.
    ``tainted``: elements that a kernel may return as NaN or inf although ``exact`` is finite.
    ``idle``: elements that must be 0, because no row or key contributes to them.
    ``sinks_size``: for each head, the sum over all rows of exp(sink - lse) sum |do o|.
    ``recompute`` computes the result of ``further``.
    """

    tainted: Mapping[str, np.ndarray] = field(default_factory=dict)
    idle: Mapping[str, np.ndarray] = field(default_factory=dict)
    sinks_size: np.ndarray = field(default_factory=lambda: np.zeros(0))
    recompute: Callable[[], ExpectedGradients] | None = None

    @cached_property
    def further(self) -> ExpectedGradients:
        """The same gradients, except that ``rounded`` also takes into account a summation order
        that is slow to compute: each element has the value from the order with the largest error.
        Without ``recompute``, this is the object itself."""
        return self if self.recompute is None else self.recompute()

    @classmethod
    def zeros(cls, inputs: Mapping[str, np.ndarray], dtype: np.dtype) -> ExpectedGradients:
        """The gradients of a problem without sequences, all zero; with dsinks if there are
        sinks."""
        shapes = {f"d{name}": inputs[name].shape for name in ("q", "k", "v")}
        exact: dict[str, np.ndarray] = {name: np.zeros(shape) for name, shape in shapes.items()}
        rounded = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
        heads = inputs["q"].shape[-2]
        if "sinks" in inputs:
            exact["dsinks"], rounded["dsinks"] = np.zeros(heads), np.zeros(heads, np.float32)
        return cls(
            exact,
            rounded,
            {name: np.zeros(shape, bool) for name, shape in shapes.items()},
            {name: np.ones(shape, bool) for name, shape in shapes.items()},
            np.zeros(heads),
        )

    def only(self, names: Collection[str]) -> ExpectedGradients:
        kept = super().only(names)
        return ExpectedGradients(
            *(kept.exact, kept.rounded, self.tainted, self.idle, self.sinks_size),
            None if self.recompute is None else partial(_only_further, self, names),
        )


def _only_further(expected: ExpectedGradients, names: Collection[str]) -> ExpectedGradients:
    return expected.further.only(names)


def compare_gradients(
    dtype: DType, outputs: Mapping[str, np.ndarray], expected: ExpectedGradients
) -> Comparison:
    """Checks all expected gradients.

    The rule for dq, dk and dv: the largest error is at most twice the rounded reference's plus 1e-5
    max(1, largest reference). In addition, the relative L2 error is at most 1e-3 (fp16) or 5e-3
    (bf16), or the norm of the error is at most twice the norm of the rounded reference's error plus
    1e-5 sqrt(elements). The second bound, on the norm, is for problems in which every row sees only
    one key, so that dq and dk are 0.

    Elements to which no row or key contributes must be 0. NaN and inf are required where no kernel
    can avoid them. They are allowed where the rounded reference has them, and in sequences that
    contain NaN or inf themselves.

    The error of dsinks is at most u times the sum over all rows of exp(sink - lse) sum |do o|, plus
    1e-5 max(1, |dsinks|), where u is 2^-11 (fp16) or 2^-8 (bf16). The last term allows for fp32
    sums of dlse, which is not rounded to u. If the check fails, it is repeated with
    ``expected.further``.

    The returned figures belong to the gradient with the largest error relative to its bound.

    Raises ArgumentError if a gradient is missing or has the wrong shape.
    """
    found = _comparison(dtype, outputs, expected)
    return found if found.ok else _comparison(dtype, outputs, expected.further)


def _comparison(
    dtype: DType, outputs: Mapping[str, np.ndarray], expected: ExpectedGradients
) -> Comparison:
    checked: dict[str, OutputVerdict] = {}
    for name, got in expected_outputs(outputs, expected):
        check = _check_sinks if name == "dsinks" else _check_gradient
        with np.errstate(invalid="ignore", over="ignore"):
            checked[name] = check(dtype, name, got.astype(np.float64), expected)
    return comparison_of(dtype, checked, outputs, expected)


def _check_gradient(
    dtype: DType, name: str, got: np.ndarray, expected: ExpectedGradients
) -> OutputVerdict:
    exact, rounded = expected.exact[name], expected.rounded[name].astype(np.float64)
    lost, may_be_lost = np.isnan(exact), expected.tainted[name] | ~np.isfinite(rounded)
    misplaced = np.where(np.isfinite(got), lost, ~(lost | may_be_lost))
    # Elements at which the rounded reference overflows are not checked, because another summation
    # order may not overflow at them.
    checked = np.isfinite(got) & ~lost & np.isfinite(rounded)
    error = np.where(checked, np.abs(got - exact), 0.0)
    honest = np.where(np.isfinite(rounded) & ~lost, np.abs(rounded - exact), 0.0)
    size = np.where(np.isfinite(exact), np.abs(exact), 0.0)
    bound = MAX_ERROR_FACTOR * _most(honest) + MAX_ERROR_SLACK * max(1.0, _most(size))
    not_zero = expected.idle[name] & (got != 0) & ~expected.tainted[name]
    max_error, norm = _most(error), float(np.linalg.norm(error))
    rel_l2 = norm / max(float(np.linalg.norm(size)), math.ulp(0.0))
    rel_l2 = rel_l2 if norm else 0.0
    honest_norm = MAX_ERROR_FACTOR * float(np.linalg.norm(honest))
    honest_norm += MAX_ERROR_SLACK * math.sqrt(exact.size)

    reasons = []
    if misplaced.any():
        reasons.append(f"NaN or inf differ in {int(misplaced.sum())} elements")
        max_error = rel_l2 = math.inf
    if max_error > bound:
        reasons.append(f"largest error {max_error:.3g} is above {bound:.3g}")
    if rel_l2 > RELATIVE_L2_BOUND[dtype] and (norm > honest_norm or misplaced.any()):
        reasons.append(f"relative L2 error {rel_l2:.3g} is above {RELATIVE_L2_BOUND[dtype]:.3g}")
    if not_zero.any():
        reasons.append(f"not 0 in {int(not_zero.sum())} elements that nothing contributes to")
    wrong = (error > bound) | misplaced | not_zero
    place = wrong if wrong.any() else error
    return OutputVerdict(tuple(reasons), place, int(wrong.sum()), max_error, bound, rel_l2)


def _check_sinks(
    dtype: DType, name: str, got: np.ndarray, expected: ExpectedGradients
) -> OutputVerdict:
    exact, rounded = expected.exact[name], expected.rounded[name]
    finite = np.isfinite(exact)
    slack = MAX_ERROR_SLACK * np.maximum(1.0, np.where(finite, np.abs(exact), 0.0))
    bounds = UNIT_ROUNDOFF[dtype] * expected.sinks_size + slack
    # Only the positions of non-finite elements are checked, not whether a kernel returns NaN or
    # inf.
    misplaced = np.where(np.isfinite(got), ~finite, finite & np.isfinite(rounded))
    error = np.where(finite & np.isfinite(got), np.abs(got - exact), 0.0)
    wrong = misplaced | (error > np.where(finite, bounds, math.inf))
    worst = int(np.argmax(np.where(finite, error / np.where(finite, bounds, 1.0), 0.0)))
    reasons = []
    if misplaced.any():
        reasons.append(f"NaN or inf differ in {int(misplaced.sum())} heads")
    if (wrong & ~misplaced).any():
        reasons.append(f"error {error[worst]:.3g} is above {bounds[worst]:.3g} in head {worst}")
    norm = float(np.linalg.norm(np.where(finite, exact, 0.0)))
    rel_l2 = float(np.linalg.norm(error)) / norm if norm else 0.0
    bound = float(bounds[worst]) if finite[worst] else MAX_ERROR_SLACK
    return OutputVerdict(
        tuple(reasons), wrong, int(wrong.sum()), float(error[worst]), bound, rel_l2
    )


def _most(values: np.ndarray) -> float:
    """The largest of some non-negative numbers; 0 if there are no numbers."""
    return float(values.max(initial=0.0))
