"""The tolerance rule: decides whether an output is correct, and finds the first element that breaks
the rule."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig
from flashsmith.verify.attention_semantics import Lens, offsets
from flashsmith.verify.reference import References

# The error of an output may be this factor times the error of a textbook kernel of the same
# precision, plus this slack.
MAX_ERROR_FACTOR = 2.0
MAX_ERROR_SLACK = 1e-5
RELATIVE_L2_BOUND = {DType.FP16: 1e-3, DType.BF16: 5e-3}
# The distance between neighbouring numbers of the dtype close to 0. If a sink has nearly all of a
# row's weight, outputs are so small that rounding alone causes many times RELATIVE_L2_BOUND.
SMALLEST_STEP = {DType.FP16: 2.0**-24, DType.BF16: 2.0**-133}
# If a reference is nearly zero, its norm is computed as if all elements had this magnitude.
L2_FLOOR = 1e-6
# In training, P is exp(score - LSE), so an absolute error of the LSE is a relative error of a row
# of P. The absolute bound is a quarter of the unit roundoff of fp16; the polynomial for exp2 has
# errors up to 1.02e-4. The relative part allows for the sums of tensor cores, whose error is up to
# 8.7e-4 for scores of 990 and d 256.
LSE_ABSOLUTE = 2.0**-13
LSE_RELATIVE = 1e-6
# With fewer outputs, the largest error is mostly chance.
MIN_OUTPUTS = 4096
# An error of another library may be at most this many times flashsmith's error. Kernels that round
# more often, for example because they merge partial results in 16 bits, stay far below this factor.
# Kernels that compute a different function are far above it.
MOST_OVER_OURS = 3.0


@dataclass(frozen=True)
class ErrorLocation:
    """An element of o, or of the statistics of a row, located in the problem and in the kernel.

    ``batch`` is the number of the sequence in the batch; ``row`` counts within the sequence.
    ``packed_row`` is the row in the packed tensor; None for dense tensors. ``column`` is None for a
    statistic; ``what`` is its name. ``tile`` is the Q tile, and ``warp`` is the warp of its CTA
    that owns the row.
    """

    batch: int
    row: int
    head: int
    column: int | None
    tile: int
    warp: int
    got: float
    expected: float
    what: str = "o"
    packed_row: int | None = None

    def __str__(self) -> str:
        sequence = f"batch {self.batch}, row {self.row}"
        if self.packed_row is not None:
            sequence = (
                f"sequence {self.batch}, row {self.row} (row {self.packed_row} of the packed "
                "tensor)"
            )
        what = self.what if self.column is None else f"column {self.column}"
        return (
            f"{sequence}, head {self.head}, {what} "
            f"(Q tile {self.tile}, warp {self.warp}): got {self.got:.6g}, "
            f"expected {self.expected:.6g}"
        )


@dataclass(frozen=True)
class Element:
    """One element of an output, for any operation."""

    what: str
    index: tuple[int, ...]
    got: float
    expected: float

    def __str__(self) -> str:
        index = ", ".join(map(str, self.index))
        return f"{self.what}[{index}]: got {self.got:.6g}, expected {self.expected:.6g}"


@dataclass(frozen=True)
class ExpectedOutputs:
    """The expected outputs by name.

    ``exact`` is in float64, never rounded. ``rounded`` is from a plain implementation that rounds
    where a kernel must.
    """

    exact: Mapping[str, np.ndarray]
    rounded: Mapping[str, np.ndarray]

    def only(self, names: Collection[str]) -> ExpectedOutputs:
        """Only the expected outputs with these names."""
        return ExpectedOutputs(
            {name: array for name, array in self.exact.items() if name in names},
            {name: array for name, array in self.rounded.items() if name in names},
        )


class OutputErrors(NamedTuple):
    """The errors of one output against float64: the largest, and the relative L2 error."""

    largest: float
    rel_l2: float


@dataclass(frozen=True)
class Comparison:
    """The comparison of an output with its references; ``reasons`` is empty if the output is
    correct. ``errors`` has the errors of each output by name; the other figures are those of a
    single output.
    """

    reasons: tuple[str, ...]
    max_error: float
    bound: float
    rel_l2: float
    rel_l2_bound: float
    lse_error: float | None
    row_max_error: float | None
    outputs: int
    mismatches: int
    first_mismatch: ErrorLocation | Element | None
    errors: Mapping[str, OutputErrors] = field(default_factory=dict, kw_only=True)

    @property
    def ok(self) -> bool:
        """Whether the whole rule is fulfilled."""
        return not self.reasons

    @property
    def mismatch_share(self) -> float:
        """The share of wrong elements of o; 0 if o is empty."""
        return self.mismatches / max(1, self.outputs)

    def compared_with(self, ours: Comparison) -> Comparison:
        """This comparison of another library's outputs, judged by another rule than
        compare()'s.

        An output is wrong if its largest error or its relative L2 error is above MOST_OVER_OURS
        times the one of ``ours``, flashsmith's comparison with the same references. Errors up to
        MAX_ERROR_SLACK are never wrong, since ours may be 0. The figures are those of the output
        with the largest error relative to its bound. Where NaN or infinities differ, compare()'s
        verdict stays.
        """
        if not self.errors or not all(math.isfinite(it.largest) for it in self.errors.values()):
            return self
        reasons = why_over(
            {name: it.largest for name, it in self.errors.items()},
            {name: it.largest for name, it in ours.errors.items()},
        )
        for name, (largest, rel_l2) in self.errors.items():
            bound = MOST_OVER_OURS * ours.errors[name].rel_l2
            if largest > MAX_ERROR_SLACK and not rel_l2 <= bound:
                reasons.append(_over(name, "relative L2 error", rel_l2, bound))
        bounds = {name: _most_allowed(it.largest) for name, it in ours.errors.items()}
        worst = max(self.errors, key=lambda name: self.errors[name].largest / bounds[name])
        largest, rel_l2 = self.errors[worst]
        return replace(
            self,
            reasons=tuple(reasons),
            max_error=largest,
            bound=bounds[worst],
            rel_l2=rel_l2,
            rel_l2_bound=MOST_OVER_OURS * ours.errors[worst].rel_l2,
        )


def why_over(theirs: Mapping[str, float], ours: Mapping[str, float]) -> list[str]:
    """Why outputs of another library are wrong by the rule of Comparison.compared_with().

    ``theirs`` and ``ours`` have the largest error of each output by name.
    """
    return [
        _over(name, "largest error", theirs[name], _most_allowed(error))
        for name, error in ours.items()
        if not theirs[name] <= _most_allowed(error)
    ]


def _most_allowed(error: float) -> float:
    return max(MOST_OVER_OURS * error, MAX_ERROR_SLACK)


def _over(name: str, what: str, error: float, bound: float) -> str:
    return f"{name}: {what} {error:.3g} is above {bound:.3g}, {MOST_OVER_OURS:g} times ours"


def heads_for_enough_outputs(batch: int, seq_q: int, heads: int, d: int) -> int:
    """The smallest multiple of ``heads`` that gives at least MIN_OUTPUTS outputs.

    A packed problem counts as a batch of one. If there are no rows, the result is ``heads``.
    """
    per_repeat = batch * seq_q * heads * d
    return heads * -(-MIN_OUTPUTS // per_repeat) if per_repeat else heads


def _same_nonfinite(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For each element, whether both arrays are finite, both are NaN, or both are the same
    infinity."""
    finite = np.isfinite(a) & np.isfinite(b)
    return finite | (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))


