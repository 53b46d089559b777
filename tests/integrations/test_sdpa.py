"""sdpa() against PyTorch's scaled_dot_product_attention: the same meaning, on our kernels."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith import sdpa  # noqa: E402
from flashsmith.errors import ArgumentError, EmulationTooLongError  # noqa: E402
from flashsmith.integrations.fallbacks import FallbackWarning, fallback_count  # noqa: E402
from flashsmith.integrations.sdpa import pytorch_sdpa  # noqa: E402
from flashsmith.runtime.launches import count_launches  # noqa: E402


def drawn(*shape: int, dtype: Any = torch.float16, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_same(output: Any, q: Any, k: Any, v: Any, **arguments: Any) -> None:
    expected = pytorch_sdpa(q.float(), k.float(), v.float(), **arguments)
    assert output.dtype == q.dtype
    assert output.shape == expected.shape
    tolerance = 2e-3 if q.dtype is torch.float16 else 1.6e-2
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("q", "kv", "arguments"),
    [
        ((2, 3, 64, 64), (2, 3, 64, 64), {}),
        ((2, 3, 40, 32), (2, 3, 40, 32), {"is_causal": True}),
        ((1, 2, 30, 32), (1, 2, 75, 32), {"is_causal": True}),
        ((1, 2, 75, 32), (1, 2, 30, 32), {"is_causal": True}),
        ((1, 2, 1, 32), (1, 2, 75, 32), {"is_causal": True}),
        ((2, 4, 20, 32), (2, 2, 33, 32), {"enable_gqa": True, "scale": 0.3}),
        ((2, 4, 20, 40), (1, 1, 33, 40), {}),
        ((3, 20, 32), (3, 33, 32), {}),
        ((20, 32), (33, 32), {"is_causal": True}),
    ],
)
def test_served(q: Any, kv: Any, arguments: dict[str, Any], dtype: Any) -> None:
    query, key, value = drawn(*q, dtype=dtype), drawn(*kv, dtype=dtype), drawn(*kv, dtype=dtype)
    value = value.flip(-2)
    before = fallback_count()
    with count_launches() as launches, warnings.catch_warnings():
        warnings.simplefilter("error")
        output = sdpa(query, key, value, **arguments, strict=True)
    assert launches.emulator == 1
    assert fallback_count() == before
    assert_same(output, query, key, value, **arguments)


def test_the_output_is_laid_out_as_pytorchs() -> None:
    q = drawn(2, 3, 20, 32)
    assert sdpa(q, q, q).stride() == (20 * 3 * 32, 32, 3 * 32, 1)


def test_heads_and_lengths_may_be_swapped_in_memory() -> None:
    q, k, v = (drawn(2, 20, 3, 32, seed=seed).transpose(1, 2) for seed in range(3))
    assert_same(sdpa(q, k, v, strict=True), q, k, v)


MASK = torch.ones(20, 20).tril().bool()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"attn_mask": MASK}, "attn_mask: a mask tensor"),
        ({"attn_mask": torch.zeros(20, 20, dtype=torch.float16)}, "attn_mask: a mask tensor"),
        ({"scale": -0.5}, "scale: -0.5"),
    ],
)
def test_not_served_by_its_arguments(arguments: dict[str, Any], reason: str) -> None:
    q = drawn(1, 2, 20, 32)
    with pytest.raises(ArgumentError, match=reason), count_launches() as launches:
        sdpa(q, q, q, **arguments, strict=True)
    with pytest.warns(FallbackWarning, match=reason):
        output = sdpa(q, q, q, **arguments)
    assert launches.total == 0
    assert torch.equal(output, pytorch_sdpa(q, q, q, **arguments))


def test_dropout_is_left_to_pytorch() -> None:
    q = drawn(1, 2, 20, 32)
    with pytest.warns(FallbackWarning, match=r"dropout_p: 0\.5"):
        output = sdpa(q, q, torch.ones_like(q), dropout_p=0.5)
    assert output.std() > 0.01


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([drawn(1, 2, 20, 32, dtype=torch.float32)] * 3, "query: dtype float32"),
        ([drawn(1, 2, 20, 59)] * 3, "query: d 59"),
        ([drawn(1, 2, 20, 264)] * 3, "query: d 264"),
        ([drawn(1, 2, 20, 32)] * 2 + [drawn(1, 2, 20, 64)], "value: d 64"),
        ([drawn(2, 1, 2, 20, 32)] * 3, "query: shape"),
        ([drawn(1, 2, 32, 20).transpose(2, 3)] * 3, "query: stride 20 of the last"),
        ([drawn(1, 2, 20, 36)[..., 2:34]] * 3, "query: address"),
        ([drawn(1, 2, 20, 36)[..., :32]] * 3, "query: stride 36"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_not_served_by_its_tensors(tensors: list[Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=f"{reason}.*strict=False leaves"):
        sdpa(*tensors, strict=True)
    with pytest.warns(FallbackWarning, match=reason):
        output = sdpa(*tensors)
    assert torch.equal(output, pytorch_sdpa(*tensors))


def test_what_pytorch_refuses_it_refuses_itself() -> None:
    q, k = drawn(1, 3, 20, 32), drawn(1, 2, 20, 32)
    with pytest.warns(FallbackWarning, match="key: 2 heads"), pytest.raises(RuntimeError):
        sdpa(q, k, k)


def test_gradients_are_left_to_pytorch() -> None:
    q, k, v = (drawn(1, 2, 20, 32, dtype=torch.float32, seed=seed) for seed in range(3))
    k = k.half().float()
    gradients = []
    for function in (pytorch_sdpa, sdpa):
        ours = [tensor.half().requires_grad_() for tensor in (q, k, v)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            function(*ours).sum().backward()
        gradients.append([tensor.grad for tensor in ours])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    tensors = [tensor.half() for tensor in (q, k, v)]
    tensors[1].requires_grad_()
    with pytest.raises(ArgumentError, match="key: requires grad"):
        sdpa(*tensors, strict=True)
    with torch.no_grad():
        assert_same(sdpa(*tensors, strict=True), *tensors)


def test_one_warning_for_one_reason() -> None:
    q, before = drawn(1, 2, 20, 32, dtype=torch.float32), fallback_count()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            sdpa(q, q, q)
        sdpa(q.half(), q.half(), q.half(), attn_mask=MASK)
    assert [warning.category for warning in caught] == [FallbackWarning] * 2
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert fallback_count() == before + 4


def test_in_the_place_of_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that calls torch.nn.functional's finds ours there, and a fallback does not come back."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    q = drawn(1, 2, 20, 32, dtype=torch.float32)
    with pytest.warns(FallbackWarning):
        output = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(output, pytorch_sdpa(q, q, q, is_causal=True))


def test_autocast_means_what_it_means_to_pytorch() -> None:
    q, k, v = (drawn(1, 2, 20, 32, dtype=torch.float32, seed=seed) for seed in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = sdpa(q, k, v, strict=True)
        assert output.dtype is pytorch_sdpa(q, k, v).dtype is torch.bfloat16
    assert_same(output, q.bfloat16(), k.bfloat16(), v.bfloat16())


def test_what_would_take_too_long_in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashsmith.integrations import sdpa as module

    def attention(*_: Any, **__: Any) -> None:
        raise EmulationTooLongError("emulating it is estimated to take 99 s")

    monkeypatch.setattr(module, "attention", attention)
    q = drawn(1, 2, 20, 32)
    with pytest.warns(FallbackWarning, match="query: emulating it is estimated to take 99 s"):
        assert torch.equal(sdpa(q, q, q), pytorch_sdpa(q, q, q))
    with pytest.raises(ArgumentError, match="99 s"):
        sdpa(q, q, q, strict=True)


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashsmith.errors import KernelNotBuiltError
    from flashsmith.integrations import sdpa as module

    def attention(*_: Any, **__: Any) -> None:
        raise KernelNotBuiltError("build it")

    monkeypatch.setattr(module, "attention", attention)
    q = drawn(1, 2, 20, 32)
    with pytest.raises(KernelNotBuiltError):
        sdpa(q, q, q)
