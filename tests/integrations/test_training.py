"""Training on the kernels through PyTorch's and FlashAttention's functions and transformers.

Gradients are at most twice as far from those in float32 as PyTorch's own of the same precision.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import shared_kernels

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

import padded_attention  # noqa: E402
from gradients import assert_within_twice, parameter_gradients  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.integrations.sdpa import pytorch_sdpa  # noqa: E402
from flashsmith.runtime.launch_counter import count_launches  # noqa: E402

CAUSAL = "b2 s20 h4:2 d64 fp16 causal uneven"
WINDOW = "b3 s11 h2:1 d64 fp16 window softcap packed uneven"
shared_kernels.want_chosen(CAUSAL, WINDOW)
shared_kernels.want_chosen(*(f"{text} backward" for text in (CAUSAL, WINDOW)))


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).half()


def gradients_of(function: Callable[..., Any], tensors: Any, dtype: Any = None) -> list[Any]:
    """The gradients of a sum of function's outputs, each weighted at random."""
    leaves = [tensor.detach().clone().to(dtype or tensor.dtype) for tensor in tensors]
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [drawn(*output.shape, seed=9).to(output) for output in outputs]
    torch.autograd.backward(outputs, weights)
    return [leaf.grad for leaf in leaves]


def check(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    tensors: Any,
    honest: Callable[..., Any] | None = None,
) -> list[Any]:
    """Our gradients, after the rule's judgement; ``theirs`` in float32 are the exact ones, and
    ``honest``, or theirs too, computes in 16 bits."""
    with count_launches() as launches, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradients_of(ours, tensors)
    assert launches.total >= 3
    exact = gradients_of(theirs, tensors, torch.float32)
    assert_within_twice(found, exact, gradients_of(honest or theirs, tensors))
    return found


# --- PyTorch's function --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "kv", "arguments"),
    [
        ((2, 4, 20, 64), (2, 2, 20, 64), {"enable_gqa": True}),
        ((1, 2, 20, 64), (1, 2, 45, 64), {}),
        ((4, 2, 20, 64), (1, 1, 20, 64), {"scale": 0.3}),
        ((2, 20, 64), (2, 20, 64), {}),
        # A repeatable kernel is chosen for four heads that share keys.
        pytest.param((2, 4, 20, 64), (1, 1, 20, 64), {"scale": 0.3}, marks=pytest.mark.full),
        pytest.param((1, 2, 45, 64), (1, 2, 20, 64), {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sdpa(q: Any, kv: Any, arguments: dict[str, Any]) -> None:
    """Aligned to the top left, where longer keys have gradients of 0, and broadcast."""

    def ours(*tensors: Any) -> Any:
        return flashsmith.sdpa(*tensors, is_causal=True, strict=True, emulate=True, **arguments)

    def theirs(*tensors: Any) -> Any:
        return pytorch_sdpa(*tensors, is_causal=True, **arguments)

    def honest(*tensors: Any) -> Any:
        q, k, v = (tensor.view(-1, *tensor.shape[-3:]).transpose(1, 2) for tensor in tensors)
        k, v = (tensor[:, : q.shape[1]].expand(len(q), -1, -1, -1) for tensor in (k, v))
        window = (None, q.shape[1] - k.shape[1])
        scale = arguments.get("scale")
        o = padded_attention.attention(q, k, v, window=window, scale=scale)
        return o.transpose(1, 2).view(tensors[0].shape)

    tensors = [drawn(*q), drawn(*kv, seed=1), drawn(*kv, seed=2)]
    _, dk, dv = check(ours, theirs, tensors, honest)
    unseen = dk[..., q[-2] :, :], dv[..., q[-2] :, :]
    assert not any(gradient.any() for gradient in unseen)


def test_gradients_of_one_tensor_alone() -> None:
    """Frozen keys and values, as adapters have them."""
    q, k, v = (drawn(2, 4, 20, 64, seed=seed) for seed in range(3))
    q.requires_grad_()
    output = flashsmith.sdpa(q, k, v, is_causal=True, strict=True, emulate=True)
    output.sum().backward()
    assert q.grad is not None
    assert k.grad is v.grad is None
    with torch.no_grad():
        assert not flashsmith.sdpa(q, k, v, is_causal=True, emulate=True).requires_grad


def test_the_gradient_of_torch_func() -> None:
    q, k, v = (drawn(2, 4, 20, 64, seed=seed) for seed in range(3))

    def loss(q: Any) -> Any:
        o = flashsmith.sdpa(q, k, v, is_causal=True, strict=True, emulate=True)
        return o.float().square().sum()

    with count_launches() as launches:
        gradient = torch.func.grad(loss)(q)
    assert launches.total >= 3
    q.requires_grad_()
    loss(q).backward()
    assert torch.equal(gradient, q.grad)


def test_autocast_gives_gradients_of_the_weights_dtype() -> None:
    q, k, v = (drawn(2, 4, 20, 64, seed=seed).float().requires_grad_() for seed in range(3))
    with torch.autocast("cpu", dtype=torch.float16):
        output = flashsmith.sdpa(q, k, v, is_causal=True, strict=True, emulate=True)
    output.float().sum().backward()
    assert q.grad.dtype is k.grad.dtype is v.grad.dtype is torch.float32
    assert v.grad.any()


# --- FlashAttention's functions ------------------------------------------------------------------


def test_flash_attn_func_and_its_statistics() -> None:
    def ours(q: Any, k: Any, v: Any) -> Any:
        return flashsmith.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]

    def theirs(q: Any, k: Any, v: Any) -> Any:
        k, v = (tensor.repeat_interleave(2, dim=2) for tensor in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 64**-0.5
        scores = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
        o = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)
        return o, torch.logsumexp(scores.float(), -1)

    check(ours, theirs, [drawn(2, 20, heads, 64, seed=heads) for heads in (4, 2, 2)])


def test_flash_attn_varlen_func_on_a_fused_tensor() -> None:
    starts = torch.tensor([0, 7, 7, 20], dtype=torch.int32)

    def ours(qkv: Any) -> Any:
        return flashsmith.flash_attn_varlen_func(
            *qkv.unbind(1), starts, starts, 13, 13, window_size=(4, 0), softcap=3.0
        )

    def theirs(qkv: Any) -> Any:
        return padded_attention.attention(
            *qkv.unbind(1),
            window=(4, 0),
            softcap=3.0,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=13,
            max_seqlen_k=13,
        )

    check(ours, theirs, [drawn(20, 3, 2, 64)])


# --- transformers --------------------------------------------------------------------------------


@pytest.fixture
def models() -> Any:
    pytest.importorskip("transformers", reason="needs transformers: it is not installed")
    import tiny_models

    from flashsmith.integrations import transformers as ours

    ours.register(strict=True, emulate=True)
    yield tiny_models
    ours.register()


def judge_model(models: Any, model: Any, dtype: Any, lengths: list[int]) -> dict[str, Any]:
    """Our gradients of all parameters in ``dtype``, after the rule's judgement against eager
    attention."""
    mask, tokens = (
        models.padding(lengths, "left").to(model.device),
        models.tokens().to(model.device),
    )

    def loss(model: Any) -> Any:
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False)[0]
        labels = tokens.masked_fill(mask == 0, -100)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    exact = parameter_gradients(model, loss)
    model = model.to(dtype)
    rounded = parameter_gradients(model, loss)
    model.config._attn_implementation = "flashsmith"
    with count_launches() as launches:
        ours = parameter_gradients(model, loss)
    assert launches.total >= 3 * model.config.num_hidden_layers
    assert ours.keys() == exact.keys()
    # Few numbers, each a sum of all rows' errors: too few for a rule that compares errors.
    sinks = [name for name in exact if name.endswith("sinks")]
    for name in sinks:
        error = (ours[name] - exact[name]).norm()
        assert error <= 4 * torch.finfo(dtype).eps * exact[name].norm()
    names = [name for name in exact if name not in sinks]
    columns = ([gradients[name] for name in names] for gradients in (ours, exact, rounded))
    assert_within_twice(*columns, names=names)
    return dict(ours)


SLIDING = {"layer_types": ["sliding_attention"] * 2, "head_dim": 64}


def test_a_padded_batch_with_windows_and_softcaps(models: Any) -> None:
    judge_model(models, models.tiny("gemma2", **SLIDING), torch.float16, [models.LENGTH, 5, 8])


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_padded_batches(name: str, dtype: Any, models: Any) -> None:
    gradients = judge_model(models, models.tiny(name), dtype, [models.LENGTH, 5, 8])
    if name == "gpt_oss":
        assert gradients["model.layers.1.self_attn.sinks"].all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_padded_batches_on_a_gpu(name: str, models: Any) -> None:
    judge_model(models, models.tiny(name).cuda(), torch.bfloat16, [models.LENGTH, 5, 8])


@pytest.mark.full
def test_a_compiled_model(models: Any) -> None:
    model = models.tiny("llama", _attn_implementation="flashsmith").half()
    compiled = torch.compile(model, backend="aot_eager")
    mask = models.padding([models.LENGTH, 5, 8], "left")

    def loss(model: Any) -> Any:
        logits = model(input_ids=models.tokens(), attention_mask=mask, use_cache=False)[0]
        return logits[mask.bool()].float().square().sum()

    expected = parameter_gradients(model, loss)
    with count_launches() as launches:
        loss(compiled).backward()
    assert launches.emulator >= 6
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, 2 * expected[name], atol=1e-2, rtol=1e-2)