def _finite_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| where both are finite, elsewhere 0."""
    finite = np.isfinite(a) & np.isfinite(b)
    return np.abs(np.subtract(a, b, out=np.zeros(a.shape), where=finite))


def _relative_l2(error: np.ndarray, reference: np.ndarray) -> float:
    norm = float(np.linalg.norm(reference[np.isfinite(reference)]))
    floor = L2_FLOOR * float(np.sqrt(max(1, reference.size)))
    return float(np.linalg.norm(error)) / max(norm, floor)


class _Mismatches:
    """Locates elements in the outputs of one problem."""

    def __init__(self, cfg: KernelConfig, lens_q: Lens | None) -> None:
        self.rows, _ = cfg.family.loop_tiles(cfg) or (1, 1)
        self.rows_per_warp = cfg.rows_per_warp
        self.cu_seqlens = None if lens_q is None else offsets(lens_q)

    def locate(
        self, what: str, wrong: np.ndarray, got: np.ndarray, expected: np.ndarray
    ) -> ErrorLocation:
        """The first element of ``wrong``, which has o's shape (..., row, head, column) or a
        statistic's (..., head, row); ... is the batch unless sequences are packed."""
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        column = None
        *batch, row, head = index
        if what == "o":
            *batch, row, head, column = index
        else:
            row, head = head, row
        packed_row = None
        if self.cu_seqlens is not None:
            packed_row = row
            batch = [int(np.searchsorted(self.cu_seqlens, row, side="right")) - 1]
            row -= int(self.cu_seqlens[batch[0]])
        return ErrorLocation(
            batch=batch[0],
            row=row,
            head=head,
            column=column,
            tile=row // self.rows,
            warp=row % self.rows // self.rows_per_warp,
            got=float(got[index]),
            expected=float(expected[index]),
            what=what,
            packed_row=packed_row,
        )


