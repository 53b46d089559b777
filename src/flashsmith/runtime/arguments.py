"""Checks the tensors of a forward pass; a call that passes all checks is safe to launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DeviceSpec,
    DType,
    KernelConfig,
    Problem,
    Semantics,
    check_legal,
    serves_gradients,
)
from flashsmith.families.canonical import VERSION, version_of
from flashsmith.families.family import config_class_names
from flashsmith.families.legality import (
    D_STEP,
    d_head_for,
    padding_advice,
    unequal_d_advice,
)
from flashsmith.operations import DEFAULT
from flashsmith.runtime.bits import cannot_keep, resolve_bits
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.program_arguments import check_program_arguments
from flashsmith.runtime.request import Request
from flashsmith.runtime.sequences import Packing, check_key_ranges, check_packing
from flashsmith.runtime.tensors import (
    DTYPES,
    check_beside,
    check_memory,
    check_output_distinct,
    view_tensor,
    view_vector,
)
from flashsmith.semantics.program import Program
from flashsmith.semantics.signature import (
    ForwardOptions,
    MaskLimits,
    check_flag,
    check_mask,
    check_scale,
    check_softcap,
)

# Kernels move 16 bytes at a time: 8 elements of 2 bytes.
ALIGNMENT_BYTES = 16
LAYOUT = "(batch, seq_len, n_heads, d_head)"
PACKED_LAYOUT = "(total_len, n_heads, d_head)"
OLDEST_ARCH = 80
# Kernels compute positions plus window limits in 32-bit integers.
LONGEST = 2**30 - 1
MOST_BLOCKS = 2**31 - 1


def check_config(cfg: Any, operation: str = DEFAULT) -> KernelConfig:
    """Raises ArgumentError unless ``cfg`` is a kernel config of a registered family; the message
    names the config classes for ``operation``."""
    if isinstance(cfg, KernelConfig):
        if not hasattr(cfg, "family"):
            raise ArgumentError(
                f"cfg: {type(cfg).__name__} belongs to no registered family; call "
                "register_family() first"
            )
        return cfg
    raise ArgumentError(
        f"cfg: got {type(cfg).__name__}; give a "
        f"{' or a '.join(config_class_names(operation))} (a short form becomes one through "
        "flashsmith.parse_kernel_name_into_config)"
    )


def check_request(
    tensors: tuple[Any, Any, Any, Any],
    options: ForwardOptions,
    *,
    check_contents: bool = True,
    output: str = "o",
) -> Request:
    """Returns the checked request for q, k, v, o (or None) and the options, independent of the
    kernel.

    ``output`` is the name of o in error messages.

    Raises ArgumentError, starting with the argument's name, when an argument is unusable.
    """
    packed = options.cu_seqlens_q is not None or options.cu_seqlens_k is not None
    q, k, v = inputs = check_inputs(*tensors[:3], packed=packed)
    mask = check_mask(options.causal, options.window)
    scale = check_scale(options.scale, max(1, q.shape[-1]))
    softcap = check_softcap(options.softcap, scale)
    packing = check_packing(options, q, k, check_contents=check_contents)
    ranges = check_key_ranges(options, q, k, packing, check_contents=check_contents)
    bits = resolve_bits(options.bits)
    if bits and ranges is not None:
        raise cannot_keep(options.bits, "partial=True merges its parts in another order")
    bound = options.program
    problem = check_problem(
        inputs,
        packing,
        mask.kind,
        softcap,
        partial=ranges is not None,
        window_keys=mask.window_keys,
        bits=bits,
        program=program_for(bound, bits),
    )
    sinks = check_sinks(options.sinks, q, problem.heads_q)
    wanted = _statistics(options, partial=ranges is not None, has_sinks=sinks is not None)
    views, sizes = {"q": q, "k": k, "v": v}, {}
    if packing is not None:
        views |= {"cu_seqlens_q": packing.cu_seqlens_q, "cu_seqlens_k": packing.cu_seqlens_k}
        sizes = {"total_q": q.shape[0], "total_k": k.shape[0]}
    if sinks is not None:
        views["sinks"] = sinks
    if ranges is not None:
        views |= ranges.views
    if tensors[3] is None:
        wanted.append("o")
    else:
        dtype = q.dtype if ranges is None else "float32"
        inputs = tuple(views.values())
        views["o"] = check_output(tensors[3], q, inputs, output, dtype=dtype, d_v=v.shape[-1])
    numbers = mask_options(mask, scale, softcap)
    if bound is not None:
        read = check_program_arguments(bound, q)
        views, sizes = views | read.views, sizes | read.sizes
        numbers["program_numbers"] = read.numbers
    return Request(problem, views, numbers, sizes, wanted)


def _statistics(options: ForwardOptions, *, partial: bool, has_sinks: bool) -> list[str]:
    """Returns the row statistics that a call returns; partial attention always returns the
    log-sum-exp.

    Raises ArgumentError if partial attention is combined with sinks or row maxima.
    """
    wanted = ["lse"] if check_flag("return_lse", options.return_lse) or partial else []
    if check_flag("return_row_max", options.return_row_max):
        wanted.append("row_max")
    if partial and (has_sinks or "row_max" in wanted):
        wrong = "sinks" if has_sinks else "return_row_max"
        raise ArgumentError(
            f"{wrong}: given with partial=True, which supports neither sinks nor row maxima; "
            + ("give them to flashsmith.merge_attention()" if has_sinks else "leave it out")
        )
    return wanted


def program_for(bound: Any, bits: str) -> str:
    """Returns a call's program as a string, in the form that kernels compute; '' without a
    program."""
    if bound is None:
        return ""
    program: Program = bound.program
    return program.exact if bits else program


def mask_options(mask: MaskLimits, scale: float, softcap: float) -> dict[str, Any]:
    """Returns scale, softcap and window limits, in the form that operations take."""
    windowed = mask.kind == "window"
    left, right = (mask.left, mask.right) if windowed else (None, None)
    return {"scale": scale, "softcap": softcap, "left": left, "right": right}


def check_inputs(q: Any, k: Any, v: Any, *, packed: bool) -> tuple[TensorView, ...]:
    """Checks q, k and v, and returns views of them.

    Raises ArgumentError for anything but three fp16 or bf16 tensors of one framework and device,
    of rank 4 (packed: 3), 16-byte aligned with a contiguous last dimension.
    """
    q_view = view_tensor("q", q)
    views = (q_view, view_tensor("k", k), view_tensor("v", v))
    for view in views:
        if len(view.shape) != (3 if packed else 4):
            raise _wrong_rank(view, packed)
        _check_same_kind(view, q_view)
        # d is checked before the strides, because an unsupported d makes a contiguous tensor's
        # strides fail, too.
        _check_d(view, q_view)
        _check_layout(view)
    return views


def check_problem(
    views: Sequence[TensorView],
    packing: Packing | None,
    mask: str,
    softcap: float,
    *,
    partial: bool = False,
    window_keys: int = 0,
    bits: str = "",
    program: str = "",
) -> Problem:
    """Checks the shapes of q, k and v, and returns the problem that they describe.

    Raises ArgumentError when the shapes do not match each other or exceed a kernel's index range.
    """
    q, k, v = views
    packed = None if packing is None else packing[2:]
    shapes = q.shape, k.shape, v.shape
    kind = mask, softcap > 0, partial, window_keys, bits, program
    return _problem(DTYPES[q.dtype], *shapes, packed, *kind)


def check_fit(cfg: KernelConfig, problem: Problem) -> Semantics:
    """Returns the semantics that ``cfg``'s kernel needs for ``problem``.

    Raises ArgumentError when the kernel cannot compute the problem: kernel and problem differ in
    operation or dtype, the kernel's d_head is too small, or the grid needs too many blocks.
    """
    if cfg.family.operation != problem.operation:
        raise ArgumentError(
            f"cfg: {cfg} computes {cfg.family.operation}, but the call needs {problem.operation}: "
            "choose another config"
        )
    if problem.dtype != cfg.dtype:
        raise ArgumentError(
            f"q: dtype {problem.dtype.name}; the config's kernel is for {cfg.dtype.name}: convert "
            "the tensors or choose another config"
        )
    check_widths("q", cfg, problem)
    check_gradients(cfg, problem)
    check_order(cfg, problem)
    check_cache(cfg, problem)
    check_program(cfg, problem)
    B_r, _ = cfg.family.loop_tiles(cfg) or (1, 1)
    if problem.batch * problem.heads_q * math.ceil(problem.seq_q / B_r) > MOST_BLOCKS:
        raise ArgumentError(
            f"q: batch x n_heads x blocks of {B_r} rows exceed {MOST_BLOCKS} ({problem}); "
            "split the batch"
        )
    return problem.required_semantics(cfg)


def check_serves(cfg: KernelConfig, problem: Problem) -> Semantics:
    """Returns the semantics that the config's kernel needs to compute the problem.

    Raises ArgumentError if the kernel cannot compute the problem: kernel and problem differ in
    operation or dtype, or the kernel's d_head is too small.
    """
    computes = cfg.family.operation
    if computes != problem.operation:
        raise ArgumentError(
            f"problem: '{problem}' needs the operation {problem.operation}; the config's kernel "
            f"({cfg}) computes {computes}: choose another config"
        )
    if problem.dtype is not cfg.dtype:
        raise ArgumentError(
            f"problem: dtype {problem.dtype.name}; the config's kernel is for {cfg.dtype.name}"
        )
    check_widths("problem", cfg, problem)
    check_gradients(cfg, problem)
    check_order(cfg, problem)
    check_cache(cfg, problem)
    check_program(cfg, problem)
    return problem.required_semantics(cfg)


def check_widths(name: str, cfg: KernelConfig, problem: Problem) -> None:
    """Raises ArgumentError when d or d_v is too large for the config's kernel, or when d and d_v
    differ and the kernel requires them to be equal."""
    if problem.d > cfg.d_head:
        what = f"d_head {problem.d}" if name == "q" else f"d {problem.d}"
        raise ArgumentError(
            f"{name}: {what}; the config's kernel is for up to {cfg.d_head}: choose a config with "
            "a larger d_head"
        )
    if problem.d_v == problem.d and problem.d_v <= cfg.d_head_v:
        return
    if name == "q":
        name = "v_cache" if any(it.is_cache for it in problem.computed.tensors) else "v"
    if isinstance(cfg.head_dims, int):
        raise ArgumentError(
            f"{name}: d_v {problem.d_v} is not d, {problem.d}; the config's kernel has one width: "
            f"choose a config with a d_v, such as one for {d_head_for(problem)}"
        )
    if problem.d_v > cfg.d_head_v:
        raise ArgumentError(
            f"{name}: d_v {problem.d_v}; the config's kernel is for up to {cfg.d_head_v}: choose a "
            "config with a larger d_v"
        )


def check_gradients(cfg: KernelConfig, problem: Problem) -> None:
    """Raises ArgumentError unless the config's kernel computes all gradients that the problem
    needs."""
    if not serves_gradients(cfg, problem):
        only = cfg.family.gradients_of(cfg)
        raise ArgumentError(
            f"gradients: {cfg} serves '{only}' problems only; choose another config"
        )


def check_order(cfg: KernelConfig, problem: Problem) -> None:
    """Raises ArgumentError when the problem needs the bits of the canonical order and the config's
    kernel does not keep that order."""
    if problem.bits and not version_of(cfg):
        raise ArgumentError(
            f"bits={problem.bits!r}: {cfg} does not sum in the canonical order; choose a config "
            f"with canonical_{VERSION}, or none"
        )


def check_cache(cfg: KernelConfig, problem: Problem) -> None:
    """Raises ArgumentError when the config's kernel expects a different cache format than the
    problem's."""
    served = cfg.family.cache_of(cfg)
    if served != problem.cache:
        other = cfg.with_knobs(cache=problem.cache_format) if "cache" in cfg.KNOBS else None
        advice = f"for example {other}" if other else "a config of another family"
        raise ArgumentError(
            f"config: {cfg} is for a cache that is {served or 'plain'}, and this call's is "
            f"{problem.cache or 'plain'}; choose {advice}"
        )


