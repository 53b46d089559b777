"""transformers' models on attn_implementation="flashsmith", against their own eager attention.

What becomes of masks, windows, caches and padding is tested with a plain attention() in the
kernels' place, which makes whole models cheap; that the kernels take over is tested at the end.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from typing import Any

import pytest
import shared_kernels

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
transformers = pytest.importorskip("transformers", reason="needs transformers: it is not installed")
pytestmark = pytest.mark.torch

from gradients import parameter_gradients  # noqa: E402
from model_runs import assert_same, both, quietly  # noqa: E402
from replaced_kernels import Calls  # noqa: E402
from tiny_models import LENGTH, padding, tiny, tokens  # noqa: E402

shared_kernels.want_chosen(
    "b3 s11 h4:2 d32 fp16 causal packed uneven",
    "b3 s11 h4:2 d32 fp16 causal softcap packed uneven",
    "b3 s11 h4:2 d32 fp16 window softcap packed uneven",
)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "gemma2", "modernbert"])
def test_padded_batches_become_packed_sequences(name: str, side: str, calls: Calls) -> None:
    mask = padding([LENGTH, 5, 8], side)
    expected, ours = both(tiny(name), input_ids=tokens(), attention_mask=mask)
    assert_same(ours, expected, mask.bool())
    assert len(calls) == 2
    assert all(call["k"].shape[0] == LENGTH + 5 + 8 for call in calls)
    if name in ("llama", "mistral", "gemma2"):
        assert all(call["q"].shape[0] == LENGTH + 5 + 8 for call in calls)


@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "gemma2", "modernbert"])
def test_batches_without_padding_stay_dense(name: str, calls: Calls) -> None:
    everything = torch.ones(3, LENGTH, dtype=torch.long)
    for mask in (None, everything):
        expected, ours = both(tiny(name), input_ids=tokens(), attention_mask=mask)
        assert_same(ours, expected)
    assert len(calls) == 4
    assert all("cu_seqlens_q" not in call for call in calls)


def test_layers_have_windows_of_their_own(calls: Calls) -> None:
    both(tiny("gemma2"), input_ids=tokens())
    assert [call["window"] for call in calls] == [(3, None), (None, None)]
    assert [call["softcap"] for call in calls] == [2.0, 2.0]
    calls.clear()
    both(tiny("modernbert"), input_ids=tokens())
    assert [call["window"] for call in calls] == [(None, None), (2, 2)]
    assert not any(call["causal"] for call in calls)


def training_gradients(model: Any, mask: Any, **inputs: Any) -> tuple[Any, Any]:
    """The gradients of all parameters with eager attention and with ours, of a loss that every real
    row has a part in."""

    def loss(model: Any) -> Any:
        output = model(input_ids=tokens(), attention_mask=mask, **inputs)[0]
        share = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        return (output * share)[mask.bool()].sum()

    found = []
    for implementation in ("eager", "flashsmith"):
        # gpt-oss lists the implementations that it may be set to.
        model.config._attn_implementation = implementation
        found.append(parameter_gradients(model, loss))
    return found[0], found[1]


def assert_gradients_are_close(ours: Any, expected: Any) -> None:
    assert ours.keys() == expected.keys()
    for name, right in expected.items():
        error, size = (ours[name] - right).norm(), right.norm()
        # The gradient of a bias of the keys is 0.
        assert error <= 5e-3 * size + 2e-5, f"{name}: {error} of {size}"


@pytest.mark.parametrize("lengths", [[LENGTH, 5, 8], [LENGTH] * 3], ids=["padded", "whole"])
@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "gemma2", "modernbert", "gpt_oss"])
def test_gradients(name: str, lengths: list[int], calls: Calls) -> None:
    model = tiny(name)
    expected, ours = training_gradients(model, padding(lengths, "left"))
    assert len(calls) == 2
    assert_gradients_are_close(ours, expected)
    if name == "gpt_oss":
        assert all(ours[f"model.layers.{i}.self_attn.sinks"].abs().min() > 0 for i in (0, 1))


def test_gradients_of_cross_attention(calls: Calls) -> None:
    inputs = {"decoder_input_ids": tokens()}
    expected, ours = training_gradients(tiny("bart"), padding([LENGTH, 4, 6], "right"), **inputs)
    assert len(calls) == 3
    assert_gradients_are_close(ours, expected)


def test_gradients_of_packed_sequences(calls: Calls) -> None:
    model = tiny("llama")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0]])

    def loss(model: Any) -> Any:
        output = model(input_ids=tokens(1), position_ids=positions, use_cache=False)[0]
        return output.square().sum()

    expected = parameter_gradients(model, loss)
    model.set_attn_implementation("flashsmith")
    ours = parameter_gradients(model, loss)
    assert calls[0]["cu_seqlens_q"].tolist() == [0, 4, 10, 11]
    assert_gradients_are_close(ours, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, calls: Calls) -> None:
    model = tiny("llama").train()
    mask = padding([LENGTH, 5, 8], "right")
    _, plain = training_gradients(model, mask)
    calls.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _, again = training_gradients(model, mask)
    assert len(calls) == 4
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_dropout_in_training_is_left_to_pytorch(calls: Calls) -> None:
    from flashsmith.integrations import transformers as ours

    ours.register(float32_as=torch.float16, emulate=True)
    model = tiny("bert").train()
    model.set_attn_implementation("flashsmith")
    _, messages = quietly(model, input_ids=tokens())
    assert "dropout_p: 0.1" in messages[0]
    assert not calls


@pytest.mark.parametrize("keys", [7, LENGTH])
def test_cross_attention_pads_keys_only(keys: int, calls: Calls) -> None:
    """Also when encoder and decoder happen to be of one length: the mask is the encoder's alone."""
    inputs = {
        "input_ids": tokens(length=keys),
        "attention_mask": padding([keys, 4, 6], "right", keys),
        "decoder_input_ids": tokens(),
    }
    expected, ours = both(tiny("bart"), **inputs)
    assert_same(ours, expected)
    encoder, decoder, cross = calls
    assert encoder["k"].shape[0] == cross["k"].shape[0] == keys + 4 + 6
    assert decoder["causal"]
    assert cross["q"].shape[0] == 3 * LENGTH


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sequences_packed_by_their_positions(name: str, calls: Calls) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0]])
    model = tiny(name)
    expected, ours = both(model, input_ids=tokens(1), position_ids=positions, use_cache=False)
    assert_same(ours, expected)
    assert calls[0]["cu_seqlens_q"].tolist() == [0, 4, 10, 11]


