"""Every keyword of transformers' mask interface is honoured, or refused by its name."""

from __future__ import annotations

import ast
import inspect
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
from transformers import masking_utils  # noqa: E402
from unvetted_models import unvetted  # noqa: E402

MASKS = {
    "none": None,
    "ones": torch.ones(3, LENGTH, dtype=torch.long),
    "left": padding([LENGTH, 5, 8], "left"),
}
READERS = ("doge", "deepseek_v32", "glm_moe_dsa", "axk2")


def asked(config: Any = None, real: Any = None, **keywords: Any) -> Any:
    from flashsmith.integrations.transformers_masks import flashsmith_mask

    config = transformers.LlamaConfig() if config is None else config
    return flashsmith_mask(3, LENGTH, LENGTH, attention_mask=real, config=config, **keywords)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", READERS)
def test_models_that_look_into_their_masks(name: str, mask: str) -> None:
    from flashsmith.integrations import transformers as ours

    ours.register(float32_as=torch.float16, emulate=True)
    model, real = unvetted(name), MASKS[mask]
    with torch.no_grad():
        expected = model(tokens(), attention_mask=real)[0]
        model.set_attn_implementation("flashsmith")
        output, messages = quietly(model, input_ids=tokens(), attention_mask=real)
    assert_same(output, expected, ... if real is None else real.bool())
    # Kernels read the mask.
    assert not any("leaves this call to PyTorch" in message for message in messages)


@pytest.mark.parametrize("name", READERS)
def test_the_caches_and_packed_lines_of_models_that_look_into_their_masks(name: str) -> None:
    from flashsmith.integrations import transformers as ours

    ours.register(emulate=True)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0]])
    outputs = {}
    for implementation in ("eager", "flashsmith"):
        model = unvetted(name)
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            past = transformers.DynamicCache(config=model.config)
            pieces = [
                model(piece, past_key_values=past).logits for piece in tokens().split([6, 4, 1], 1)
            ]
            alone = model(tokens(1), position_ids=packed, use_cache=False).logits
        outputs[implementation] = [*pieces, alone]
    for ours_, expected in zip(outputs["flashsmith"], outputs["eager"], strict=True):
        torch.testing.assert_close(ours_, expected, atol=1e-5, rtol=1e-5)


def test_a_step_over_a_static_cache_of_a_model_that_looks_into_its_masks() -> None:
    """Also where the first token is the first call: transformers forbids all shortcuts then."""
    from flashsmith.integrations import transformers as ours

    ours.register(emulate=True)
    outputs = {}
    for implementation in ("eager", "flashsmith"):
        model = unvetted("doge")
        model.set_attn_implementation(implementation)
        past = transformers.StaticCache(config=model.config, max_cache_len=8)
        with torch.no_grad():
            steps = [
                model(token, past_key_values=past).logits for token in tokens(3, 3).split(1, 1)
            ]
        outputs[implementation] = torch.cat(steps, 1)
    torch.testing.assert_close(outputs["flashsmith"], outputs["eager"], atol=1e-5, rtol=1e-5)


def test_indices_of_keys_are_honoured_and_need_a_mask() -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    q = torch.zeros(1, 1, 4, 32).half()
    indices = torch.zeros(1, 4, 2, dtype=torch.long)
    with pytest.raises(ArgumentError, match=r"indices: shape \(1, 4, 2\), with .* of shape None"):
        flashsmith_attention_forward(torch.nn.Identity(), q, q, q, None, indices=indices)


