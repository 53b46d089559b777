"""A model like Gemma 4: local layers with a window, global layers of d 512 with one K/V head."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
transformers = pytest.importorskip("transformers", reason="needs transformers: it is not installed")
pytestmark = pytest.mark.torch

from model_runs import assert_same, both, quietly  # noqa: E402
from replaced_kernels import Calls  # noqa: E402
from tiny_models import LENGTH, padding, tokens  # noqa: E402

import flashsmith.integrations.transformers as ours  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402


def tiny_gemma(head_dim: int = 32) -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        global_head_dim=512,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=0,
    )
    return transformers.Gemma4ForCausalLM(config).eval()


def test_padded_batches(calls: Calls) -> None:
    mask = padding([LENGTH, 5, 8], "left")
    expected, output = both(tiny_gemma(), input_ids=tokens(), attention_mask=mask)
    assert_same(output, expected, mask.bool())
    assert [call["q"].shape for call in calls] == [(LENGTH + 5 + 8, 4, d) for d in (32, 512)]
    assert [call["k"].shape[1] for call in calls] == [2, 1]
    assert [call["window"] for call in calls] == [(3, None), (None, None)]


def test_generation_with_a_static_cache(calls: Calls) -> None:
    model, found = tiny_gemma(), []
    for implementation in ("eager", "flashsmith"):
        model.set_attn_implementation(implementation)
        how = {"cache_implementation": "static", "do_sample": False, "max_new_tokens": 4}
        found.append(model.generate(tokens(), **how, disable_compile=True))
    assert torch.equal(*found)
    steps = [call for call in calls if "cache_lens" in call]
    assert {call["q"].shape[-1] for call in steps} >= {512}


def test_repeatable_gradients_of_sinks_are_refused_before_the_kernel() -> None:
    """The sinks alone require grad; PyTorch cannot take over, because it has no sinks."""
    x = torch.zeros(1, 2, 9, 264, dtype=torch.float16)
    ours.register(emulate=True)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ArgumentError, match=r"^query: d 264 under .*has no s_aux: use"):
            ours.flashsmith_attention_forward(
                torch.nn.Module(), x, x, x, None, is_causal=True,
                s_aux=torch.zeros(2, requires_grad=True),
            )  # fmt: skip
    finally:
        torch.use_deterministic_algorithms(False)
        ours.register()


@pytest.mark.full
def test_kernels_of_both_widths() -> None:
    model = tiny_gemma(256).half()
    ours.register(emulate=True, strict=True)
    try:
        expected, output = both(model, input_ids=tokens())
        assert_same(output, expected)
        assert quietly(model, input_ids=tokens())[1] == []
    finally:
        ours.register()
