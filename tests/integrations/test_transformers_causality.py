"""transformers' models see what their masks say, whatever their layers state: against eager
attention."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
transformers = pytest.importorskip("transformers", reason="needs transformers: it is not installed")
pytestmark = pytest.mark.torch

from model_runs import assert_same, quietly  # noqa: E402
from replaced_kernels import Calls  # noqa: E402
from tiny_models import LENGTH, padding, tiny, tokens  # noqa: E402
from unvetted_models import unvetted  # noqa: E402

MASKS = {
    "none": None,
    "ones": torch.ones(3, LENGTH, dtype=torch.long),
    "left": padding([LENGTH, 5, 8], "left"),
    "right": padding([LENGTH, 5, 8], "right"),
}
SERIES = torch.arange(64.0).view(2, 32, 1)
SEQ2SEQ = ("nllb_moe", "bigbird_pegasus", "pegasus_x")


def in_both(model: Any, **inputs: Any) -> tuple[Any, Any]:
    """The model's first output with eager attention and with ours, set as from_pretrained() does,
    which asks no class whether it can be set."""
    with torch.no_grad():
        expected = model(**inputs)[0]
        model.config._attn_implementation = "flashsmith"
        return expected, model(**inputs)[0]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["splinter", "clap", "align", "bert_lm"])
def test_layers_that_state_nothing_or_the_wrong_thing(name: str, mask: str, calls: Calls) -> None:
    real = MASKS[mask]
    expected, ours = in_both(unvetted(name), input_ids=tokens(), attention_mask=real)
    assert_same(ours, expected, ... if real is None else real.bool())
    assert [call["causal"] for call in calls] == [name == "bert_lm"] * 2
    assert all(("cu_seqlens_k" in call) == (mask in ("left", "right")) for call in calls)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_decoders_see_no_future_and_cross_attention_all(name: str, mask: str, calls: Calls) -> None:
    inputs = {"attention_mask": MASKS[mask], "decoder_input_ids": tokens()}
    expected, ours = in_both(unvetted(name), input_ids=tokens(), **inputs)
    assert_same(ours, expected)
    # Two encoders compute block-sparse attention of their own.
    of_decoder = [True, False]
    assert [call["causal"] for call in calls][-2:] == of_decoder


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "modernbert", "gpt_oss"])
@pytest.mark.parametrize("misstated", [True, False, None])
def test_a_mask_beats_what_a_layer_states(name: str, misstated: bool | None, calls: Calls) -> None:
    for mask in ("none", "left"):
        model = tiny(name)
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = misstated
        real = MASKS[mask]
        expected, ours = in_both(model, input_ids=tokens(), attention_mask=real)
        assert_same(ours, expected, ... if real is None else real.bool())
    assert {call["causal"] for call in calls} == {name not in ("bert", "modernbert")}


@pytest.mark.parametrize("name", ["mistral", "modernbert"])
def test_a_mask_beats_the_window_that_a_layer_states(name: str, calls: Calls) -> None:
    from transformers import AttentionInterface

    from flashsmith.integrations.transformers import flashsmith_attention_forward

    def without_window(*tensors: Any, sliding_window: Any = None, **keywords: Any) -> Any:
        return flashsmith_attention_forward(*tensors, **keywords)

    AttentionInterface.register("flashsmith", without_window)
    for mask in ("none", "right"):
        real = MASKS[mask]
        expected, ours = in_both(tiny(name), input_ids=tokens(), attention_mask=real)
        assert_same(ours, expected, ... if real is None else real.bool())
    window = {"mistral": (3, None), "modernbert": (2, 2)}[name]
    assert window in [call["window"] for call in calls]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_decoders_that_are_configured_to_see_the_future(name: str, calls: Calls) -> None:
    model = tiny(name, is_causal=False)
    expected, ours = in_both(model, input_ids=tokens(), use_cache=False)
    assert_same(ours, expected)
    assert not any(call["causal"] for call in calls)


def test_a_static_cache_of_a_layer_that_states_nothing(calls: Calls) -> None:
    logits = {}
    model = unvetted("bert_lm")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    for implementation in ("eager", "flashsmith"):
        model.config._attn_implementation = implementation
        past = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            pieces = [
                model(piece, past_key_values=past).logits for piece in tokens().split([4, 6, 1], 1)
            ]
        logits[implementation] = torch.cat(pieces, dim=1)
    assert_same(logits["flashsmith"], logits["eager"])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["markuplm", "patchtsmixer"])
def test_models_without_masks_on_eager_attention_alone_are_refused(
    name: str, strict: bool, calls: Calls
) -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations import transformers as ours

    ours.register(float32_as=torch.float16, strict=strict, emulate=True)
    inputs = {"input_ids": tokens()} if name == "markuplm" else {"past_values": SERIES}
    model = unvetted(name)
    model.config._attn_implementation = "flashsmith"
    layer = "MarkupLMSelfAttention" if name == "markuplm" else "PatchTSMixerAttention"
    with pytest.raises(ArgumentError, match=rf"{layer} of \w+: .*neither sdpa nor flash"):
        model(**inputs)
    assert not calls


class Unstated(torch.nn.Module):
    """A layer that does not state whether it is causal."""


def test_a_layer_without_a_mask_that_states_nothing_is_refused(calls: Calls) -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    q = torch.zeros(1, 1, 4, 32).half()
    with pytest.raises(ArgumentError, match=r"is_causal: Unstated has no attention_mask"):
        flashsmith_attention_forward(Unstated(), q, q, q, None)
    assert not calls
    # Of one query causality says nothing.
    flashsmith_attention_forward(Unstated(), q[:, :, :1], q, q, None)
    flashsmith_attention_forward(Unstated(), q, q, q, None, is_causal=True)
    assert [call["causal"] for call in calls] == [False, True]


@pytest.mark.parametrize("mask", ["ones", "left"])
def test_models_that_compute_attention_themselves_get_masks_to_add(mask: str) -> None:
    """Also the encoder beside a decoder that calls the attention function."""
    from flashsmith.integrations import transformers as ours

    ours.register()
    for name in ("rembert", "bigbird_pegasus"):
        inputs = {"decoder_input_ids": tokens()} if name in SEQ2SEQ else {}
        model = unvetted(name)
        expected, output = in_both(model, input_ids=tokens(), attention_mask=MASKS[mask], **inputs)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_masks_that_arrive_as_other_objects_keep_what_they_say(calls: Calls) -> None:
    """As with layers on several devices, and checkpoints of the older kind."""
    from flashsmith.integrations.transformers import flashsmith_attention_forward
    from flashsmith.integrations.transformers_masks import flashsmith_mask

    config = transformers.LlamaConfig()
    q = torch.zeros(3, 1, LENGTH, 32).half()
    for real in (None, padding([LENGTH, 5, 8], "left").bool()):
        mask = flashsmith_mask(3, LENGTH, LENGTH, attention_mask=real, config=config)
        for changed in (mask.clone(), mask.detach(), mask.contiguous(), mask[:, :, :, :LENGTH]):
            flashsmith_attention_forward(Unstated(), q, q, q, changed)
    assert len(calls) == 8
    assert all(call["causal"] for call in calls)


def test_a_mask_that_a_model_has_changed_is_refused_or_a_pattern(calls: Calls) -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations import transformers as ours
    from flashsmith.integrations.transformers_masks import flashsmith_mask

    q = torch.zeros(3, 1, LENGTH, 32).half()
    compact = flashsmith_mask(3, LENGTH, LENGTH, config=transformers.LlamaConfig())
    with pytest.raises(ArgumentError, match=r"attention_mask: shape \(3, 0, 1, 1\).*has changed"):
        ours.flashsmith_attention_forward(Unstated(), q, q, q, compact[:, :, -1:])
    ours.register(emulate=True)
    real = padding([LENGTH, 5, 8], "left").bool()
    doge = transformers.DogeConfig()
    full = flashsmith_mask(3, LENGTH, LENGTH, attention_mask=real, config=doge)
    ours.flashsmith_attention_forward(Unstated(), q, q, q, full)
    assert calls.pop()["causal"]
    full[:, :, :, 3] = False
    _, messages = quietly(lambda: ours.flashsmith_attention_forward(Unstated(), q, q, q, full))
    assert not messages
    assert torch.equal(calls.pop()["mask"], full)
