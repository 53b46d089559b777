"""sdpa() and FlashAttention's functions, repeated: looked up by their own arguments. No GPU: host
tensors pass for one's."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import flashsmith
from flashsmith import chooser
from flashsmith.errors import ArgumentError
from flashsmith.runtime import forget_cached_launches, forward_pass

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from cached_calls import events, half, offsets, qkv, refuse_checks, without_addresses  # noqa: E402
from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402

from flashsmith.integrations import fallbacks, flash_attn, saved_call, sdpa  # noqa: E402
from flashsmith.runtime import backward_pass, decode_pass  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


@pytest.fixture
def untranslated(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on a call that is translated or checked fails."""

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("the call was translated")

    def start() -> None:
        refuse_checks(monkeypatch, forward_pass, decode_pass, backward_pass)
        monkeypatch.setattr(sdpa, "_by_kernel", refuse)
        monkeypatch.setattr(flash_attn, "Translated", refuse)
        monkeypatch.setattr(saved_call, "run_backward", refuse)

    return start


def outside(seq_q: int = 64, seq_k: int = 64, heads: int = 4, heads_k: int = 4) -> list[Any]:
    """q, k and v of (batch, heads, length, d), dense."""
    return [half(2, n, s, 64) for n, s in ((heads, seq_q), (heads_k, seq_k), (heads_k, seq_k))]


def inside(*sizes: int) -> list[Any]:
    """The same, as views of (batch, length, heads, d)."""
    return [tensor.transpose(1, 2) for tensor in qkv(*sizes)]


def over_pages(**others: Any) -> dict[str, Any]:
    return {
        **{"q": half(2, 1, 4, 64), "k_cache": half(8, 64, 4, 64), "v_cache": half(8, 64, 4, 64)},
        **{"cache_seqlens": offsets(70).new_tensor([70, 100])},
        **{"page_table": torch.arange(8, dtype=torch.int32).view(2, 4), **others},
    }


def packed(**others: Any) -> dict[str, Any]:
    tensors = {name: it.flatten(0, 1) for name, it in zip("qkv", qkv(), strict=True)}
    at = {"cu_seqlens_q": offsets(100, 28), "cu_seqlens_k": offsets(28, 100)}
    return {**tensors, **at, "max_seqlen_q": 100, "max_seqlen_k": 100, **others}


def dense(**others: Any) -> dict[str, Any]:
    return {**dict(zip("qkv", qkv(), strict=True)), **others}


def of_sdpa(make: Callable[..., list[Any]], *sizes: int, **others: Any) -> dict[str, Any]:
    return {**dict(zip(("query", "key", "value"), make(*sizes), strict=True)), **others}


CALLS: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    "sdpa": (flashsmith.sdpa, partial(of_sdpa, outside)),
    "sdpa, heads inside": (flashsmith.sdpa, partial(of_sdpa, inside)),
    "sdpa, causal": (flashsmith.sdpa, partial(of_sdpa, inside, is_causal=True)),
    "sdpa, fewer queries": (flashsmith.sdpa, partial(of_sdpa, inside, 37, 90, is_causal=True)),
    "sdpa, more queries": (flashsmith.sdpa, partial(of_sdpa, inside, 90, 37, is_causal=True)),
    "sdpa, groups": (flashsmith.sdpa, partial(of_sdpa, outside, 64, 64, 4, 2, enable_gqa=True)),
    "sdpa, one head": (flashsmith.sdpa, partial(of_sdpa, outside, 64, 64, 4, 1)),
    "sdpa, one batch": (
        flashsmith.sdpa,
        lambda: of_sdpa(outside, key=half(1, 4, 64, 64), value=half(1, 4, 64, 64)),
    ),
    "sdpa, scaled": (flashsmith.sdpa, partial(of_sdpa, inside, scale=0.25, bits="canonical")),
    "func": (flashsmith.flash_attn_func, dense),
    "func, all": (
        flashsmith.flash_attn_func,
        lambda: dense(
            **{"causal": True, "window_size": (9, -1), "softcap": 5.0, "deterministic": True},
            **{"return_attn_probs": True, "s_aux": torch.zeros(4), "num_splits": 1},
        ),
    ),
    "varlen": (flashsmith.flash_attn_varlen_func, packed),
    "varlen, lse": (
        flashsmith.flash_attn_varlen_func,
        partial(packed, causal=True, return_attn_probs=True),
    ),
    "kvcache": (flashsmith.flash_attn_with_kvcache, partial(over_pages, causal=True)),
    "kvcache, lse": (
        flashsmith.flash_attn_with_kvcache,
        partial(over_pages, return_softmax_lse=True, num_splits=0),
    ),
}


