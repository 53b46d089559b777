"""Every unusable argument is refused with its name, what it was and what to do; nothing is run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashsmith.configs import DType, FlashForwardKernelConfig, device_spec
from flashsmith.errors import ArgumentError, IllegalConfigError
from flashsmith.runtime import forward, forward_timed
from flashsmith.runtime.arguments import check_device, check_output, check_scale
from flashsmith.runtime.device_array import DeviceArray
from flashsmith.runtime.libraries import LoadedKernels
from flashsmith.runtime.tensors import view_tensor

CFG = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4, swizzled=True)
SHAPE = (2, 64, 3, 64)


@pytest.fixture(autouse=True)
def _nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a bad argument came as far as the kernel library")

    monkeypatch.setattr(LoadedKernels, "get", refuse)


def tensor(shape: tuple[int, ...] = SHAPE, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


def aligned(n_bytes: int, offset: int = 0) -> np.ndarray:
    """Bytes whose first one lies ``offset`` past a multiple of 64."""
    buffer = np.zeros(n_bytes + 128, np.uint8)
    start = -buffer.__array_interface__["data"][0] % 64 + offset
    return buffer[start : start + n_bytes]


def refused(message: str, **changed: Any) -> None:
    arguments = {"q": tensor(), "k": tensor(), "v": tensor()} | changed
    for call in (forward, forward_timed):
        with pytest.raises(ArgumentError, match=message):
            call(changed.get("cfg", CFG), **{k: v for k, v in arguments.items() if k != "cfg"})


@pytest.mark.parametrize("cfg", ["(FP16, 64, 64, 32, 4): load_0_0_0_tiles", None, 3])
def test_cfg_of_another_type(cfg: object) -> None:
    refused("cfg: got .*; give a FlashForwardKernelConfig", cfg=cfg)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [None, [[1.0]], 1.0, "q"])
def test_not_a_tensor(name: str, value: object) -> None:
    refused(f"{name}: got .*; give a PyTorch tensor or a NumPy array", **{name: value})


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("shape", [(64,), (64, 3, 64), (1, 2, 64, 3, 64)])
def test_rank(name: str, shape: tuple[int, ...]) -> None:
    refused(rf"{name}: rank {len(shape)} \(shape .*must be 4: \(batch", **{name: tensor(shape)})


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("axis", range(4))
def test_empty(name: str, axis: int) -> None:
    shape = tuple(0 if i == axis else size for i, size in enumerate(SHAPE))
    refused(f"{name}: is empty", **{name: tensor(shape)})


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.float64, ">f2"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_dtype_no_kernel_takes(name: str, dtype: Any) -> None:
    refused(f"{name}: dtype .*allowed are float16 and bfloat16", **{name: tensor(dtype=dtype)})


@pytest.mark.parametrize("name", ["k", "v"])
def test_dtypes_mixed(name: str) -> None:
    mixed = {name: tensor(dtype=ml_dtypes.bfloat16)}
    refused(f"{name}: dtype BF16 and q FP16; all must have one dtype", **mixed)


def test_dtype_not_the_configs() -> None:
    three = {name: tensor(dtype=ml_dtypes.bfloat16) for name in ("q", "k", "v")}
    refused("q: dtype BF16; the config's kernel is for FP16", **three)


def test_d_head_not_the_configs() -> None:
    three = {name: tensor((2, 64, 3, 128)) for name in ("q", "k", "v")}
    refused("q: d_head 128 .*the config's kernel is for 64", **three)


def test_k_and_v_disagree() -> None:
    refused(r"v: shape \(2, 32, 3, 64\); must be k's, \(2, 64, 3, 64\)", v=tensor((2, 32, 3, 64)))


@pytest.mark.parametrize("shape", [(1, 64, 3, 64), (2, 64, 3, 128)])
def test_q_and_k_disagree(shape: tuple[int, ...]) -> None:
    refused("k: shape .*; batch and d_head must be q's", k=tensor(shape), v=tensor(shape))


def test_head_counts_differ() -> None:
    kv = tensor((2, 64, 1, 64))
    refused("k: 1 heads and q 3; this version needs as many", k=kv, v=kv)


def test_q_length_not_a_multiple_of_B_r() -> None:
    refused("q: seq_len 96 is not a multiple of the config's B_r=64", q=tensor((2, 96, 3, 64)))


def test_k_length_not_a_multiple_of_B_c() -> None:
    kv = tensor((2, 80, 3, 64))
    refused("k: seq_len 80 is not a multiple of the config's B_c=32", k=kv, v=kv)


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_last_dimension_not_contiguous(name: str) -> None:
    strided = tensor((2, 64, 3, 128))[..., ::2]
    refused(f"{name}: stride of the last dimension is 2; must be 1", **{name: strided})


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
@pytest.mark.parametrize("offset", [2, 4, 8])
def test_misaligned_address(name: str, offset: int) -> None:
    count = math.prod(SHAPE)
    misaligned = aligned(2 * count, offset).view(np.float16).reshape(SHAPE)
    refused(f"{name}: address 0x.* is not a multiple of 16 bytes", **{name: misaligned})


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_misaligned_stride(name: str) -> None:
    padded = aligned(2 * 2 * 64 * 3 * 68).view(np.float16).reshape(2, 64, 3, 68)[..., :64]
    refused(f"{name}: stride 204 of dimension 1 is not a multiple of 8", **{name: padded})


def test_strides_that_split_elements() -> None:
    rows = np.zeros((2, 64, 3, 131), np.uint8)
    odd = np.lib.stride_tricks.as_strided(
        rows.view(np.uint8)[..., :2].view(np.float16), SHAPE, (64 * 3 * 131, 3 * 131, 131, 0)
    )
    refused("q: strides of .* bytes are no whole elements", q=odd)


@pytest.mark.parametrize("name", ["k", "v"])
def test_frameworks_mixed(name: str) -> None:
    on_gpu = DeviceArray(SHAPE, np.dtype(np.float16), 0, 1 << 20)
    refused(f"{name}: is a flashsmith tensor and q a numpy one", **{name: on_gpu})


@pytest.mark.parametrize("name", ["k", "v"])
def test_devices_mixed(name: str) -> None:
    three = {n: DeviceArray(SHAPE, np.dtype(np.float16), int(n == name), 1 << 20) for n in "qkv"}
    refused(f"{name}: lives on cuda:1 and q on cuda:0; move all to one device", **three)


def test_emulating_gpu_tensors() -> None:
    arrays = [DeviceArray(SHAPE, np.dtype(np.float16), 0, (i + 1) << 20) for i in range(4)]
    with pytest.raises(ArgumentError, match="emulate=True: the tensors live on cuda:0"):
        forward(CFG, *arrays, emulate=True)


@pytest.mark.parametrize("shape", [(2, 64, 3, 32), (2, 32, 3, 64), (64, 3, 64), (1, 64, 3, 64)])
def test_output_of_another_shape(shape: tuple[int, ...]) -> None:
    refused(r"o: shape .*; must be q's, \(2, 64, 3, 64\)", o=tensor(shape))


def test_output_of_another_dtype() -> None:
    refused("o: dtype BF16 and q FP16", o=tensor(dtype=ml_dtypes.bfloat16))


def test_output_read_only() -> None:
    o = tensor()
    o.flags.writeable = False
    refused("o: is read-only", o=o)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_output_is_an_input(name: str) -> None:
    shared = tensor()
    refused(f"o: shares memory with {name}", o=shared, **{name: shared})


def test_output_overlaps_an_input_in_part() -> None:
    both = tensor((3, 64, 3, 64))
    refused("o: shares memory with v", v=both[:2], o=both[1:])


def test_output_overlaps_itself() -> None:
    expanded = np.lib.stride_tricks.as_strided(tensor(), SHAPE, (0, 384, 128, 2), writeable=True)
    refused("o: strides .* put several elements", o=expanded)


def test_output_interleaved_with_inputs_is_accepted() -> None:
    """q, k, v and o as slices of one packed tensor touch different bytes."""
    packed = np.zeros((2, 64, 4, 3, 64), np.float16)
    q, k, v, o = (view_tensor("qkvo"[i], packed[:, :, i]) for i in range(4))
    assert check_output(o.source, q, (q, k, v)).address == o.address


@pytest.mark.parametrize(
    "scale", [0, 0.0, -1.0, math.inf, -math.inf, math.nan, True, "1", 1e39, 1e-45, 1j, [1.0]]
)
def test_scale(scale: object) -> None:
    refused("scale=.*give a finite number above 0", scale=scale)


@pytest.mark.parametrize("scale", [1, 0.125, np.float32(0.3), np.float64(2.0)])
def test_scales_that_are_fine(scale: Any) -> None:
    assert check_scale(scale, 64) == float(scale)


def test_the_default_scale() -> None:
    assert check_scale(None, 64) == 0.125


@pytest.mark.parametrize("arch", [70, 75])
def test_compute_capability_too_low(arch: int) -> None:
    old = replace(device_spec("A100"), name="V100", arch=arch)
    capability = f"{arch // 10}.{arch % 10}"
    with pytest.raises(ArgumentError, match=f"V100 has compute capability {capability}.*need 8.0"):
        check_device(CFG, old)


def test_shared_memory_above_the_devices_limit() -> None:
    large = FlashForwardKernelConfig(DType.FP16, 128, 128, 128, 8)
    small = replace(device_spec("L4"), max_smem_per_block=65536)
    with pytest.raises(IllegalConfigError, match="98304 of 65536 bytes on L4"):
        check_device(large, small)


def test_an_illegal_config_never_reaches_the_compiler() -> None:
    illegal = replace(CFG, n_warps=8)
    with pytest.raises(IllegalConfigError, match="B_r / n_warps"):
        forward(illegal, tensor(), tensor(), tensor())


@pytest.mark.torch
class TestTorch:
    """The same checks see through PyTorch's tensors."""

    @staticmethod
    def tensors() -> dict[str, Any]:
        import torch

        return {name: torch.zeros(SHAPE, dtype=torch.float16) for name in "qkv"}

    def test_dtype(self) -> None:
        three = self.tensors()
        refused("k: dtype torch.float32; allowed", **(three | {"k": three["k"].float()}))

    def test_rank(self) -> None:
        three = self.tensors()
        refused("v: rank 3", **(three | {"v": three["v"][0]}))

    def test_last_stride(self) -> None:
        three = self.tensors()
        turned = three["q"].repeat(1, 1, 1, 2)[..., ::2]
        refused("q: stride of the last dimension is 2", **(three | {"q": turned}))

    def test_misaligned(self) -> None:
        import torch

        three = self.tensors()
        shifted = torch.zeros(math.prod(SHAPE) + 4, dtype=torch.float16)[4:].view(SHAPE)
        refused("q: address 0x.* is not a multiple of 16", **(three | {"q": shifted}))

    def test_mixed_with_numpy(self) -> None:
        refused("v: is a numpy tensor and q a torch one", **(self.tensors() | {"v": tensor()}))

    def test_output_aliases(self) -> None:
        three = self.tensors()
        refused("o: shares memory with k", **three, o=three["k"].view(SHAPE))

    def test_sparse(self) -> None:
        three = self.tensors()
        refused("q: layout torch.sparse_coo", **(three | {"q": three["q"].to_sparse()}))

    def test_elsewhere(self) -> None:
        three = self.tensors()
        refused("q: lives on device meta", **(three | {"q": three["q"].to("meta")}))
