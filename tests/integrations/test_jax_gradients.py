"""jax.grad and jax.vjp of attention(): the gradients of backward()."""

from __future__ import annotations

import functools
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
from flashsmith.integrations import flash_attn, jax_gradients  # noqa: E402

# What tests/integrations/test_autograd.py has, too.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
REPEATABLE = parse("(FP16, 64, 64, 64, 4): backward")
shared_kernels.want([CFG], Semantics("causal", uneven=True))
shared_kernels.want_chosen("b1 s12:20 h2:1 d40 fp16 causal uneven canonical")
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


def total(q: Any, k: Any = K, v: Any = V, **options: Any) -> Any:
    return (flashsmith.attention(q, k, v, **CALL, **options) * DO).sum()


def test_every_way_to_ask_jax_for_a_gradient() -> None:
    whole = expected()
    dq, dk, dv = whole.dq, whole.dk, whole.dv
    value = np.asarray(total(Q))
    ways: dict[str, tuple[Any, Any]] = {
        "grad": (jax.grad(total)(Q), dq),
        "arrays by keyword": (jax.grad(total)(Q, k=K, v=V), dq),
        "argnums": (jax.grad(total, argnums=(2, 0))(Q, K, V), (dv, dq)),
        "options by position": (
            jax.grad(lambda q, causal, scale: (
                flashsmith.attention(q=q, k=K, v=V, **{**CALL, "causal": causal}, scale=scale) * DO
            ).sum())(Q, True, None),
            dq,
        ),
        "has_aux": (jax.grad(lambda q: (total(q), q), has_aux=True)(Q), (dq, np.asarray(Q))),
        "value_and_grad": (jax.value_and_grad(total, (0, 1))(Q, K, V), (value, (dq, dk))),
        "vjp with has_aux": (
            jax.vjp(lambda k: (flashsmith.attention(Q, k, V, **CALL), 3), K, has_aux=True)[1](DO),
            (dk,),
        ),
        "vjp of the function itself": (
            jax.vjp(functools.partial(flashsmith.attention, **CALL), Q, K, V)[1](DO), (dq, dk, dv),
        ),
    }  # fmt: skip
    for way, (ours, theirs) in ways.items():
        ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
        for our, their in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(np.asarray(our), their, err_msg=way)


def test_flash_attn_func_and_packed_offsets_are_differentiated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = functools.partial(flashsmith.attention, config=CFG, backward_config=REPEATABLE)
    monkeypatch.setattr(flash_attn, "attention", attention)
    _, pull = jax.vjp(lambda q: flashsmith.flash_attn_func(q, K, V, 0.0, None, True), Q)
    (dq,) = pull(DO)
    np.testing.assert_array_equal(np.asarray(dq), expected().dq)

    def packed(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any) -> Any:
        return flash_attn.attention(
            q[0], k[0], v[0], causal=True, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k
        )

    starts = (jax.device_put(jnp.asarray([0, rows], jnp.int32), HOST) for rows in (12, 20))
    _, pull = jax.vjp(packed, Q, K, V, *starts)
    # JAX's gradients of whole numbers are of its dtype without values.
    for ours, theirs in zip(pull(DO[0]), expected()[:3], strict=False):
        np.testing.assert_allclose(np.asarray(ours), theirs, atol=0.01)


STACK = jnp.stack([Q, Q])
REFUSED: dict[str, Any] = {
    "jit": lambda: jax.jit(total)(Q),
    "grad in jit": lambda: jax.jit(jax.grad(total))(Q),
    "jit in grad": lambda: jax.grad(jax.jit(total))(Q),
    "scan": lambda: jax.lax.scan(lambda sums, q: (sums + total(q), None), jnp.float16(0), STACK),
    "scan in grad": lambda: jax.grad(lambda q: jax.lax.map(total, q).sum())(STACK),
    "cond": lambda: jax.lax.cond(True, total, lambda q: q.sum(), Q),
    "while": lambda: jax.lax.fori_loop(0, 2, lambda _, q: q + total(q), Q),
    "vmap": lambda: jax.vmap(total)(STACK),
    "grad in vmap": lambda: jax.vmap(jax.grad(total))(STACK),
    "vmap in grad": lambda: jax.grad(lambda q: jax.vmap(total)(q).sum())(STACK),
    "jvp": lambda: jax.jvp(total, (Q,), (Q,)),
    "jacfwd": lambda: jax.jacfwd(total)(Q),
    "linearize": lambda: jax.linearize(total, Q),
    "hessian": lambda: jax.hessian(total)(Q),
    "a second grad": lambda: jax.grad(lambda q: jax.grad(total)(q).sum())(Q),
    "grad in jvp": lambda: jax.jvp(jax.grad(total), (Q,), (Q,)),
    "checkpoint": lambda: jax.checkpoint(total)(Q),
    "checkpoint in grad": lambda: jax.grad(jax.checkpoint(total))(Q),
    "eval_shape": lambda: jax.eval_shape(total, Q),
}


@pytest.mark.parametrize("transformation", REFUSED)
def test_other_transformations_are_refused(transformation: str) -> None:
    with pytest.raises(ArgumentError, match=r"q: is a tracer .*outside of jax.jit.*, once, by"):
        REFUSED[transformation]()


def test_the_refusal_names_the_argument() -> None:
    for name, place in (("k", 1), ("v", 2)):
        with pytest.raises(ArgumentError, match=f"{name}: is a tracer"):
            jax.jit(lambda it, place=place: total(*[it if i == place else Q for i in range(3)]))(K)
    with pytest.raises(ArgumentError, match="sinks: is a tracer"):
        jax.jvp(lambda sinks: total(Q, sinks=sinks), (SINKS,), (SINKS,))
    with pytest.raises(ArgumentError, match=r"scale=.*Tracer.*: give a finite number"):
        jax.grad(lambda scale: total(Q, scale=scale))(0.5)


def test_cotangents_that_are_traced_are_refused() -> None:
    _, pull = jax.vjp(functools.partial(flashsmith.attention, **CALL), Q, K, V)
    for transformed in (jax.jit(pull), lambda do: jax.vmap(pull)(do[None])):
        with pytest.raises(ArgumentError, match="do: is a tracer"):
            transformed(DO)
    with pytest.raises(ArgumentError, match="do: is a tracer"):
        jax.jacrev(lambda q: flashsmith.attention(q, K, V, **CALL))(Q)


def test_what_has_no_gradient() -> None:
    with pytest.raises(ArgumentError, match="out: given, and JAX's arrays are immutable"):
        jax.grad(lambda q: total(q, out=Q))(Q)
    with pytest.raises(ArgumentError, match="partial: q is a tracer of JAX, and parts have no"):
        jax.grad(lambda q: total(q, partial=True))(Q)


def test_canonical_bits_are_those_without_gradients_and_gradients_are_repeatable() -> None:
    def attended(*inputs: Any, **options: Any) -> Any:
        return flashsmith.attention(*inputs, causal=True, bits="canonical", **options)

    o, pull = jax.vjp(attended, Q, K, V)
    assert jnp.array_equal(o, attended(Q, K, V))
    assert [it.shape for it in pull(DO)] == [Q.shape, K.shape, V.shape]
    atomic = parse("(FP16, 64, 64, 64, 4): backward+stages_2+dq_atomics")
    with pytest.raises(ArgumentError, match=r"deterministic=True: .*dq_atomics"):
        jax.vjp(lambda *it: attended(*it, backward_config=atomic), Q, K, V)
