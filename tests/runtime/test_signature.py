"""The public functions, their overloads' keywords and the options within have the arguments of
semantics/signature.py: the same names, order, defaults and types."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_type_hints

import pytest

import flashsmith
from flashsmith.chooser import (
    attention,
    attention_with_cache,
    backward,
    merge_attention,
    write_slots,
)
from flashsmith.operations.cache_scales import SCALE_OPTIONS
from flashsmith.runtime import forward, keywords
from flashsmith.runtime.decode_pass import DecodeOptions, DecodeTensors
from flashsmith.runtime.latent_pass import LatentOptions, LatentTensors
from flashsmith.semantics.signature import (
    ARGUMENTS,
    ATTENTION,
    BACKWARD,
    CACHE,
    FORWARD,
    REQUIRED,
    SIGNATURES,
    BackwardOptions,
    ForwardOptions,
    Signature,
)

FUNCTIONS = {
    it.__name__: it
    for it in (
        *(attention, forward, backward),
        *(attention_with_cache, merge_attention, write_slots),
    )
}
# Of what is returned, which overloads tell apart.
RETURNED = {"return_lse", "return_row_max", "partial"}


def spelled(function: Any) -> list[inspect.Parameter]:
    """A function's keywords."""
    parameters = inspect.signature(function).parameters.values()
    return [it for it in parameters if it.kind is it.KEYWORD_ONLY]


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_spells_its_signature(name: str) -> None:
    parameters = spelled(FUNCTIONS[name])
    assert [it.name for it in parameters] == list(SIGNATURES[name].defaults)
    for it in parameters:
        default = SIGNATURES[name].defaults[it.name]
        assert it.default is (it.empty if default is REQUIRED else default) or (
            it.default == default and type(it.default) is type(default)
        )
        assert it.annotation == ARGUMENTS[it.name].kind, it.name


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_package_has_that_function(name: str) -> None:
    assert spelled(getattr(flashsmith, name)) == spelled(FUNCTIONS[name])


@pytest.mark.parametrize(
    ("typed", "signature", "others"),
    [
        (keywords.ForwardKeywords, FORWARD, set()),
        (keywords.AttentionKeywords, ATTENTION, set()),
        (keywords.CacheKeywords, CACHE, {"cache_lens"}),
    ],
)
def test_overloads_share_the_other_keywords(
    typed: Any, signature: Signature, others: set[str]
) -> None:
    assert set(typed.__annotations__) == set(signature.defaults) - RETURNED - others
    for name, annotation in typed.__annotations__.items():
        assert annotation.__forward_arg__ == ARGUMENTS[name].kind, name


@pytest.mark.torch
def test_parallel_attention_has_attentions_keywords() -> None:
    from flashsmith.parallel import attention_keywords

    own = {"group", "schedule"}
    found = set(attention_keywords.ParallelKeywords.__annotations__)
    # Functions would see the indices of a GPU's part of the sequence.
    functions = {"score_mod", "mask_mod", "mask", "bias", "positions"}
    others = RETURNED | functions | {"seqused_k", "k_begin"}
    assert found == own | set(ATTENTION.defaults) - others


def test_options_have_the_defaults() -> None:
    for options, signature in (
        (ForwardOptions, FORWARD),
        (BackwardOptions, BACKWARD),
        (DecodeOptions, CACHE),
        (DecodeTensors, CACHE),
    ):
        for name, default in options._field_defaults.items():
            # Whether gradients must be repeatable is resolved before. attention() makes the program
            # of functions.
            if name not in ("forward", "deterministic", "program", *SCALE_OPTIONS):
                assert (name, default) == (name, signature.defaults[name])
    assert set(FORWARD.defaults) == {*ForwardOptions._fields, "emulate"} - {"program"}
    # A scale is a tensor or a number.
    options = [name for name in DecodeOptions._fields if name not in SCALE_OPTIONS]
    functions = {"score_mod", "mask_mod", "mask", "bias"}
    assert set(CACHE.defaults) - {"v_width"} - functions == (
        {*options, *DecodeTensors._fields[3:], "config", "emulate"} - {"program"}
    )
    latent = {*LatentOptions._fields, *LatentTensors._fields[2:]} - {*SCALE_OPTIONS, "program"}
    assert set(CACHE.defaults) > latent
    assert [name for name in options if ARGUMENTS[name].is_tensor] == []
    assert [name for name in DecodeTensors._fields[3:] if not ARGUMENTS[name].is_tensor] == []


def entries(function: Any) -> dict[str, str]:
    """What a docstring says of each argument."""
    text = inspect.getdoc(function) or ""
    section = text.partition("Args:\n")[2].partition("\n\nR")[0]
    found: dict[str, str] = {}
    for names, said in re.findall(
        r"^    (\w[\w, \n]*?): (.*?)(?=^    \w|\Z)", section, re.M | re.S
    ):
        found |= dict.fromkeys(re.split(r",\s+", names), " ".join(said.split()))
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_argument_is_explained(name: str) -> None:
    assert set(SIGNATURES[name].defaults) <= set(entries(FUNCTIONS[name]))


def test_one_argument_is_explained_in_one_place() -> None:
    of_forward = entries(forward)
    for name in FORWARD.defaults:
        assert of_forward[name].startswith("as for attention()"), name


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected .* 'causl'.*causal"):
        ATTENTION.bind({"causl": True})
    with pytest.raises(TypeError, match=r"^attention_with_cache\(\) missing .* 'cache_lens'$"):
        CACHE.bind({})


def test_annotations_are_types() -> None:
    """As they are, not only as text."""
    assert get_type_hints(forward)["window"] == tuple[int | None, int | None]
