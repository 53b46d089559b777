"""forward on a GPU: the tensors' device, the caller's stream, every framework, every error."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

from flashsmith.errors import ArgumentError, LaunchError
from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    Problem,
    parse_kernel_name_into_config,
)
from flashsmith.runtime import (
    cached_calls,
    forget_cached_launches,
    forward,
    forward_timed,
    gpu_count,
    query_gpu,
    run_forward,
)
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.runtime.prepared_call import unplaced_call
from flashsmith.verify import InputSpec, compare, compute_references, make_inputs
from flashsmith.verify.proof_inputs import default_scale

pytestmark = pytest.mark.gpu

FEATURES = "async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
CONFIGS = {
    dtype: parse_kernel_name_into_config(f"({dtype.name}, 64, 64, 32, 4): {FEATURES}")
    for dtype in DType
}
CFG = CONFIGS[DType.FP16]
BATCH, SEQ_Q, SEQ_K, HEADS, D = 2, 256, 192, 3, 64


def drawn(dtype: DType = DType.FP16, seed: int = 0) -> list[np.ndarray]:
    spec = InputSpec("random", dtype, BATCH, SEQ_Q, SEQ_K, HEADS, D, default_scale(D), seed)
    inputs = make_inputs(spec)
    return [inputs.q, inputs.k, inputs.v]


def assert_attention(o: np.ndarray, lse: np.ndarray | None, qkv: list[np.ndarray]) -> None:
    dtype = DType.FP16 if o.dtype == np.float16 else DType.BF16
    references = compute_references(*qkv, default_scale(D))
    checked = compare(CONFIGS[dtype], o, lse, references)
    assert checked.ok, (checked.reasons, str(checked.first_mismatch))


def test_arrays_survive_the_trip_to_the_gpu_and_back() -> None:
    for dtype in DType:
        (array, *_) = drawn(dtype)
        assert DeviceArray.from_host(array).to_host().tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", list(DType))
def test_without_a_framework(dtype: DType) -> None:
    qkv = drawn(dtype)
    on_gpu = [DeviceArray.from_host(array) for array in qkv]
    result = run_forward(CONFIGS[dtype], *on_gpu, return_lse=True, poisoned=True)
    assert_attention(result.o.to_host(), result.lse.to_host(), qkv)
    assert result.emulation is None


@pytest.fixture
def two_gpus() -> None:
    if gpu_count() < 2:
        pytest.skip("needs 2 NVIDIA GPUs")


@pytest.mark.usefixtures("two_gpus")
def test_the_second_gpu_without_a_framework() -> None:
    """And the first again: a kernel is loaded for every GPU that it is launched on."""
    qkv = drawn()
    for ordinal in (1, 0, 1):
        on_gpu = [DeviceArray.from_host(array, ordinal) for array in qkv]
        result = run_forward(CFG, *on_gpu, return_lse=True, poisoned=True)
        assert result.o.ordinal == result.lse.ordinal == ordinal
        assert_attention(result.o.to_host(), result.lse.to_host(), qkv)


def test_a_gpu_that_does_not_exist() -> None:
    with pytest.raises(
        ArgumentError, match=f"GPU 4095 does not exist; this process sees {gpu_count()}"
    ):
        query_gpu(4095)


def test_timed_gives_milliseconds() -> None:
    qkv = drawn()
    o, ms = forward_timed(CFG, *map(DeviceArray.from_host, qkv))
    assert ms is not None
    assert 0 < ms < 1000
    assert_attention(o.to_host(), None, qkv)


def test_an_impossible_allocation_is_a_launch_error() -> None:
    with pytest.raises(LaunchError, match="cuMemAlloc_v2: CUDA error 2: out of memory"):
        DeviceArray.empty((1 << 46,), np.dtype(np.float16))


def test_repeated_runs_are_bitwise_equal() -> None:
    on_gpu = [DeviceArray.from_host(array) for array in drawn()]
    outputs = {forward(CFG, *on_gpu).to_host().tobytes() for _ in range(20)}
    assert len(outputs) == 1


def test_the_largest_shared_memory_is_granted() -> None:
    """96 KiB: refused by the driver unless the kernel's limit was raised first."""
    cfg = FlashForwardKernelConfig(DType.FP16, 128, 128, 128, 8, True, True, True, 2, 2, 2)
    if cfg.smem_bytes() > query_gpu(0).max_smem_per_block:
        cfg = FlashForwardKernelConfig(DType.FP16, 128, 128, 64, 8, True, True, True, 2, 2, 2)
    spec = InputSpec("random", DType.FP16, 1, 256, 256, 1, 128, default_scale(128))
    drawn = make_inputs(spec)
    qkv = [drawn.q, drawn.k, drawn.v]
    o = forward(cfg, *map(DeviceArray.from_host, qkv)).to_host()
    assert compare(cfg, o, None, compute_references(*qkv, default_scale(128))).ok


