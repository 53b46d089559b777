"""attention() under jax.grad and jax.vjp: a custom_vjp with kernels for both passes.

Other transformations are refused before JAX calls the custom_vjp, because their tracers have no
values, or because they differentiate in forward mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from flashsmith import chooser
from flashsmith.chooser.attention import check_attention_config
from flashsmith.chooser.backward import (
    CHOOSERS,
    backward_ahead,
    check_backward_config,
    resolve_deterministic,
)
from flashsmith.chooser.choice import choose_config
from flashsmith.chooser.functions import CallFunctions, bound_functions, sizes_of
from flashsmith.errors import ArgumentError
from flashsmith.integrations.jax_captured_gradients import (
    captured_gradients_of_jax,
    check_can_differentiate,
)
from flashsmith.runtime import run_backward, run_call
from flashsmith.runtime.frameworks import why_refused
from flashsmith.semantics.program import BoundProgram
from flashsmith.semantics.signature import (
    ATTENTION,
    NO_WINDOW,
    BackwardOptions,
    ForwardOptions,
    check_flag,
)
from flashsmith.tracing.captures import is_traced_by_jax


def attention_with_functions(
    q: Any, k: Any, v: Any, functions: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Any:
    """Computes attention() for arrays that a transformation of JAX may trace. ``functions`` are the
    keywords of attention() that define a program.

    The arrays that a score function reads have gradients, too; PyTorch must be installed for these.
    """
    program, causal, window = bound_functions(
        CallFunctions(**functions),
        (keywords.get("causal", False), keywords.get("window", NO_WINDOW)),
        sizes_of(q, k, keywords.get("cu_seqlens_q")),
    )
    reads = () if program is None else program.tensors
    if not any(map(is_traced_by_jax, (q, k, v, keywords.get("sinks"), *reads))):
        return chooser.attention(q, k, v, **functions, **keywords)
    limits = {"causal": causal, "window": window}
    return differentiable_attention(q, k, v, program, **{**keywords, **limits})


def differentiable_attention(
    q: Any, k: Any, v: Any, program: BoundProgram | None = None, **keywords: Any
) -> Any:
    """Computes attention() for arrays that a transformation of JAX traces. Takes the arguments of
    attention() and the program of the call's functions; returns the results of attention().

    Raises ArgumentError unless that transformation is jax.grad or jax.vjp alone.
    """
    asked = ATTENTION.bind(keywords)
    sinks = asked["sinks"]
    reads = () if program is None else program.tensors
    named = (("q", q), ("k", k), ("v", v), ("sinks", sinks), *(("score_mod", it) for it in reads))
    for name, it in named:
        if isinstance(it, jax.core.Tracer) and not _is_one_vjp(it):
            raise ArgumentError(f"{name}: {why_refused(type(it))}")
    if asked["out"] is not None:
        raise ArgumentError("out: given, and JAX's arrays are immutable; leave it out")
    check_attention_config(asked["config"])
    check_backward_config("backward_config", asked["backward_config"])
    options = ForwardOptions(**{name: asked.get(name) for name in ForwardOptions._fields})
    call = _Call(
        options._replace(return_lse=True, program=program),
        asked["config"],
        asked["backward_config"],
        resolve_deterministic(asked["deterministic"], q, asked["bits"]),
        asked["emulate"],
    )
    attend = jax.custom_vjp(call.undifferentiated)
    attend.defvjp(call.forward, call.backward, symbolic_zeros=True)
    o, lse, *row_max = attend(q, k, v, sinks, *reads)
    if check_flag("return_lse", asked["return_lse"]):
        return (o, lse, *row_max)
    return (o, *row_max) if row_max else o


class _Call(NamedTuple):
    """The forward and backward functions of one call's custom_vjp. Its inputs are q, k, v, sinks
    and the arrays that the program reads."""

    options: ForwardOptions
    config: Any
    backward_config: Any
    deterministic: bool
    emulate: bool

    def _of(self, sinks: Any, reads: Sequence[Any]) -> ForwardOptions:
        """Returns the call's options, with these sinks and these arrays in place of the original
        ones."""
        bound = self.options.program
        bound = None if bound is None else bound._replace(tensors=tuple(reads))
        return self.options._replace(sinks=sinks, program=bound)

    def _run(self, q: Any, k: Any, v: Any, options: ForwardOptions, ahead: Any) -> Any:
        chosen = self.config or choose_config
        return run_call(chosen, (q, k, v, None), options, self.emulate, "out", ahead)

    # JAX binds all arguments of this function, including defaults, and passes each one to forward.
    def undifferentiated(self, q: Any, k: Any, v: Any, sinks: Any, *reads: Any) -> Any:
        return self._run(q, k, v, self._of(sinks, reads), None)

    def forward(self, *inputs: Any) -> Any:
        q, k, v, sinks, *reads = (None if it is None else it.value for it in inputs)
        needs = tuple(it is not None and it.perturbed for it in inputs)
        if any(needs[4:]):
            check_can_differentiate()
        ahead = backward_ahead(self.backward_config, self.deterministic, *needs[:3])
        results = self._run(q, k, v, self._of(sinks, reads), ahead)
        return results, (q, k, v, sinks, reads, *results[:2], needs)

    def backward(self, saved: Any, cotangents: Any) -> Any:
        q, k, v, sinks, reads, o, lse, needs = saved
        do, dlse = (None if isinstance(it, SymbolicZero) else it for it in cotangents[:2])
        if do is None and dlse is None:
            return (None,) * len(needs)
        if do is None:
            do = jax.numpy.zeros_like(o)
        tensors, options = (do, q, k, v, o, lse), self._of(sinks, reads)
        found: Sequence[Any] = (None,) * 4
        if any(needs[:4]):
            asked = BackwardOptions(options, dlse, self.deterministic, needs[:4])
            chosen = self.backward_config or CHOOSERS[self.deterministic]
            found = run_backward(chosen, tensors, asked, self.emulate)
        if not any(needs[4:]):
            return (*found, *(None for _ in reads))
        offsets = options.cu_seqlens_q, options.cu_seqlens_k
        return (*found, *captured_gradients_of_jax((*tensors, dlse, *offsets), options, needs[4:]))


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
