"""Every unusable argument is refused with its name, what it was and what to do; nothing is run."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashsmith.errors import ArgumentError, IllegalConfigError
from flashsmith.families import DType, FlashForwardKernelConfig, device_spec
from flashsmith.runtime import forward, forward_timed
from flashsmith.runtime.arguments import check_device, check_output, check_request
from flashsmith.runtime.frameworks import CupyArrays
from flashsmith.runtime.frameworks.device_array import DeviceArray, DeviceArrays
from flashsmith.runtime.libraries import LoadedKernels
from flashsmith.runtime.tensors import view_tensor
from flashsmith.semantics.signature import (
    MAX_UNCAPPED_SCALE,
    UNLIMITED,
    ForwardOptions,
    MaskLimits,
    check_mask,
    check_scale,
    check_softcap,
)

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
    refused(
        f"{name}: got .*; give a PyTorch tensor, or a NumPy, CuPy or JAX array", **{name: value}
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tracers_of_jax_are_distinguished_from_its_arrays(name: str) -> None:
    """The advice must not be to pass a JAX array: inside a jitted function it is one."""
    module = "jax._src.interpreters.partial_eval"
    base = type("Tracer", (), {"__module__": "jax._src.core"})
    tracer = type("DynamicJaxprTracer", (base,), {"__module__": module})()
    refused(
        rf"^{name}: is a tracer of a JAX transformation \(DynamicJaxprTracer\), not an array;"
        r".* outside of jax\.jit, jax\.vmap",
        **{name: tracer},
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("shape", [(64,), (64, 3, 64), (1, 2, 64, 3, 64)])
def test_rank(name: str, shape: tuple[int, ...]) -> None:
    refused(rf"{name}: rank {len(shape)} \(shape .*must be 4: \(batch", **{name: tensor(shape)})


def test_no_heads() -> None:
    none = tensor((2, 64, 0, 64))
    refused("q: shape .*must have at least one head", q=none)
    refused("k: 0 heads and q 3; q's must be a multiple", k=none, v=none)


def test_no_columns() -> None:
    three = {name: tensor((2, 64, 3, 0)) for name in "qkv"}
    refused("q: d_head 0 .*must be a multiple of 8", **three)


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
    refused("q: d_head 128; the config's kernel is for up to 64", **three)


@pytest.mark.parametrize("d", [4, 59, 60, 111])
def test_d_head_of_no_whole_chunks(d: int) -> None:
    wide = {name: tensor((2, 64, 3, 128))[..., :d] for name in ("q", "k", "v")}
    refused(f"q: d_head {d} .*must be a multiple of 8: pad q, k and v with zeros", **wide)


def test_k_and_v_disagree() -> None:
    refused(r"v: shape \(2, 32, 3, 64\); must be k's, \(2, 64, 3, 64\)", v=tensor((2, 32, 3, 64)))


@pytest.mark.parametrize(("shape", "what"), [((1, 64, 3, 64), "batch"), ((2, 64, 3, 56), "d_head")])
def test_q_and_k_disagree(shape: tuple[int, ...], what: str) -> None:
    refused(f"k: shape .*; {what} must be q's", k=tensor(shape), v=tensor(shape))


@pytest.mark.parametrize("heads", [2, 6])
def test_heads_do_not_group(heads: int) -> None:
    kv = tensor((2, 64, heads, 64))
    refused(f"k: {heads} heads and q 3; q's must be a multiple", k=kv, v=kv)


def test_lengths_beyond_what_a_kernel_counts() -> None:
    endless = np.broadcast_to(tensor((1, 1, 1, 64)), (1, 2**30, 1, 64))
    refused(
        "k: 1073741824 rows; kernels count up to", q=tensor((1, 64, 1, 64)), k=endless, v=endless
    )
    refused("q: 1073741824 rows", q=endless, k=tensor((1, 64, 1, 64)), v=tensor((1, 64, 1, 64)))


def test_more_blocks_than_a_grid_holds() -> None:
    row = tensor((1, 1, 1, 64))
    q = np.broadcast_to(row, (2**20, 2**12 * 64, 1, 64))
    kv = np.broadcast_to(row, (2**20, 64, 1, 64))
    refused("q: batch x n_heads x blocks of 64 rows exceed 2147483647", q=q, k=kv, v=kv)


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
    refused("q: strides of .* bytes are not whole elements", q=odd)


def test_cupys_strides_that_split_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy counts bytes as NumPy does; a step of 17 is no step of 8 elements."""
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    array = SimpleNamespace(itemsize=2, strides=(34, 17, 2), shape=(2, 2, 8))
    with pytest.raises(ArgumentError, match=r"q: strides of .*copy it with cupy\.ascontiguous"):
        CupyArrays().view("q", array)