def facts(outputs: Any) -> list[Any]:
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    return [it if it is None else (it.shape, it.stride(), it.dtype) for it in every]


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_launches_the_same_elsewhere(
    name: str, gpu: PretendedGpu, untranslated: Callable[[], None]
) -> None:
    call, make = CALLS[name]
    first, second = make(), make()
    translated = call(**first)
    untranslated()
    outputs = call(**second)
    assert facts(outputs) == facts(translated)
    before, after = gpu.launches
    assert without_addresses(before) == without_addresses(after)
    own = {it.data_ptr() for it in (*second.values(), *_tensors(outputs)) if torch.is_tensor(it)}
    assert own >= {address for address in after.addresses if address}
    assert own.isdisjoint({address for address in before.addresses if address})


def _tensors(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


class StandIn:
    """Computes what the kernels compute, with dense (batch, length, heads, d) memory at the
    addresses of a launch."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def at(self, address: int) -> Any:
        """A (batch, heads, length, d) view of the memory."""
        memory = (ctypes.c_char * (2 * math.prod(self.shape))).from_address(address)
        return np.frombuffer(memory, np.float16).reshape(self.shape).swapaxes(1, 2)

    def __call__(self, stream: int, *at: int) -> None:
        # Repeated calls leave zeros at the end out: the forward pass has 5 or 11 addresses.
        is_backward = len(at) in (9, 14)
        given = at[1:4] if is_backward else at[:3]
        q, k, v = (self.at(it).astype(np.float64) for it in given)
        scale = q.shape[-1] ** -0.5
        weights = np.exp(q @ k.swapaxes(-1, -2) * scale)
        weights /= weights.sum(-1, keepdims=True)
        if not is_backward:
            self.at(at[3])[...] = weights @ v
            return
        do = self.at(at[0]).astype(np.float64)
        dp = do @ v.swapaxes(-1, -2)
        ds = weights * (dp - (dp * weights).sum(-1, keepdims=True)) * scale
        self.at(at[6])[...] = ds @ k
        self.at(at[7])[...] = ds.swapaxes(-1, -2) @ q
        self.at(at[8])[...] = weights.swapaxes(-1, -2) @ do


def drawn(count: int, seed: int) -> list[Any]:
    """Views (batch, heads, length, d) of random dense (batch, length, heads, d) tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, 24, 4, 64, generator=generator).half().transpose(1, 2) for _ in range(count)
    ]


def both(call: Any, tensors: list[Any], do: Any) -> list[Any]:
    """The output and the gradients of q, k and v."""
    leaves = [it.detach().requires_grad_() for it in tensors]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@pytest.mark.parametrize("expanded", [False, True], ids=["do", "expanded do"])
def test_repeated_gradients_are_right(
    expanded: bool, gpu: PretendedGpu, untranslated: Callable[[], None]
) -> None:
    gpu.launcher = StandIn(2, 24, 4, 64)
    for seed in range(4):
        *tensors, do = drawn(4, seed)
        if expanded:
            do = do[:, :, :1].expand(do.shape)  # a dense copy is made of it
        if seed == 2:
            untranslated()
        found = both(flashsmith.sdpa, tensors, do)
        expected = both(sdpa.pytorch_sdpa, [it.float() for it in tensors], do.float())
        for one, other, like in zip(found, expected, (tensors[0], *tensors), strict=True):
            assert one.stride() == like.stride()
            torch.testing.assert_close(one.float(), other, rtol=2e-3, atol=2e-3)


def test_some_gradients_of_a_repeated_call(
    gpu: PretendedGpu, untranslated: Callable[[], None]
) -> None:
    for turn in range(4):
        if turn == 2:
            untranslated()
        q, k, v = inside()
        k.requires_grad_()
        flashsmith.sdpa(q, k, v).backward(half(2, 4, 64, 64))
        assert q.grad is v.grad is None
        assert k.grad.shape == k.shape


def test_second_derivatives_of_a_repeated_call_are_refused(gpu: PretendedGpu) -> None:
    for _ in range(3):
        q, k, v = (it.requires_grad_() for it in inside())
        out = flashsmith.sdpa(q, k, v)
        (dq,) = torch.autograd.grad(out, q, half(2, 4, 64, 64), create_graph=True)
        with pytest.raises(ArgumentError, match="second derivative"):
            dq.sum().backward()