def test_sequences_packed_by_the_caller(calls: Calls) -> None:
    starts = torch.tensor([0, 4, 10, 11], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0]])
    model = tiny("llama")
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6}
    packed |= {"max_length_k": 6}
    inputs = {"input_ids": tokens(1), "position_ids": positions, "use_cache": False}
    expected, _ = both(model, **inputs)
    with torch.no_grad():
        ours = model(**inputs, **packed)[0]
    assert_same(ours, expected)
    assert calls[-1]["cu_seqlens_q"] is starts


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_with_left_padding(name: str, cache: str, calls: Calls) -> None:
    model = tiny(name)
    mask = padding([LENGTH, 5, 8], "left")
    generated = {}
    for implementation in ("eager", "flashsmith"):
        model.set_attn_implementation(implementation)
        generated[implementation] = model.generate(
            tokens(),
            attention_mask=mask,
            max_new_tokens=5,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
        )
    assert generated["flashsmith"].tolist() == generated["eager"].tolist()
    assert len(calls) == 2 * 5
    assert calls[-1]["q"].shape[0] == 3
    if name == "llama":
        assert calls[-1]["k"].shape[0] == LENGTH + 5 + 8 + 3 * 4


@pytest.mark.parametrize("cache", [transformers.DynamicCache, transformers.StaticCache])
def test_a_prompt_in_pieces(cache: Any, calls: Calls) -> None:
    model = tiny("llama")
    logits = {}
    for implementation in ("eager", "flashsmith"):
        model.set_attn_implementation(implementation)
        past = cache(
            config=model.config, **({"max_cache_len": 16} if "S" in cache.__name__ else {})
        )
        with torch.no_grad():
            pieces = [
                model(piece, past_key_values=past).logits for piece in tokens().split([4, 6, 1], 1)
            ]
        logits[implementation] = torch.cat(pieces, dim=1)
    assert_same(logits["flashsmith"], logits["eager"])
    keys = {call["k"].shape[-3] for call in calls if "cache_lens" not in call}
    assert keys == ({4} if "S" in cache.__name__ else {4, 10, 11})


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "modernbert"])
def test_float32_is_left_to_pytorch(name: str, side: str) -> None:
    from flashsmith.integrations import transformers as ours

    ours.register()
    model = tiny(name)
    mask = padding([LENGTH, 5, 8], side)
    with torch.no_grad():
        expected = model(input_ids=tokens(), attention_mask=mask)[0]
        model.set_attn_implementation("flashsmith")
        for said in (1, 0):
            output, messages = quietly(model, input_ids=tokens(), attention_mask=mask)
            assert len(messages) == said
            torch.testing.assert_close(output[mask.bool()], expected[mask.bool()])
            for message in messages:
                assert "query: dtype float32" in message
                assert "float32_as" in message


