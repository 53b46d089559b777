"""jax.grad and jax.vjp of attention() with score and mask functions."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax", reason="needs JAX: it is not installed")
jnp = jax.numpy

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import parse_kernel_name_into_config as parse  # noqa: E402
from flashsmith.integrations import jax_captured_gradients  # noqa: E402

CONFIG = parse("(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax")
BACKWARD = parse("(FP16, 64, 64, 64, 4): backward")
CALL = {"config": CONFIG, "backward_config": BACKWARD}
HOST = jax.devices("cpu")[0]
SEQ_Q, SEQ_K, HEADS, D = 40, 70, 2, 40


def on_host(array: Any) -> Any:
    return jax.device_put(jnp.asarray(array), HOST)


def drawn(*shape: int, seed: int) -> Any:
    return on_host(np.random.default_rng(seed).standard_normal(shape).astype(np.float16))


Q, DO = (drawn(1, SEQ_Q, HEADS, D, seed=seed) for seed in (1, 2))
K, V = (drawn(1, SEQ_K, 1, D, seed=seed) for seed in (3, 4))
SLOPES = on_host(np.array([0.05, -0.02], np.float32))
CAP = on_host(np.float32(1.5))
IDS = on_host((np.arange(SEQ_K) // 30).astype(np.int32))


def attended(q: Any, k: Any, v: Any, slopes: Any, cap: Any = None, **options: Any) -> Any:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        capped = s if cap is None else cap * np.tanh(s / cap)
        return capped + slopes[h] * (k - q)

    return flashsmith.attention(
        *(q, k, v),
        score_mod=score,
        mask_mod=lambda b, h, q, k: IDS[q] == IDS[k],
        **{**CALL, **options},
    )


def expected(q: Any, k: Any, v: Any, slopes: Any, cap: Any = None) -> Any:
    """The same by JAX's own operations, in fp32."""
    rows, keys = jnp.arange(SEQ_Q)[:, None], jnp.arange(SEQ_K)
    score = jnp.einsum("bihd,bjgd->bhij", q, k) / D**0.5
    score = score if cap is None else cap * jnp.tanh(score / cap)
    score = score + slopes[:, None, None] * (keys - rows)
    score = jnp.where(IDS[rows] == IDS[keys], score, -jnp.inf)
    lse = jax.nn.logsumexp(score, axis=-1)
    weights = jnp.exp(score - lse[..., None])
    return jnp.einsum("bhij,bjgd->bihd", weights, v), lse


INPUTS = Q, K, V, SLOPES


def close(found: Any, wanted: Any) -> None:
    size = float(jnp.abs(wanted).max())
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=4e-3 * size, rtol=0)


@pytest.mark.torch
@pytest.mark.parametrize(
    "inputs", [INPUTS, pytest.param((*INPUTS, CAP), marks=pytest.mark.full)], ids=["slopes", "cap"]
)
def test_gradients_of_tensors_and_of_what_functions_read(inputs: tuple[Any, ...]) -> None:
    """Also through the log-sum-exp, and of a number that is an array."""
    dlse = on_host(np.random.default_rng(5).standard_normal((1, HEADS, SEQ_Q)).astype(np.float32))
    outputs, pull = jax.vjp(lambda *it: attended(*it, return_lse=True), *inputs)
    as_float = [it.astype(jnp.float32) for it in inputs]
    wanted, pull_wanted = jax.vjp(expected, *as_float)
    for ours, theirs in zip(outputs, wanted, strict=True):
        close(ours, theirs)
    gradients = pull((DO, dlse))
    theirs = pull_wanted((DO.astype(jnp.float32), dlse))
    for given, ours, its in zip(inputs, gradients, theirs, strict=True):
        assert (ours.dtype, ours.shape) == (given.dtype, given.shape)
        close(ours, its)


def test_the_same_bits_as_backward_gives_numpy() -> None:
    """Without gradients of what functions read, which need PyTorch."""
    o, pull = jax.vjp(lambda q, v: attended(q, K, v, SLOPES), Q, V)
    assert jnp.array_equal(o, attended(*INPUTS))
    dq, dv = pull(DO)
    again = jax.grad(lambda q: (attended(q, K, V, SLOPES) * DO).sum())(Q)
    assert jnp.array_equal(dq, again)
    assert dv.shape == V.shape


def test_a_mask_that_is_causal() -> None:
    """It runs the causal kernels."""
    mask = {"mask_mod": lambda b, h, q, k: q >= k, "positions": "end", **CALL}
    dq = jax.grad(lambda q: (flashsmith.attention(q, K, V, **mask) * DO).sum())(Q)
    of_causal = {"causal": True, **CALL}
    same = jax.grad(lambda q: (flashsmith.attention(q, K, V, **of_causal) * DO).sum())(Q)
    assert jnp.array_equal(dq, same)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"score_mod: is a tracer .*outside of jax.jit"):
        jax.jit(lambda slopes: attended(Q, K, V, slopes))(SLOPES)
    with pytest.raises(ArgumentError, match=r"q: is a tracer .*outside of jax.jit"):
        jax.vmap(lambda q: attended(q, K, V, SLOPES))(Q[None])
    monkeypatch.setattr(jax_captured_gradients, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"score_mod, bias: .*PyTorch .*stop_gradient"):
        jax.grad(lambda cap: attended(Q, K, V, SLOPES, cap).sum())(CAP)
