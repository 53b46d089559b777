"""What kernels a model needs, from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashsmith.chooser.prebuild import parse_any_length
from flashsmith.errors import ArgumentError
from flashsmith.integrations.model_config import ModelAttention, read_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GEMMA2 = LLAMA | {
    "model_type": "gemma2",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "dtype": "float16",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "dtype": "bfloat16",
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "torch_dtype": "float32",
}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    "dtype": "bfloat16",
    "text_config": {**LLAMA, "sliding_window": 32768, "use_sliding_window": False},
    "vision_config": {"embed_dim": 1280, "hidden_size": 3584, "num_heads": 16},
}
BART = {
    "model_type": "bart",
    "is_encoder_decoder": True,
    "d_model": 1024,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 8,
    "torch_dtype": "float16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "dtype": "bfloat16",
}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "multi_query": True,
    "dtype": "bfloat16",
}


def model(folder: Path, config: Any, **how: bool) -> ModelAttention:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder, **how)


def causal(heads: str, *words: str) -> list[str]:
    """A decoder's problems of one mask."""
    kinds = " ".join([*words, "packed"])
    return [f"{heads} {kinds}", f"{heads} decode {kinds}"]


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        pytest.param(LLAMA, causal("h32:8 d128 bf16", "causal"), id="llama"),
        pytest.param(
            GEMMA2,
            causal("h8:4 d256 fp16", "causal", "softcap")
            + causal("h8:4 d256 fp16", "window_4096", "softcap"),
            id="gemma2",
        ),
        pytest.param(
            GPT_OSS,
            causal("h64:8 d64 bf16", "causal") + causal("h64:8 d64 bf16", "window_128"),
            id="gpt_oss",
        ),
        pytest.param(BERT, ["h12 d64 bf16 packed"], id="bert"),
        pytest.param(
            QWEN2_VL,
            [*causal("h32:8 d128 bf16", "causal"), "h16 d80 bf16 packed"],
            id="qwen2_vl",
        ),
        pytest.param(
            BART,
            ["h16 d64 fp16 packed", *causal("h8 d128 fp16", "causal"), "h8 d128 fp16 packed"],
            id="bart",
        ),
        pytest.param(DEEPSEEK, causal("h128 d192 bf16", "causal"), id="deepseek"),
        pytest.param(
            DEEPSEEK | {"v_head_dim": 128},
            causal("h128 d192:128 bf16", "causal"),
            id="deepseek of two widths",
        ),
        pytest.param(FALCON, causal("h71:1 d64 bf16", "causal"), id="falcon"),
    ],
)
def test_the_problems_of_a_model(
    config: dict[str, Any], problems: list[str], tmp_path: Path
) -> None:
    found = model(tmp_path, config)
    assert list(found.problems) == problems
    assert found.name == config["model_type"]
    for text in found.problems:
        parse_any_length(text)
    assert read_model(tmp_path / "config.json") == found


def test_gradients_on_request(tmp_path: Path) -> None:
    found = model(tmp_path, LLAMA, gradients=True)
    assert found.problems[-1] == "h32:8 d128 bf16 backward causal packed"
    assert len(found.problems) == 3


def test_what_was_assumed_is_said(tmp_path: Path) -> None:
    assert "has dtype float32; the kernels are for bf16" in model(tmp_path, BERT).notes[0]
    linear = LLAMA | {"layer_types": ["full_attention", "linear_attention"]}
    assert "linear_attention have no kernels" in model(tmp_path, linear).notes[0]
    assert model(tmp_path, LLAMA).notes == ()
    # Some layers have no kernels, others do.
    large = GEMMA2 | {"global_head_dim": 520, "num_global_key_value_heads": 2}
    assert "8 query heads over 2 KV heads of d 520" in model(tmp_path, large).notes[0]


def test_global_layers_have_a_width_of_their_own(tmp_path: Path) -> None:
    found = model(tmp_path, GEMMA2 | {"global_head_dim": 512, "num_global_key_value_heads": 1})
    assert found.notes == ()
    assert "h8:1 d512 fp16 causal softcap packed" in found.problems
    assert "h8:1 d512 fp16 decode causal softcap packed" in found.problems


def test_of_real_configs_of_transformers(tmp_path: Path) -> None:
    """As the library writes them, with every default, or with what differs alone."""
    llama = pytest.importorskip("transformers.models.llama.configuration_llama")
    config = llama.LlamaConfig(num_key_value_heads=4, dtype="float16")
    for use_diff in (True, False):
        (tmp_path / "config.json").write_text(config.to_json_string(use_diff=use_diff))
        assert read_model(tmp_path).problems[0] == "h32:4 d128 fp16 causal packed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not an object"),
        ("{", "it is not JSON"),
        ('{"hidden_size": 64}', "names no num_attention_heads and hidden_size"),
        ('{"hidden_size": 60, "num_attention_heads": 2}', "d must be a multiple of 8 up to"),
    ],
)
def test_what_is_no_model(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match="--model=") as caught:
        read_model(tmp_path)
    assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--model='.*config.json'"):
        read_model(tmp_path / "config.json")
