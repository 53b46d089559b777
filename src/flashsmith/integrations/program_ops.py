"""Defines PyTorch custom ops for attention() with score and mask functions.

An op takes a program as a string, and the tensors and numbers that its functions capture as
arguments. ``flashsmith::attention_of_program`` returns the output, its log-sum-exp, and the row
maximum, or an empty tensor. ``flashsmith::attention_of_program_backward`` returns the gradients of
q, k, v and sinks, and of the captured tensors; a gradient that is not needed is an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashsmith.bundle import OPERATORS
from flashsmith.chooser.backward import backward_ahead
from flashsmith.chooser.choice import choose_config
from flashsmith.chooser.functions import sizes_of, with_limits
from flashsmith.integrations.autograd_functions import refuse_vmap
from flashsmith.integrations.captured_gradients import Saved, captured_gradients
from flashsmith.integrations.op_flop import flop, flop_backward
from flashsmith.integrations.op_options import (
    OPS,
    OpOptions,
    call_options,
    call_options_backward,
)
from flashsmith.integrations.saved_call import backward_directly
from flashsmith.integrations.torch_ops import FOLLOWING, SHARED, TAGS, nothing_like
from flashsmith.runtime import run_call
from flashsmith.semantics.signature import ATTENTION
from flashsmith.tracing.binding import limited
from flashsmith.tracing.graph_plans import program_of_text

_PACKING = "Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
# The arguments that pass a program and its numbers, as declared in an op's schema.
PROGRAM = "str program, SymInt[] ints, float[] floats"
_SCHEMAS = {
    "attention_of_program": (
        f"(Tensor q, Tensor k, Tensor v, {_PACKING}, Tensor[] reads, *, {PROGRAM}, str positions, "
        f"{SHARED}, {ATTENTION.in_schema('bits')}, bool return_row_max=False, "
        f"{FOLLOWING}) -> (Tensor, Tensor, Tensor)"
    ),
    "attention_of_program_backward": (
        "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, "
        f"{_PACKING}, Tensor[] reads, *, {PROGRAM}, str positions, {SHARED}, "
        "bool deterministic=False, bool[4] needs, bool[] needs_reads) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor[])"
    ),
}


def _with_program(
    opts: OpOptions, q: Any, k: Any, cu_q: Any, reads: Any, program: str, ints: Any, floats: Any,
    positions: str,
) -> OpOptions:  # fmt: skip
    """Adds the program to the options, in the form that kernels require for tensors of these
    lengths."""
    bound = program_of_text(program, tuple(reads), tuple(ints), tuple(floats))
    sizes = sizes_of(q, k, cu_q)
    found = limited(bound, None if sizes is None else sizes.lengths, positions)
    own = opts.options
    bound_program, causal, window = with_limits(found, (own.causal, own.window))
    options = own._replace(causal=causal, window=window, program=bound_program)
    return opts._replace(options=options)


def _run(
    q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_k: Any, reads: Any, *,
    program: str, ints: Any, floats: Any, positions: str, return_row_max: bool = False,
    with_backward: bool = False, needs: Any = (), **keywords: Any,
) -> Any:  # fmt: skip
    opts = call_options(return_lse=True, return_row_max=return_row_max, **keywords)
    opts = _with_program(opts, q, k, cu_q, reads, program, ints, floats, positions)
    options = opts.options.with_tensors(sinks, cu_q, cu_k)
    ahead = None
    if with_backward:
        ahead = backward_ahead(
            opts.backward_config, opts.deterministic, *(tuple(needs) or (True,) * 3)
        )
    found = run_call(
        opts.config or choose_config, (q, k, v, None), options, opts.emulate, "out", ahead
    )
    return found if return_row_max else (*found, nothing_like(q))


def _fake(q: Any, *_: Any, return_row_max: bool = False, **__: Any) -> Any:
    *leading, length, heads, _d = q.shape
    statistics = (*leading, heads, length)
    row_max = q.new_empty(statistics if return_row_max else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), q.new_empty(statistics, dtype=torch.float32), row_max


def _run_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, sinks: Any, cu_q: Any, cu_k: Any,
    reads: Any, *, program: str, ints: Any, floats: Any, positions: str, needs: Any,
    needs_reads: Any, config: str | None = None, **keywords: Any,
) -> Any:  # fmt: skip
    opts = call_options_backward(config, **keywords)
    opts = _with_program(opts, q, k, cu_q, reads, program, ints, floats, positions)
    found: Any = (None,) * 4
    if any(needs):
        tensors = do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k
        found = backward_directly(tensors, opts, tuple(needs))
    first = [nothing_like(q, q.dtype) if it is None else it for it in found[:3]]
    dsinks = nothing_like(q) if found[3] is None else found[3]
    return (
        *first,
        dsinks,
        _captured(Saved(do, q, k, v, o, lse, dlse, cu_q, cu_k), opts, reads, needs_reads),
    )


def _captured(saved: Saved, opts: OpOptions, reads: Any, needs: Any) -> list[Any]:
    """Returns the gradients of the captured tensors; an empty tensor stands for a gradient that is
    not needed."""
    gradients = [
        torch.zeros_like(it) if need else it.new_empty((0,))
        for it, need in zip(reads, needs, strict=True)
    ]
    program = opts.options.program
    if program is None or not any(needs):
        return gradients
    # If the mask became a window, the program no longer contains it and may read fewer tensors.
    places = [next(i for i, it in enumerate(reads) if it is tensor) for tensor in program.tensors]
    wanted = [needs[place] for place in places]
    found = captured_gradients(saved, opts.options, program, wanted)
    for place, one in zip(places, found, strict=True):
        if one is not None:
            gradients[place] = one
    return gradients


def _fake_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, sinks: Any, cu_q: Any, cu_k: Any,
    reads: Any, *, needs: Any, needs_reads: Any, **__: Any,
) -> Any:  # fmt: skip
    first = [
        it.new_empty(it.shape if need else (0,)) for it, need in zip((q, k, v), needs, strict=False)
    ]
    has_sinks = needs[3] and sinks is not None
    dsinks = q.new_empty(sinks.shape if has_sinks else (0,), dtype=torch.float32)
    captured = [
        it.new_empty(it.shape if need else (0,))
        for it, need in zip(reads, needs_reads, strict=True)
    ]
    return *first, dsinks, captured


# --- autograd -------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    *tensors, reads = inputs
    o, lse, row_max = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(row_max)
    ctx.options = dict(keyword_only_inputs)
    ctx.needs_reads = [it.requires_grad for it in reads]
    ctx.save_for_backward(o, lse, *tensors, *reads)


def _differentiate(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:
    o, lse, q, k, v, sinks, cu_q, cu_k, *reads = ctx.saved_tensors
    nothing = [None] * len(reads)
    if do is None and dlse is None:
        return (*(None,) * 6, nothing)
    options = dict(ctx.options)
    config = options.pop("backward_config")
    for name in ("config", "bits", "return_row_max", "with_backward", "needs"):
        options.pop(name)
    needs = [*ctx.needs_input_grad[:4]]
    found = OPS.attention_of_program_backward(
        *(torch.zeros_like(o) if do is None else do, q, k, v, o, lse, dlse, sinks, cu_q, cu_k),
        reads,
        needs=needs,
        needs_reads=ctx.needs_reads,
        config=config,
        **options,
    )
    *first, captured = found
    own = [it if need else None for it, need in zip(first, needs, strict=True)]
    of_reads = [it if need else None for it, need in zip(captured, ctx.needs_reads, strict=True)]
    return (*own, None, None, of_reads)


_library = torch.library.Library(OPERATORS, "FRAGMENT")
for _name, _kernel, _fake_kernel in (
    ("attention_of_program", _run, _fake),
    ("attention_of_program_backward", _run_backward, _fake_backward),
):
    _library.define(_name + _SCHEMAS[_name], tags=TAGS)
    _op = f"{OPERATORS}::{_name}"
    torch.library.impl(_op, "default", _kernel, lib=_library)
    torch.library.register_fake(_op, _fake_kernel, lib=_library)
    torch.library.register_vmap(_op, refuse_vmap, lib=_library)
torch.library.register_autograd(
    f"{OPERATORS}::attention_of_program",
    _differentiate,
    setup_context=_save,
    lib=_library,
)
register_flop_formula(OPS.attention_of_program, get_raw=True)(flop)
register_flop_formula(OPS.attention_of_program_backward, get_raw=True)(flop_backward)
