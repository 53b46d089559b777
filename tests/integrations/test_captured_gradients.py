"""Gradients of tensors that score functions read, against PyTorch's autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashsmith.integrations import captured_gradients as ours
from flashsmith.integrations.captured_by_kernels import ScoreSums, axis_of
from flashsmith.integrations.captured_gradients import Saved, captured_gradients
from flashsmith.semantics.signature import ForwardOptions
from flashsmith.tracing import trace

BATCH, HEADS, HEADS_K, SEQ_Q, SEQ_K, D = 2, 4, 2, 37, 53, 16
OF = torch.Generator().manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=OF)


def captured(*shape: int) -> torch.Tensor:
    return draw(*shape).requires_grad_()


SLOPES, TABLE, ROWS, KEYS = captured(HEADS), captured(2 * SEQ_K), captured(SEQ_Q), captured(SEQ_K)
BIAS, SHARED, FACTOR = captured(BATCH, HEADS, SEQ_Q, SEQ_K), captured(SEQ_Q, SEQ_K), captured()
BUCKETS, EMBEDDING = torch.randint(0, 5, (SEQ_Q,), generator=OF), captured(5, HEADS)

Function = Callable[..., Any]
FUNCTIONS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "slopes": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q) / 8, (SLOPES,)),
    "table by distance": (lambda s, b, h, q, k: s + TABLE[k - q + SEQ_K], (TABLE,)),
    "rows and keys": (lambda s, b, h, q, k: s * ROWS[q].tanh() + KEYS[k], (ROWS, KEYS)),
    "bias": (lambda s, b, h, q, k: s + BIAS[b, h, q, k], (BIAS,)),
    "shared bias": (lambda s, b, h, q, k: s + SHARED[q, k], (SHARED,)),
    "a number": (lambda s, b, h, q, k: FACTOR * torch.tanh(s / 3), (FACTOR,)),
    "buckets": (lambda s, b, h, q, k: s + EMBEDDING[BUCKETS[q], h], (EMBEDDING,)),
    "read twice": (lambda s, b, h, q, k: s + KEYS[k] * KEYS[q], (KEYS,)),
    "gates": (
        lambda s, b, h, q, k: s + SLOPES[h] * KEYS[k] + 0.5 * ROWS[q] + 0.3 * SHARED[q, k],
        (SLOPES, KEYS, ROWS, SHARED),
    ),
    "with a mask's": (
        lambda s, b, h, q, k: torch.where(q % 5 == 0, s * SLOPES[h], s + SLOPES[0]),
        (SLOPES,),
    ),
}


def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q + k) % 3 != 0) & (q != 7)  # one row sees no key


def inputs() -> dict[str, torch.Tensor]:
    q, do = draw(BATCH, SEQ_Q, HEADS, D), draw(BATCH, SEQ_Q, HEADS, D)
    k, v = draw(BATCH, SEQ_K, HEADS_K, D), draw(BATCH, SEQ_K, HEADS_K, D)
    return {"do": do, "q": q, "k": k, "v": v, "dlse": draw(BATCH, HEADS, SEQ_Q)}


def by_autograd(
    at: dict[str, torch.Tensor], function: Function, causal: bool, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse in float64, differentiable with respect to captured tensors."""
    q, k, v = (at[name].double().transpose(1, 2) for name in "qkv")
    k, v = (x.repeat_interleave(HEADS // HEADS_K, 1) for x in (k, v))
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    row, key = torch.arange(SEQ_Q)[:, None], torch.arange(SEQ_K)
    scores = q @ k.mT * D**-0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = function(scores, b, h, row, key)
    seen = visible(b, h, row, key).expand(scores.shape)
    if causal:
        seen = seen & (key <= row + SEQ_K - SEQ_Q)
    alive = seen.any(-1)
    lse = torch.logsumexp(scores.masked_fill(~seen & alive[..., None], -torch.inf), -1)
    weights = torch.where(seen, torch.exp(scores - lse[..., None]), 0)
    return (weights @ v).transpose(1, 2), lse.masked_fill(~alive, -torch.inf)


@pytest.mark.parametrize("limits", [(False, 0.0), (True, 2.0)], ids=["plain", "causal and capped"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_gradients(monkeypatch: pytest.MonkeyPatch, name: str, limits: tuple[bool, float]) -> None:
    function, tensors = FUNCTIONS[name]
    at, (causal, softcap) = inputs(), limits
    o, lse = by_autograd(at, function, causal, softcap)
    alive = lse.isfinite()
    loss = (o * at["do"]).sum() + (torch.where(alive, lse, 0) * at["dlse"])[alive].sum()
    expected = torch.autograd.grad(loss, tensors)
    monkeypatch.setattr(ours, "MOST_SCORES", 5 * HEADS * SEQ_K)  # several blocks of rows
    program = trace(function, visible)
    saved = Saved(**at, o=o.detach(), lse=lse.detach(), cu_seqlens_q=None, cu_seqlens_k=None)
    needs = [it.requires_grad for it in program.tensors]
    options = ForwardOptions(causal=causal, softcap=softcap)
    found = captured_gradients(saved, options, program, needs)
    again = captured_gradients(saved, options, program, needs)
    assert [it is None for it in found] == [not need for need in needs]
    read = [it for it, need in zip(program.tensors, needs, strict=True) if need]
    gradients, repeated = ([it for it in x if it is not None] for x in (found, again))
    assert all(map(torch.equal, gradients, repeated))
    # A tensor that is read at a constant index is captured as an element of it.
    through = torch.autograd.grad(read, tensors, gradients)
    for one, other in zip(through, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_packed_sequences() -> None:
    """Those of two sequences are the sums of those of each alone."""
    function = FUNCTIONS["slopes"][0]
    at = inputs()
    o, lse = by_autograd(at, function, True, 0.0)
    program, options = trace(function, visible), ForwardOptions(causal=True)
    each = Saved(**at, o=o.detach(), lse=lse.detach(), cu_seqlens_q=None, cu_seqlens_k=None)
    flat = {name: x.flatten(0, 1) for name, x in at.items() if name != "dlse"}
    together = Saved(
        **flat,
        o=o.detach().flatten(0, 1),
        lse=torch.cat(list(lse.detach()), 1),
        dlse=torch.cat(list(at["dlse"]), 1),
        cu_seqlens_q=torch.tensor([0, SEQ_Q, 2 * SEQ_Q]),
        cu_seqlens_k=torch.tensor([0, SEQ_K, 2 * SEQ_K]),
    )
    (one,), (other,) = (captured_gradients(it, options, program, [True]) for it in (each, together))
    torch.testing.assert_close(one, other)


# --- by kernels ----------------------------------------------------------------------------------

# Reads whose indices kernels sum by; the kernel of each is compiled.
SERVED = ("slopes", "table by distance", "bias", "shared bias", "rows and keys", "a number")
BY_DEFAULT = ("table by distance",)
CLAMPED = captured(9)
FUNCTIONS["clamped distances"] = (
    lambda s, b, h, q, k: s + CLAMPED[(q - k).clamp(-4, 4) + 4] * 0.5, (CLAMPED,)
)  # fmt: skip


def in_fp16(at: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x if name == "dlse" else x.half() for name, x in at.items()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(it, marks=[pytest.mark.full] * (it not in BY_DEFAULT))
        for it in (*SERVED, "clamped distances", "buckets", "gates", "with a mask's")
    ],
)
def test_gradients_by_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function = FUNCTIONS[name][0]
    at = in_fp16(inputs())
    o, lse = by_autograd(at, function, True, 0.0)
    program = trace(function, visible)
    saved = Saved(
        **at, o=o.detach().half(), lse=lse.detach().float(), cu_seqlens_q=None, cu_seqlens_k=None
    )
    needs, options = [it.requires_grad for it in program.tensors], ForwardOptions(causal=True)
    expected = captured_gradients(saved, options, program, needs)
    monkeypatch.setattr(ours, "_sequences", lambda *_: pytest.fail("not by a kernel"))
    found = captured_gradients(saved, options, program, needs, emulate=True)
    again = captured_gradients(saved, options, program, needs, emulate=True)
    for one, other, repeated in zip(found, expected, again, strict=True):
        if other is not None:
            size = other.abs().max().item()
            assert size > 0
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * size)
            assert torch.equal(one, repeated)


@pytest.mark.full
def test_packed_sequences_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lengths that are no whole tiles, one of them 0."""
    function = FUNCTIONS["table by distance"][0]
    at = in_fp16(inputs())
    flat = {name: x.flatten(0, 1)[:70] for name, x in at.items() if name in ("do", "q")}
    flat |= {name: at[name].flatten(0, 1) for name in "kv"}
    q, k = torch.tensor([0, 12, 12, 70]), torch.tensor([0, 40, 50, 106])
    program = trace(function, visible)
    options = ForwardOptions(causal=True)
    saved = Saved(
        **flat,
        o=torch.randn(70, HEADS, D, generator=OF).half(),
        lse=torch.rand(HEADS, 70, generator=OF) + 3,
        dlse=torch.randn(HEADS, 70, generator=OF),
        cu_seqlens_q=q.int(),
        cu_seqlens_k=k.int(),
    )
    (expected,) = captured_gradients(saved, options, program, [True])
    monkeypatch.setattr(ours, "_sequences", lambda *_: pytest.fail("not by a kernel"))
    (found,) = captured_gradients(saved, options, program, [True], emulate=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("name", "axes"),
    {
        "slopes": ["rows"],
        "table by distance": ["distances"],
        "clamped distances": ["distances"],
        "rows and keys": ["rows", "keys"],
        "bias": ["elements"],
        "buckets": ["rows"],
        "read twice": ["keys", "rows"],
    }.items(),
)
def test_axes(name: str, axes: list[str]) -> None:
    score = trace(FUNCTIONS[name][0]).program.score
    assert score is not None
    reads = [it for it in score.parts() if it.function == "read" and it.operands[1] == "float32"]
    assert sorted(axis_of(it) or "" for it in reads) == sorted(axes)


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        # Those by row, key and element have a derivative that does not vary within a sum.
        (FUNCTIONS["gates"][0], 2),
        (lambda s, b, h, q, k: s + SLOPES[h] * TABLE[k - q + SEQ_K] - TABLE[q - k + SEQ_K], 2),
        (lambda s, b, h, q, k: s * ROWS[q] + KEYS[k], 2),
        (lambda s, b, h, q, k: s + SLOPES[h] * (ROWS[q] - EMBEDDING[2, h]), 1),
    ],
)
def test_reads_of_equal_sums_share_a_kernel(function: Function, kernels: int) -> None:
    program = trace(function, visible)
    zero = torch.zeros(BATCH, HEADS, SEQ_Q)
    saved = Saved(**inputs(), o=None, lse=zero, cu_seqlens_q=None, cu_seqlens_k=None)
    sums = ScoreSums(saved, ForwardOptions(), program, True)
    score = program.program.score
    assert score is not None
    found = set()
    for node in score.parts():
        axis = axis_of(node) if node.function == "read" else None
        if axis is not None:
            found.add(sums.summed_by(sums.slope(node, axis).at_element).program)
    assert len(found) == kernels


def test_reads_that_kernels_do_not_sum() -> None:
    others = [
        lambda s, b, h, q, k: s + ROWS[q // 2 + k],
        lambda s, b, h, q, k: s + SHARED[q % 5, k],
    ]
    for function in others:
        score = trace(function).program.score
        assert score is not None
        (node,) = (it for it in score.parts() if it.function == "read")
        assert axis_of(node) is None


def test_heads_that_no_kernel_of_sums_takes() -> None:
    """PyTorch's operations sum for a d above 256, which attention() serves on sm_90."""
    at = {name: x if name == "dlse" else x.repeat(1, 1, 1, 17) for name, x in inputs().items()}
    statistics = torch.full((BATCH, HEADS, SEQ_Q), 40.0)
    saved = Saved(
        **in_fp16(at), o=at["do"].half(), lse=statistics, cu_seqlens_q=None, cu_seqlens_k=None
    )
    assert saved.q.shape[-1] == 272
    program, options = trace(FUNCTIONS["slopes"][0]), ForwardOptions()
    (expected,) = captured_gradients(saved, options, program, [True])
    (found,) = captured_gradients(saved, options, program, [True], emulate=True)
    assert expected is not None
    assert found is not None
    assert expected.abs().max() > 0
    assert torch.equal(found, expected)
