"""Defines PyTorch custom ops for attention_with_cache() with score and mask functions.

An op takes a program as a string, and the tensors and numbers that its functions capture as
arguments, as for ``flashsmith::attention_of_program``.
``flashsmith::attention_of_program_with_cache`` only reads the caches, and
``flashsmith::attention_of_program_with_cache_appended`` appends to them. Both return the output and
the log-sum-exp, which is empty if it was not requested.
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
from flashsmith.integrations.torch_ops import nothing_like
from flashsmith.operations.decode import DECODE, check_split
from flashsmith.runtime.decode_pass import DecodeOptions, DecodeTensors, run_decode
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
    split: str = "invariant",
    config: str | None = None,
    emulate: bool = False,
    **options: Any,
) -> Any:
    named = dict(zip(names_of(name), tensors, strict=False))
    bound = program_of_text(program, tuple(named.pop("reads")), tuple(ints), tuple(floats))
    limits = causal, (window_left, window_right)
    own, causal, window = with_limits(limited(bound, None, "end"), limits)
    chosen = None if config is None else parse_kernel_name_into_config(config)
    check_config_for(DECODE.name, "config", chosen)
    found = run_decode(
        chosen or CHOOSERS[check_split(split)],
        DecodeTensors(**named),
        DecodeOptions(causal, window, split=split, program=own, **options),
        emulate,
    )
    return found if options.get("return_lse", False) else (found, nothing_like(named["q"]))


for _without, _schema in SCHEMAS.items():
    _name = _without.replace("attention", "attention_of_program", 1)
    _schema = _schema.replace(" v_cache,", " v_cache, Tensor[] reads,", 1)
    define_op(_name, _schema.replace("*, ", f"*, {PROGRAM}, ", 1), partial(_run, _name))
OPS_OVER_CACHES = (
    OPS.attention_of_program_with_cache,
    OPS.attention_of_program_with_cache_appended,
)