def compare(
    kernel: KernelConfig | DType,
    o: np.ndarray,
    lse: np.ndarray | None,
    references: References,
    *,
    row_max: np.ndarray | None = None,
    lens_q: Lens | None = None,
) -> Comparison:
    """Checks o (batch, seq_q, heads, d) and, if given, the LSE and the row maximum (batch, heads,
    seq_q). With lens_q they are packed: (total, heads, d) and (heads, total). For a kernel of
    another library only the dtype is known, so mismatches are not located in its tiles.

    NaN and inf must be where the float64 reference or the same-precision reference has them. These
    differ if a weight rounds to 0 and v is inf, or if o exceeds the range of the dtype: then one
    has NaN and the other inf. A tainted output, which a masked key may affect, may be finite or
    not.

    The largest error may be twice the same-precision reference's plus 1e-5. The relative L2
    error may be 1e-3 (fp16) or 5e-3 (bf16). It may be larger if no output is off by more than the
    smallest step of the dtype. The error of the statistics may be 2^-13 + 1e-6 |value|.
    """
    dtype = kernel if isinstance(kernel, DType) else kernel.dtype
    check = None if isinstance(kernel, DType) else _Mismatches(kernel, lens_q)
    found = _check_output(dtype, o, references.o, references.same_precision, references.tainted)
    reasons = list(found.reasons)
    first_mismatch = None
    if reasons and check:
        first_mismatch = check.locate("o", found.wrong, o, references.o)

    errors: dict[str, float | None] = {}
    for what, values, expected in (
        ("LSE", lse, references.lse),
        ("row maximum", row_max, references.row_max),
    ):
        errors[what] = None
        if values is None:
            continue
        wrong_rows, errors[what] = _check_statistic(values, expected)
        if wrong_rows.any():
            reasons.append(
                f"{what} wrong in {int(wrong_rows.sum())} rows, by up to {errors[what]:.3g}"
            )
            if check and not first_mismatch:
                first_mismatch = check.locate(what, wrong_rows, values, expected)
    return Comparison(
        reasons=tuple(reasons),
        max_error=found.max_error,
        bound=found.bound,
        rel_l2=found.rel_l2,
        rel_l2_bound=RELATIVE_L2_BOUND[dtype],
        lse_error=errors["LSE"],
        row_max_error=errors["row maximum"],
        outputs=o.size,
        mismatches=found.mismatches,
        first_mismatch=first_mismatch,
        errors={"o": OutputErrors(found.max_error, found.rel_l2)},
    )


def compare_tensors(
    dtype: DType, outputs: Mapping[str, np.ndarray], expected: ExpectedOutputs
) -> Comparison:
    """Checks each expected output by compare()'s rule for o, with the bounds for ``dtype``; whole
    numbers must be equal. The returned figures belong to the output with the largest error
    relative to its bound.

    Raises ArgumentError if an output is missing or has the wrong shape.
    """
    checked = {
        name: _check_output(dtype, got, expected.exact[name], expected.rounded[name])
        for name, got in expected_outputs(outputs, expected)
    }
    return comparison_of(dtype, checked, outputs, expected, named=len(checked) > 1)


def expected_outputs(
    outputs: Mapping[str, np.ndarray], expected: ExpectedOutputs
) -> Iterator[tuple[str, np.ndarray]]:
    """The expected outputs that are in ``outputs``, by name.

    Raises ArgumentError if an output is missing or has the wrong shape.
    """
    for name, exact in expected.exact.items():
        got = outputs.get(name)
        if got is None or got.shape != exact.shape:
            have = "is missing" if got is None else f"has shape {got.shape}"
            raise ArgumentError(f"{name}: {have}; the reference expects {exact.shape}")
        yield name, got