def on_gpu(array: np.ndarray, device: int = 0) -> Any:
    import torch

    if array.dtype == np.float16:
        return torch.from_numpy(array.copy()).to(f"cuda:{device}")
    bits = torch.from_numpy(array.view(np.int16).copy())
    return bits.to(f"cuda:{device}").view(torch.bfloat16)


def on_host(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).cpu().numpy().view(drawn(DType.BF16)[0].dtype)
    return tensor.cpu().numpy()


@pytest.mark.torch
class TestTorch:
    @pytest.mark.parametrize("dtype", list(DType))
    def test_torch_in_torch_out(self, dtype: DType) -> None:
        import torch

        qkv = drawn(dtype)
        tensors = [on_gpu(array) for array in qkv]
        o, lse = forward(CONFIGS[dtype], *tensors, return_lse=True)
        assert o.device == lse.device == tensors[0].device
        assert o.dtype is tensors[0].dtype
        assert lse.dtype is torch.float32
        assert_attention(on_host(o), on_host(lse), qkv)

    def test_every_tensor_with_strides_of_its_own(self) -> None:
        import torch

        qkv = drawn()
        q, k, v = map(on_gpu, qkv)
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        wide = torch.full((*v.shape[:3], D + 8), torch.nan, dtype=v.dtype, device=v.device)
        wide[..., :D] = v
        storage = torch.full((SEQ_Q, HEADS, BATCH, D), torch.nan, dtype=q.dtype, device=q.device)
        o = storage.permute(2, 0, 1, 3)
        assert forward(CFG, q, k, wide[..., :D], o) is o
        assert_attention(on_host(o.contiguous()), None, qkv)

    def test_broadcast_keys_and_values(self) -> None:
        q, k, v = map(on_gpu, drawn())
        k1, v1 = (tensor[:, :, :1].expand_as(tensor) for tensor in (k, v))
        o = forward(CFG, q, k1, v1)
        assert_attention(on_host(o), None, [on_host(q), on_host(k1), on_host(v1)])

    def test_the_callers_stream_is_used(self) -> None:
        """The inputs arrive on a side stream behind a long wait; another stream would miss them."""
        import torch

        qkv = drawn()
        ready = [on_gpu(array) for array in qkv]
        tensors = [torch.zeros_like(tensor) for tensor in ready]
        o = torch.full_like(tensors[0], torch.nan)
        forward(CFG, *tensors, o)  # whatever a first call loads is loaded now
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            for tensor, value in zip(tensors, ready, strict=True):
                tensor.copy_(value)
            forward(CFG, *tensors, o)
            copy = o.clone()
        assert not side.query(), "the call waited for the GPU"
        side.synchronize()
        assert_attention(on_host(copy), None, qkv)

    def test_calls_like_one_before_on_tensors_elsewhere(self) -> None:
        """Each has inputs of its own at addresses of its own; only the first is checked."""
        import torch

        forget_cached_launches()
        inputs = [drawn(seed=seed) for seed in range(4)]
        tensors = [[on_gpu(array) for array in qkv] for qkv in inputs]
        outs = [torch.full_like(q, torch.nan) for q, _, _ in tensors]
        for qkv, arrays, out in zip(tensors, inputs, outs, strict=True):
            o, lse, _ = forward(CFG, *qkv, return_lse=True, return_row_max=True)
            assert_attention(on_host(o), on_host(lse), arrays)
            assert forward(CFG, *qkv, out) is out
            assert_attention(on_host(out), None, arrays)
        assert len(cached_calls.cached) == 2
        q, k, v = tensors[0]
        with pytest.raises(ArgumentError, match="o: shares memory with q"):
            forward(CFG, q, k, v, q)
        with pytest.raises(ArgumentError, match="v: requires grad"):
            forward(CFG, q, k, v.clone().requires_grad_())

    def test_two_streams_at_once(self) -> None:
        import torch

        inputs = [drawn(seed=seed) for seed in range(2)]
        tensors = [[on_gpu(array) for array in qkv] for qkv in inputs]
        torch.cuda.synchronize()
        outputs = []
        for qkv in tensors:
            with torch.cuda.stream(torch.cuda.Stream()):
                outputs.append([forward(CFG, *qkv) for _ in range(20)])
        torch.cuda.synchronize()
        for qkv, several in zip(inputs, outputs, strict=True):
            assert_attention(on_host(several[-1]), None, qkv)
            assert all(torch.equal(o, several[0]) for o in several)

    def test_threads(self) -> None:
        import torch

        inputs = [drawn(seed=seed) for seed in range(8)]
        outputs: dict[int, np.ndarray] = {}

        def work(index: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                tensors = [on_gpu(array) for array in inputs[index]]
                for _ in range(10):
                    o = forward(CFG, *tensors)
                torch.cuda.current_stream().synchronize()
                outputs[index] = on_host(o)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, qkv in enumerate(inputs):
            assert_attention(outputs[index], None, qkv)

    @pytest.mark.usefixtures("two_gpus")
    def test_a_device_that_is_not_current(self) -> None:
        import torch

        qkv = drawn()
        tensors = [on_gpu(array, device=1) for array in qkv]
        with torch.cuda.device(0):
            o, lse = forward(CFG, *tensors, return_lse=True)
            assert torch.cuda.current_device() == 0
            _, ms = forward_timed(CFG, *tensors)
            assert torch.cuda.current_device() == 0
        assert o.device.index == lse.device.index == 1
        assert ms is not None
        assert_attention(on_host(o), on_host(lse), qkv)

    @pytest.mark.usefixtures("two_gpus")
    def test_the_stream_of_a_device_that_is_not_current(self) -> None:
        import torch

        qkv = drawn()
        ready = [on_gpu(array, device=1) for array in qkv]
        tensors = [torch.zeros_like(tensor) for tensor in ready]
        forward(CFG, *tensors)
        torch.cuda.synchronize(1)
        with torch.cuda.stream(torch.cuda.Stream(device=1)):
            torch.cuda._sleep(200_000_000)
            for tensor, value in zip(tensors, ready, strict=True):
                tensor.copy_(value)
            with torch.cuda.device(0):
                # Entering device 0 leaves device 1's current stream as it is.
                o = forward(CFG, *tensors)
        torch.cuda.synchronize(1)
        assert_attention(on_host(o), None, qkv)

    @pytest.mark.usefixtures("two_gpus")
    def test_two_devices_mixed(self) -> None:
        q, k, v = map(on_gpu, drawn())
        with pytest.raises(ArgumentError, match="v: lives on cuda:1 and q on cuda:0"):
            forward(CFG, q, k, v.to("cuda:1"))

    def test_host_and_gpu_mixed(self) -> None:
        q, k, v = map(on_gpu, drawn())
        with pytest.raises(ArgumentError, match="k: lives on cpu and q on cuda:0"):
            forward(CFG, q, k.cpu(), v)

    def test_output_aliases_an_input(self) -> None:
        q, k, v = map(on_gpu, drawn())
        with pytest.raises(ArgumentError, match="o: shares memory with q"):
            forward(CFG, q, k, v, q)

    def test_emulating_gpu_tensors_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match="emulate=True: the tensors live on cuda:0"):
            forward(CFG, *map(on_gpu, drawn()), emulate=True)

    def test_more_sequences_than_a_grids_second_dimension_holds(self) -> None:
        """70,000 batches: their inputs are one, their outputs have to be."""
        qkv = [array[:1, :64, :1] for array in drawn()]
        q, k, v = (on_gpu(array).expand(70_000, -1, -1, -1) for array in qkv)
        o, lse = forward(CFG, q, k, v, return_lse=True)
        assert bool((o == o[0]).all())
        assert bool((lse == lse[0]).all())
        assert_attention(on_host(o[:1]), on_host(lse[:1]), qkv)

    def test_a_refused_launch_leaves_the_next_one_alone(self) -> None:
        import torch

        qkv = drawn()
        tensors = [on_gpu(array) for array in qkv]
        kernel = loaded_kernels.get(CFG, query_gpu(0).arch)
        problem = Problem(1, 64, 64, 1, 1, D, DType.FP16)
        call = unplaced_call(problem, query_gpu(0), 0.1)
        with pytest.raises(LaunchError, match="cudaErrorInvalidDevice"):
            kernel.prepare(call, 4095)(0, *call.addresses)
        assert_attention(on_host(forward(CFG, *tensors)), None, qkv)
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", list(DType))
def test_emulator_and_gpu_agree_on_identical_ptx(dtype: DType) -> None:
    qkv = drawn(dtype)
    emulated = run_forward(CONFIGS[dtype], *qkv, arch=query_gpu(0).arch, emulate=True).o
    computed = forward(CONFIGS[dtype], *map(DeviceArray.from_host, qkv)).to_host()
    difference = emulated.astype(np.float64) - computed.astype(np.float64)
    relative = np.linalg.norm(difference) / np.linalg.norm(computed.astype(np.float64))
    assert relative <= (1e-3 if dtype is DType.FP16 else 5e-3)
    assert math.isfinite(relative)
