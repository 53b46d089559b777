"""torch.nn.attention's registry of flash implementations, with flashsmith's activated."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

import padded_attention  # noqa: E402
from gradients import assert_within_twice  # noqa: E402
from torch.nn import attention as registry  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from flashsmith.errors import ArgumentError, DependencyError  # noqa: E402
from flashsmith.integrations import flash_registry  # noqa: E402
from flashsmith.integrations.fallbacks import FallbackWarning, fallback_count  # noqa: E402
from flashsmith.runtime.launch_counter import count_launches  # noqa: E402

CAUSAL = "b2 s20 h2 d64 fp16 causal uneven"
shared_kernels.want_chosen(CAUSAL, f"{CAUSAL} backward")


@pytest.fixture
def activated() -> Iterator[None]:
    flash_registry.register(emulate=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.activate_flash_attention_impl("flashsmith")
    yield
    registry.restore_flash_attention_impl()


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).half()


def exactly(*tensors: Any, **arguments: Any) -> Any:
    """PyTorch's result in float32, by an implementation that no registry has a part in."""
    with registry.sdpa_kernel(registry.SDPBackend.MATH):
        return scaled_dot_product_attention(*(tensor.float() for tensor in tensors), **arguments)


def mixed(x: Any, layer: Any) -> Any:
    """A decoder's layer of torch.nn.MultiheadAttention."""
    mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return layer(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]


