"""CuPy's and JAX's arrays on a GPU: on CuPy's own stream, and as new arrays of JAX's."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashsmith
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.runtime.launch_counter import count_launches

pytestmark = pytest.mark.gpu

# JAX would take three quarters of the GPU's memory, which other tests need, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def drawn(dtype: Any = np.float16, *, length: int = 100) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((2, length, 4, 64)).astype(dtype) for _ in range(3)]


def expected(arrays: list[np.ndarray], **keywords: Any) -> Any:
    """The same through arrays of our own."""
    results = flashsmith.attention(*map(DeviceArray.from_host, arrays), **keywords)
    if isinstance(results, tuple):
        return tuple(result.to_host() for result in results)
    return results.to_host()


class TestCupy:
    @pytest.fixture
    def cupy(self) -> Any:
        return pytest.importorskip("cupy", reason="needs CuPy: it is not installed")

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_cupy_in_cupy_out(self, cupy: Any, dtype: Any) -> None:
        if dtype is ml_dtypes.bfloat16:
            try:
                cupy.zeros(1, dtype)
            except (TypeError, ValueError):
                return  # CuPy before 14 has no such arrays
        arrays = drawn(dtype)
        with count_launches() as launches:
            o, lse = flashsmith.attention(*map(cupy.asarray, arrays), causal=True, return_lse=True)
        assert launches.gpu == 1
        assert isinstance(o, cupy.ndarray)
        o_expected, lse_expected = expected(arrays, causal=True, return_lse=True)
        assert o.get().tobytes() == o_expected.tobytes()
        assert np.array_equal(lse.get(), lse_expected)

    def test_an_output_of_the_callers(self, cupy: Any) -> None:
        arrays = drawn()
        out = cupy.full((2, 4, 100, 64), np.nan, np.float16).transpose(0, 2, 1, 3)
        assert flashsmith.attention(*map(cupy.asarray, arrays), out=out) is out
        assert np.array_equal(out.get(), expected(arrays))

    def test_packed_sequences_without_their_longest(self, cupy: Any) -> None:
        arrays = [array.reshape(200, 4, 64) for array in drawn()]
        starts = np.array([0, 30, 30, 200], np.int32)
        on_gpu = cupy.asarray(starts)
        o = flashsmith.attention(
            *map(cupy.asarray, arrays), cu_seqlens_q=on_gpu, cu_seqlens_k=on_gpu
        )
        on_ours = DeviceArray.from_host(starts)
        same = expected(arrays, cu_seqlens_q=on_ours, cu_seqlens_k=on_ours)
        assert np.array_equal(o.get(), same)

    def test_cupys_current_stream_is_used(self, cupy: Any) -> None:
        """The inputs arrive behind long work on a side stream; another stream would miss them."""
        arrays = drawn()
        ready = [cupy.asarray(array) for array in arrays]
        tensors = [cupy.zeros_like(array) for array in ready]
        flashsmith.attention(*tensors)
        big = cupy.random.random((8192, 8192), dtype=cupy.float32)
        big @ big
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                big @ big
            for tensor, value in zip(tensors, ready, strict=True):
                tensor[...] = value
            o = flashsmith.attention(*tensors)
            assert not stream.done, "the call waited for the GPU"
            stream.synchronize()
        assert np.array_equal(o.get(), expected(arrays))

    def test_a_captured_graph(self, cupy: Any) -> None:
        arrays = drawn()
        tensors = [cupy.asarray(array) for array in arrays]
        out = flashsmith.attention(*tensors)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            flashsmith.attention(*tensors, out=out)
            graph = stream.end_capture()
            out.fill(0)
            graph.launch(stream)
            stream.synchronize()
        assert np.array_equal(out.get(), expected(arrays))


class TestJax:
    @pytest.fixture
    def jax(self) -> Any:
        jax = pytest.importorskip("jax", reason="needs JAX: it is not installed")
        if not any(device.platform == "gpu" for device in jax.devices()):
            pytest.skip("needs JAX: it is not installed for GPUs")
        return jax

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_jax_in_jax_out(self, jax: Any, dtype: Any) -> None:
        arrays = drawn(dtype)
        q, k, v = (jax.device_put(array) for array in arrays)
        with count_launches() as launches:
            o, lse = flashsmith.attention(2 * q / 2, k, v, causal=True, return_lse=True)
        assert launches.gpu == 1
        assert isinstance(o, jax.Array)
        assert o.devices() == q.devices()
        o_expected, lse_expected = expected(arrays, causal=True, return_lse=True)
        assert np.asarray(o).tobytes() == o_expected.tobytes()
        assert np.array_equal(np.asarray(lse), lse_expected)

    def test_what_jax_does_next_sees_the_output(self, jax: Any) -> None:
        arrays = drawn(length=2000)
        tensors = [jax.device_put(array) for array in arrays]
        same = expected(arrays).astype(np.float32).sum(dtype=np.float64)
        for _ in range(10):
            total = flashsmith.attention(*tensors).astype("float32").sum()
            assert abs(float(total) - same) <= 1e-3 * np.abs(expected(arrays)).sum()

    def test_packed_sequences_without_their_longest(self, jax: Any) -> None:
        arrays = [array.reshape(200, 4, 64) for array in drawn()]
        starts = np.array([0, 30, 30, 200], np.int32)
        o = flashsmith.attention(
            *map(jax.device_put, arrays),
            cu_seqlens_q=jax.device_put(starts),
            cu_seqlens_k=jax.device_put(starts),
        )
        on_ours = DeviceArray.from_host(starts)
        same = expected(arrays, cu_seqlens_q=on_ours, cu_seqlens_k=on_ours)
        assert np.array_equal(np.asarray(o), same)
