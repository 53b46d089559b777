"""Every architecture of transformers' auto mappings, and a tiny random model of each.

A config is made smaller by rules for the names of its fields. Widths and numbers of heads are
divided by the same factor, so that they still match each other. The size of a head stays that of
the published model, because the kernels support only some sizes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 160
# Random tokens are below this number; those that mean something to a model are above.
PLAIN_TOKENS = range(10, 90)
_WINDOW = 4
# SAM's later models, whose weights have the shape of their images' size.
_LARGE_IMAGES = re.compile(r"sam2|sam3(?!_vision)|sam_hq")
_MOST_PARAMETERS = 90_000_000

# The mapping that says best what a model is for comes first.
_KINDS = {
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "decoder": ("CAUSAL_LM",),
    "multimodal": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    "base": ("", "MASKED_LM", "PRETRAINING", "BACKBONE", "CTC", "IMAGE", "TEXT_ENCODING"),
}

_HEADS = re.compile(r"(^|_)(n_heads?|num_heads|attention_heads|(key_value|kv|query)_heads)$")
_WIDTHS = re.compile(
    r"(^|_)(hidden_size|hidden_dim|d_model|d_ff|n_embd|n_inner|embed_dim|emb_dim|ffn_dim|dim|width"
    r"|intermediate_size|ffn_hidden_size|mlp_dim|hidden_sizes?|embedding_size|projection_dim"
    r"|output_size|lru_width|word_embed_proj_dim|dim_feedforward|projection_size|d_inner)$"
)
_NOT_WIDTHS = re.compile(r"head_dim|codebook|codevector|rope|kernel|positional|mel_dim|conv_dim")
_DEPTHS = re.compile(r"(^|_)(num_hidden_layers|n_layers?|num_layers|layers|depth|num_blocks)$")
_NOT_DEPTHS = re.compile(r"feat_extract|adapter|postnet|prenet|predictor|conv_layers|lstm")
_EXPERTS = re.compile(r"(^|_)(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
_CHOSEN = re.compile(r"(^|_)(num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts)$")
_TOKENS = re.compile(r"_token_(id|index)$|_token_ids?$|_pad_id$|_(start|end|bos|eos)_id$")
_VOCABULARIES = re.compile(r"vocab_size(_per_layer_input)?$|^vocab_size|n_vocab$")
_FIXED = {
    "sliding_window": _WINDOW,
    "sliding_window_size": _WINDOW,
    "attention_window_size": _WINDOW,
    "attention_chunk_size": _WINDOW,
    "local_attention": _WINDOW,
    "index_topk": 6,
    "n_group": 1,
    "num_expert_group": 1,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "encoder_hash_byte_group_vocab": 64,
    "topk_group": 1,
    "num_kv_shared_layers": 0,
    "num_nextn_predict_layers": 0,
    "max_window_layers": 1,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 16,
    "max_source_positions": 48,
}
# Where a rule does not do: fields of a type of model.
_OF_TYPE: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "xmod": {"default_language": "en_XX"},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 100, "<racm3:break>": 101, "<eoss>": 102}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}


class Architecture(NamedTuple):
    """A kind of model: transformers' name of its config, and the class that is tried."""

    name: str
    model_type: str
    class_name: str
    kind: str  # of _KINDS
    decodes: bool = False  # an encoder's class that is set to decode

    def __str__(self) -> str:
        return self.name


class Size(NamedTuple):
    """What is made small, besides depth and vocabulary."""

    narrow: bool  # widths and numbers of heads
    small: bool  # images


# Not every model can be narrow, or see small images: the next size is tried.
SIZES = (Size(True, True), Size(True, False), Size(False, False))


class NotBuildableError(Exception):
    """Why no tiny model of an architecture can be made."""


def architectures() -> list[Architecture]:
    """All of transformers' auto mappings, one class for each type of model, and one more of types
    that encode unless they are set to decode."""
    return sorted(_architectures(), key=lambda it: it.name)


def _architectures() -> Iterator[Architecture]:
    classes = {kind: [_mapping(name) for name in mappings] for kind, mappings in _KINDS.items()}
    types = {name for found in classes.values() for mapping in found for name in mapping}
    for model_type in types:
        found = {
            kind: next((mapping[model_type] for mapping in group if model_type in mapping), None)
            for kind, group in classes.items()
        }
        kind, name = next((kind, name) for kind, name in found.items() if name)
        if kind == "decoder" and found["multimodal"] not in (None, name):
            if f"{model_type}_text" not in types:
                yield Architecture(f"{model_type} (text)", model_type, name, kind)
            yield Architecture(model_type, model_type, found["multimodal"], "multimodal")
        elif kind == "decoder" and found["base"] and _encodes_by_default(model_type):
            yield Architecture(model_type, model_type, found["base"], "base")
            yield Architecture(f"{model_type} (decoder)", model_type, name, "decoder", True)
        else:
            yield Architecture(model_type, model_type, name, kind)


@cache
def _mapping(name: str) -> dict[str, str]:
    whole = f"MODEL_{'FOR_' if name and name != 'PRETRAINING' else ''}{name}_MAPPING_NAMES"
    found = getattr(modeling_auto, whole.replace("MODEL__", "MODEL_"), {})
    return {key: it if isinstance(it, str) else it[0] for key, it in found.items()}


def _encodes_by_default(model_type: str) -> bool:
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:  # whatever it is, building the model says it
        return False
    return getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder


# --- configs -------------------------------------------------------------------------------------


def tiny_config(model_type: str, size: Size) -> Any:
    """The default config with few layers and tokens."""
    default = CONFIG_MAPPING[model_type]()
    return type(default)(**_changes(default, size) | _OF_TYPE.get(model_type, {}))