def gradients(dtype: Any) -> list[Any]:
    """Of a layer's input and parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.MultiheadAttention(128, 2, batch_first=True).to(dtype)
    x = drawn(2, 20, 128).to(dtype).requires_grad_()
    (mixed(x, layer) * drawn(2, 20, 128, seed=1)).sum().backward()
    return [x.grad, *(weight.grad for weight in layer.parameters())]


def test_multihead_attention_trains(activated: None) -> None:
    assert registry.current_flash_attention_impl() == "flashsmith"
    before = fallback_count()
    with count_launches() as launches:
        ours = gradients(torch.float16)
    assert launches.emulator >= 3
    assert fallback_count() == before
    registry.restore_flash_attention_impl()
    with count_launches() as launches:
        theirs = gradients(torch.float16)
    assert launches.total == 0
    assert_within_twice(ours, gradients(torch.float32), theirs)
    # Not a copy of PyTorch's.
    assert not torch.equal(ours[0], theirs[0])
    registry.activate_flash_attention_impl("flashsmith")


def test_what_the_kernels_cannot_compute_is_left_to_pytorch(activated: None) -> None:
    q, short = drawn(2, 2, 20, 64), drawn(2, 2, 13, 64)
    mask = torch.ones(20, 20).tril().bool()
    for arguments, reason in (
        ({"attn_mask": mask}, "attn_mask: a mask tensor"),
        ({"scale": -0.5}, r"scale: -0\.5"),
    ):
        with count_launches() as launches, pytest.warns(FallbackWarning, match=reason):
            output = scaled_dot_product_attention(q, q, q, **arguments)
        exact = exactly(q, q, q, **arguments)
        torch.testing.assert_close(output.float(), exact, atol=2e-3, rtol=2e-3)
        assert launches.total == 0
    with pytest.warns(FallbackWarning, match="is_causal: with different lengths of query"):
        output = scaled_dot_product_attention(q, short, short, is_causal=True)
    exact = exactly(q, short, short, is_causal=True)
    torch.testing.assert_close(output.float(), exact, atol=2e-3, rtol=2e-3)


def test_host_tensors_are_left_to_pytorch_unless_asked_for(
    activated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHSMITH_EMULATE", raising=False)
    flash_registry.register()
    registry.activate_flash_attention_impl("flashsmith")
    q = drawn(2, 2, 20, 64).requires_grad_()
    with count_launches() as launches, pytest.warns(FallbackWarning, match="query: on the host"):
        scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert launches.total == 0
    assert q.grad.any()


@pytest.mark.full
@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_sequences(is_causal: bool, activated: None) -> None:
    """PyTorch has no kernel for these on the host."""
    starts = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    window = (-1, 0) if is_causal else (-1, -1)

    def ours(q: Any, k: Any, v: Any) -> Any:
        o, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, 13, 13, 0.0, is_causal, False,
            window_size_left=window[0], window_size_right=window[1],
        )  # fmt: skip
        return o

    def one_by_one(q: Any, k: Any, v: Any) -> Any:
        pieces = []
        for first, last in ((0, 7), (7, 20)):
            one = (tensor[first:last].transpose(0, 1) for tensor in (q, k, v))
            pieces.append(exactly(*one, is_causal=is_causal).transpose(0, 1))
        return torch.cat(pieces)

    def rounded(q: Any, k: Any, v: Any) -> Any:
        packing = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        longest = {"max_seqlen_q": 13, "max_seqlen_k": 13}
        return padded_attention.attention(q, k, v, causal=is_causal, **packing, **longest)

    found = []
    for function, dtype in (
        (ours, torch.float16),
        (one_by_one, torch.float32),
        (rounded, torch.float16),
    ):
        leaves = [drawn(20, 2, 64, seed=seed).to(dtype).requires_grad_() for seed in range(3)]
        function(*leaves).backward(drawn(20, 2, 64, seed=9).to(dtype))
        found.append([leaf.grad for leaf in leaves])
    assert_within_twice(*found)
    q, options = drawn(20, 2, 64), {"seqused_k": starts[1:]}
    with pytest.raises(ArgumentError, match="seqused_k: the kernels have no such argument; and"):
        torch.ops.aten._flash_attention_forward(
            q, q, q, starts, starts, 13, 13, 0.0, True, False, **options
        )


def described(results: Any) -> list[Any]:
    return [
        (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one
        for one in results
    ]


# Packed in memory by rows, by heads, and as parts of one tensor.
LAYOUTS = {
    "rows": lambda: [drawn(2, 20, 2, 64, seed=seed).transpose(1, 2) for seed in range(3)],
    "heads": lambda: [drawn(2, 2, 20, 64, seed=seed) for seed in range(3)],
    "fused": lambda: list(drawn(2, 20, 3, 2, 64).permute(2, 0, 3, 1, 4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_what_pytorchs_fake_kernels_say(layout: str) -> None:
    """Compiled code trusts them. On host tensors those of GPUs, too, since no others are here."""
    kernels = flash_registry._Activated(emulate=True)
    tensors = LAYOUTS[layout]()
    fake = [
        torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        for one in tensors
    ]
    dense = (0.0, True)
    theirs = torch.ops.aten
    state = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
    on_gpus = kernels._sdpa(*tensors, *dense)
    expected = theirs._scaled_dot_product_flash_attention(*fake, *dense)
    assert described(on_gpus) == described(expected)
    o, lse = on_gpus[:2]
    rest = (None, None, 20, 20, *dense, *state)
    gradients = kernels._sdpa_backward(torch.ones_like(o), *tensors, o, lse, *rest)
    expected = theirs._scaled_dot_product_flash_attention_backward(
        *(expected[0], *fake, *expected[:2], None, None, 20, 20, *dense, *expected[6:8])
    )
    assert described(gradients) == described(expected)

    on_the_host = kernels._sdpa_on_the_host(*tensors, *dense)
    expected = theirs._scaled_dot_product_flash_attention_for_cpu(*fake, *dense)
    assert described(on_the_host) == described(expected)
    gradients = kernels._sdpa_on_the_host_backward(
        torch.ones_like(o), *tensors, *on_the_host, *dense
    )
    expected = theirs._scaled_dot_product_flash_attention_for_cpu_backward(
        expected[0], *fake, *expected, *dense
    )
    assert described(gradients) == described(expected)
    leaves = [one.float().requires_grad_() for one in tensors]
    exactly(*leaves, is_causal=True).sum().backward()
    for ours, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(ours.float(), leaf.grad, atol=4e-3, rtol=4e-3)

    rows, fake_rows = ([one.transpose(1, 2) for one in some] for some in (tensors, fake))
    arguments = (None, None, 20, 20, *dense, False)
    ours = kernels._forward(*rows, *arguments)
    expected = theirs._flash_attention_forward(*fake_rows, *arguments)
    assert described(ours) == described(expected)
    rest = (None, None, 20, 20, *dense, *state)
    gradients = kernels._backward(torch.ones_like(ours[0]), *rows, *ours[:2], *rest)
    expected = [torch.empty_like(one) for one in fake_rows]
    assert described(gradients) == described(expected)
    kernels.remove()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    from torch.nn.attention.varlen import varlen_attn

    flash_registry.register()
    starts = torch.tensor([0, 70, 70, 200], dtype=torch.int32, device="cuda")
    found: dict[str, list[Any]] = {}
    for name in ("flashsmith", "PyTorch"):
        if name == "flashsmith":
            registry.activate_flash_attention_impl(name)
        leaves = [drawn(2, 4, 200, 64, seed=seed).cuda().requires_grad_() for seed in range(3)]
        with (
            registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION),
            count_launches() as launches,
        ):
            dense = scaled_dot_product_attention(*leaves, is_causal=True)
            rows = [leaf[0].transpose(0, 1) for leaf in leaves]
            packed = varlen_attn(*rows, starts, starts, 130, 130)
            (dense.sum() + (packed * packed).sum()).backward()
        assert (launches.gpu >= 6) == (name == "flashsmith")
        found[name] = [dense, packed, *(leaf.grad for leaf in leaves)]
        if name == "flashsmith":
            registry.restore_flash_attention_impl()
    for ours, theirs in zip(found["flashsmith"], found["PyTorch"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_register_refuses_what_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="emulate='yes': allowed are True, False and None"):
        flash_registry.register(emulate="yes")  # type: ignore[arg-type]
    monkeypatch.delattr(registry, "register_flash_attention_impl")
    with pytest.raises(
        DependencyError, match=r"has no registry of flash implementations; .* 2\.11"
    ):
        flash_registry.register()
