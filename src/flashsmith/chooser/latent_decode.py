"""attention_with_cache(q, k_cache, v_width=512): attention over a latent cache, with an
automatically chosen kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashsmith.chooser.backward import check_config_for
from flashsmith.chooser.functions import CallFunctions, bound_over_cache, sizes_over_cache
from flashsmith.errors import ArgumentError
from flashsmith.operations.decode import check_split
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.printable import quoted
from flashsmith.runtime import Chooser
from flashsmith.runtime.cache_scales import Scales
from flashsmith.runtime.latent_pass import LatentOptions, LatentTensors, run_latent
from flashsmith.semantics.signature import CACHE
from flashsmith.semantics.sizes import FREE

_TENSORS = ("cache_lens", "out", "page_table", "k", "sinks", "cu_seqlens_q")
# The fields of LatentOptions without the program, which the functions are turned into, and without
# the scale, which may be a tensor.
_OPTIONS = tuple(name for name in LatentOptions._fields if name not in ("program", "k_scale_value"))
_FUNCTIONS = ("score_mod", "mask_mod", "mask", "bias")


def attention_with_latent_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    keywords: Mapping[str, Any],
    choosers: Mapping[str, Chooser],
) -> Any:
    """Computes attention_with_cache() with ``v_width``. ``keywords`` has all keywords of that
    function. ``choosers`` has, for each value of ``split``, the function that chooses a kernel."""
    check_keywords(v_cache, keywords)
    config = keywords["config"]
    check_config_for(LATENT_DECODE.name, "config", config)
    scales = Scales.of(keywords["k_scale"], None)
    scale, number = scales.tensors[0], scales.numbers[0]
    options = {name: keywords[name] for name in _OPTIONS}
    functions = {name: keywords[name] for name in _FUNCTIONS}
    if any(it is not None for it in functions.values()):
        over = sizes_over_cache(q, k_cache, keywords["page_table"], keywords["cu_seqlens_q"], None)
        limits = options["causal"], options["window"]
        program, causal, window = bound_over_cache(CallFunctions(**functions), limits, over)
        options |= {"program": program, "causal": causal, "window": window}
    return run_latent(
        config or choosers[check_split(keywords["split"])],
        LatentTensors(q, k_cache, **{name: keywords[name] for name in _TENSORS}, k_scale=scale),
        LatentOptions(**options, k_scale_value=number),
        keywords["emulate"],
    )


def check_keywords(v_cache: Any, keywords: Mapping[str, Any]) -> None:
    """Raises ArgumentError if a v_cache is given, or a keyword that attention over a latent cache
    does not have."""
    if v_cache is not None:
        raise ArgumentError(
            "v_cache: given, and v_width, too, by which the values are columns of k_cache; leave "
            "one out"
        )
    if keywords["v_scale"] is not None:
        raise ArgumentError(
            "v_scale: a row of a latent cache is key and value, and has one scale, k_scale; leave "
            "v_scale out"
        )
    # rotary_interleaved is accepted because it has no effect without cos, which is refused.
    others = "k_scale", "config", "emulate", "rotary_interleaved"
    served = {*_TENSORS, *_OPTIONS, *_FUNCTIONS, *others}
    for name, value in keywords.items():
        is_plain = isinstance(value, (str, int, float))
        neutral = (CACHE.defaults[name], FREE if name == "bits" else None)
        if name in served or value is None or (is_plain and value in neutral):
            continue
        shown = f"={quoted(value)}" if is_plain else ""
        raise ArgumentError(
            f"{name}{shown}: attention over a latent cache (v_width) has no {name}; leave it out"
        )