class Adapted(torch.nn.Module):
    """A frozen projection and what an adapter of rank 2 adds to it."""

    def __init__(self, projection: Any) -> None:
        super().__init__()
        self.projection = projection
        down, up = torch.randn(2, projection.in_features), torch.randn(projection.out_features, 2)
        self.down, self.up = torch.nn.Parameter(down * 0.1), torch.nn.Parameter(up * 0.1)

    def forward(self, x: Any) -> Any:
        return self.projection(x) + x @ self.down.T @ self.up.T


@pytest.mark.full
def test_adapters_of_the_queries(models: Any) -> None:
    model = models.tiny("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    gradients = judge_model(models, model, torch.float16, [models.LENGTH, 5, 8])
    assert len(gradients) == 4


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, models: Any) -> None:
    model = models.tiny("llama", _attn_implementation="flashsmith").half().train()

    def loss(model: Any) -> Any:
        return model(input_ids=models.tokens(), labels=models.tokens(), use_cache=False).loss

    plain = parameter_gradients(model, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with count_launches() as launches:
        again = parameter_gradients(model, loss)
    # Each layer's forward pass runs twice.
    assert launches.emulator >= 4 * model.config.num_hidden_layers
    assert all(torch.equal(again[name], plain[name]) for name in plain)


@pytest.mark.full
def test_twenty_steps(models: Any) -> None:
    losses = {}
    for implementation in ("eager", "flashsmith"):
        model = models.tiny("llama", _attn_implementation=implementation).bfloat16().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[implementation] = []
        for _ in range(20):
            loss = model(input_ids=models.tokens(), labels=models.tokens(), use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[implementation].append(loss.item())
    assert losses["flashsmith"][-1] < 0.5 * losses["flashsmith"][0]
    torch.testing.assert_close(
        torch.tensor(losses["flashsmith"]), torch.tensor(losses["eager"]), rtol=0.05, atol=0.05
    )
