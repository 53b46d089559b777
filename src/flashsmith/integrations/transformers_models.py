"""Finds out what transformers declares about a model's classes: how the classes use masks, and
whether they may run on attention implementations other than eager."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from flashsmith.errors import ArgumentError
from flashsmith.integrations.pytorch_state import assume_constant_result


class Model(NamedTuple):
    """Flags that hold for every model class that uses a given config class.

    name: the name of the first class.
    calls_interface: attention is computed by the function that the config names, not by the model's
        own code.
    passes_masks_on: the attention function receives the masks of transformers' mask functions
        unchanged.
    supported: transformers allows attention implementations other than eager.
    builds_masks: the module imports transformers' mask functions.
    """

    name: str
    calls_interface: bool
    passes_masks_on: bool
    supported: bool
    builds_masks: bool


def model_of(config: Any) -> Model | None:
    """Returns the model of a config; None if its module is not found."""
    return None if config is None else _model_of(type(config))


_found: dict[type, Model] = {}


# A tracer records the result as a constant instead of tracing the search through modules.
@assume_constant_result
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
        # The masks of FlashAttention are (batch, keys), so a class that supports FlashAttention
        # does not inspect its masks.
        any(it._supports_flash_attn for it in found),
        any(it._supports_sdpa or it._supports_flash_attn for it in found),
        any(getattr(it, "__module__", "") == "transformers.masking_utils" for it in names.values()),
    )


def check_that_it_builds_masks(module: Any) -> None:
    """Raises ArgumentError if a layer's model runs on eager attention only and builds no masks,
    because nothing says which keys the attention function of such a model hides."""
    model = model_of(getattr(module, "config", None))
    if model is not None and not model.supported and not model.builds_masks:
        raise _unsupported(module, model)


def stated_causality(module: Any, given: bool | None, queries: int) -> bool:
    """Whether a layer declares itself causal; used if the mask does not determine whether attention
    is causal.

    Raises:
        ArgumentError: the layer declares nothing, or transformers runs its model on eager attention
            only, so that its declaration was never tested.
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
        "neither sdpa nor flash attention, and it built no mask that describes which keys its "
        'queries see; use attn_implementation="eager"'
    )