@pytest.mark.parametrize("name", ["block_indices", "sinks"])
def test_what_single_models_give_their_own_attention_is_refused(name: str) -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    q = torch.zeros(1, 1, 4, 32).half()
    with pytest.raises(ArgumentError, match=rf"^{name}: passed by Identity; .*eager"):
        flashsmith_attention_forward(torch.nn.Identity(), q, q, q, None, **{name: q})


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (masking_utils.causal_mask_function, {"allow_is_causal_skip": False}),
        (masking_utils.bidirectional_mask_function, {"allow_is_bidirectional_skip": False}),
        (
            masking_utils.sliding_window_causal_mask_function(4),
            {"allow_is_causal_skip": False, "local_size": 4},
        ),
        (masking_utils.chunked_causal_mask_function(4, torch.zeros(3, dtype=int)), {}),
        (
            masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k != 2),
            {"use_vmap": True, "allow_torch_fix": True},
        ),
    ],
    ids=["causal", "bidirectional", "window", "chunks", "vmap"],
)
def test_no_shortcut_is_taken_that_is_not_allowed(
    function: Any, keywords: dict[str, Any], mask: str, calls: Calls
) -> None:
    real = None if MASKS[mask] is None else MASKS[mask].bool()
    found = asked(real=real, mask_function=function, **keywords)
    keywords = {**keywords, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    expected = masking_utils.sdpa_mask(
        3, LENGTH, LENGTH, mask_function=function, attention_mask=real, **keywords
    )
    assert found.dtype is torch.bool
    assert torch.equal(found, expected)


def test_the_dtype_is_that_of_masks_to_add() -> None:
    for config in (transformers.RemBertConfig(), transformers.SplinterConfig()):
        unvetted("rembert"), unvetted("splinter")  # their modules are found by their configs
        assert asked(config, dtype=torch.float16).dtype is torch.float16


def test_every_keyword_of_this_version_is_known() -> None:
    tree = ast.parse(inspect.getsource(masking_utils))
    names = {
        keyword.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "mask_interface"
        for keyword in node.keywords
    }
    assert {"mask_function", "config", "local_size", "use_vmap"} <= names
    names -= {"batch_size", "q_length", "kv_length", "config", "attention_mask"}
    defaults = dict.fromkeys(names - {"mask_function", "q_offset", "kv_offset"})
    asked(**{**defaults, "use_vmap": False, "device": "cpu", "allow_is_causal_skip": True})


def test_any_other_keyword_is_refused() -> None:
    from flashsmith.errors import ArgumentError

    with pytest.raises(
        ArgumentError, match=r"soft_edges=True: not a keyword of the mask interface"
    ):
        asked(soft_edges=True)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_masks_that_are_read_are_still_computed_by_the_kernels(name: str, calls: Calls) -> None:
    """A real mask that a model passes on as it got it is known by what it was made for."""
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    function = {
        "llama": masking_utils.causal_mask_function,
        "bert": masking_utils.bidirectional_mask_function,
    }[name]
    q = torch.zeros(3, 1, LENGTH, 32).half()
    for real in (None, padding([LENGTH, 5, 8], "left").bool()):
        mask = asked(real=real, mask_function=function, allow_is_causal_skip=False)
        flashsmith_attention_forward(tiny(name), q, q, q, mask)
    assert [call["causal"] for call in calls] == [name == "llama"] * 2
    assert ["cu_seqlens_k" in call for call in calls] == [False, True]


def test_values_may_have_another_width(calls: Calls) -> None:
    """DeepSeek's: 48 of queries and keys, 32 of values; and the other way around."""
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    model = unvetted("deepseek_v3")
    real = padding([LENGTH, 5, 8], "left")
    with torch.no_grad():
        expected = model(tokens(), attention_mask=real)[0]
        model.set_attn_implementation("flashsmith")
        output, messages = quietly(model, input_ids=tokens(), attention_mask=real)
    assert_same(output, expected, real.bool())
    assert len(calls) == 2
    assert not messages
    q, k, v = (torch.randn(1, 2, 9, d, generator=torch.manual_seed(d)).half() for d in (32, 32, 64))
    k = k.flip(2)
    output, _ = flashsmith_attention_forward(torch.nn.Identity(), q, k, v, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_deepseek_generates_over_caches_of_two_widths(cache: str) -> None:
    model = unvetted("deepseek_v3")
    how = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(tokens()[:1], **how)
    model.set_attn_implementation("flashsmith")
    found, messages = quietly(model.generate, inputs=tokens()[:1], **how)
    assert torch.equal(found, expected[0])
    assert not [it for it in messages if "value" in it]


def test_output_attentions_warns(calls: Calls) -> None:
    model = tiny("bert")
    model.set_attn_implementation("flashsmith")
    with torch.no_grad():
        _, messages = quietly(model, input_ids=tokens(), output_attentions=True)
    assert len(messages) == 1
    assert "output_attentions: the kernels keep no weights; use eager attention" in messages[0]