def test_a_mask_that_no_kernel_would_see() -> None:
    refused(r"k: is a masked array.*\.filled\(\)", k=np.ma.masked_array(tensor(), mask=False))


@pytest.mark.torch
def test_tensors_without_memory() -> None:
    """Fake ones, and those whose storage was given back: their address is 0."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    gone = torch.zeros(SHAPE, dtype=torch.float16)
    given = {name: torch.zeros_like(gone) for name in "qkv"}
    sinks = torch.zeros(3)
    for tensor_ in (gone, sinks):
        tensor_.untyped_storage().resize_(0)
    for name in "qkv":
        refused(f"{name}: has no memory", **{**given, name: gone})
    refused("sinks: has no memory", **given, sinks=sinks)


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


@pytest.mark.parametrize("name", ["causal", "return_lse", "return_row_max", "emulate"])
@pytest.mark.parametrize("value", [1, 0, None, "yes", [True]])
def test_flags(name: str, value: object) -> None:
    refused(f"{name}=.*: allowed are True and False", **{name: value})


@pytest.mark.parametrize("window", [None, 3, (1,), (1, 2, 3), "12", {1, 2}])
def test_a_window_that_is_no_pair(window: object) -> None:
    refused("window=.*: give a pair", window=window)


@pytest.mark.parametrize("limit", [-1, 1.0, True, "4", np.float32(3)])
@pytest.mark.parametrize("side", [0, 1])
def test_window_limits(side: int, limit: object) -> None:
    window = (limit, None) if side == 0 else (None, limit)
    refused("window=.*is not a limit; give a whole number from 0, or None", window=window)


@pytest.mark.parametrize(
    "softcap", [-1.0, math.inf, -math.inf, math.nan, True, None, "30", 1e39, 1e-45, 1j, [30.0]]
)
def test_softcap(softcap: object) -> None:
    refused("softcap=.*give a finite number above 0", softcap=softcap)


@pytest.mark.parametrize(("softcap", "scale"), [(1e-30, 1e30), (1e30, 1e-30)])
def test_softcap_and_scale_too_far_apart(softcap: float, scale: float) -> None:
    refused("softcap=.*: scale / softcap is .*fp32 cannot hold", softcap=softcap, scale=scale)


@pytest.mark.parametrize("shape", [(2,), (4,), (0,)])
def test_sinks_of_another_length(shape: tuple[int, ...]) -> None:
    refused(r"sinks: shape .*must be \(n_heads of q,\), \(3,\)", sinks=tensor(shape, np.float32))


def test_sinks_of_another_kind() -> None:
    refused("sinks: got .*; give a PyTorch tensor", sinks=[0.0, 0.0, 0.0])
    refused("sinks: dtype float64; must be float32", sinks=tensor((3,), np.float64))
    refused("sinks: rank 2", sinks=tensor((1, 3), np.float32))
    refused("sinks: stride 2; must be 1", sinks=tensor((6,), np.float32)[::2])
    on_gpu = DeviceArray((3,), np.dtype(np.float32), 0, 1 << 20)
    refused("sinks: is a flashsmith tensor and q a numpy one", sinks=on_gpu)


def test_output_overlaps_the_sinks() -> None:
    o = aligned(2 * math.prod(SHAPE)).view(np.float16).reshape(SHAPE)
    sinks = o.reshape(-1)[16:22].view(np.float32)
    refused("o: shares memory with sinks", sinks=sinks, o=o)


class TestPacked:
    """Two sequences of q, 40 and 24 rows, and of k and v, 10 and 54."""

    @staticmethod
    def refused(message: str, **changed: Any) -> None:
        rows = {name: tensor((64, 3, 64)) for name in "qkv"}
        offsets = {"cu_seqlens_q": offsets_of(40, 24), "cu_seqlens_k": offsets_of(10, 54)}
        refused(message, **(rows | offsets | changed))

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    @pytest.mark.parametrize("shape", [(64, 64), SHAPE])
    def test_rank(self, name: str, shape: tuple[int, ...]) -> None:
        self.refused(rf"{name}: rank .*must be 3: \(total_len", **{name: tensor(shape)})

    @pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
    def test_one_of_both_missing(self, name: str) -> None:
        self.refused(f"{name}: missing; packed sequences need both", **{name: None})

    @pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
    def test_limits_are_of_packed_sequences(self, name: str) -> None:
        refused(f"{name}=64: is for packed sequences only", **{name: 64})

    @pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
    @pytest.mark.parametrize("value", [-1, 40.0, True, "64"])
    def test_limits(self, name: str, value: object) -> None:
        self.refused(f"{name}=.*: give a whole number from 0, or None", **{name: value})

    @pytest.mark.parametrize(("side", "longest"), [("q", 40), ("k", 54)])
    def test_a_limit_below_the_longest(self, side: str, longest: int) -> None:
        message = f"max_seqlen_{side}={longest - 1}: the longest sequence has {longest} rows"
        self.refused(message, **{f"max_seqlen_{side}": longest - 1})

    @pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
    def test_offsets_of_another_kind(self, name: str) -> None:
        right = offsets_of(40, 24)
        self.refused(f"{name}: got builtins.list", **{name: [0, 40, 64]})
        self.refused(f"{name}: dtype int64; must be int32", **{name: right.astype(np.int64)})
        self.refused(f"{name}: rank 2", **{name: right[None]})
        self.refused(f"{name}: stride 2; must be 1", **{name: np.repeat(right, 2)[::2]})
        self.refused(f"{name}: is empty", **{name: right[:0]})
        odd = aligned(12, 2).view(np.int32)
        self.refused(f"{name}: address .* is not a multiple of 4", **{name: odd})
        on_gpu = DeviceArray((3,), np.dtype(np.int32), 0, 1 << 20)
        self.refused(f"{name}: is a flashsmith tensor and q a numpy one", **{name: on_gpu})

    def test_batches_differ(self) -> None:
        message = "cu_seqlens_k: describes 3 sequences, but cu_seqlens_q 2"
        self.refused(message, cu_seqlens_k=offsets_of(10, 50, 4))

    @pytest.mark.parametrize("side", ["q", "k"])
    @pytest.mark.parametrize("offsets", [[1, 40, 64], [0, 40, 63], [0, 70, 64], [0, -1, 64]])
    def test_offsets_that_do_not_rise_from_0_to_the_total(
        self, side: str, offsets: list[int]
    ) -> None:
        name = f"cu_seqlens_{side}"
        message = f"{name}: goes from .*must rise, or stay, from 0 to {side}'s 64 rows"
        self.refused(message, **{name: np.array(offsets, np.int32)})

    def test_rows_of_no_sequence(self) -> None:
        none = offsets_of()
        message = "cu_seqlens_q: describes no sequence, but q has 64 rows"
        self.refused(message, cu_seqlens_q=none, cu_seqlens_k=none)

    def test_output_overlaps_the_offsets(self) -> None:
        o = aligned(2 * 64 * 3 * 64).view(np.float16).reshape(64, 3, 64)
        offsets = o.reshape(-1)[:6].view(np.int32)
        offsets[:] = 0, 40, 64
        self.refused("o: shares memory with cu_seqlens_k", cu_seqlens_k=offsets, o=o)

    @staticmethod
    def on_gpu() -> tuple[tuple[Any, Any, Any, None], DeviceArray]:
        """q, k, v and their offsets at unmapped addresses."""
        q, k, v = (DeviceArray((64, 3, 64), np.dtype(np.float16), 0, i << 20) for i in (1, 2, 3))
        return (q, k, v, None), DeviceArray((3,), np.dtype(np.int32), 0, 1 << 30)

    def test_contents_on_a_device_are_not_looked_at(self) -> None:
        tensors, offsets = self.on_gpu()
        options = ForwardOptions(
            cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=50, max_seqlen_k=100
        )
        request = check_request(tensors, options)
        # No sequence is longer than all of them together.
        p = request.problem
        assert (p.batch, p.seq_q, p.seq_k) == (2, 50, 64)

    @pytest.mark.parametrize("missing", ["q", "k"])
    def test_a_limit_missing_while_a_graph_is_captured(
        self, missing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DeviceArrays, "is_capturing", lambda framework, ordinal: True)
        tensors, offsets = self.on_gpu()
        limits = {"max_seqlen_q": 64, "max_seqlen_k": 64} | {f"max_seqlen_{missing}": None}
        options = ForwardOptions(cu_seqlens_q=offsets, cu_seqlens_k=offsets, **limits)
        message = f"max_seqlen_{missing}: missing during CUDA graph capture"
        with pytest.raises(ArgumentError, match=message):
            check_request(tensors, options)


def offsets_of(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


NOTHING = MaskLimits("none", UNLIMITED, UNLIMITED)


@pytest.mark.parametrize(
    ("causal", "window", "mask"),
    [
        (False, (None, None), NOTHING),
        (False, [None, None], NOTHING),
        (True, (None, None), MaskLimits("causal", UNLIMITED, 0)),
        (np.True_, (None, 7), MaskLimits("causal", UNLIMITED, 0)),
        (False, (None, 0), MaskLimits("causal", UNLIMITED, 0)),
        (False, (5, None), MaskLimits("window", 5, UNLIMITED)),
        (False, (np.int64(0), 0), MaskLimits("window", 0, 0)),
        (False, (None, 3), MaskLimits("window", UNLIMITED, 3)),
        (True, (5, 3), MaskLimits("window", 5, 0)),
        (False, (2**40, None), NOTHING),
        (True, (2**40, 2**70), MaskLimits("causal", UNLIMITED, 0)),
    ],
)
def test_causal_and_window_make_one_mask(causal: Any, window: Any, mask: MaskLimits) -> None:
    assert check_mask(causal, window) == mask


@pytest.mark.parametrize(("softcap", "value"), [(0, 0.0), (0.0, 0.0), (30, 30.0), (0.5, 0.5)])
def test_softcaps_that_are_fine(softcap: Any, value: float) -> None:
    assert check_softcap(softcap, 0.125) == value


def test_a_scale_that_alone_makes_logits_too_large_needs_a_softcap() -> None:
    assert check_softcap(0.0, MAX_UNCAPPED_SCALE) == 0.0
    assert check_softcap(30.0, 2.0**100) == 30.0
    for softcap in (0, 0.0):
        with pytest.raises(
            ArgumentError, match=r"^scale=1e\+20: at most 2\*\*27 without a softcap"
        ):
            check_softcap(softcap, 1e20)


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

    def test_gradients(self) -> None:
        import torch

        three = self.tensors()
        for name in "qkv":
            grown = three | {name: three[name].detach().requires_grad_()}
            refused(rf"{name}: requires grad.*flashsmith.attention\(\)", **grown)
        sinks = torch.zeros(3, requires_grad=True)
        refused("sinks: requires grad", **three, sinks=sinks)

    def test_offsets_and_sinks(self) -> None:
        import torch

        three = self.tensors()
        refused(
            "sinks: dtype torch.float64; must be float32", **three, sinks=torch.zeros(3).double()
        )
        packed = {name: tensor[0] for name, tensor in three.items()}
        wide = torch.tensor([0, 64])
        both = {"cu_seqlens_q": wide.int(), "cu_seqlens_k": wide}
        refused("cu_seqlens_k: dtype torch.int64; must be int32", **packed, **both)
        both["cu_seqlens_k"] = np.array([0, 64], np.int32)
        refused("cu_seqlens_k: is a numpy tensor and q a torch one", **packed, **both)

    def test_elsewhere(self) -> None:
        three = self.tensors()
        refused("q: lives on device meta", **(three | {"q": three["q"].to("meta")}))