def check_program(cfg: KernelConfig, problem: Problem) -> None:
    """Raises ArgumentError when the call has a score or mask function that no kernel of the config
    supports."""
    if not problem.semantics.program:
        return
    adapted = cfg.family.adapt_to_program(cfg, problem.semantics)
    if adapted != cfg:
        advice = "a config of another family" if adapted is None else f"for example {adapted}"
        raise ArgumentError(
            f"cfg: {cfg} has no kernel for this score or mask function; choose {advice}"
        )


def check_sinks(sinks: Any, q: TensorView, heads_q: int) -> TensorView | None:
    """Returns a view of the sinks, or None without sinks. Raises ArgumentError unless the sinks are
    an fp32 tensor of shape (heads_q,)."""
    if sinks is None:
        return None
    view = view_vector("sinks", sinks, "float32")
    check_beside(view, q)
    if view.shape[0] != heads_q:
        raise ArgumentError(
            f"sinks: shape {view.shape}; must be (n_heads of q,), ({heads_q},): give one logit "
            "a head"
        )
    return view


def check_output(
    o: Any,
    q: TensorView,
    inputs: Sequence[TensorView],
    name: str = "o",
    *,
    dtype: str = "",
    d_v: int | None = None,
) -> TensorView:
    """Returns a view of the output tensor that the caller passed as argument ``name``.

    The output's dtype must be ``dtype`` ('' means q's dtype), and its last dimension must be
    ``d_v`` (None means q's d).

    Raises ArgumentError unless the output has the right shape, dtype, framework and device, is
    writable and aligned, and does not overlap an input or itself.
    """
    view = view_tensor(name, o) if dtype in ("", q.dtype) else view_tensor(name, o, (dtype,))
    shape = q.shape if d_v is None else (*q.shape[:-1], d_v)
    if view.shape != shape:
        whose = "q's" if shape == q.shape else "q's with v's d"
        raise ArgumentError(
            f"{name}: shape {view.shape}; must be {whose}, {shape}: give such a tensor, or None"
        )
    if dtype in ("", q.dtype):
        _check_same_kind(view, q)
    else:
        check_beside(view, q)
    _check_layout(view)
    if not view.writable:
        raise ArgumentError(f"{name}: is read-only; give a writable array")
    check_output_distinct(view, inputs)
    return view


