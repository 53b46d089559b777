"""Calls of the operation score_gradients, and their proof against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from program_calls import PROGRAMS, Call
from program_gradients import Drawn, draw_gradients, sequences_of

from flashsmith.families import DType, device_spec
from flashsmith.families.score_sums.config import ScoreSumsKernelConfig
from flashsmith.operations.score_sums import sums_shape
from flashsmith.runtime.emulation import Observer, all_checks
from flashsmith.runtime.score_sums import run_score_sums
from flashsmith.semantics.program import SCORE, BoundProgram, H, K, Q, program_of
from flashsmith.semantics.signature import ForwardOptions
from flashsmith.verify.attention_semantics import Attention
from flashsmith.verify.score_sums_reference import expected_sums

CONFIG = ScoreSumsKernelConfig(DType.FP16, 64)
LENS = {"lens_q": (70, 0, 1, 200), "lens_k": (75, 9, 0, 190)}
CALLS = {
    "dense": Call(batch=2, seq_q=150, seq_k=201, heads_q=4, heads_k=2, d=56),
    "window": Call(seq_q=90, window=(40, 7)),
    "softcap": Call(seq_q=90, batch=1, softcap=1.5),
    "packed causal": Call(**LENS, causal=True),
}


def with_slope(made: BoundProgram) -> BoundProgram:
    """The program with a slope that depends on everything: the score, and both indices."""
    its = made.program
    score = SCORE if its.score is None else its.score
    found, reads, numbers = program_of(score, its.mask, score * 0.25 + (K - Q) * 0.01 + H)
    tensors = dict(zip((it.name for it in its.reads), made.tensors, strict=True))
    given = dict(zip((it.name for it in its.numbers), made.numbers, strict=True))
    return BoundProgram(
        found, tuple(tensors[it] for it in reads), tuple(given[it] for it in numbers)
    )


@cache
def drawn_for(name: str, program: str, sinks: bool) -> tuple[Call, BoundProgram, Drawn]:
    call = CALLS[name]
    made = PROGRAMS[program](call, np.random.default_rng(3))
    return call, with_slope(made), draw_gradients(CONFIG, call, made, sinks=sinks, dlse=True)


def shape_of(call: Call, axis: str) -> tuple[int, int, int, int]:
    return sums_shape(axis, call.sequences, call.heads_q, *call.longest)


def run_drawn_sums(
    name: str,
    program: str,
    axis: str,
    shape: tuple[int, ...] = (),
    *,
    sinks: bool = True,
    observers: Sequence[Observer] = (),
    arch: int = 90,
    schedule_seed: int | None = None,
) -> Any:
    """The result of the kernel, whose sums are NaN before."""
    call, made, drawn = drawn_for(name, program, sinks)
    inputs = drawn.inputs
    return run_score_sums(
        tuple(inputs[it] for it in ("do", "q", "k", "v", "o", "lse")),
        ForwardOptions(**{**drawn.options, "program": made}, sinks=inputs.get("sinks")),
        inputs.get("dlse"),
        np.full(shape or shape_of(call, axis), np.nan, np.float32),
        axis,
        emulate=True,
        arch=replace(device_spec(arch), sm_count=3),
        observers=observers,
        schedule_seed=schedule_seed,
    )


def wrong_sums(
    name: str,
    program: str,
    axis: str,
    shape: tuple[int, ...] = (),
    *,
    sinks: bool = True,
    arch: int = 90,
) -> str:
    """What is wrong with the kernel's sums; '' if nothing is."""
    call, made, drawn = drawn_for(name, program, sinks)
    result = run_drawn_sums(
        name, program, axis, shape, sinks=sinks, observers=all_checks(), arch=arch
    )
    if result.emulation.findings:
        return str(result.emulation.findings[0])
    attention = Attention(
        call.d**-0.5, causal=call.causal, window=call.window, softcap=call.softcap,
        lens_q=call.lens_q, lens_k=call.lens_k, program=made,
    )  # fmt: skip
    got = result.outputs["sums"]
    expected = expected_sums(axis, got.shape, drawn.inputs, attention, sequences_of(call))
    size = np.abs(expected).max()
    assert size > 0.1
    # Scores are sums of products that tensor cores truncate: about 2^-20 of a score and of dP.
    is_right = np.abs(got - expected) <= 2e-4 * np.abs(expected) + 2e-5 * size
    return "" if is_right.all() else f"{(~is_right).sum()} of {got.size} sums"
