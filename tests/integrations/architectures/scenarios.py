"""What is tried with a tiny model: each scenario runs it once, on whatever attention it is set to,
and gives what must not depend on that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from inputs import LENGTH, is_seq2seq, padding, takes

NEW_TOKENS = 3
PIECES = (4, 6, 1)


class NotApplicableError(Exception):
    """The model has nothing to do with a scenario."""


class Given(NamedTuple):
    """A model, and inputs that it takes."""

    model: Any
    inputs: dict[str, Any]

    @property
    def is_text(self) -> bool:
        return "input_ids" in self.inputs

    def forward(self, **more: Any) -> Any:
        return first_tensor(self.model(**self.inputs | more))


def first_tensor(output: Any, shape: Any = ()) -> Any:
    """The logits or the last hidden state, mostly; one that begins with ``shape`` if any does."""
    tensors = list(_tensors(output))
    like = [it for it in tensors if it.shape[: len(shape)] == shape]
    _need(bool(tensors), "no tensor among its outputs")
    return (like or tensors)[0]


def _tensors(output: Any) -> Iterator[Any]:
    """All of an output, but a cache's."""
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, dict | tuple | list):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors(value)


def _plain(given: Given) -> Any:
    return given.forward()


def _masked(side: str) -> Callable[[Given], Any]:
    def run(given: Given) -> Any:
        _need(given.is_text and takes(given.model, "attention_mask"), "no mask")
        batch, length = given.inputs["input_ids"].shape
        mask = padding(side, batch, length)
        # Some models look for the largest token, wherever it is.
        ids = given.inputs["input_ids"].masked_fill(mask == 0, _pad_token(given.model))
        inputs = given.inputs | {"input_ids": ids, "attention_mask": mask}
        if is_seq2seq(given.model):
            return first_tensor(given.model(**inputs))
        output = first_tensor(given.model(**inputs), mask.shape)
        # Of padding a model may compute anything.
        return output[mask.bool()] if output.shape[:2] == mask.shape else output

    return run


def _pad_token(model: Any) -> int:
    token = getattr(model.config.get_text_config(), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else 0


def _decoder_masked(given: Given) -> Any:
    _need(takes(given.model, "decoder_attention_mask"), "no decoder's mask")
    mask = padding("right", *given.inputs["decoder_input_ids"].shape)
    output = given.forward(decoder_attention_mask=mask)
    return output[mask.bool()] if output.shape[:2] == mask.shape else output


def _positions() -> Any:
    return torch.cat([torch.arange(length) for length in PIECES])[None]


def packed_alone(given: Given) -> Any:
    """What packing must give: each sequence by itself."""
    pieces = given.inputs["input_ids"][:1].split(PIECES, 1)
    return torch.cat([first_tensor(given.model(input_ids=it)) for it in pieces], 1)


def _packed(*, ones: bool) -> Callable[[Given], Any]:
    def run(given: Given) -> Any:
        causal = takes(given.model, "position_ids") and takes(given.model, "use_cache")
        _need(given.is_text and causal and not is_seq2seq(given.model), "no position ids")
        how = {"attention_mask": torch.ones(1, LENGTH).long()} if ones else {"use_cache": False}
        ids = given.inputs["input_ids"][:1]
        return first_tensor(given.model(input_ids=ids, position_ids=_positions(), **how))

    return run


def _generated(cache: str) -> Callable[[Given], Any]:
    def run(given: Given) -> Any:
        model = given.model
        _need(given.is_text and model.can_generate(), "does not generate")
        ids = given.inputs["input_ids"]
        found = model.generate(
            **given.inputs,
            attention_mask=padding("left", *ids.shape),
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            cache_implementation=cache,
            disable_compile=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return torch.stack(found.logits)

    return run


def _autocast(given: Given) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return given.forward().float()


def _trained(given: Given) -> Any:
    """The gradients of a loss that all of the output has a part in."""
    model = given.model
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        output = given.forward()
        _need(output.requires_grad, "no gradients")
        share = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        (output * share).sum().backward()
    found = [it.grad.flatten() for it in model.parameters() if it.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(found)


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotApplicableError(otherwise)


SCENARIOS: dict[str, Callable[[Given], Any]] = {
    "plain": _plain,
    "ones": _masked("ones"),
    "left": _masked("left"),
    "right": _masked("right"),
    "decoder-right": _decoder_masked,
    "packed": _packed(ones=False),
    "packed-ones": _packed(ones=True),
    "dynamic": _generated("dynamic"),
    "static": _generated("static"),
    "autocast": _autocast,
    "training": _trained,
}
PACKED = ("packed", "packed-ones")
# Rounded to 8 bits, in another order.
ROUNDED = ("autocast",)
