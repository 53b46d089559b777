"""Inputs for a tiny model of any kind, by the names in its forward()'s signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from builders import PLAIN_TOKENS

BATCH, LENGTH, ENCODER_LENGTH = 3, 11, 9
_FRAMES = (96, 3000)
_SAMPLES = 6400
_GRID = (1, 4, 6)  # patches of a video or an image: time, height, width


def takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def is_seq2seq(model: Any) -> bool:
    return takes(model, "decoder_input_ids")


def tokens(length: int = LENGTH, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        PLAIN_TOKENS.start, PLAIN_TOKENS.stop, (BATCH, length), generator=generator
    )


def padding(side: str, batch: int, length: int) -> Any:
    """A mask whose second line, and third, are padded on the side; of 'ones', none is."""
    position = torch.arange(length)
    if side == "left":
        position = position.flip(0)
    lengths = [length, 5, 8][:batch] if side != "ones" else [length] * batch
    return (position < torch.tensor(lengths)[:, None]).long()


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs that the model may take, the likelier ones first."""
    decoder = {"decoder_input_ids": tokens(seed=2)} if is_seq2seq(model) else {}
    text = {}
    if takes(model, "input_ids"):
        text = {"input_ids": tokens(ENCODER_LENGTH if decoder else LENGTH)}
        yield text | decoder
        if takes(model, "bbox"):
            sides = _config_value(model, "dim_bbox") or 4
            yield text | {"bbox": torch.zeros(*text["input_ids"].shape, sides).long()}
    others = list(_others(model))
    for other in others:
        yield other | decoder
    if text:
        for other in others:
            yield text | other | decoder


def _others(model: Any) -> Iterator[dict[str, Any]]:
    """Images, sounds or embeddings."""
    for name in ("pixel_values", "hidden_states"):
        if takes(model, name) and takes(model, "grid_thw"):
            yield {name: _patches(model), "grid_thw": torch.tensor([_GRID, _GRID])}
    if takes(model, "pixel_values"):
        for pixels in _pixels(model):
            yield {"pixel_values": pixels}
    if takes(model, "pixel_values_videos"):
        for pixels in _pixels(model):
            video = pixels if pixels.dim() == 5 else pixels[:, None].repeat(1, 4, 1, 1, 1)
            yield {"pixel_values_videos": video}
    if takes(model, "input_values"):
        for shape in ((_SAMPLES,), (1, _SAMPLES), (1024, 128)):
            yield {"input_values": _noise(BATCH, *shape)}
    bins = _config_value(model, "num_mel_bins", "feature_size", "input_dim", "input_feat_size")
    for name in ("input_features", "audio_values"):
        if takes(model, name):
            for frames in _FRAMES:
                yield {name: _noise(BATCH, frames, bins or 80)}
                yield {name: _noise(BATCH, bins or 80, frames)}
                yield {name: _noise(BATCH, 1, frames, bins or 80)}
    width = _config_value(model, "hidden_size", "d_model", "embed_dim") or 64
    for name in ("hidden_states", "inputs_embeds", "query_embeds"):
        if takes(model, name):
            yield {name: _noise(BATCH, LENGTH, width)}


def _patches(model: Any) -> Any:
    """(patches of two images, values of a patch)."""
    names = ("in_channels", "num_channels"), ("temporal_patch_size",), ("patch_size",)
    channels, times, side = (_config_value(model, *it) for it in names)
    number = 2 * _GRID[0] * _GRID[1] * _GRID[2]
    return _noise(number, (channels or 3) * (times or 1) * (side or 14) ** 2)


def _pixels(model: Any) -> Iterator[Any]:
    channels = _config_value(model, "num_channels", "in_channels", "in_chans") or 3
    size = _config_value(model, "image_size", "img_size", "input_size")
    height, width = size if isinstance(size, list | tuple) else (size or 224, size or 224)
    yield _noise(BATCH, channels, height, width)
    frames = _config_value(model, "num_frames", "frames_per_clip")
    if frames:
        yield _noise(1, frames, channels, height, width)
    if (height, width) != (224, 224):
        yield _noise(BATCH, channels, 224, 224)


def _config_value(model: Any, *names: str) -> Any:
    configs = [model.config, *(getattr(model.config, it, None) for it in model.config.sub_configs)]
    for name in names:
        for config in configs:
            if (value := getattr(config, name, None)) is not None:
                return value
    return None


def _noise(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))
