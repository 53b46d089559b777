"""Every check on the arguments of a forward pass. What passes here is safe to launch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from flashsmith.configs import DeviceSpec, FlashForwardKernelConfig, Problem, check_legal
from flashsmith.errors import ArgumentError
from flashsmith.runtime.overlap import check_output_distinct
from flashsmith.runtime.tensors import TensorView, view_tensor

# Kernels move 16 bytes at a time: 8 elements of 2 bytes.
ALIGNMENT_BYTES = 16
LAYOUT = "(batch, seq_len, n_heads, d_head)"
# The kernel takes scale * log2(e) as fp32; outside of these it would become inf, or lose bits.
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**127
OLDEST_ARCH = 80


def check_config(cfg: Any) -> FlashForwardKernelConfig:
    """Raises ArgumentError unless ``cfg`` is a kernel config."""
    if isinstance(cfg, FlashForwardKernelConfig):
        return cfg
    raise ArgumentError(
        f"cfg: got {type(cfg).__name__}; give a FlashForwardKernelConfig (a short form becomes one "
        "through flashsmith.parse_kernel_name_into_config)"
    )


def check_scale(scale: Any, d: int) -> float:
    """The scale as a float; None gives 1/sqrt(d). Raises ArgumentError unless finite and > 0."""
    if scale is None:
        return 1.0 / math.sqrt(d)
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        value = float(scale)
        if MIN_SCALE <= value <= MAX_SCALE:
            return value
    raise ArgumentError(
        f"scale={scale!r}: give a finite number above 0 that fp32 can hold, or None for 1/sqrt(d)"
    )


def check_inputs(
    cfg: FlashForwardKernelConfig, q: Any, k: Any, v: Any
) -> tuple[Problem, TensorView, TensorView, TensorView]:
    """Views of q, k, v and the problem they pose to ``cfg``'s kernel.

    Raises ArgumentError for anything but three fp16 or bf16 tensors of one framework and device,
    of rank 4, not empty, 16-byte aligned with a contiguous last dimension, whose shapes agree with
    each other and with the config's dtype, d_head and tiles.
    """
    views = (view_tensor("q", q), view_tensor("k", k), view_tensor("v", v))
    for view in views:
        _check_rank_and_size(view)
        _check_same_kind(view, views[0])
        _check_layout(view)
    q_view, k_view, v_view = views
    _check_against_config(cfg, q_view)
    return _problem(cfg, q_view.shape, k_view.shape, v_view.shape), *views


def check_output(o: Any, q: TensorView, inputs: Sequence[TensorView]) -> TensorView:
    """A view of a given output. Raises ArgumentError unless it is q's equal in shape, dtype,
    framework and device, writable, aligned, and shares no memory with an input or itself."""
    view = view_tensor("o", o)
    if view.shape != q.shape:
        raise ArgumentError(f"o: shape {view.shape}; must be q's, {q.shape}")
    _check_same_kind(view, q)
    _check_layout(view)
    if not view.writable:
        raise ArgumentError("o: is read-only; give a writable array")
    check_output_distinct(view, inputs)
    return view


def check_device(cfg: FlashForwardKernelConfig, device: DeviceSpec) -> None:
    """Raises ArgumentError when the GPU is too old, IllegalConfigError when the config does not
    fit it (shared memory above its limit, say)."""
    if device.arch < OLDEST_ARCH:
        raise ArgumentError(
            f"device: {device.name} has compute capability {_capability(device.arch)}; these "
            f"kernels need {_capability(OLDEST_ARCH)} or newer. Host tensors run in the emulator"
        )
    check_legal(cfg, device)


def _capability(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


def _check_rank_and_size(view: TensorView) -> None:
    if len(view.shape) != 4:
        raise ArgumentError(
            f"{view.name}: rank {len(view.shape)} (shape {view.shape}); must be 4: {LAYOUT}"
        )
    if 0 in view.shape:
        raise ArgumentError(
            f"{view.name}: is empty (shape {view.shape}); every dimension must be at least 1"
        )


def _check_same_kind(view: TensorView, q: TensorView) -> None:
    if view.framework != q.framework:
        raise ArgumentError(
            f"{view.name}: is a {view.framework} tensor and q a {q.framework} one; "
            "give all of one framework"
        )
    if view.dtype != q.dtype:
        raise ArgumentError(
            f"{view.name}: dtype {view.dtype.name} and q {q.dtype.name}; all must have one dtype"
        )
    if view.device != q.device:
        raise ArgumentError(
            f"{view.name}: lives on {view.device} and q on {q.device}; move all to one device"
        )


def _check_layout(view: TensorView) -> None:
    """The last dimension contiguous; address and every step that is taken whole 16-byte chunks."""
    *steps, last = view.strides
    if last != 1 and view.shape[-1] > 1:
        raise ArgumentError(
            f"{view.name}: stride of the last dimension is {last}; must be 1 (make it contiguous)"
        )
    if view.address % ALIGNMENT_BYTES:
        raise ArgumentError(
            f"{view.name}: address {view.address:#x} is not a multiple of {ALIGNMENT_BYTES} bytes; "
            "copy it into a tensor of its own"
        )
    elements = ALIGNMENT_BYTES // view.dtype.element_size
    for axis, stride in enumerate(steps):
        # Of a dimension of one no step is taken, and frameworks put any number there.
        if stride % elements and view.shape[axis] > 1:
            raise ArgumentError(
                f"{view.name}: stride {stride} of dimension {axis} is not a multiple of {elements} "
                f"elements ({ALIGNMENT_BYTES} bytes); make it contiguous"
            )


def _check_against_config(cfg: FlashForwardKernelConfig, q: TensorView) -> None:
    if q.dtype != cfg.dtype:
        raise ArgumentError(
            f"q: dtype {q.dtype.name}; the config's kernel is for {cfg.dtype.name}: convert the "
            "tensors or choose another config"
        )
    if q.shape[3] != cfg.d_head:
        raise ArgumentError(
            f"q: d_head {q.shape[3]} (shape {q.shape}); the config's kernel is for {cfg.d_head}"
        )


@lru_cache(maxsize=1024)
def _problem(
    cfg: FlashForwardKernelConfig, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> Problem:
    """The problem of three shapes. Kept, because a model calls with few of them, and often."""
    batch, seq_q, heads_q, d = q
    _, seq_k, heads_k, _ = k
    if v != k:
        raise ArgumentError(f"v: shape {v}; must be k's, {k}")
    if (k[0], k[3]) != (batch, d):
        raise ArgumentError(f"k: shape {k}; batch and d_head must be q's (q has shape {q})")
    if heads_k != heads_q:
        raise ArgumentError(
            f"k: {heads_k} heads and q {heads_q}; this version needs as many of both (expand k and "
            "v over the heads, a stride of 0 will do)"
        )
    _check_length("q", seq_q, "B_r", cfg.B_r)
    _check_length("k", seq_k, "B_c", cfg.B_c)
    return Problem(batch, seq_q, seq_k, heads_q, heads_k, d, cfg.dtype)


def _check_length(name: str, length: int, tile_name: str, tile: int) -> None:
    if length % tile:
        raise ArgumentError(
            f"{name}: seq_len {length} is not a multiple of the config's {tile_name}={tile}; "
            "choose a config whose tiles divide it"
        )
