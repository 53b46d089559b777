"""What transformers states about a model's classes: what becomes of its masks, and whether it may
run on any attention but its own."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from flashsmith.errors import ArgumentError


class Model(NamedTuple):
    """The classes of one config, as their flags describe them.

    name: the first of them. calls_interface: attention is computed by the function that the config
    names, and not by code of the model. passes_masks_on: attention masks go from transformers' mask
    functions to the attention function as they are. supported: transformers allows an attention
    other than eager. builds_masks: the module imports transformers' mask functions.
    """

    name: str
    calls_interface: bool
    passes_masks_on: bool
    supported: bool
    builds_masks: bool


def model_of(config: Any) -> Model | None:
    """The model of a config; None where its module is not to be found."""
    return None if config is None else _model_of(type(config))


_found: dict[type, Model] = {}


# A tracer takes the answer for a constant, and looks into no module.
@torch.compiler.assume_constant_result
def _model_of(config_class: type) -> Model | None:
    if config_class not in _found:
        model = _find_model(config_class)
        if model is None:  # its module may be imported later
            return None
        _found[config_class] = model
    return _found[config_class]


def _find_model(config_class: type) -> Model | None:
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name)
    names = {} if module is None else vars(module)
    found: list[Any] = [
        it
        for it in names.values()
        if isinstance(it, type)
        and issubclass(it, PreTrainedModel)
        and getattr(it, "config_class", None) is config_class
    ]
    if not found:
        return None
    return Model(
        found[0].__name__,
        any(it._can_set_attn_implementation() for it in found),
        # FlashAttention's masks are (batch, keys): a class that it serves never looks into masks.
        any(it._supports_flash_attn for it in found),
        any(it._supports_sdpa or it._supports_flash_attn for it in found),
        any(getattr(it, "__module__", "") == "transformers.masking_utils" for it in names.values()),
    )


def check_that_it_builds_masks(module: Any) -> None:
    """Raises ArgumentError for a layer of a model that transformers runs on eager attention only,
    and that asks for no mask either: nothing then says what its attention function leaves out."""
    model = model_of(getattr(module, "config", None))
    if model is not None and not model.supported and not model.builds_masks:
        raise _unsupported(module, model)


def stated_causality(module: Any, given: bool | None, queries: int) -> bool:
    """Whether a layer whose mask does not say so is causal, by its own statement.

    Raises:
        ArgumentError: it states nothing, or transformers runs its model on eager attention only, so
            that what it states was never tried.
    """
    check_that_it_builds_masks(module)
    stated = getattr(module, "is_causal", None) if given is None else given
    model = model_of(getattr(module, "config", None))
    if model is not None and not model.supported:
        # Eager attention without a mask hides nothing.
        if stated and queries != 1:
            raise _unsupported(module, model)
        return False
    if stated is None and queries != 1:
        raise ArgumentError(
            f"is_causal: {type(module).__name__} has no attention_mask and does not state whether "
            "it is causal; set is_causal on the layer, or pass it to the attention function"
        )
    return bool(stated)


def _unsupported(module: Any, model: Model) -> ArgumentError:
    return ArgumentError(
        f"{type(module).__name__} of {model.name}: transformers marks the class as supporting "
        "neither sdpa nor flash attention, and no mask that it built says what its queries see; "
        'use attn_implementation="eager"'
    )
