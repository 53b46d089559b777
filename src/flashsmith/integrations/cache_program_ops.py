"""Defines PyTorch custom ops for attention_with_cache() with score and mask functions.

An op takes a program as a string, and the tensors and numbers that its functions capture as
arguments, as for ``flashsmith::attention_of_program``.
``flashsmith::attention_of_program_with_cache`` only reads the caches, and
``flashsmith::attention_of_program_with_cache_appended`` appends to them. Both return the output and
the log-sum-exp, which is empty if it was not requested. The ops with ``latent`` in their names do
the same over a latent cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flashsmith.chooser.backward import check_config_for
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.chooser.functions import with_limits
from flashsmith.families import parse_kernel_name_into_config
from flashsmith.integrations.op_options import OPS
from flashsmith.integrations.program_ops import PROGRAM
from flashsmith.integrations.torch_decode import SCHEMAS, define_op, names_of
from flashsmith.integrations.torch_latent_decode import SCHEMAS as LATENT_SCHEMAS
from flashsmith.integrations.torch_latent_decode import fake_latent
from flashsmith.integrations.torch_ops import nothing_like
from flashsmith.operations.decode import DECODE, INVARIANT, check_split
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.runtime.decode_pass import DecodeOptions, DecodeTensors, run_decode
from flashsmith.runtime.latent_pass import LatentOptions, LatentTensors, run_latent
from flashsmith.tracing.binding import limited
from flashsmith.tracing.graph_plans import program_of_text


def _run(
    name: str,
    *tensors: Any,
    program: str,
    ints: Any,
    floats: Any,
    causal: bool = True,
    window_left: int | None = None,
    window_right: int | None = None,
    config: str | None = None,
    emulate: bool = False,
    **options: Any,
) -> Any:
    named = dict(zip(names_of(name), tensors, strict=False))
    bound = program_of_text(program, tuple(named.pop("reads")), tuple(ints), tuple(floats))
    limits = causal, (window_left, window_right)
    own, causal, window = with_limits(limited(bound, None, "end"), limits)
    options |= {"causal": causal, "window": window, "program": own}
    chosen = None if config is None else parse_kernel_name_into_config(config)
    run = _run_latent if "latent" in name else _run_decode
    found = run(chosen, named, options, emulate)
    return found if options.get("return_lse", False) else (found, nothing_like(named["q"]))


def _run_decode(
    chosen: Any, tensors: dict[str, Any], options: dict[str, Any], emulate: bool
) -> Any:
    check_config_for(DECODE.name, "config", chosen)
    chosen = chosen or CHOOSERS[check_split(options.setdefault("split", INVARIANT))]
    return run_decode(chosen, DecodeTensors(**tensors), DecodeOptions(**options), emulate)


def _run_latent(
    chosen: Any, tensors: dict[str, Any], options: dict[str, Any], emulate: bool
) -> Any:
    check_config_for(LATENT_DECODE.name, "config", chosen)
    options = dict.fromkeys(LatentOptions._fields) | {"return_lse": False} | options
    options["split"] = check_split(options["split"] or INVARIANT)
    chosen = chosen or CHOOSERS[options["split"]]
    return run_latent(chosen, LatentTensors(**tensors), LatentOptions(**options), emulate)


def _define(schemas: dict[str, str], last_cache: str, *fake: Any) -> tuple[Any, ...]:
    """Defines the ops with programs for ops over a cache, and returns them. The tensors that a
    program reads follow the argument ``last_cache``."""
    names = [it.replace("attention", "attention_of_program", 1) for it in schemas]
    for name, schema in zip(names, schemas.values(), strict=True):
        own = schema.replace(f" {last_cache},", f" {last_cache}, Tensor[] reads,", 1)
        own = own.replace("*, ", f"*, {PROGRAM}, ", 1)
        define_op(name, own, partial(_run, name), *fake)
    return tuple(getattr(OPS, it) for it in names)


# For each kind of cache, the op that only reads it, and the one that appends to it.
OPS_OVER_CACHES = _define(SCHEMAS, "v_cache")
OPS_OVER_LATENT_CACHES = _define(LATENT_SCHEMAS, "k_cache", fake_latent)