def test_a_pattern_of_ones_own_is_read_by_kernels() -> None:
    from flashsmith.integrations import transformers as ours

    ours.register(float32_as=torch.float16, emulate=True)
    model = tiny("llama")
    seen = torch.rand(3, 1, LENGTH, LENGTH) > 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(input_ids=tokens(), attention_mask=bias)[0]
        model.set_attn_implementation("flashsmith")
        output, messages = quietly(model, input_ids=tokens(), attention_mask=seen)
        added, _ = quietly(model, input_ids=tokens(), attention_mask=bias)
    assert_same(output, expected)
    assert_same(added, expected)
    assert not any("leaves this call to PyTorch" in message for message in messages)


def test_a_window_counts_holes_so_they_are_left_to_pytorch() -> None:
    from flashsmith.integrations import transformers as ours

    ours.register(float32_as=torch.float16)
    model = tiny("mistral")
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, 4:6] = 0
    with torch.no_grad():
        expected = model(input_ids=tokens(), attention_mask=mask)[0]
        model.set_attn_implementation("flashsmith")
        output, messages = quietly(model, input_ids=tokens(), attention_mask=mask)
    torch.testing.assert_close(output[mask.bool()], expected[mask.bool()])
    assert "attention_mask: padding between real tokens" in messages[0]


