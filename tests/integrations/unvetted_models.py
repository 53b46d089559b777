"""Small models that transformers runs on few attentions, or whose layers misstate what they see."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny_models import GROUPED, HEADS, SIZES

_SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
}
_LATENT = {
    **SIZES,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "pad_token_id": 0,
}
_INDEXED = {**_LATENT, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 6}
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "splinter": ("SplinterModel", "SplinterConfig", {**SIZES, **HEADS}),
    "clap": ("ClapTextModel", "ClapTextConfig", {**SIZES, **HEADS}),
    "align": ("AlignTextModel", "AlignTextConfig", {**SIZES, **HEADS}),
    "nllb_moe": (
        "NllbMoeModel",
        "NllbMoeConfig",
        {**_SEQ2SEQ, "num_experts": 2, "encoder_sparse_step": 0, "decoder_sparse_step": 0},
    ),
    "bigbird_pegasus": (
        "BigBirdPegasusModel",
        "BigBirdPegasusConfig",
        {**_SEQ2SEQ, "attention_type": "original_full"},
    ),
    "pegasus_x": ("PegasusXModel", "PegasusXConfig", {**_SEQ2SEQ, "block_size": 8}),
    "bert_lm": ("BertLMHeadModel", "BertConfig", {**SIZES, **HEADS, "is_decoder": True}),
    "doge": ("DogeForCausalLM", "DogeConfig", {**SIZES, **GROUPED}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", _INDEXED),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", _INDEXED),
    "axk2": ("AXK2ForCausalLM", "AXK2Config", _INDEXED),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_LATENT, "qk_nope_head_dim": 32, "v_head_dim": 32},
    ),
    "markuplm": ("MarkupLMModel", "MarkupLMConfig", {**SIZES, **HEADS}),
    "patchtsmixer": (
        "PatchTSMixerModel",
        "PatchTSMixerConfig",
        {"context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 32,
         "num_layers": 1, "self_attn": True, "self_attn_heads": 2},
    ),
    "rembert": ("RemBertModel", "RemBertConfig", {**SIZES, **HEADS, "input_embedding_size": 16}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**SIZES, **HEADS, "alibi": True}),
}  # fmt: skip


def unvetted(name: str, **changes: Any) -> Any:
    """A model of ``name`` with random weights, in float32, on eager attention."""
    model, config, values = _CONFIGS[name]
    torch.manual_seed(0)
    configured = getattr(transformers, config)(**{**values, **changes})
    configured._attn_implementation = "eager"
    return getattr(transformers, model)(configured).eval()
