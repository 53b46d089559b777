"""bits='canonical' the ways PyTorch's users ask for it: with gradients, compiled, by a variable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

pytest.importorskip("transformers", reason="needs transformers: it is not installed")


import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import parse_kernel_name_into_config as parse  # noqa: E402
from flashsmith.families.canonical import CHUNK  # noqa: E402
from flashsmith.integrations import flash_attn, flash_registry  # noqa: E402
from flashsmith.integrations import transformers as ours  # noqa: E402
from flashsmith.integrations.fallbacks import FallbackWarning  # noqa: E402
from flashsmith.runtime import prepared_call  # noqa: E402

# A kernel that adds up in an order of its own, and one whose dq timing decides.
FREE = parse("(FP16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax")
ATOMIC = parse("(FP16, 64, 64, 64, 4): backward+stages_2+dq_atomics")
PROBLEM = "b1 s20:40 h2:1 d64 fp16 causal"
CANONICAL = flashsmith.choose(f"{PROBLEM} canonical", 80).config
REPEATABLE = flashsmith.choose(f"backward {PROBLEM}", 80, deterministic=True).config
shared_kernels.want_chosen(f"{PROBLEM} uneven canonical", "decode " + PROBLEM + " canonical")
shared_kernels.want([FREE, ATOMIC, REPEATABLE], flashsmith.Semantics("causal", uneven=True))


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).half()


def tensors(*, grows: bool = False) -> tuple[Any, Any, Any]:
    q, k, v = drawn(1, 20, 2, 64), drawn(1, 40, 1, 64, seed=1), drawn(1, 40, 1, 64, seed=2)
    return tuple(it.requires_grad_(grows) for it in (q, k, v))  # type: ignore[return-value]


def attended(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    return flashsmith.attention(
        q, k, v, **{"causal": True, "bits": "canonical", "return_lse": True, **keywords}
    )


def decoded(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    lens = torch.tensor([k.shape[1]], dtype=torch.int32)
    asked = {"cache_lens": lens, "bits": "canonical", "return_lse": True, **keywords}
    return flashsmith.attention_with_cache(q, k, v, **asked)


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def gradients(o: Any, *inputs: Any) -> Any:
    return torch.autograd.grad(o, inputs, drawn(*o.shape, seed=3))


def test_what_trains_has_the_bits_of_what_serves() -> None:
    expected = attended(*tensors())
    assert_same([it.detach() for it in attended(*tensors(grows=True))], expected)
    q, k, v = tensors()
    for rows in (1, 3):
        o, lse = decoded(q[:, -rows:], k, v)
        assert_same((o, lse), (expected[0][:, -rows:], expected[1][..., -rows:]))


def test_gradients_are_those_of_the_canonical_output_by_a_repeatable_kernel() -> None:
    q, k, v = inputs = tensors(grows=True)
    found = gradients(attended(*inputs)[0], *inputs)
    with torch.no_grad():
        o, lse = attended(q, k, v)
        do = drawn(*o.shape, seed=3)
        expected = flashsmith.backward(
            do, q, k, v, o, lse, causal=True, deterministic=True, needs=(True, True, True, False)
        )
    assert_same(found, expected[:3])


def test_repeatable_is_the_default_of_gradients() -> None:
    inputs = tensors(grows=True)
    with pytest.raises(ArgumentError, match=r"deterministic=True: .*dq_atomics"):
        attended(*inputs, backward_config=ATOMIC)
    o, _ = attended(*inputs, backward_config=ATOMIC, deterministic=False)
    assert len(gradients(o, *inputs)) == 3
    o, _ = attended(*inputs, backward_config=ATOMIC, bits="free", config=FREE)
    assert len(gradients(o, *inputs)) == 3


def test_a_config_with_an_order_of_its_own_is_refused_in_a_graph_as_well() -> None:
    with pytest.raises(ArgumentError, match=r"bits='canonical': .* not sum in the canonical order"):
        attended(*tensors(grows=True), config=FREE)
    compiled = torch.compile(attended, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"bits='canonical': .* not sum in the canonical order"):
        compiled(*tensors(), config=FREE)


@pytest.mark.parametrize("function", [attended, decoded])
def test_a_compiled_call_has_the_bits_of_an_eager_one(function: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*tensors()), function(*tensors()))
    # Its op asks for them itself, whatever the variable says when it runs.
    with pytest.raises(Exception, match=r"bits='fast': give 'canonical'"):
        compiled(*tensors(), bits="fast")


def test_compiled_training_has_the_bits_of_eager_training() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    inputs = tensors(grows=True)
    found, expected = compiled(*inputs), attended(*inputs)
    assert_same([it.detach() for it in found], [it.detach() for it in expected])
    assert_same(gradients(found[0], *inputs), gradients(expected[0], *inputs))
    with pytest.raises(Exception, match=r"deterministic=True: .*dq_atomics"):
        compiled(*inputs, backward_config=ATOMIC)


def test_autocast_and_refusals_are_as_without() -> None:
    wide = tuple(it.float() for it in tensors())
    with torch.autocast("cpu", torch.float16):
        assert_same(attended(*wide), attended(*tensors()))
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match=r"inside torch\.vmap"):
        torch.vmap(lambda q: attended(q, k, v))(q[None])


def test_the_variable_asks_for_calls_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = attended(*tensors())
    monkeypatch.setenv("FLASHSMITH_BITS", "canonical")
    assert_same(attended(*tensors(), bits=None), expected)
    for function in (attended, decoded):
        with pytest.raises(ArgumentError, match="does not sum in the canonical order"):
            function(*tensors(), bits=None, config=FREE if function is attended else DECODE)
    inputs = tensors(grows=True)
    with pytest.raises(ArgumentError, match=r"deterministic=True: .*dq_atomics"):
        attended(*inputs, bits=None, backward_config=ATOMIC)
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match=r"deterministic=True: .*dq_atomics"):
        flashsmith.backward(q, q, k, v, *expected, causal=True, config=ATOMIC)
    assert len(attended(*tensors(), bits="free", config=FREE)) == 2


DECODE = parse("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")


def test_parts_are_refused_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"partial": True, "config": FREE, "return_lse": False}
    with pytest.raises(ArgumentError, match="bits='canonical': partial=True merges its parts"):
        attended(*tensors(), **parts)
    monkeypatch.setenv("FLASHSMITH_BITS", "canonical")
    with pytest.raises(
        ArgumentError, match=r"FLASHSMITH_BITS=canonical: partial=True.*bits='free' to this"
    ):
        attended(*tensors(), **parts, bits=None)
    monkeypatch.setenv("FLASHSMITH_BITS", "fast")
    with pytest.raises(ArgumentError, match="FLASHSMITH_BITS='fast': give 'canonical'"):
        attended(*tensors(), bits=None)


# --- the facades ---------------------------------------------------------------------------------


def heads_first(*tensors: Any) -> Any:
    return tuple(it.transpose(1, 2) for it in tensors)


SQUARE = "b1 s20 h2:1 d64 fp16 causal"
shared_kernels.want_chosen(f"{SQUARE} uneven canonical", f"{SQUARE} packed uneven canonical")


def square() -> tuple[Any, Any, Any]:
    q, k, v = tensors()
    return q, k[:, :20].contiguous(), v[:, :20].contiguous()


def by_sdpa(q: Any, k: Any, v: Any, **asked: Any) -> Any:
    keywords = {"is_causal": True, "enable_gqa": True, "emulate": True, **asked}
    return flashsmith.sdpa(*heads_first(q, k, v), **keywords).transpose(1, 2)


def by_func(q: Any, k: Any, v: Any, **asked: Any) -> Any:
    return flash_attn.flash_attn_func(q, k, v, causal=True, **asked)


def by_varlen(q: Any, k: Any, v: Any, **asked: Any) -> Any:
    starts = torch.tensor([0, q.shape[1]], dtype=torch.int32)
    rows = (it.flatten(0, 1) for it in (q, k, v))
    return flash_attn.flash_attn_varlen_func(*rows, starts, starts, causal=True, **asked)[None]


def by_kvcache(q: Any, k: Any, v: Any, **asked: Any) -> Any:
    return flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=k.shape[1], causal=True, num_splits=4, **asked
    )


@contextmanager
def registered(**asked: Any) -> Iterator[None]:
    flash_registry.register(emulate=True, **asked)
    torch.nn.attention.activate_flash_attention_impl("flashsmith")
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def by_registry(q: Any, k: Any, v: Any, **asked: Any) -> Any:
    function = torch.nn.functional.scaled_dot_product_attention
    with registered(**asked):
        o = function(*heads_first(q, k, v), is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


class Layer(torch.nn.Module):
    is_causal = True


def by_transformers(q: Any, k: Any, v: Any, **asked: Any) -> Any:
    ours.register(emulate=True, **asked)
    try:
        return ours.flashsmith_attention_forward(Layer(), *heads_first(q, k, v), None)[0]
    finally:
        ours.register()


FACADES = [by_sdpa, by_func, by_varlen, by_kvcache, by_registry, by_transformers]


@pytest.mark.parametrize("facade", FACADES)
def test_every_facade_keeps_them(
    facade: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = attended(*square(), return_lse=False)
    used: list[Any] = []
    right = prepared_call.PreparedCall.run
    monkeypatch.setattr(
        prepared_call.PreparedCall,
        "run",
        lambda self, *rest: used.append(self.kernel.config) or right(self, *rest),
    )
    assert torch.equal(facade(*square(), bits="canonical"), expected)
    monkeypatch.setenv("FLASHSMITH_BITS", "canonical")
    assert torch.equal(facade(*square()), expected)
    assert [config.canonical for config in used] == [1, 1]
    facade(*square(), bits="free")
    assert used[-1].canonical == 0
    with pytest.raises(ArgumentError, match="bits='exact': give 'canonical'"):
        facade(*square(), bits="exact")


def unserved(facade: Callable[..., Any], **asked: Any) -> Any:
    """A call that the kernels do not serve: PyTorch has tensors of any size."""
    return facade(*(it[..., :20] for it in square()), **asked)


@pytest.mark.parametrize("facade", [by_sdpa, by_transformers, by_registry])
def test_pytorch_takes_no_call_over(
    facade: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(FallbackWarning):
        expected = unserved(facade)
    with pytest.raises(ArgumentError, match=r"bits='canonical': .*which would take over, has othe"):
        unserved(facade, bits="canonical")
    monkeypatch.setenv("FLASHSMITH_BITS", "canonical")
    with pytest.raises(ArgumentError, match=r"FLASHSMITH_BITS=canonical: .*, or unset the variab"):
        unserved(facade)
    assert torch.equal(unserved(facade, bits="free"), expected)


def test_gradients_of_the_registry_are_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    right = flashsmith.backward
    monkeypatch.setattr(
        flashsmith,
        "backward",
        lambda *it, **how: asked.append(how["deterministic"]) or right(*it, **how),
    )
    for bits in ("canonical", "free"):
        inputs = heads_first(*(it.requires_grad_() for it in square()))
        with registered(bits=bits):
            function = torch.nn.functional.scaled_dot_product_attention
            function(*inputs, is_causal=True, enable_gqa=True).sum().backward()
    assert asked == [True, False]


def test_parts_of_the_keys_by_seqused_k_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    used = torch.tensor([13], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"bits='canonical': seqused_k: given without block_t"):
        by_varlen(*square(), seqused_k=used, bits="canonical")
    monkeypatch.setenv("FLASHSMITH_BITS", "canonical")
    with pytest.raises(ArgumentError, match="FLASHSMITH_BITS=canonical: seqused_k: given without"):
        by_varlen(*square(), seqused_k=used)


# --- rolling caches ------------------------------------------------------------------------------


def test_a_cache_that_drops_whole_chunks_keeps_them() -> None:
    keys = CHUNK + 36
    q, k, v = drawn(1, 2, 1, 64), drawn(1, keys, 1, 64, seed=1), drawn(1, keys, 1, 64, seed=2)
    how = {"window": (20, None)}
    rolled = decoded(q, k[:, CHUNK:].contiguous(), v[:, CHUNK:].contiguous(), **how)
    assert_same(rolled, decoded(q, k, v, **how))
