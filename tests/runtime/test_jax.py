"""JAX arrays on the host: read in place, and returned as JAX arrays."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

# Where there is a GPU, JAX would take three quarters of its memory, which other tests need, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax", reason="needs JAX: it is not installed")
jnp = jax.numpy

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.runtime import forward  # noqa: E402

CONFIGS = {
    dtype: flashsmith.parse_kernel_name_into_config(
        f"({name}, 64, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
    )
    for dtype, name in ((jnp.float16.dtype, "FP16"), (jnp.bfloat16.dtype, "BF16"))
}
HOST = jax.devices("cpu")[0]


def drawn(*shape: int, dtype: Any = jnp.float16, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(jnp.asarray(values, dtype), HOST)


@pytest.mark.parametrize("dtype", CONFIGS)
def test_jax_in_jax_out(dtype: Any) -> None:
    q, k, v = (drawn(2, 50, 3, 64, dtype=dtype, seed=seed) for seed in range(3))
    o, lse = forward(CONFIGS[dtype], q, k, v, causal=True, return_lse=True)
    assert isinstance(o, jax.Array)
    assert (o.shape, o.dtype, o.devices()) == (q.shape, q.dtype, q.devices())
    assert (lse.shape, lse.dtype) == ((2, 3, 50), jnp.float32)
    same = forward(CONFIGS[dtype], *map(np.asarray, (q, k, v)), causal=True, return_lse=True)
    assert np.array_equal(np.asarray(o), same[0])
    assert np.array_equal(np.asarray(lse), same[1])


def test_packed_sequences() -> None:
    q, k, v = (drawn(70, 2, 64, seed=seed) for seed in range(3))
    starts = jax.device_put(jnp.asarray([0, 11, 70], jnp.int32), HOST)
    cfg = CONFIGS[q.dtype]
    o = forward(cfg, q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)
    alone = forward(cfg, *(array[None, 11:] for array in (q, k, v)))
    assert jnp.array_equal(o[11:], alone[0])


def test_two_calls_have_outputs_of_their_own() -> None:
    first, second = (drawn(1, 8, 1, 64, seed=seed) for seed in range(2))
    cfg = CONFIGS[first.dtype]
    one = forward(cfg, first, first, first)
    before = np.asarray(one).copy()
    forward(cfg, second, second, second)
    assert np.array_equal(np.asarray(one), before)


def test_arrays_that_cannot_be_written_are_no_outputs() -> None:
    q = drawn(1, 8, 1, 64)
    with pytest.raises(ArgumentError, match="o: is read-only"):
        forward(CONFIGS[q.dtype], q, q, q, jnp.zeros_like(q))


def test_what_jit_traces_is_refused() -> None:
    q = drawn(1, 8, 1, 64)
    with pytest.raises(ArgumentError, match="q: is a tracer of a JAX transformation"):
        jax.jit(lambda array: forward(CONFIGS[q.dtype], array, array, array))(q)


def test_frameworks_do_not_mix() -> None:
    q = drawn(1, 8, 1, 64)
    with pytest.raises(ArgumentError, match="k: is a numpy tensor and q a jax one"):
        forward(CONFIGS[q.dtype], q, np.asarray(q), q)
