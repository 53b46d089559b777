"""trace(): FlexAttention's functions give programs of the same values, or an error with a line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from flashsmith.errors import ArgumentError, TraceError
from flashsmith.semantics.program import BoundProgram
from flashsmith.tracing import trace, tracer
from flashsmith.tracing.captures import captures_of
from tests.tracing.eager_flex import check

WIDTH = 5
SLOPES = torch.rand(4)
DOCUMENTS = torch.randint(0, 3, (2, 24)).sort().values
OFFSETS = torch.tensor([0, 7, 11, 24], dtype=torch.int32)
TABLE = np.linspace(-1, 1, 47, dtype=np.float32)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


MASKS = {
    "causal": causal,
    "window": lambda b, h, q, k: (q - k <= WIDTH) & (k - q < WIDTH + 1),
    "documents": lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b][k],
    "nested": lambda b, h, q, k: k >= OFFSETS[DOCUMENTS[b, q]],
    "not": lambda b, h, q, k: ~(q < k) | torch.logical_not(h > 1),
    "and_masks": and_masks(causal, lambda b, h, q, k: q % 3 == k % 3),
    "or_masks": or_masks(causal, lambda b, h, q, k: (q ^ k) & 4 != 0),
    "signs": lambda b, h, q, k: ((k - q) // 3 == -1) | ((k - q) % 5 == 2) | ((q - k) % -4 == -1),
    "truncation": lambda b, h, q, k: torch.div(k - q, 3, rounding_mode="trunc") == torch.fmod(k, 4),
    "clamp": lambda b, h, q, k: q.clamp(3, 20) >= torch.clamp(k, min=h),
    "new_ones": lambda b, h, q, k: b.new_ones((), dtype=torch.bool) & (q > k),
    "logical": lambda b, h, q, k: torch.logical_and(q > k, torch.logical_xor(q > 9, k > 4)),
    "where": lambda b, h, q, k: torch.where(h == 1, q > k, q <= k),
    "bits": lambda b, h, q, k: ((1 << (q % 8)) >> (k % 8)) & 1 == 1,
    "float comparison": lambda b, h, q, k: (q / 7.0).floor() == torch.floor(k.float() / 7),
    "numpy": lambda b, h, q, k: np.abs(TABLE[q - k + 23]) > 0.25,
}
SCORES = {
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "alibi without a tensor": lambda s, b, h, q, k: s - 2 ** (-8 * (h + 1) / 4) * (q - k).abs(),
    "softcap": lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0),
    "hidden": lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
    "functions": lambda s, b, h, q, k: s.sigmoid() + torch.log1p(s.abs()) * torch.exp2(-s * s),
    "roots": lambda s, b, h, q, k: (s.abs() + 1).rsqrt() + s.square().sqrt() - s.pow(3) + s**-2,
    "rounding": lambda s, b, h, q, k: torch.round(s * 4) + s.floor() - s.ceil() + s.trunc(),
    "remainders": lambda s, b, h, q, k: (s % 0.75) + (s // 0.5) - torch.fmod(s, 0.3),
    "extremes": lambda s, b, h, q, k: torch.minimum(s, torch.maximum(-s, s * s)),
    "gelu": lambda s, b, h, q, k: torch.nn.functional.gelu(s),
    "where of a tensor": lambda s, b, h, q, k: s.where(q >= k, -7.0) + (q < k).where(k > 3, h > 0),
    "where of a number": lambda s, b, h, q, k: s + torch.tensor(2.5).where(q >= k, s * s),
    "silu": lambda s, b, h, q, k: torch.nn.functional.silu(s),
    "leaky_relu": lambda s, b, h, q, k: torch.nn.functional.leaky_relu(s, 0.1),
    "relu6": lambda s, b, h, q, k: torch.nn.functional.relu6(s * 4),
    "hardtanh": lambda s, b, h, q, k: torch.nn.functional.hardtanh(s, -0.5, 0.75),
    "elu": lambda s, b, h, q, k: torch.nn.functional.elu(s * 100, 0.5),
    "mish": lambda s, b, h, q, k: torch.nn.functional.mish(s),
    "logsigmoid": lambda s, b, h, q, k: torch.nn.functional.logsigmoid(s * 200),
    "softsign": lambda s, b, h, q, k: torch.nn.functional.softsign(s),
    "addcmul": lambda s, b, h, q, k: torch.addcmul(s, SLOPES[h], s, value=0.5),
    "addcdiv": lambda s, b, h, q, k: torch.addcdiv(s, SLOPES[h], s.abs() + 1, value=2),
    "lerp": lambda s, b, h, q, k: torch.lerp(s, SLOPES[h], 0.3),
    "frac": lambda s, b, h, q, k: torch.frac(s * 3),
    "bool arithmetic": lambda s, b, h, q, k: s * (q > k) + (q < k),
    "integer division": lambda s, b, h, q, k: s + (q - k) / 3 + (h + 1) // 2,
    "numpy table": lambda s, b, h, q, k: s + TABLE[q - k + 23],
    "square of distance": lambda s, b, h, q, k: s - 0.01 * (q - k) ** 2,
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, -1e9),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    if name == "numpy":
        bound = trace(None, MASKS[name])
        assert bound.tensors[0] is TABLE
        return
    check(mask=MASKS[name])


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    if name == "numpy table":
        assert trace(SCORES[name]).tensors[0] is TABLE
        return
    check(score=SCORES[name])


def test_new_numbers_and_tensors_do_not_change_the_program() -> None:
    def alibi(slopes: torch.Tensor, factor: float) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s + factor * slopes[h] * (k - q)

    one = trace(alibi(SLOPES, 0.5))
    other_slopes = torch.rand(7)
    other = trace(alibi(other_slopes, 0.25))
    assert one.program is other.program
    assert (one.numbers, other.numbers) == ((0.5,), (0.25,))
    assert one.tensors[0] is SLOPES
    assert other.tensors[0] is other_slopes


def test_numbers_that_python_needs_become_constants() -> None:
    def taps(n: int) -> Callable[..., Any]:
        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            found = q == k
            for i in range(n):
                found = found | (q - k == i * n)
            return found if n > 1 else q >= k

        return mask

    for n in (3, 1, 2, 3):
        check(mask=taps(n))
    assert trace(None, taps(3)).program is not trace(None, taps(2)).program
    assert trace(None, taps(3)).numbers == ()


class Window:
    def __init__(self, width: int, ids: torch.Tensor) -> None:
        self.width = width
        self.ids = ids

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k < self.width) & (self.ids[b, q] == self.ids[b, k])


def test_objects_and_partials() -> None:
    window = Window(4, DOCUMENTS)
    first = check(mask=window)
    window.width = 9
    second = check(mask=window)
    assert first.program is second.program
    assert (first.numbers, second.numbers) == ((4,), (9,))

    def within(width: int, b: Any, h: Any, q: Any, k: Any, *, shift: int = 0) -> Any:
        return q - k + shift < width

    assert check(mask=functools.partial(within, 3, shift=2)).numbers == (2, 3)
    # PyTorch counts self as an argument of a method.
    assert trace(None, Window(3, DOCUMENTS).__call__).numbers == (3,)


def test_zero_dimensional_tensors_are_numbers() -> None:
    cap = torch.tensor(2.0)
    bound = check(score=lambda s, b, h, q, k: cap * torch.tanh(s / cap))
    assert bound.numbers == (2.0, 0.5)
    cap.fill_(3.0)
    assert trace(lambda s, b, h, q, k: cap * torch.tanh(s / cap)).numbers == (3.0, 1 / 3)


def test_a_bfloat16_tensor_is_evaluated() -> None:
    """NumPy has no such type."""
    slopes = SLOPES.bfloat16()
    program = trace(lambda s, b, h, q, k: s + slopes[h]).program
    (read,) = program.reads
    assert program.score is not None
    found = program.score.evaluate({"score": 0.0, "h": np.arange(4)}, {read.name: slopes})
    np.testing.assert_array_equal(found, slopes.double().numpy())


def test_a_zero_dimensional_tensor_that_requires_grad_is_read() -> None:
    """As a number it would have no gradient."""
    cap = torch.tensor(2.0, requires_grad=True)
    score = lambda s, b, h, q, k: s * cap  # noqa: E731
    bound = trace(score)
    assert bound.numbers == ()
    assert bound.tensors[0] is cap
    cap = torch.tensor(2.0)
    assert trace(score).numbers == (2.0,)


def test_uses_of_tensors_by_the_trace_do_not_forbid_its_reuse() -> None:
    cap = torch.tensor(2.0)
    functions = (lambda s, b, h, q, k: s * cap + SLOPES[h], None)
    made = tracer.traced(functions, captures_of(functions))
    assert made.is_reusable
    shape = (lambda s, b, h, q, k: s * SLOPES.shape[0], None)
    assert not tracer.traced(shape, captures_of(shape)).is_reusable


def test_values_that_steer_python_are_read_in_every_call() -> None:
    limit = torch.tensor([2, 9])

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k if int(limit.max()) > 5 else q <= k

    assert str(trace(None, mask).program.mask) == "k <= q"
    limit.fill_(0)
    assert str(trace(None, mask).program.mask) == "q <= k"


def _branch(b: Any, h: Any, q: Any, k: Any) -> Any:
    if q > k:
        return True
    return h > 1


REFUSED = {
    "branch": (_branch, r"truth value of 'k < q'.*if q > k:.*torch\.where"),
    "and": (lambda b, h, q, k: q > k and h > 1, "truth value.*&"),
    "whole tensor": (lambda b, h, q, k: h < SLOPES, r"shape \(4,\).*one element"),
    "row": (lambda b, h, q, k: DOCUMENTS[b] == k, "dimensions left"),
    "slice": (lambda b, h, q, k: DOCUMENTS[b, q:] == k, "slice"),
    "dot": (lambda b, h, q, k: torch.dot(SLOPES[h], SLOPES[h]) > 0, "dot product"),
    "unknown function": (lambda b, h, q, k: torch.lgamma(q) > 0, "'lgamma'"),
    "nothing": (lambda b, h, q, k: None, "mask_mod returned None"),
    "item": (lambda b, h, q, k: q.item() > 3, r"item\(\)"),
    "list": (lambda b, h, q, k: [1, 2, 3][h] > q, "index or a count"),
    "float index": (lambda b, h, q, k: DOCUMENTS[b, q / 2] > 0, "float32 index"),
    "float64": (lambda b, h, q, k: torch.zeros(24, dtype=torch.float64)[q] > 0, "float64 elements"),
    "matrix product": (lambda b, h, q, k: DOCUMENTS[b] @ DOCUMENTS[h] > 0, "append its vectors"),
    "product with a number": (lambda b, h, q, k: q @ k > 0, "'matmul'.*append its vectors"),
    "sum of a row": (lambda b, h, q, k: DOCUMENTS[b].sum() > k, "1 dimension left.*precompute"),
    "too many indices": (
        lambda b, h, q, k: DOCUMENTS[b, q, k] > 0,
        r"3 indices of a tensor of shape \(\d+, \d+\).*give 2, one for each dimension",
    ),
    "write": (lambda b, h, q, k: SLOPES.__setitem__(h, q), "writes to no tensor"),
    "large int": (lambda b, h, q, k: q < 2**70, r"int64 cannot hold it; give a float, or an int"),
    "its own error": (
        lambda b, h, q, k: q < 1 / 0,
        r"^mask_mod raised ZeroDivisionError .*: division by zero \(test_trace.py:\d+: .* its "
        "arguments are 0-dimensional tensors without values",
    ),
    "exception": (lambda b, h, q, k: q.no_such_thing, "no_such_thing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(TraceError, match=message) as caught:
        trace(None, function)
    assert "test_trace.py:" in str(caught.value) or name == "nothing"


def test_not_a_function() -> None:
    with pytest.raises(ArgumentError, match="score_mod=3: give a function"):
        trace(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="mask_mod=None: give a score function, a mask functi"):
        trace()


def test_other_arguments_are_named() -> None:
    expected = (
        r"^mask_mod=<function .*>: it takes \(b, h, q\), and is called with "
        r"\(b, h, q_idx, kv_idx\) \(too many positional arguments\); let it take these"
    )
    with pytest.raises(TraceError, match=expected):
        trace(None, lambda b, h, q: q > 0)
    with pytest.raises(TraceError, match=r"^score_mod=.*\(score, b, h, q_idx, kv_idx\) \(missing"):
        trace(lambda score, b, h, q, k, more: score)
    trace(None, lambda *indices: indices[2] >= indices[3])


def test_a_global_number_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound() -> BoundProgram:
        return trace(None, MASKS["window"])

    before = bound()
    monkeypatch.setattr(__import__(__name__, fromlist=["WIDTH"]), "WIDTH", 8)
    assert bound().program is before.program
    assert bound().numbers != before.numbers
