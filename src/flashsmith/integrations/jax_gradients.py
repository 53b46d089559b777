"""attention() under jax.grad and jax.vjp: a custom_vjp with kernels for both passes.

Other transformations are refused before JAX calls the custom_vjp, because their tracers have no
values, or because they differentiate in forward mode.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from flashsmith.chooser.attention import check_attention_config
from flashsmith.chooser.backward import (
    CHOOSERS,
    backward_ahead,
    check_backward_config,
    resolve_deterministic,
)
from flashsmith.chooser.choice import choose_config
from flashsmith.errors import ArgumentError
from flashsmith.runtime import run_backward, run_call
from flashsmith.runtime.frameworks import why_refused
from flashsmith.semantics.signature import ATTENTION, BackwardOptions, ForwardOptions, check_flag


def differentiable_attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    """attention() for arrays that a transformation of JAX traces; same arguments and results.

    Raises ArgumentError unless that transformation is jax.grad or jax.vjp alone.
    """
    asked = ATTENTION.bind(keywords)
    sinks = asked["sinks"]
    for name, it in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if isinstance(it, jax.core.Tracer) and not _is_one_vjp(it):
            raise ArgumentError(f"{name}: {why_refused(type(it))}")
    if asked["out"] is not None:
        raise ArgumentError("out: given, and JAX's arrays are immutable; leave it out")
    config, backward_config = asked["config"], asked["backward_config"]
    emulate = asked["emulate"]
    check_attention_config(config)
    check_backward_config("backward_config", backward_config)
    repeatable = resolve_deterministic(asked["deterministic"], q, asked["bits"])
    options = ForwardOptions(**{name: asked.get(name) for name in ForwardOptions._fields})
    return_lse = asked["return_lse"]

    def of(sinks: Any) -> ForwardOptions:
        return options._replace(sinks=sinks, return_lse=True)

    def run(q: Any, k: Any, v: Any, sinks: Any, ahead: Any) -> Any:
        chosen = config or choose_config
        return run_call(chosen, (q, k, v, None), of(sinks), emulate, "out", ahead)

    def forward(*inputs: Any) -> Any:
        q, k, v, sinks = (None if it is None else it.value for it in inputs)
        needs = tuple(it is not None and it.perturbed for it in inputs)
        ahead = backward_ahead(backward_config, repeatable, *needs[:3])
        results = run(q, k, v, sinks, ahead)
        return results, (q, k, v, sinks, *results[:2], needs)

    def backward(kept: Any, cotangents: Any) -> Any:
        q, k, v, sinks, o, lse, needs = kept
        do, dlse = (None if isinstance(it, SymbolicZero) else it for it in cotangents[:2])
        if do is None and dlse is None:
            return (None,) * 4
        if do is None:
            do = jax.numpy.zeros_like(o)
        asked = BackwardOptions(of(sinks), dlse, repeatable, needs)
        chosen = backward_config or CHOOSERS[repeatable]
        return tuple(run_backward(chosen, (do, q, k, v, o, lse), asked, emulate))

    # JAX binds all arguments of this function, including defaults, and passes each one to forward.
    def undifferentiated(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return run(q, k, v, sinks, None)

    attend = jax.custom_vjp(undifferentiated)
    attend.defvjp(forward, backward, symbolic_zeros=True)
    o, lse, *row_max = attend(q, k, v, sinks)
    if check_flag("return_lse", return_lse):
        return (o, lse, *row_max)
    return (o, *row_max) if row_max else o


def _is_one_vjp(tracer: Any) -> bool:
    """Whether a tracer belongs to one reverse-mode differentiation and no other transformation."""
    primal = getattr(tracer, "primal", None)
    if primal is None or isinstance(primal, jax.core.Tracer):
        return False  # jax.jit, jax.vmap, ...; or one of these around the differentiation
    # In forward mode a tangent is an array, and under jax.jacfwd a batch of arrays. In reverse mode
    # the tangent is a tracer of an unknown value.
    tangent = tracer.tangent
    if not isinstance(tangent, jax.core.Tracer) or hasattr(tangent, "batch_dim"):
        return False
    # jax.linearize uses the same tracers, but in forward mode.
    return bool(getattr(tracer._trace, "is_vjp", True))
