"""Gradients with score and mask functions, and their proof against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from program_calls import Call, draw_inputs

from flashsmith.families import KernelConfig, device_spec
from flashsmith.runtime import run_gradients
from flashsmith.runtime.emulation import all_checks
from flashsmith.semantics.program import BoundProgram
from flashsmith.semantics.signature import BackwardOptions, ForwardOptions
from flashsmith.verify.attention_semantics import Attention, offsets
from flashsmith.verify.gradient_tolerance import compare_gradients
from flashsmith.verify.gradients import Rows, compute_gradients
from flashsmith.verify.reference import references_of


def sequences_of(call: Call) -> list[Rows]:
    if call.lens_q is None or call.lens_k is None:
        both = slice(0, call.seq_q), slice(0, call.seq_k)
        return [Rows(batch, *both) for batch in range(call.batch)]
    starts = (pairwise(offsets(lens).tolist()) for lens in (call.lens_q, call.lens_k))
    return [Rows(None, slice(*q), slice(*k)) for q, k in zip(*starts, strict=True)]


class Drawn(NamedTuple):
    """Inputs of a backward pass, the options of both passes, and the gradients in float64."""

    inputs: dict[str, np.ndarray]
    options: dict[str, Any]
    expected: Any


def draw_gradients(
    cfg: KernelConfig,
    call: Call,
    made: BoundProgram,
    *,
    seed: int = 0,
    sinks: bool = False,
    dlse: bool = False,
) -> Drawn:
    draw = np.random.default_rng(seed + 2000)
    q, k, v, logits = draw_inputs(call, cfg.dtype, draw, sinks=sinks)
    options = {"causal": call.causal, "window": call.window, "softcap": call.softcap}
    attention = Attention(
        call.d**-0.5, **options, lens_q=call.lens_q, lens_k=call.lens_k, program=made
    )
    exact = references_of(attention, q, k, v, logits)
    do = draw.standard_normal(q.shape).astype(q.dtype)
    lse = exact.lse.astype(np.float32)
    inputs = {"do": do, "q": q, "k": k, "v": v, "o": exact.o.astype(q.dtype), "lse": lse}
    if logits is not None:
        inputs["sinks"] = logits
    if dlse:
        inputs["dlse"] = draw.standard_normal(lse.shape).astype(np.float32)
    if call.lens_q is not None and call.lens_k is not None:
        options["cu_seqlens_q"] = offsets(call.lens_q)
        options["cu_seqlens_k"] = offsets(call.lens_k)
    if made.program.mask is not None:
        # Of rows that see no key, nothing gets into the gradients of others.
        inputs["q"] = q = np.where(exact.o.any(-1, keepdims=True), q, np.nan).astype(q.dtype)
        inputs["do"] = np.where(exact.o.any(-1, keepdims=True), do, np.nan).astype(q.dtype)
    expected = compute_gradients(inputs, attention, sequences_of(call), exact.o, exact.lse)
    return Drawn(inputs, {**options, "program": made}, expected)


def run_drawn(
    cfg: KernelConfig,
    drawn: Drawn,
    *,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
    checks: bool = True,
    arch: int = 90,
    sm_count: int | None = None,
    run: Callable[..., Any] = run_gradients,
    deterministic: bool = False,
    schedule_seed: int | None = None,
) -> Any:
    """The result of the kernel, whose outputs are NaN before."""
    inputs, device = drawn.inputs, device_spec(arch)
    forward = ForwardOptions(**drawn.options, sinks=inputs.get("sinks"))
    return run(
        cfg,
        tuple(inputs[name] for name in ("do", "q", "k", "v", "o", "lse")),
        BackwardOptions(forward, inputs.get("dlse"), deterministic, needs),
        emulate=True,
        poisoned=True,
        arch=device if sm_count is None else replace(device, sm_count=sm_count),
        observers=all_checks() if checks else (),
        schedule_seed=schedule_seed,
    )


def wrong_gradients(
    cfg: KernelConfig,
    call: Call,
    made: BoundProgram,
    *,
    seed: int = 0,
    sinks: bool = False,
    dlse: bool = False,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
    **how: Any,
) -> str:
    """What is wrong with the kernel's gradients, which are NaN before; '' if nothing is."""
    drawn = draw_gradients(cfg, call, made, seed=seed, sinks=sinks, dlse=dlse)
    result = run_drawn(cfg, drawn, needs=needs, **how)
    if result.emulation is not None and result.emulation.findings:
        return str(result.emulation.findings[0])
    names = [name for name, it in zip(("dq", "dk", "dv", "dsinks"), needs, strict=True) if it]
    names = [name for name in names if name != "dsinks" or sinks]
    found = compare_gradients(cfg.dtype, result.outputs, drawn.expected.only(names))
    return "; ".join(map(str, found.reasons))
