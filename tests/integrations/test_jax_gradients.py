"""jax.grad and jax.vjp of attention(): the gradients of backward()."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import shared_kernels

# Where there is a GPU, JAX would take three quarters of its memory, which other tests need, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax", reason="needs JAX: it is not installed")
jnp = jax.numpy

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import DType, FlashForwardKernelConfig, Semantics  # noqa: E402
from flashsmith.families import parse_kernel_name_into_config as parse  # noqa: E402
from flashsmith.integrations import jax_gradients  # noqa: E402

# What tests/integrations/test_autograd.py has, too.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
REPEATABLE = parse("(FP16, 64, 64, 64, 4): backward")
shared_kernels.want([CFG], Semantics("causal", uneven=True))
shared_kernels.want([REPEATABLE], Semantics("causal", uneven=True))
CALL = {"causal": True, "config": CFG, "backward_config": REPEATABLE}
HOST = jax.devices("cpu")[0]


def drawn(*shape: int, seed: int) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    return jax.device_put(jnp.asarray(values), HOST)


Q, K, V = (drawn(1, rows, heads, 40, seed=heads) for rows, heads in ((12, 2), (20, 1), (20, 1)))
DO = drawn(1, 12, 2, 40, seed=7)
SINKS = jax.device_put(jnp.asarray([0.5, -1.0]), HOST)


def expected(sinks: Any = None, **options: Any) -> Any:
    q, k, v = (np.asarray(it) for it in (Q, K, V))
    how = {"causal": True, "sinks": sinks}
    o, lse = flashsmith.attention(q, k, v, return_lse=True, config=CFG, **how)
    return flashsmith.backward(np.asarray(DO), q, k, v, o, lse, config=REPEATABLE, **how, **options)


def test_vjp() -> None:
    dlse = jax.device_put(jnp.full((1, 2, 12), 0.25, jnp.float32), HOST)
    outputs, pull = jax.vjp(lambda *it: flashsmith.attention(*it, return_lse=True, **CALL), Q, K, V)
    for ours, theirs in zip(
        outputs,
        flashsmith.attention(Q, K, V, return_lse=True, causal=True, config=CFG),
        strict=True,
    ):
        assert jnp.array_equal(ours, theirs)
    for ours, theirs in zip(pull((DO, dlse)), expected(dlse=np.asarray(dlse)), strict=False):
        assert isinstance(ours, jax.Array)
        np.testing.assert_array_equal(np.asarray(ours), theirs)


def test_grad_of_one_computes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    right = jax_gradients.run_backward

    def noting(config: Any, tensors: Any, options: Any, emulate: Any) -> Any:
        seen.append(options)
        return right(config, tensors, options, emulate)

    monkeypatch.setattr(jax_gradients, "run_backward", noting)

    def total(sinks: Any, v: Any) -> Any:
        return (flashsmith.attention(Q, K, v, sinks=sinks, **CALL) * DO).sum()

    dsinks, dv = jax.grad(total, (0, 1))(SINKS, V)
    ((*_, dlse, deterministic, needs, _),) = seen
    assert (dlse, deterministic, needs) == (None, False, (False, False, True, True))
    whole = expected(sinks=np.asarray(SINKS))
    np.testing.assert_array_equal(np.asarray(dsinks), whole.dsinks)
    np.testing.assert_array_equal(np.asarray(dv), whole.dv)


def test_what_has_no_gradient() -> None:
    def total(q: Any) -> Any:
        return flashsmith.attention(q, K, V, **CALL).sum()

    with pytest.raises(ArgumentError, match=r"q: is a tracer .*outside of jax.jit and jax.vmap"):
        jax.jit(jax.grad(total))(Q)
    with pytest.raises(ArgumentError, match="q: is a tracer"):
        jax.vmap(total)(jnp.stack([Q, Q]))
    with pytest.raises(ArgumentError, match=r"is a tracer .*differentiated, once"):
        jax.grad(lambda q: jax.grad(total)(q).sum())(Q)
    with pytest.raises(ArgumentError, match="out: given, and JAX's arrays are immutable"):
        jax.grad(lambda q: flashsmith.attention(q, K, V, out=Q, **CALL).sum())(Q)