def test_hooks_see_a_repeated_call(gpu: PretendedGpu) -> None:
    saved, seen = [], []
    for _ in range(2):
        q, k, v = (it.requires_grad_() for it in inside())
        with torch.autograd.graph.saved_tensors_hooks(
            lambda it: saved.append(it.shape) or it, lambda it: it
        ):
            out = flashsmith.sdpa(q, k, v)
        out.register_hook(lambda gradient: seen.append(gradient.shape))
        out.backward(half(2, 4, 64, 64))
    assert len(saved) == 10
    assert seen == [out.shape] * 2


def made_by_kernel(gpu: PretendedGpu, call: Callable[[], Any]) -> bool:
    """Whether a call launches a kernel; else it falls back to PyTorch."""
    launches, count = len(gpu.launches), fallbacks.fallback_count()
    call()
    launched = len(gpu.launches) - launches
    assert launched + fallbacks.fallback_count() - count == 1
    return bool(launched)


@pytest.mark.filterwarnings("ignore::flashsmith.integrations.fallbacks.FallbackWarning")
@pytest.mark.parametrize("grown", [False, True], ids=["inference", "gradients"])
def test_what_falls_back_does_so_after_repeated_calls(grown: bool, gpu: PretendedGpu) -> None:
    def call(*tensors: Any, **keywords: Any) -> bool:
        given = tensors or inside()
        for tensor in given:
            tensor.requires_grad_(grown)
        return made_by_kernel(gpu, lambda: flashsmith.sdpa(*given, **keywords))

    def odd() -> Any:
        return half(2 * 64 * 4 * 64 + 1)[1:].view(2, 64, 4, 64).transpose(1, 2)

    assert call()
    assert call()
    assert not call(dropout_p=0.5)
    assert not call(odd(), *inside()[1:])
    assert not call(*inside()[:2], odd())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not call()
    for dtype in (torch.float32, torch.float64):
        assert not call(*(it.to(dtype) for it in inside()))
    assert not call(*(it.as_subclass(Subclass) for it in inside()))
    assert call()


class Subclass(torch.Tensor):
    """A tensor whose operations may be anything."""


@pytest.mark.filterwarnings("ignore::flashsmith.integrations.fallbacks.FallbackWarning")
def test_transforms_and_tracers_see_repeated_calls(gpu: PretendedGpu) -> None:
    call = flashsmith.sdpa
    for _ in range(2):
        call(*inside())
    count = fallbacks.fallback_count()
    torch.vmap(call)(*(it.unsqueeze(0) for it in inside()))
    torch.jit.trace(call, tuple(inside()), check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        call(*inside())
    assert fallbacks.fallback_count() == count + 3
    launches = len(gpu.launches)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*inside()).dtype is torch.bfloat16
    assert gpu.launches[launches].config.dtype is not gpu.launches[0].config.dtype


def test_autograd_switched_on_or_off_after_repeated_calls(gpu: PretendedGpu) -> None:
    for first in (False, True):
        forget_cached_launches()
        for turn in range(4):
            for grown in (first, not first):
                with torch.set_grad_enabled(turn != 2):
                    q, k, v = (it.requires_grad_(grown) for it in inside())
                    out = flashsmith.sdpa(q, k, v)
                    assert out.requires_grad == (grown and turn != 2)