def check_device(cfg: KernelConfig, device: DeviceSpec) -> None:
    """Raises ArgumentError when the GPU is too old, and IllegalConfigError when the config does not
    fit the GPU, for example because the kernel needs too much shared memory."""
    if device.arch < OLDEST_ARCH:
        raise ArgumentError(
            f"device: {device.name} has compute capability {_capability(device.arch)}; these "
            f"kernels need {_capability(OLDEST_ARCH)} or newer. Host tensors run in the emulator"
        )
    check_legal(cfg, device)


def _capability(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


def _wrong_rank(view: TensorView, packed: bool) -> ArgumentError:
    rank, layout, hint = 4, LAYOUT, f" without cu_seqlens_q and cu_seqlens_k, {PACKED_LAYOUT} with"
    if packed:
        rank, layout, hint = 3, PACKED_LAYOUT, " with cu_seqlens_q and cu_seqlens_k"
    return ArgumentError(
        f"{view.name}: rank {len(view.shape)} (shape {view.shape}); must be {rank}: {layout}{hint}"
    )


def _check_same_kind(view: TensorView, q: TensorView) -> None:
    check_beside(view, q)
    if view.dtype != q.dtype:
        own, of_q = DTYPES[view.dtype].name, DTYPES[q.dtype].name
        raise ArgumentError(
            f"{view.name}: dtype {own} and q {of_q}; all must have one dtype: convert one"
        )


def _check_d(view: TensorView, q: TensorView) -> None:
    d = view.shape[-1]
    if d != q.shape[-1] and view.name != "v":
        raise ArgumentError(
            f"{view.name}: shape {view.shape}; d_head must be q's (q has shape {q.shape}): "
            f"{unequal_d_advice(view.name, d, q.shape[-1])}"
        )
    if d == 0 or d % D_STEP:
        advice = padding_advice(d) if d else "give tensors with elements"
        raise ArgumentError(
            f"{view.name}: d_head {d} (shape {view.shape}); must be a multiple of {D_STEP}: "
            f"{advice}"
        )


def _check_layout(view: TensorView) -> None:
    """Checks that the last dimension is contiguous and that the address and strides are multiples
    of 16 bytes."""
    if wrong := _wrong_stride(view.shape, view.strides):
        raise ArgumentError(f"{view.name}: {wrong}")
    check_memory(view)
    # No kernel reads or writes an empty tensor, so its address and strides do not matter.
    if view.address % ALIGNMENT_BYTES and 0 not in view.shape:
        raise ArgumentError(
            f"{view.name}: address {view.address:#x} is not a multiple of {ALIGNMENT_BYTES} bytes; "
            "copy it into a tensor of its own"
        )


@lru_cache(maxsize=1024)
def _wrong_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    if 0 in shape:
        return None
    *steps, last = strides
    if last != 1 and shape[-1] > 1:
        return f"stride of the last dimension is {last}; must be 1 (make it contiguous)"
    for axis, stride in enumerate(steps):
        # The stride of a dimension of size 1 is never used, so frameworks may set any value.
        if stride % D_STEP and shape[axis] > 1:
            return (
                f"stride {stride} of dimension {axis} is not a multiple of {D_STEP} elements "
                f"({ALIGNMENT_BYTES} bytes); make it contiguous"
            )
    return None


@lru_cache(maxsize=1024)
def _problem(
    dtype: DType,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    packed: tuple[int, int, int] | None,
    mask: str,
    softcap: bool,
    partial: bool,
    window_keys: int,
    bits: str,
    program: str,
) -> Problem:
    """Returns the problem that three shapes describe. Cached, because a model's many calls have few
    distinct shapes."""
    *q_rows, heads_q, d = q
    *k_rows, heads_k, _ = k
    if v[:-1] != k[:-1]:
        raise ArgumentError(f"v: shape {v}; must be k's, {k}: give a value for every key")
    if heads_q == 0:
        raise ArgumentError(
            f"q: shape {q}; must have at least one head: give a tensor with heads, or skip the call"
        )
    if heads_k == 0 or heads_q % heads_k:
        raise ArgumentError(
            f"k: {heads_k} heads and q {heads_q}; q's must be a multiple of k's (and v's): check "
            "that heads are the second-to-last dimension, or repeat the heads of k and v"
        )
    for name, rows in (("q", q_rows), ("k", k_rows)):
        if max(rows) > LONGEST:
            raise ArgumentError(
                f"{name}: {max(rows)} rows; kernels count up to {LONGEST}: split the tensor"
            )
    if packed is None:
        batch, seq_q = q_rows
        batch_k, seq_k = k_rows
        if batch_k != batch:
            raise ArgumentError(
                f"k: shape {k}; batch must be q's (q has shape {q}): expand the smaller, or give "
                "cu_seqlens_q and cu_seqlens_k for packed sequences"
            )
    else:
        batch, seq_q, seq_k = packed
    uneven = packed is not None or partial or program != ""
    semantics = Semantics(mask, softcap, packed is not None, uneven, partial, program)
    sizes = batch, seq_q, seq_k, heads_q, heads_k, d
    return Problem(*sizes, dtype, semantics, window_keys=window_keys, bits=bits, d_v=v[-1])
