"""transformers' models with a few thousand random weights, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0}
LENGTH = 11


def tiny(name: str, **changes: Any) -> Any:
    """A model of ``name`` with random weights, in float32, and ``changes`` of its config."""
    torch.manual_seed(0)
    model, config = {
        "bert": (transformers.BertModel, transformers.BertConfig(**SIZES, **HEADS)),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, **GROUPED)),
        "mistral": (
            transformers.MistralForCausalLM,
            transformers.MistralConfig(**SIZES, **GROUPED, sliding_window=4),
        ),
        "gemma2": (
            transformers.Gemma2ForCausalLM,
            transformers.Gemma2Config(
                **SIZES,
                **GROUPED,
                sliding_window=4,
                attn_logit_softcapping=2.0,
                query_pre_attn_scalar=32,
            ),
        ),
        "gemma3n": (
            transformers.Gemma3nForCausalLM,
            transformers.Gemma3nTextConfig(
                **{**SIZES, **GROUPED, "num_hidden_layers": 4},
                vocab_size_per_layer_input=64,
                hidden_size_per_layer_input=16,
                activation_sparsity_pattern=[0.0] * 4,
                laurel_rank=16,
                sliding_window=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                num_kv_shared_layers=2,
            ),
        ),
        "modernbert": (
            transformers.ModernBertModel,
            transformers.ModernBertConfig(
                **SIZES, **HEADS, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0
            ),
        ),
        "bart": (
            transformers.BartModel,
            transformers.BartConfig(
                vocab_size=64,
                d_model=64,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                pad_token_id=0,
            ),
        ),
        "gpt_oss": (
            transformers.GptOssForCausalLM,
            transformers.GptOssConfig(
                **SIZES,
                **GROUPED,
                num_local_experts=2,
                num_experts_per_tok=1,
                sliding_window=4,
                layer_types=["sliding_attention"] * 2,
            ),
        ),
    }[name]
    for key, value in {"_attn_implementation": "eager", **changes}.items():
        setattr(config, key, value)
    return model(config).eval()


def tokens(batch: int = 3, length: int = LENGTH) -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 64, (batch, length), generator=generator)


def padding(lengths: list[int], side: str, length: int = LENGTH) -> Any:
    position = torch.arange(length)
    if side == "left":
        position = position.flip(0)
    return (position < torch.tensor(lengths)[:, None]).long()