def test_gradients_become_repeatable_when_pytorch_asks(gpu: PretendedGpu) -> None:
    def config() -> Any:
        both(flashsmith.sdpa, [half(2, 4, 512, 128) for _ in range(3)], half(2, 4, 512, 128))
        return gpu.launches[-1].config

    usual = [config() for _ in range(3)]
    torch.use_deterministic_algorithms(True)
    try:
        repeatable = [config() for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for found in (usual, repeatable):
        assert len({*found}) == 1
    assert repeatable[0].family.is_deterministic(repeatable[0])
    assert not usual[0].family.is_deterministic(usual[0])


def prepared(gpu: PretendedGpu, call: Callable[[], Any]) -> Any:
    """The last launch's arguments, without addresses."""
    call()
    return without_addresses(gpu.launches[-1])


def test_what_may_change_is_read_every_time(gpu: PretendedGpu) -> None:
    window: Any = [5, 0]

    def func() -> Any:
        return flashsmith.flash_attn_func(*qkv(), window_size=window)

    narrow = prepared(gpu, func)
    assert prepared(gpu, func) == narrow
    window[0] = 9
    wide = prepared(gpu, func)
    window = (9, 0)
    assert prepared(gpu, func) == wide != narrow


def test_lengths_beside_the_lengths_are_compared_every_time(gpu: PretendedGpu) -> None:
    given = over_pages(rotary_cos=torch.ones(256, 32), rotary_sin=torch.zeros(256, 32))
    given |= {name: half(2, 1, 4, 64) for name in "kv"}
    lens = given["cache_seqlens"].clone()
    for _ in range(3):
        flashsmith.flash_attn_with_kvcache(**given, rotary_seqlens=lens)
    lens += 1
    with pytest.raises(ArgumentError, match="rotary_seqlens"):
        flashsmith.flash_attn_with_kvcache(**given, rotary_seqlens=lens)


def test_keywords_without_effect_stay_refused_with_one(gpu: PretendedGpu) -> None:
    for _ in range(3):
        flashsmith.flash_attn_func(*qkv(), attention_chunk=0)
    for refused in ({"attention_chunk": 1}, {"attention_chunk": False, "causl": True}):
        with pytest.raises(ArgumentError):
            flashsmith.flash_attn_func(*qkv(), **refused)


def test_arguments_that_are_no_tensors_are_refused_after_repeated_calls(gpu: PretendedGpu) -> None:
    for _ in range(3):
        flashsmith.flash_attn_func(*qkv())
        flashsmith.flash_attn_func(**dense())
    for wrong in ((), (None, None, None), ("q", "k", "v"), (*qkv()[:2], 1)):
        with pytest.raises((ArgumentError, TypeError)):
            flashsmith.flash_attn_func(*wrong)
    with pytest.raises((ArgumentError, TypeError)):
        flashsmith.flash_attn_func(causal=True, **dense(q=None))


def as_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"cache_lens" if it == "cache_seqlens" else it: a for it, a in arguments.items()}


def grown(tensors: list[Any]) -> list[Any]:
    return [it.requires_grad_() for it in tensors]


# Each beside the call of attention() or attention_with_cache() that it stands for.
PAIRS: dict[str, Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "sdpa": lambda: (
        partial(flashsmith.sdpa, *inside(), is_causal=True),
        partial(flashsmith.attention, *qkv(), causal=True),
    ),
    "sdpa, gradients": lambda: (
        partial(both, flashsmith.sdpa, inside(), half(2, 4, 64, 64)),
        partial(both, flashsmith.attention, qkv(), half(2, 64, 4, 64)),
    ),
    "func": lambda: (
        partial(flashsmith.flash_attn_func, *qkv(), causal=True),
        partial(flashsmith.attention, *qkv(), causal=True),
    ),
    "func, gradients": lambda: (
        partial(both, flashsmith.flash_attn_func, qkv(), half(2, 64, 4, 64)),
        partial(both, flashsmith.attention, qkv(), half(2, 64, 4, 64)),
    ),
    "varlen": lambda: (
        partial(flashsmith.flash_attn_varlen_func, **packed(causal=True)),
        partial(flashsmith.attention, **packed(causal=True)),
    ),
    "kvcache": lambda: (
        partial(flashsmith.flash_attn_with_kvcache, **over_pages()),
        partial(flashsmith.attention_with_cache, **as_cache(over_pages())),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_repeated_call_enters_as_few_functions_as_attention(name: str, gpu: PretendedGpu) -> None:
    ours, attention = PAIRS[name]()
    gpu.launcher = lambda stream, *at: None
    first = events(ours)
    for call in (ours, attention) * 2:
        call()
    assert events(ours) <= events(attention) + 4 < first / 2


def test_arrays_after_repeated_calls_of_tensors(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (flashsmith.attention, flashsmith.flash_attn_func):
        for _ in range(2):
            call(*qkv(), causal=True)
        launches = len(gpu.launches)
        arrays = [tensor.numpy() for tensor in qkv()]
        with pytest.raises(ArgumentError, match="k: "):
            call(qkv()[0], *arrays[1:], causal=True)
        with monkeypatch.context() as patch:
            patch.setattr(chooser, "attention", lambda *given, **keywords: "of arrays")
            assert call(*arrays, causal=True) == "of arrays"
        assert len(gpu.launches) == launches
