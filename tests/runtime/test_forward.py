"""forward on host tensors: every way of passing them gives attention, and touches nothing else."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import shared_kernels

from flashsmith.errors import EmulationTooLongError
from flashsmith.families import (
    DeviceSpec,
    DType,
    KernelConfig,
    Problem,
    parse_kernel_name_into_config,
)
from flashsmith.runtime import forward, forward_timed, kernel_choice, run_forward
from flashsmith.runtime.forward_pass import run_request
from flashsmith.semantics.signature import ForwardOptions
from flashsmith.verify import InputSpec, compare, compute_references, make_inputs
from flashsmith.verify.proof_inputs import default_scale

FEATURES = "async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
CONFIGS = {
    dtype: parse_kernel_name_into_config(f"({dtype.name}, 64, 64, 32, 4): {FEATURES}")
    for dtype in DType
}
WGMMA = parse_kernel_name_into_config("(FP16, 64, 64, 64, 1wg): tma+stages_2+regs_24_240")
shared_kernels.want([*CONFIGS.values(), WGMMA])
shared_kernels.want([CONFIGS[DType.FP16]], arch=90)
BATCH, SEQ_Q, SEQ_K, HEADS, D = 2, 128, 64, 2, 64


def drawn(dtype: DType = DType.FP16, seed: int = 0) -> list[np.ndarray]:
    spec = InputSpec("random", dtype, BATCH, SEQ_Q, SEQ_K, HEADS, D, default_scale(D), seed)
    inputs = make_inputs(spec)
    return [inputs.q, inputs.k, inputs.v]


def assert_attention(
    o: np.ndarray, lse: np.ndarray | None, qkv: list[np.ndarray], scale: float = default_scale(D)
) -> None:
    dtype = DType.FP16 if o.dtype == np.float16 else DType.BF16
    checked = compare(CONFIGS[dtype], o, lse, compute_references(*qkv, scale))
    assert checked.ok, (checked.reasons, str(checked.first_mismatch))


@pytest.mark.parametrize("dtype", list(DType))
def test_numpy_in_numpy_out(dtype: DType) -> None:
    qkv = drawn(dtype)
    before = [array.tobytes() for array in qkv]
    o, lse = forward(CONFIGS[dtype], *qkv, return_lse=True)
    assert isinstance(o, np.ndarray)
    assert (o.shape, o.dtype) == (qkv[0].shape, qkv[0].dtype)
    assert (lse.shape, lse.dtype) == ((BATCH, HEADS, SEQ_Q), np.float32)
    assert_attention(o, lse, qkv)
    assert [array.tobytes() for array in qkv] == before


def test_the_output_is_written_where_it_was_asked_for() -> None:
    qkv = drawn()
    o = np.full(qkv[0].shape, np.nan, np.float16)
    assert forward(CONFIGS[DType.FP16], *qkv, o) is o
    assert_attention(o, None, qkv)


def test_scale_is_used() -> None:
    qkv = drawn()
    o, lse = forward(CONFIGS[DType.FP16], *qkv, scale=0.3, return_lse=True)
    assert_attention(o, lse, qkv, scale=0.3)


def test_timed_on_the_host_has_no_time() -> None:
    qkv = drawn()
    o, ms = forward_timed(CONFIGS[DType.FP16], *qkv)
    assert ms is None
    assert_attention(o, None, qkv)


def heads_outside(array: np.ndarray) -> np.ndarray:
    """The same tensor over (batch, heads, seq, d) memory."""
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def padded_rows(array: np.ndarray) -> np.ndarray:
    wide = np.full((*array.shape[:3], array.shape[3] + 8), np.nan, array.dtype)
    wide[..., : array.shape[3]] = array
    return wide[..., : array.shape[3]]


def every_other_row(array: np.ndarray) -> np.ndarray:
    tall = np.full((array.shape[0], 2 * array.shape[1], *array.shape[2:]), np.nan, array.dtype)
    tall[:, ::2] = array
    return tall[:, ::2]


def reversed_rows(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array[:, ::-1])[:, ::-1]


LAYOUTS = [heads_outside, padded_rows, every_other_row, reversed_rows]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "o"])
def test_each_tensor_has_strides_of_its_own(which: str, layout: Any) -> None:
    qkv = drawn()
    o = np.full(qkv[0].shape, np.nan, np.float16)
    laid_out = {"q": qkv[0], "k": qkv[1], "v": qkv[2], "o": o}
    laid_out[which] = layout(laid_out[which])
    surroundings = laid_out["o"].base
    forward(CONFIGS[DType.FP16], *laid_out.values())
    assert_attention(laid_out["o"], None, qkv)
    if surroundings is not None and which == "o":
        assert np.isnan(surroundings.astype(np.float32)).sum() == surroundings.size - o.size


def test_broadcast_keys_and_values() -> None:
    """A stride of 0 shares one head of K and V among all."""
    q, k, v = drawn()
    k1, v1 = (np.broadcast_to(array[:, :, :1], array.shape) for array in (k, v))
    o = forward(CONFIGS[DType.FP16], q, k1, v1)
    assert_attention(o, None, [q, k1, v1])


def test_broadcast_keys_are_left_to_the_family_that_can_read_them() -> None:
    """TMA takes no stride of 0, so a chooser that says wgmma is asked again."""
    asked: list[tuple[Any, ...]] = []

    def choose(problem: Problem, device: DeviceSpec, family: str | None = None) -> KernelConfig:
        asked.append((device.arch, family))
        return WGMMA if family is None else CONFIGS[DType.FP16]

    q, k, v = drawn()
    k, v = (np.broadcast_to(array[:, :, :1], array.shape) for array in (k, v))
    options = ForwardOptions(return_lse=True)
    found = run_request(choose, (q, k, v, None), options, emulate=False, arch=90)
    assert asked == [(90, None), (90, "mma_sync")]
    assert_attention(found.outputs["o"], found.outputs["lse"], [q, k, v])


def test_read_only_inputs() -> None:
    qkv = drawn()
    for array in qkv:
        array.flags.writeable = False
    assert_attention(forward(CONFIGS[DType.FP16], *qkv), None, qkv)


def test_poisoned_outputs_are_wholly_overwritten() -> None:
    qkv = drawn()
    result = run_forward(CONFIGS[DType.FP16], *qkv, return_lse=True, poisoned=True)
    assert np.isfinite(result.o).all()
    assert np.isfinite(result.lse).all()
    assert result.emulation is not None
    assert result.emulation.warp_instructions > 0


def test_threads_share_kernels_and_keep_their_tensors_apart() -> None:
    inputs = [drawn(seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda qkv: forward(CONFIGS[DType.FP16], *qkv), inputs))
    for qkv, o in zip(inputs, outputs, strict=True):
        assert_attention(o, None, qkv)


def test_the_lse_is_written_only_when_asked_for() -> None:
    assert run_forward(CONFIGS[DType.FP16], *drawn()).lse is None


def test_another_arch_is_emulated_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    get = kernel_choice.loaded_kernels.get

    def noting(cfg: Any, arch: int, *options: Any) -> Any:
        seen.append(arch)
        return get(cfg, 80, *options)

    monkeypatch.setattr(kernel_choice, "loaded_kernels", SimpleNamespace(get=noting))
    run_forward(CONFIGS[DType.FP16], *drawn(), arch=90)
    forward(CONFIGS[DType.FP16], *drawn())
    assert seen == [90, 80]


class TestLongEmulations:
    """Above 60 s the caller has to insist."""

    @pytest.fixture(autouse=True)
    def _slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flashsmith.runtime import running_time

        monkeypatch.setattr(running_time, "estimate_seconds", lambda *args: 3661.0)

    def test_refused_before_anything_is_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_choice, "loaded_kernels", None)
        with pytest.raises(EmulationTooLongError, match=r"3661 s, above 60 s; pass emulate=True"):
            forward(CONFIGS[DType.FP16], *drawn())

    def test_run_when_asked_for(self) -> None:
        qkv = drawn()
        assert_attention(forward(CONFIGS[DType.FP16], *qkv, emulate=True), None, qkv)


def test_a_large_problem_really_is_estimated_above_the_limit() -> None:
    large = np.broadcast_to(np.zeros(D, np.float16), (16, 16384, 16, D))
    with pytest.raises(EmulationTooLongError, match="b16 s16384 h16 d64 fp16"):
        forward(CONFIGS[DType.FP16], large, large, large)


@pytest.mark.torch
class TestTorch:
    @pytest.mark.parametrize("dtype", list(DType))
    def test_torch_in_torch_out(self, dtype: DType) -> None:
        import torch

        qkv = drawn(dtype)
        tensors = [as_torch(array) for array in qkv]
        o, lse = forward(CONFIGS[dtype], *tensors, return_lse=True)
        assert isinstance(o, torch.Tensor)
        assert o.dtype is tensors[0].dtype
        assert o.shape == tensors[0].shape
        assert (lse.dtype, tuple(lse.shape)) == (torch.float32, (BATCH, HEADS, SEQ_Q))
        assert_attention(as_numpy(o), lse.numpy(), qkv)

    def test_memory_is_shared_not_copied(self) -> None:
        import torch

        qkv = drawn(DType.BF16)
        storage = torch.full((BATCH, HEADS, SEQ_Q, D), torch.nan, dtype=torch.bfloat16)
        o = storage.transpose(1, 2)
        assert forward(CONFIGS[DType.BF16], *map(as_torch, qkv), o) is o
        assert_attention(as_numpy(storage.transpose(1, 2)), None, qkv)

    def test_parameters_and_tensors_that_require_grad(self) -> None:
        import torch

        qkv = drawn()
        q, k, v = map(as_torch, qkv)
        with torch.no_grad():
            o = forward(CONFIGS[DType.FP16], torch.nn.Parameter(q), k.requires_grad_(), v)
        assert not o.requires_grad
        assert_attention(as_numpy(o), None, qkv)


def as_torch(array: np.ndarray) -> Any:
    import torch

    if array.dtype == np.float16:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)


def as_numpy(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype is torch.float16:
        return tensor.detach().numpy()
    return tensor.detach().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def test_numpy_tensors_need_no_torch() -> None:
    program = f"""
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import numpy as np
import flashsmith
config = flashsmith.parse_kernel_name_into_config({str(CONFIGS[DType.FP16])!r})
q = np.ones((1, 64, 1, 64), np.float16)
o = flashsmith.forward(config, q, q, q)
assert np.allclose(o, 1), o
"""
    subprocess.run([sys.executable, "-c", program], check=True)