def comparison_of(
    dtype: DType,
    checked: Mapping[str, OutputVerdict],
    outputs: Mapping[str, np.ndarray],
    expected: ExpectedOutputs,
    *,
    named: bool = True,
) -> Comparison:
    """One comparison for several outputs.

    Its figures belong to the output with the largest error relative to its bound. ``named``:
    whether reasons begin with the name of the output.
    """
    reasons = tuple(
        f"{name}: {reason}" if named else reason
        for name, found in checked.items()
        for reason in found.reasons
    )
    worst = max(checked, key=lambda name: (bool(checked[name].reasons), checked[name].excess))
    first = None
    if reasons:
        index = np.unravel_index(int(np.argmax(checked[worst].wrong)), outputs[worst].shape)
        first = Element(
            worst,
            tuple(map(int, index)),
            float(outputs[worst][index]),
            float(expected.exact[worst][index]),
        )
    return Comparison(
        reasons=reasons,
        max_error=checked[worst].max_error,
        bound=checked[worst].bound,
        rel_l2=checked[worst].rel_l2,
        rel_l2_bound=RELATIVE_L2_BOUND[dtype],
        lse_error=None,
        row_max_error=None,
        outputs=sum(outputs[name].size for name in checked),
        mismatches=sum(found.mismatches for found in checked.values()),
        first_mismatch=first,
        errors={name: OutputErrors(it.max_error, it.rel_l2) for name, it in checked.items()},
    )


class OutputVerdict(NamedTuple):
    """The verdict on one output.

    ``wrong`` marks the elements that break the rule. If only a norm breaks it, ``wrong`` has the
    error of each element instead.
    """

    reasons: tuple[str, ...]
    wrong: np.ndarray
    mismatches: int
    max_error: float
    bound: float
    rel_l2: float

    @property
    def excess(self) -> float:
        """The largest error divided by the bound."""
        return self.max_error / self.bound if self.bound else self.max_error


def _check_output(
    dtype: DType,
    output: np.ndarray,
    exact: np.ndarray,
    rounded: np.ndarray,
    tainted: np.ndarray | None = None,
) -> OutputVerdict:
    """The verdict on one output, by the rule of compare()."""
    if output.dtype.kind in "iub":
        differ = output != exact
        said = (f"{int(differ.sum())} numbers differ",) if differ.any() else ()
        most = _largest(np.abs(output.astype(np.float64) - exact))
        return OutputVerdict(said, differ, int(differ.sum()), most, 0.0, 0.0)
    got, same = output.astype(np.float64), rounded.astype(np.float64)
    error = _finite_difference(got, exact)
    bound = MAX_ERROR_FACTOR * _largest(_finite_difference(same, exact))
    bound += MAX_ERROR_SLACK
    nonfinite_equal = _same_nonfinite(got, exact)
    if not nonfinite_equal.all():
        nonfinite_equal |= _same_nonfinite(got, same) & ~np.isfinite(got)
    if tainted is not None:
        nonfinite_equal |= tainted & ~np.isfinite(got)
    wrong = (error > bound) | ~nonfinite_equal
    max_error, rel_l2 = _largest(error), _relative_l2(error, exact)
    rel_l2_bound = RELATIVE_L2_BOUND[dtype]

    reasons = []
    if not nonfinite_equal.all():
        reasons.append(f"NaN or inf differ in {int((~nonfinite_equal).sum())} elements")
        max_error = rel_l2 = math.inf
    if max_error > bound:
        reasons.append(f"largest error {max_error:.3g} is above {bound:.3g}")
    if rel_l2 > rel_l2_bound and max_error > SMALLEST_STEP[dtype]:
        reasons.append(f"relative L2 error {rel_l2:.3g} is above {rel_l2_bound:.3g}")
    shown = wrong if wrong.any() else error
    return OutputVerdict(tuple(reasons), shown, int(wrong.sum()), max_error, bound, rel_l2)


def _largest(errors: np.ndarray) -> float:
    """The largest of some non-negative numbers; 0 if there are no numbers."""
    return float(errors.max(initial=0.0))


def _check_statistic(values: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, float]:
    """The rows in which the statistic is wrong, and the largest finite error."""
    error = _finite_difference(values.astype(np.float64), reference)
    magnitude = np.where(np.isfinite(reference), np.abs(reference), 0.0)
    allowed = LSE_ABSOLUTE + LSE_RELATIVE * magnitude
    return (error > allowed) | ~_same_nonfinite(values, reference), _largest(error)
