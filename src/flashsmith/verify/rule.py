"""The tolerance rule: when an output counts as right, and where it first is not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flashsmith.configs import DType, FlashForwardKernelConfig
from flashsmith.verify.reference import References

# An output may err twice as much as a textbook kernel of the same precision, and this much more.
MAX_ERROR_FACTOR = 2.0
MAX_ERROR_SLACK = 1e-5
RELATIVE_L2_BOUND = {DType.FP16: 1e-3, DType.BF16: 5e-3}
# The norm of an all but zero reference is taken as if its elements were this large.
L2_FLOOR = 1e-6
LSE_ABSOLUTE = 1e-3
LSE_RELATIVE = 1e-6
# Fewer outputs than this make the maximum error a matter of luck.
MIN_OUTPUTS = 4096


@dataclass(frozen=True)
class Location:
    """One element of o (or, with column None, of the LSE), in problem and in kernel terms.

    ``tile`` is the Q tile, ``warp`` the warp of its CTA that owns the row.
    """

    batch: int
    row: int
    head: int
    column: int | None
    tile: int
    warp: int
    got: float
    expected: float

    def __str__(self) -> str:
        what = "LSE" if self.column is None else f"column {self.column}"
        return (
            f"batch {self.batch}, row {self.row}, head {self.head}, {what} "
            f"(Q tile {self.tile}, warp {self.warp}): got {self.got:.6g}, "
            f"expected {self.expected:.6g}"
        )


@dataclass(frozen=True)
class Comparison:
    """An output set against its references. ``reasons`` is empty when it is right."""

    reasons: tuple[str, ...]
    max_error: float
    bound: float
    rel_l2: float
    rel_l2_bound: float
    lse_error: float | None
    outputs: int
    mismatches: int
    first_mismatch: Location | None

    @property
    def ok(self) -> bool:
        """Whether every part of the rule holds."""
        return not self.reasons

    @property
    def mismatch_share(self) -> float:
        """Mismatching elements of o as a share of all."""
        return self.mismatches / self.outputs


def heads_for_enough_outputs(batch: int, seq_q: int, heads: int, d: int) -> int:
    """The smallest multiple of ``heads`` that gives at least MIN_OUTPUTS outputs."""
    per_repeat = batch * seq_q * heads * d
    return heads * -(-MIN_OUTPUTS // per_repeat)


def _same_nonfinite(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise: both finite, both NaN, or the same infinity."""
    finite = np.isfinite(a) & np.isfinite(b)
    return finite | (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))


def _finite_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| where both are finite, else 0."""
    finite = np.isfinite(a) & np.isfinite(b)
    return np.abs(np.subtract(a, b, out=np.zeros(a.shape), where=finite))


def _relative_l2(error: np.ndarray, reference: np.ndarray) -> float:
    norm = float(np.linalg.norm(reference[np.isfinite(reference)]))
    floor = L2_FLOOR * float(np.sqrt(reference.size))
    return float(np.linalg.norm(error)) / max(norm, floor)


def _locate(
    cfg: FlashForwardKernelConfig, index: tuple[int, ...], got: np.ndarray, expected: np.ndarray
) -> Location:
    """Names element ``index``: (batch, row, head, column) of o or (batch, head, row) of the LSE."""
    if len(index) == 4:
        batch, row, head, column = index
    else:
        (batch, head, row), column = index, None
    return Location(
        batch=batch,
        row=row,
        head=head,
        column=column,
        tile=row // cfg.B_r,
        warp=row % cfg.B_r // cfg.rows_per_warp,
        got=float(got[index]),
        expected=float(expected[index]),
    )


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))


def compare(
    cfg: FlashForwardKernelConfig,
    o: np.ndarray,
    lse: np.ndarray | None,
    references: References,
) -> Comparison:
    """Judges o (batch, seq_q, heads, d) and, unless None, the LSE (batch, heads, seq_q).

    Rule: NaN and inf stand exactly where the float64 reference has them; the largest error is at
    most twice the same-precision reference's plus 1e-5; the relative L2 error is at most 1e-3
    (fp16) or 5e-3 (bf16); the LSE is within 1e-3 + 1e-6 |LSE|.
    """
    got = o.astype(np.float64)
    same = references.same_precision.astype(np.float64)
    error = _finite_difference(got, references.o)
    bound = MAX_ERROR_FACTOR * float(_finite_difference(same, references.o).max())
    bound += MAX_ERROR_SLACK
    nonfinite_equal = _same_nonfinite(got, references.o)
    wrong = (error > bound) | ~nonfinite_equal
    max_error, rel_l2 = float(error.max()), _relative_l2(error, references.o)
    rel_l2_bound = RELATIVE_L2_BOUND[cfg.dtype]

    reasons = []
    if not nonfinite_equal.all():
        reasons.append(f"NaN or inf differ in {int((~nonfinite_equal).sum())} elements")
        max_error = rel_l2 = math.inf
    if max_error > bound:
        reasons.append(f"largest error {max_error:.3g} is above {bound:.3g}")
    if rel_l2 > rel_l2_bound:
        reasons.append(f"relative L2 error {rel_l2:.3g} is above {rel_l2_bound:.3g}")
    first = _locate(cfg, _first(wrong if wrong.any() else error), got, references.o)
    first_mismatch = first if reasons else None

    lse_error = None
    if lse is not None:
        lse_wrong, lse_error = _judge_lse(lse, references.lse)
        if lse_wrong.any():
            reasons.append(f"LSE wrong in {int(lse_wrong.sum())} rows, by up to {lse_error:.3g}")
            where = _locate(cfg, _first(lse_wrong), lse, references.lse)
            first_mismatch = first_mismatch or where
    return Comparison(
        reasons=tuple(reasons),
        max_error=max_error,
        bound=bound,
        rel_l2=rel_l2,
        rel_l2_bound=rel_l2_bound,
        lse_error=lse_error,
        outputs=o.size,
        mismatches=int(wrong.sum()),
        first_mismatch=first_mismatch,
    )


def _judge_lse(lse: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, float]:
    """Which rows' LSE is wrong, and the largest finite error."""
    error = _finite_difference(lse.astype(np.float64), reference)
    magnitude = np.where(np.isfinite(reference), np.abs(reference), 0.0)
    allowed = LSE_ABSOLUTE + LSE_RELATIVE * magnitude
    return (error > allowed) | ~_same_nonfinite(lse, reference), float(error.max())
