"""Reads a model's attention problems from the config.json that transformers writes for the model.

`flashsmith build --model` builds kernels for these problems. This module needs neither PyTorch nor
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.safe_json import UnusableTextError, read_json
from flashsmith.semantics.sizes import window_class

# The names that model families use for the model's width; the first name present is used.
_WIDTH = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")
# In the config of a vision tower, hidden_size may be the width of the language model.
_WIDTH_OF_TOWERS = ("embed_dim", *_WIDTH)
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_ENCODER_HEADS = ("encoder_attention_heads", *_HEADS)
_DECODER_HEADS = ("decoder_attention_heads", "num_decoder_heads", *_HEADS)
_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
# Parts of a model with attention layers in which every query sees all keys.
_TOWERS = ("vision_config", "audio_config", "encoder_config")
# Suffixes of architectures, and parts of model types, in which every query sees all keys.
_SEES_ALL = ("ForMaskedLM", "ForPreTraining", "ForImageClassification", "ForTokenClassification")
_SEES_ALL_TYPES = ("bert", "electra", "mpnet", "vit", "siglip", "dino")
_LONGEST_HEAD = 512


@dataclass(frozen=True)
class ModelAttention:
    """The attention problems of a model.

    problems: distinct problems without batch and lengths, as `build --any-length` takes them.
    notes: assumptions, and layers that have no kernels.
    """

    name: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Heads:
    """The attention that some layers share: numbers of query heads and KV heads, d, and the words
    for the masks in a problem string."""

    heads_q: int
    heads_k: int
    d: int
    masks: tuple[str, ...]  # '': no mask
    softcap: bool = False
    generates: bool = True
    d_v: int = 0  # 0: d


def read_model(path: Path | str, *, gradients: bool = False) -> ModelAttention:
    """Reads a model's problems from its config.json; ``path`` is that file or its folder.

    The problems have packed sequences, because padded batches are computed as packed sequences.
    Models that generate also have problems with a KV cache, and ``gradients`` adds the problems of
    the backward pass.

    Raises ArgumentError if the file does not exist or is not a model's config, or if no kernel
    supports the model's heads.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(file)
    except UnusableTextError as error:
        raise ArgumentError(f"--model={quoted(str(path))}{error.place}: {error}") from None
    if not isinstance(config, dict):
        raise ArgumentError(f"--model={quoted(str(path))}: not an object, as a config.json is")
    notes: list[str] = []
    found = [one for part in _parts(config) for one in _attention_of(*part, notes)]
    if not found:
        raise ArgumentError(
            f"--model={quoted(str(path))}: names no {_HEADS[0]} and {_WIDTH[0]}; give the "
            "config.json of a transformers model, or the problems themselves with --for"
        )
    dtype = _dtype(config, notes)
    problems = dict.fromkeys(text for one in found for text in _texts(one, dtype, gradients, notes))
    if not problems:
        raise ArgumentError(f"--model={quoted(str(path))}: {'; '.join(notes)}")
    name = str(config.get("model_type") or file.parent.name or file.name)
    return ModelAttention(name, tuple(problems), tuple(dict.fromkeys(notes)))


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yields the parts of a model that have attention layers, each with its role: 'encoder',
    'decoder', 'causal', or 'all' if every query sees all keys."""
    text = next((config[n] for n in ("text_config", "llm_config") if _is_part(config, n)), None)
    if config.get("is_encoder_decoder"):
        for name, role in (("encoder", "encoder"), ("decoder", "decoder")):
            part = config.get(name)
            yield (part if isinstance(part, Mapping) else config), role
    elif text is not None:
        yield text, "causal"
    else:
        yield config, "all" if _sees_all(config) else "causal"
    for name in _TOWERS:
        if _is_part(config, name):
            yield config[name], "all"


def _is_part(config: Mapping[str, Any], name: str) -> bool:
    return isinstance(config.get(name), Mapping)


def _sees_all(config: Mapping[str, Any]) -> bool:
    names = [str(name) for name in config.get("architectures") or ()]
    if config.get("is_decoder") or any("CausalLM" in name for name in names):
        return False
    kind = str(config.get("model_type", ""))
    return any(name.endswith(_SEES_ALL) for name in names) or any(
        word in kind for word in _SEES_ALL_TYPES
    )


def _attention_of(config: Mapping[str, Any], role: str, notes: list[str]) -> Iterator[_Heads]:
    """Yields the attention of one part of a model, or nothing if the part's config does not give a
    number of heads."""
    names = {"encoder": _ENCODER_HEADS, "decoder": _DECODER_HEADS}.get(role, _HEADS)
    heads_q = _number(config, names)
    width = _number(config, _WIDTH_OF_TOWERS if role == "all" else _WIDTH)
    if heads_q is None or (width is None and _number(config, ("head_dim",)) is None):
        return
    heads_k = _number(config, _KV_HEADS) or heads_q
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        heads_k = 1
    d = _number(config, ("head_dim", "d_kv")) or (width or 0) // heads_q
    d_v = d
    latent = [_number(config, (f"qk_{word}_head_dim",)) for word in ("nope", "rope")]
    if None not in latent:
        # Latent attention: after expansion, every head has its own K and V.
        d, heads_k = sum(filter(None, latent)), heads_q
        d_v = _number(config, ("v_head_dim",)) or d
    softcap = bool(config.get("attn_logit_softcapping"))
    if role in ("all", "encoder"):
        yield _Heads(heads_q, heads_k, d, ("",), softcap, generates=False)
        return
    window = _window_word(config)
    masks = ("causal", window) if window else ("causal",)
    yield _Heads(heads_q, heads_k, d, masks, softcap, d_v=d_v)
    if role == "decoder":
        yield _Heads(heads_q, heads_k, d, ("",), softcap, generates=False)  # cross-attention
    of_all = _number(config, ("global_head_dim",))
    if of_all:
        of_all_k = _number(config, ("num_global_key_value_heads",)) or heads_k
        yield _Heads(heads_q, of_all_k, of_all, ("causal",), softcap)
    other = {str(one) for one in config.get("layer_types") or ()} - {
        "full_attention",
        "sliding_attention",
    }
    if other:
        notes.append(f"layers of type {', '.join(sorted(other))} have no kernels here")


def _window_word(config: Mapping[str, Any]) -> str:
    """Returns the problem-string word for the sliding-window layers' mask; '' without such
    layers."""
    keys = _number(config, ("sliding_window",))
    types = config.get("layer_types")
    if keys is None or config.get("use_sliding_window") is False:
        return ""
    # A window of n keys consists of the row's own key and the n - 1 keys to its left.
    return (
        f"window_{window_class(keys - 1, 0)}" if not types or "sliding_attention" in types else ""
    )


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Returns the first positive integer among the values of the named fields; None if there is
    none."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _dtype(config: Mapping[str, Any], notes: list[str]) -> str:
    """Returns the word for a model's dtype. If the config does not give a supported dtype, the word
    is 'bf16', and a note says so."""
    text = config.get("text_config")
    of_text = text if isinstance(text, Mapping) else {}
    named = next(
        (one[key] for one in (config, of_text) for key in ("dtype", "torch_dtype") if one.get(key)),
        None,
    )
    found = _DTYPES.get(str(named).removeprefix("torch."))
    if found is None:
        fact = "names no dtype" if named is None else f"has dtype {named}"
        notes.append(f"the model {fact}; the kernels are for bf16, as under autocast")
    return found or "bf16"


def _texts(of: _Heads, dtype: str, gradients: bool, notes: list[str]) -> Iterator[str]:
    if of.d % 8 or not 0 < of.d <= _LONGEST_HEAD or of.heads_q % of.heads_k:
        notes.append(
            f"transformers' layers have no kernel for {of.heads_q} query heads over {of.heads_k} "
            f"KV heads of d {of.d}: d must be a multiple of 8 up to "
            f"{_LONGEST_HEAD}, and KV heads must divide query heads"
        )
        return
    heads = f"h{of.heads_q}" + (f":{of.heads_k}" if of.heads_k != of.heads_q else "")
    for visible in of.masks:
        words = [word for word in (visible, "softcap" * of.softcap, "packed") if word]
        operations = ["", *["decode"] * of.generates, *["backward"] * gradients]
        for operation in operations:
            widths = f"d{of.d}" if of.d_v in (0, of.d) else f"d{of.d}:{of.d_v}"
            yield " ".join(filter(None, [heads, widths, dtype, operation, *words]))