def test_host_tensors_are_left_to_pytorch_unless_asked_for(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations import transformers as ours

    monkeypatch.delenv("FLASHSMITH_EMULATE", raising=False)
    ours.register(float32_as=torch.float16)
    model = tiny("llama")
    model.set_attn_implementation("flashsmith")
    with torch.no_grad():
        _, messages = quietly(model, input_ids=tokens())
        assert len(messages) == 1
        assert "emulate=True" in messages[0]
        assert "FLASHSMITH_EMULATE=1" in messages[0]
        ours.register(float32_as=torch.float16, strict=True)
        with pytest.raises(ArgumentError, match=r"query: on the host.*FLASHSMITH_EMULATE=1"):
            model(input_ids=tokens())
        assert not calls
        monkeypatch.setenv("FLASHSMITH_EMULATE", "1")
        model(input_ids=tokens())
        assert [call["emulate"] for call in calls] == [True, True]
        ours.register(float32_as=torch.float16, strict=True, emulate=False)
        with pytest.raises(ArgumentError, match="query: on the host"):
            model(input_ids=tokens())


def test_an_architecture_without_measurements_is_left_to_pytorch(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.families import device_spec
    from flashsmith.integrations import pytorch_state
    from flashsmith.integrations import transformers as ours

    def as_on_a_gpu(device: Any, *arguments: Any, **keywords: Any) -> Any:
        return pytorch_state.why_not_on(torch.device("cuda", 0), *arguments, **keywords)

    monkeypatch.setattr(pytorch_state, "query_gpu", lambda ordinal: device_spec("B200"))
    monkeypatch.setattr(ours, "why_not_on", as_on_a_gpu)
    model = tiny("llama")
    model.set_attn_implementation("flashsmith")
    with torch.no_grad():
        with pytest.raises(ArgumentError, match=r"query: on cuda:0, an sm_100; nothing was"):
            model(input_ids=tokens())
        monkeypatch.setenv("FLASHSMITH_UNTUNED", "1")
        model(input_ids=tokens())
    assert len(calls) == 2


class Logits(torch.nn.Module):
    """A model that torch.jit.trace can take: tensors in, a tensor out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


def test_jit_trace_records_pytorchs_attention_and_no_mask_as_a_constant(calls: Calls) -> None:
    from flashsmith.integrations import transformers as ours

    ours.register(float32_as=torch.float16, emulate=True)
    model = tiny("mistral")
    model.config.use_cache = False
    model.set_attn_implementation("flashsmith")
    everything = torch.ones(3, LENGTH, dtype=torch.long)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(Logits(model), (tokens(), everything), check_trace=False)
    assert not calls
    assert any("query: traced by torch.jit.trace" in str(w.message) for w in caught)
    model.set_attn_implementation("eager")
    for mask in (everything, padding([LENGTH, 5, 8], "right")):
        with torch.no_grad():
            expected = model(input_ids=tokens(), attention_mask=mask)[0]
            output = traced(tokens(), mask)
        torch.testing.assert_close(output[mask.bool()], expected[mask.bool()])


def test_vmap_is_left_to_pytorch(calls: Calls) -> None:
    from flashsmith.integrations import transformers as ours
    from flashsmith.integrations.fallbacks import FallbackWarning
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    def layer(q: Any) -> Any:
        return flashsmith_attention_forward(Sinking(), q, q, q, None)[0]

    ours.register(emulate=True)
    q = torch.randn(3, 2, 4, 9, 32, generator=torch.manual_seed(0)).half()
    with pytest.warns(FallbackWarning, match=r"query: inside a transform of torch\.func"):
        output = torch.vmap(layer)(q)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(output, expected.transpose(2, 3), atol=2e-3, rtol=2e-3)
    assert not calls


def test_strict_raises_instead() -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations import transformers as ours

    ours.register(strict=True)
    model = tiny("llama")
    model.set_attn_implementation("flashsmith")
    with pytest.raises(ArgumentError, match="query: dtype float32"), torch.no_grad():
        model(input_ids=tokens())
    ours.register()


def test_what_pytorch_cannot_do_either_is_an_error() -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations import transformers as ours

    ours.register()
    model = tiny("gemma2")
    model.set_attn_implementation("flashsmith")
    with pytest.raises(ArgumentError, match=r"dtype float32.* has no softcap"), torch.no_grad():
        model(input_ids=tokens())


def test_register_refuses_what_is_not_allowed() -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations import transformers as ours

    with pytest.raises(ArgumentError, match=r"emulate='yes': allowed are True, False and None"):
        ours.register(emulate="yes")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"float32_as=torch\.float64: give torch\.float16"):
        ours.register(float32_as=torch.float64)


def test_a_model_can_be_loaded_with_it(tmp_path: Any) -> None:
    """transformers looks on the hub for names with 'flash' in them, but not for ours."""
    from flashsmith.integrations import transformers as ours

    ours.register()
    ours.register()
    tiny("bert").save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="flashsmith")
    assert model.config._attn_implementation == "flashsmith"
    with pytest.raises((ImportError, ValueError)):
        model.set_attn_implementation("flash_attention_2")


class Sinking(torch.nn.Module):
    """A layer with sinks, as gpt-oss has them."""

    is_causal = True
    layer_idx = 0


def test_sinks_are_passed_on(calls: Calls) -> None:
    import padded_attention

    from flashsmith.integrations.transformers import flashsmith_attention_forward

    q, k, v = (torch.randn(2, 4, 9, 32, generator=torch.manual_seed(i)).half() for i in range(3))
    sinks = torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.0, 3.0]).half())
    output, weights = flashsmith_attention_forward(
        Sinking(), q, k, v, None, scaling=0.2, sliding_window=3, s_aux=sinks
    )
    assert weights is None
    assert calls[0]["sinks"].dtype is torch.float32
    expected = padded_attention.attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        causal=True,
        window=(2, None),
        scale=0.2,
        sinks=sinks.detach(),
    )
    assert torch.equal(output, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_static_cache_is_read_through_its_lengths_which_the_host_never_sees(
    name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = tiny(name), []

    def noting(right: Any) -> Any:
        def convert(tensor: Any, *arguments: Any) -> Any:
            frame = sys._getframe(1)
            if "flashsmith/integrations" in frame.f_code.co_filename:
                read.append(frame.f_code.co_name)
            return right(tensor, *arguments)

        return convert

    generated = {}
    for implementation in ("eager", "flashsmith"):
        model.set_attn_implementation(implementation)
        if implementation == "flashsmith":
            for conversion in ("__bool__", "__int__", "__index__", "item", "tolist"):
                right = getattr(torch.Tensor, conversion)
                monkeypatch.setattr(torch.Tensor, conversion, noting(right))
        generated[implementation] = model.generate(
            tokens(), max_new_tokens=5, do_sample=False, cache_implementation="static",
            disable_compile=True,
        )  # fmt: skip
    assert generated["flashsmith"].tolist() == generated["eager"].tolist()
    assert not read
    lens = [call["cache_lens"].tolist() for call in calls if "cache_lens" in call]
    # A layer whose window is full sees all that its cache holds.
    full = [[LENGTH + step] * 3 for step in range(1, 5)] if name != "mistral" else []
    assert [it for it in full if it in lens] == full
    # The prompt itself is no step over a cache.
    if name == "llama":
        assert {call["q"].shape[1] for call in calls if "cache_lens" not in call} == {LENGTH}


def test_a_static_cache_that_is_left_to_pytorch_is_masked_by_its_lengths() -> None:
    model = tiny("mistral")
    generated = {}
    for implementation in ("eager", "flashsmith"):
        model.set_attn_implementation(implementation)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            generated[implementation] = model.generate(
                tokens(), max_new_tokens=5, do_sample=False, cache_implementation="static",
                disable_compile=True,
            )  # fmt: skip
    assert generated["flashsmith"].tolist() == generated["eager"].tolist()


def test_a_static_cache_has_gradients(calls: Calls) -> None:
    model = tiny("llama")
    model.set_attn_implementation("flashsmith")
    past = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(tokens()[:, :4], past_key_values=past)
    model(tokens()[:, 4:6], past_key_values=past).logits.sum().backward()
    assert not any("cache_lens" in call for call in calls)
    assert calls[-1]["k"].shape[1] == 6


@pytest.mark.parametrize(
    "name", ["mistral", *(pytest.param(it, marks=pytest.mark.full) for it in ("llama", "gemma3n"))]
)
def test_continuous_batching_generates_the_tokens_of_pytorchs_attention(
    name: str, calls: Calls
) -> None:
    prompts = [[3, 5, 7, 9, 11], [4, 6], [8, 10, 12, 14, 16, 18, 20, 22]]
    generated = generated_by_both(name, prompts)
    assert generated["flashsmith"] == generated["sdpa"]
    assert sorted(map(list, generated["flashsmith"])) == sorted(prompts)
    # One token of each sequence, beside no other.
    assert any(call["cu_seqlens_q"].diff().tolist() == [1, 1, 1] for call in calls)


def generated_by_both(
    name: str, prompts: list[list[int]], config: dict[str, Any] | None = None, **options: Any
) -> dict[str, dict[Any, list[int]]]:
    generated = {}
    for implementation in ("sdpa", "flashsmith"):
        model = tiny(name, **(config or {}))
        model = model.to(model.config.dtype or torch.float32)
        model.set_attn_implementation(implementation)
        generated[implementation] = generated_tokens(model, prompts, **options)
    return generated


def generated_tokens(model: Any, prompts: list[list[int]], **options: Any) -> dict[Any, list[int]]:
    """Of continuous batching, by prompts."""
    pytest.importorskip("psutil", reason="needs psutil: it is not installed")
    from transformers import ContinuousBatchingConfig, GenerationConfig

    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(
            max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"num_blocks": 64, "max_batch_tokens": 32, "auto_switch_to_flash": False, **options}
        ),
        progress_bar=False,
    )
    return {tuple(it.prompt_ids): it.generated_tokens for it in outputs.values()}


# The last is longer than what a step takes, and has several pages.
PROMPTS = [[3, 5, 7, 9, 11], [4, 6], list(range(8, 58))]
PAGED = {"page_size": 16, "max_batch_tokens": 24}


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("llama", 8),
        pytest.param("gemma3n", 0, marks=pytest.mark.full),
        pytest.param("llama", 0, marks=pytest.mark.full),
        pytest.param("gemma3n", 8, marks=pytest.mark.full),
    ],
)
def test_pages_of_continuous_batching_are_read_in_place(
    name: str, blocks: int, calls: Calls
) -> None:
    """Tokens beside chunks of a prompt, and, where transformers gives tables of pages, steps of one
    token for each sequence. Half of gemma3n's layers have the keys of others."""
    config: dict[str, Any] = {"dtype": torch.float16}
    if name == "gemma3n":
        config["layer_types"] = ["full_attention"] * 4
    generated = generated_by_both(name, PROMPTS, config, max_blocks_per_request=blocks, **PAGED)
    assert generated["flashsmith"] == generated["sdpa"]
    assert len(generated["sdpa"]) == 3
    # Only what has no keys in the cache yet is computed without it.
    paged = [call for call in calls if "page_table" in call]
    assert len(paged) > len(calls) // 2
    assert all(call["cache_lens"].min() >= 0 for call in paged)
    ragged = [call["cu_seqlens_q"].diff() for call in paged if "cu_seqlens_q" in call]
    assert [2, 2, 5] in [counts.tolist() for counts in ragged]  # the prompt's last two tokens
    steps = [call for call in paged if "cu_seqlens_q" not in call]
    assert bool(steps) == bool(blocks)
    for call in steps:
        assert call["q"].shape[:2] == (call["page_table"].shape[0], 1)


@pytest.mark.parametrize(
    "changed", ["both", *(pytest.param(it, marks=pytest.mark.full) for it in ("keys", "values"))]
)
def test_keys_that_a_model_changes_are_gathered(
    changed: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cache gives is what it would have gathered, for whoever looks into it."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    update = PagedAttentionCache.update

    def update_and_change(self: Any, *tensors: Any, kwargs: Any, **keywords: Any) -> Any:
        key, value = update(self, *tensors, kwargs=kwargs, **keywords)
        assert key.shape[2] == int(kwargs["cu_seq_lens_k"][-1])
        return key if changed == "values" else -key, value if changed == "keys" else -value

    # In 5.23 the attention function calls it, later the model.
    monkeypatch.setattr(PagedAttentionCache, "update", update_and_change)
    config = {"dtype": torch.float16}
    generated = generated_by_both("llama", PROMPTS, config, max_blocks_per_request=0, **PAGED)
    assert generated["flashsmith"] == generated["sdpa"]
    assert len(generated["sdpa"]) == 3
    assert not any("page_table" in call for call in calls)


@pytest.mark.full
@pytest.mark.parametrize("blocks", [0, 8])
def test_the_kernels_read_the_pages_of_continuous_batching(blocks: int) -> None:
    from flashsmith.integrations import transformers as ours
    from flashsmith.runtime import count_launches

    ours.register(strict=True, emulate=True)
    model = tiny("llama", dtype=torch.float16).half()
    expected = generated_tokens(model, PROMPTS, **PAGED)
    model.set_attn_implementation("flashsmith")
    with count_launches() as launches:
        found = generated_tokens(model, PROMPTS, max_blocks_per_request=blocks, **PAGED)
    ours.register()
    assert launches.emulator > 10
    assert found == expected


def test_rings_of_windows_and_wide_caches_are_gathered(calls: Calls) -> None:
    for name, dtype in (("mistral", torch.float16), ("llama", torch.float32)):
        model = tiny(name, dtype=dtype).to(dtype)
        model.set_attn_implementation("flashsmith")
        generated_tokens(model, PROMPTS[:2], max_blocks_per_request=8, **PAGED)
    assert calls
    assert not any("page_table" in call for call in calls)


@pytest.mark.parametrize("name", ["ensure_decode_fast_path_is_available", "ATTN_TYPE_TO_ALLOCATOR"])
def test_older_versions_without_tables_of_pages_are_left_as_they_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashsmith.integrations import transformers as ours
    from flashsmith.integrations import transformers_pages as pages

    older = types.SimpleNamespace(
        ensure_decode_fast_path_is_available=len,
        ATTN_TYPE_TO_ALLOCATOR={},
        group_layers_by_attn_type=len,
    )
    delattr(older, name)
    before = dict(vars(older))
    monkeypatch.setattr(pages, "initialization", older)
    ours.register()
    assert vars(older) == before


def test_continuous_batching_that_cannot_be_served_is_an_error() -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    class OlderCache:
        def update(self, key_states: Any, value_states: Any, layer_idx: int) -> None: ...

    q = torch.zeros(1, 1, 4, 32)

    class ChangingCache:
        def update(self, kwargs: dict[str, Any], **_: Any) -> Any:
            return q, q

    for cache, more, message in (
        (OlderCache(), {}, r"cache: .*continuous batching of transformers 5\.23"),
        (OlderCache(), {"block_table": q}, r"cache: .*continuous batching of transformers 5\.23"),
        (
            ChangingCache(),
            {"block_table": q},
            r"cache: Sinking changes keys .*max_blocks_per_request=0",
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            flashsmith_attention_forward(Sinking(), q, q, q, None, cache=cache, **more)


def test_tables_of_wide_pages_are_an_error() -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    from flashsmith.errors import ArgumentError
    from flashsmith.integrations import transformers as ours

    q = torch.zeros(1, 1, 4, 32)
    pages = types.SimpleNamespace(
        supports_block_table=True,
        block_physical_stride=4,
        get_cache_for_block_table=lambda layer_idx: (q, q),
    )

    class WideCache(PagedAttentionCache):
        config = types.SimpleNamespace(_attn_implementation="flashsmith")

        def __init__(self) -> None:
            self.layer_to_allocator = {0: pages}

    ours.register()
    lengths = {"block_table": q, "cu_seq_lens_k": torch.arange(2)}
    with pytest.raises(ArgumentError, match=r"dtype torch.float32; .*max_blocks_per_request=0"):
        WideCache().update(q, q, 0, kwargs=lengths)


def test_a_mask_of_another_length_is_refused(calls: Calls) -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    q = torch.zeros(2, 1, 4, 32).half()
    mask = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ArgumentError, match=r"attention_mask: shape \(2, 5\); must be .*\(2, 4\)"):
        flashsmith_attention_forward(Sinking(), q, q, q, mask)
    assert not calls


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_kernels_take_over(name: str) -> None:
    """Causal, grouped heads, left padding; gemma2 with a window and a softcap, too."""
    from flashsmith.integrations import transformers as ours
    from flashsmith.runtime import count_launches

    ours.register(float32_as=torch.float16, strict=True, emulate=True)
    mask = padding([LENGTH, 5, 8], "left")
    with count_launches() as launches:
        expected, output = both(tiny(name), input_ids=tokens(), attention_mask=mask)
    ours.register()
    assert launches.emulator == 2
    assert_same(output, expected, mask.bool())