def _changes(config: Any, size: Size) -> dict[str, Any]:
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    factor = _factor(fields) if size.narrow else 1
    places = _kept_layers(fields)
    changes: dict[str, Any] = {}
    tokens: dict[int, int] = {}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = {"model_type": value.model_type, **_changes(value, size)}
            continue
        changed = _changed(name, value, factor, places, tokens)
        if changed is not value:
            changes[name] = changed
    changes |= _derived(fields | changes)
    if size.small:
        changes |= _small_images(fields)
    return changes


def _derived(fields: dict[str, Any]) -> dict[str, Any]:
    """What some configs leave for a published model's to say."""
    found = {}
    heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
    if type(heads) is int and type(width) is int and heads:
        if fields.get("head_dim", 0) is None:
            found["head_dim"] = width // heads if width // heads % 8 == 0 else 64
        if fields.get("num_key_value_heads", 0) is None:
            found["num_key_value_heads"] = heads
    return found


def _small_images(fields: dict[str, Any]) -> dict[str, Any]:
    """Four patches wide; at least 64 pixels, since convolutions halve them again and again."""
    patch, image = fields.get("patch_size"), fields.get("image_size")
    if type(patch) is not int or type(image) is not int or image <= max(64, 4 * patch):
        return {}
    return {"image_size": max(4 * patch, -(-64 // patch) * patch)}


def _factor(fields: dict[str, Any]) -> int:
    """What widths and numbers of heads are divided by, so that two heads are left, or few."""
    heads = [value for name, value in _integers(fields) if _HEADS.search(name) and value > 0]
    queries = [value for name, value in _integers(fields) if re.search(r"attention_heads$", name)]
    most = max(queries or heads or [1])
    width = next((fields[it] for it in ("hidden_size", "d_model", "n_embd") if it in fields), 0)
    if type(width) is not int:
        return 1
    factors = [most // left for left in (2, 3, 4, 5, 6, 7, 1) if most % left == 0]
    return next((it for it in factors if width % it == 0), 1)


def _integers(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    return ((name, value) for name, value in fields.items() if type(value) is int)


def _kept_layers(fields: dict[str, Any]) -> tuple[int, list[int]] | None:
    """How many layers there are, and which stay: two, and one of each type."""
    number = fields.get("num_hidden_layers")
    types = fields.get("layer_types") or fields.get("layers_block_type")
    if not isinstance(number, int):
        return None
    if not types:
        return number, list(range(min(2, number)))
    firsts = [types.index(kind) for kind in dict.fromkeys(types)][:4]
    more = [place for place in range(number) if place not in firsts]
    return number, sorted(firsts + more[: max(0, 2 - len(firsts))])


def _changed(name: str, value: Any, factor: int, places: Any, tokens: dict[int, int]) -> Any:
    if isinstance(value, list) and places and len(value) == places[0] > 2:
        return [value[place] for place in places[1]]
    if type(value) is list and _TOKENS.search(name) and all(type(it) is int for it in value):
        return [_token(it, tokens) for it in value]
    if type(value) is not int:
        return value
    if name in _FIXED:
        return min(value, _FIXED[name]) if value > 0 else value
    if _TOKENS.search(name):
        return _token(value, tokens)
    if _VOCABULARIES.search(name):
        return min(value, VOCABULARY)
    if name == "num_hidden_layers" and places:
        return len(places[1])
    if _DEPTHS.search(name) and not _NOT_DEPTHS.search(name):
        return min(value, 2)
    if _EXPERTS.search(name):
        return min(value, 4)
    if _CHOSEN.search(name):
        return min(value, 2)
    if _HEADS.search(name):
        return max(1, value // factor)
    if _WIDTHS.search(name) and not _NOT_WIDTHS.search(name) and value % factor == 0:
        return value // factor
    return value


def _token(value: int, tokens: dict[int, int]) -> int:
    """A token of the small vocabulary: others than each other stay so."""
    if value < PLAIN_TOKENS[0]:
        return value
    return tokens.setdefault(value, VOCABULARY - 1 - len(tokens))


# --- models --------------------------------------------------------------------------------------


def tiny_model(architecture: Architecture, size: Size) -> Any:
    """A model in float32, in eval mode.

    Raises:
        NotBuildableError: transformers or PyTorch refuses the config, or it is large.
    """
    from transformers import logging

    logging.set_verbosity_error()
    if _LARGE_IMAGES.match(architecture.model_type):
        raise NotBuildableError(
            "takes minutes: its images have a fixed size of 1,008 pixels or more"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = tiny_config(architecture.model_type, size)
            if architecture.decodes:
                config.is_decoder = True
            config._attn_implementation = config._experts_implementation = "eager"
            model_class = getattr(transformers, architecture.class_name)
            if not isinstance(config, model_class.config_class or PreTrainedConfig):
                config = config.get_text_config()
            with torch.device("meta"):
                weights = sum(it.numel() for it in model_class(config).parameters())
            if weights > _MOST_PARAMETERS:
                raise NotBuildableError(f"{weights / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = model_class(config)
    except NotBuildableError:
        raise
    except Exception as error:
        raise NotBuildableError(_said(error)) from error
    _randomize(model)
    return model.eval()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _randomize(model: Any) -> None:
    """Weights by which attention is far from uniform, and no gate is closed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                fan_in = max(1, parameter[:1].numel())
                parameter.normal_(0.0, fan_in**-0.5, generator=generator)
            elif not parameter.any():
                parameter.normal_(0.0, 0.1, generator=generator)
