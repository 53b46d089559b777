"""attention() with a d above 256: what it computes, and what it says to be missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import device_spec  # noqa: E402
from flashsmith.integrations import pytorch_state  # noqa: E402
from flashsmith.integrations.fallbacks import FallbackWarning  # noqa: E402
from flashsmith.integrations.flash_attn import flash_attn_func  # noqa: E402
from flashsmith.integrations.sdpa import pytorch_sdpa, sdpa  # noqa: E402


def drawn(*shape: int, seed: int = 0) -> Any:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(torch.float16)


def exact(q: Any, k: Any, v: Any, keys: list[int]) -> Any:
    """Causal attention in float64 over the first keys of each sequence."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    position = torch.arange(q.shape[2])[None, :, None] - q.shape[2]
    seen = torch.arange(k.shape[2]) <= position + torch.tensor(keys)[:, None, None]
    weights = torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), dim=-1)
    return (weights @ v).transpose(1, 2)


def test_output_and_gradients() -> None:
    inputs = drawn(1, 70, 2, 264), drawn(1, 100, 1, 264, seed=1), drawn(1, 100, 1, 264, seed=2)
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    o = flashsmith.attention(*ours, causal=True, emulate=True)
    expected = exact(*theirs, [100])
    do = drawn(1, 70, 2, 264, seed=3)
    o.backward(do)
    expected.backward(do.double())
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-3)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=0, atol=6e-3)


@pytest.mark.parametrize("mask", [None, "added"])
def test_sdpa(mask: str | None) -> None:
    q, k, v = (drawn(1, 2, 70, 264), *(drawn(1, 1, 70, 264, seed=seed) for seed in (1, 2)))
    added = None if mask is None else drawn(70, 70, seed=4)
    ours = [x.clone().requires_grad_(mask is None) for x in (q, k, v)]
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    how = {"is_causal": mask is None, "enable_gqa": True}
    o = sdpa(*ours, added, **how, strict=True, emulate=True)
    expected = pytorch_sdpa(*theirs, None if added is None else added.double(), **how)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-3)
    if mask is not None:
        return
    do = drawn(1, 2, 70, 264, seed=3)
    o.backward(do)
    expected.backward(do.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=0, atol=6e-3)


def test_flash_attn() -> None:
    q, k, v = drawn(1, 70, 2, 264), drawn(1, 100, 1, 264, seed=1), drawn(1, 100, 1, 264, seed=2)
    o = flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(o.double(), exact(q, k, v, [100]), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("arch", "is_served"), [(80, False), (90, True), (100, False)])
def test_gpus_without_kernels_of_such_heads(
    arch: int, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = replace(device_spec("H100"), arch=arch)
    monkeypatch.setattr(pytorch_state, "query_gpu", lambda ordinal: device)
    monkeypatch.setenv("FLASHSMITH_UNTUNED", "1")
    reason = pytorch_state.why_not_on(torch.device("cuda", 0), None, 264, with_gradients=False)
    if is_served:
        assert reason is None
    else:
        assert f"an sm_{arch}; kernels of d above 256 need sm_90" in reason.facts


def test_compiled_code_asks_for_a_symbolic_d(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_state, "query_gpu", lambda ordinal: device_spec("A100"))

    def served(x: torch.Tensor) -> torch.Tensor:
        gpu, d = torch.device("cuda", 0), x.shape[-1]
        return x + (pytorch_state.why_not_on(gpu, None, d, with_gradients=False) is None)

    compiled = torch.compile(served, backend="eager", dynamic=True, fullgraph=True)
    for d in (64, 72, 264, 320):
        assert compiled(torch.zeros(3, d)).unique().item() == (d <= 256)


def test_repeatable_gradients_are_left_to_pytorch() -> None:
    q = drawn(1, 2, 20, 264).requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ArgumentError, match=r"^query: d 264 under torch.use_deterministic"):
            sdpa(q, q, q, strict=True, emulate=True)
        with pytest.warns(FallbackWarning, match="is not bitwise repeatable"):
            assert torch.equal(sdpa(q, q, q, emulate=True), pytorch_sdpa(q, q, q))
    finally:
        torch.use_deterministic_algorithms(False)


def test_queries_over_a_dense_cache() -> None:
    """By the forward kernels: the lengths stay on the device."""
    q, cache, values = drawn(2, 1, 8, 512), drawn(2, 96, 1, 512, seed=1), drawn(2, 96, 1, 512)
    lengths = [33, 90]
    for sequence, length in enumerate(lengths):
        cache[sequence, length:] = values[sequence, length:] = torch.nan
    o, lse = flashsmith.attention(
        *(q, cache, values), causal=True, partial=True, emulate=True,
        seqused_k=torch.tensor(lengths, dtype=torch.int32),
    )  # fmt: skip
    expected = exact(q, cache.nan_to_num(), values.nan_to_num(), lengths)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=4e-4)
    assert lse.isfinite().all()


def test_what_is_missing_is_named() -> None:
    q, k = drawn(1, 9, 2, 320), drawn(1, 9, 1, 320)
    with pytest.raises(
        ArgumentError, match=r"^deterministic=True: no backward kernel of d_head 512"
    ):
        flashsmith.attention(
            *(x.clone().requires_grad_() for x in (q, k, k)), deterministic=True, emulate=True
        )
    with pytest.raises(ArgumentError, match=r"give False. None means True with canonical bits"):
        flashsmith.attention(
            *(x.clone().requires_grad_() for x in (q, k, k)), bits="canonical", emulate=True
        )
    with pytest.raises(ArgumentError, match=r"^q: d=320, d_v=256: .* to one width, and"):
        flashsmith.attention(q, k, k[..., :256].contiguous(), emulate=True)
    with pytest.raises(ArgumentError, match=r"^q: d=520: kernels exist for .* 8 to 512"):
        flashsmith.attention(*[drawn(1, 9, 1, 520)] * 3, emulate=True)
