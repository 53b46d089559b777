"""Detects the modes of PyTorch, and the devices, for which every call falls back to PyTorch.

sdpa() and the transformers integration share these checks. attention() has no fallback, because
its callers choose flashsmith explicitly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad

from flashsmith import env
from flashsmith.errors import ArgumentError
from flashsmith.families.warpgroups import HOPPER_ARCH
from flashsmith.integrations.fallbacks import Reason
from flashsmith.integrations.layer_kernels import unserved_head
from flashsmith.integrations.sdpa_problem import MAX_D, MAX_D_OF_ALL_GPUS
from flashsmith.printable import quoted
from flashsmith.runtime import query_gpu
from flashsmith.runtime.arguments import OLDEST_ARCH
from flashsmith.runtime.frameworks.torch import no_memory_of_its_own

# For this architecture and later ones there is no measured table of winners, and their kernels use
# only Ampere instructions.
FIRST_UNTUNED_ARCH = 100

_TRANSFORM = Reason(
    "query",
    "inside a transform of torch.func (vmap, jvp, a second grad, ...); the kernels take plain "
    "tensors, and grad alone",
)
_JIT = Reason("query", "traced by torch.jit.trace, which would not record a kernel of flashsmith")
_ONNX = Reason("query", "exported by torch.onnx.export, which cannot export flashsmith's kernels")
_FORWARD_AD = Reason("query", "forward-mode differentiation; the kernels compute no tangents")
_SWITCHED_OFF = Reason(
    "sdpa_kernel",
    "PyTorch's flash attention is switched off, by this or by enable_flash_sdp, which also "
    "switches off flashsmith's",
)
_ON_THE_HOST = Reason(
    "query",
    "on the host, where kernels run in an emulator, many times slower than PyTorch; to use it, "
    "pass emulate=True or set the variable FLASHSMITH_EMULATE=1",
)

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32)
# The device types on which the kernels or the emulator run; both have autocast.
_WITH_AUTOCAST = ("cpu", "cuda")

_F = TypeVar("_F", bound=Callable[..., Any])


def assume_constant_result(function: _F) -> _F:
    """Does the same as torch.compiler.assume_constant_result, which imports torch._dynamo and so
    takes a second. Tracers record the function's result as a constant."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_any_autocast = torch._C._is_any_autocast_enabled


def is_direct() -> bool:
    """Whether run_repeated may serve a call: PyTorch neither traces nor intercepts operations, and
    autocast is off."""
    return not (
        _is_compiling()
        or _dispatch_modes()
        or _transforms()
        or forward_ad._current_level >= 0
        or _any_autocast()
    )


# Tracers cannot trace a read of the environment.
_emulation_enabled = assume_constant_result(env.emulation_enabled)


def _autocast_dtype(device: str) -> Any:
    """Returns the dtype to which autocast casts tensors on this device type; None if autocast is
    not enabled."""
    # PyTorch raises an error for device types without autocast, such as meta.
    if device not in _WITH_AUTOCAST or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def check_emulate(emulate: Any) -> bool | None:
    """Raises ArgumentError unless ``emulate`` is True, False or None."""
    if emulate is None or emulate is True or emulate is False:
        return emulate
    raise ArgumentError(
        f"emulate={quoted(emulate)}: allowed are True, False and None, which reads "
        "FLASHSMITH_EMULATE"
    )


def under_autocast(*tensors: Any) -> tuple[Any, ...]:
    """If autocast is enabled, casts the tensors as autocast casts the inputs of PyTorch's
    attention.

    Arguments that are not tensors, and tensors on another device type, are returned unchanged.
    """
    if not isinstance(tensors[0], torch.Tensor):
        return tensors
    device = tensors[0].device.type
    dtype = _autocast_dtype(device)
    if dtype is None:
        return tensors
    return tuple(
        it.to(dtype)
        if isinstance(it, torch.Tensor) and it.dtype in _CASTABLE and it.device.type == device
        else it
        for it in tensors
    )


def under_autocast_over(k_cache: Any, *tensors: Any) -> tuple[Any, ...]:
    """If autocast is enabled, casts the tensors to the dtype of the KV cache with which they are
    used.

    Tensors that already have the cache's dtype are returned unchanged, for any dtype of autocast,
    unless the cache is float32.

    Raises:
        ArgumentError: autocast is enabled and casts to another dtype than the cache's.
    """
    own = getattr(k_cache, "dtype", None)
    if own is not torch.float32 and all(it is None or it.dtype is own for it in tensors):
        return tensors
    if isinstance(k_cache, torch.Tensor) and is_cast(k_cache) and any(map(is_cast, tensors)):
        dtype = torch.get_autocast_dtype(k_cache.device.type)
        raise ArgumentError(
            f"k_cache: dtype {own}, and autocast casts q, k and v to {dtype}; a cache is read in "
            f"place and never cast: keep k_cache and v_cache in {dtype}"
        )
    return under_autocast(*tensors)


def is_cast(tensor: Any) -> bool:
    """Whether autocast would change the dtype of an argument; False if it is not a tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _CASTABLE:
        return False
    dtype = _autocast_dtype(tensor.device.type)
    return dtype is not None and tensor.dtype is not dtype


def why_not_now(tracing: bool) -> Reason | None:
    """Returns why the kernels cannot run in PyTorch's current state, or None if they can.

    ``tracing``: the result of is_tracing(). Callers check this before they read any tensor:
    transform() explains why.
    """
    reason = transform(tracing)
    if reason is None and not torch._C._get_flash_sdp_enabled():
        return _SWITCHED_OFF
    return reason


def transform(tracing: bool) -> Reason | None:
    """Returns why the kernels cannot run in PyTorch's current mode; None if they can.

    In some modes, tensors have no storage, or their sizes are not concrete integers.
    """
    if torch._C._are_functorch_transforms_active() and (tracing or not _is_one_grad()):
        return _TRANSFORM
    if tracing:
        return _ONNX if is_exporting_to_onnx() else None
    if torch._C._is_tracing():
        return _JIT
    return _FORWARD_AD if forward_ad._current_level >= 0 else None


@assume_constant_result
def is_exporting_to_onnx() -> bool:
    """Whether the caller runs within torch.onnx.export.

    Tracers let Python run this function, because one of PyTorch's tracers would replace the call to
    is_in_onnx_export() by a constant.
    """
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and bool(onnx.is_in_onnx_export())


def check_for_an_op(**tensors: Any) -> None:
    """Raises ArgumentError if a tracer cannot record flashsmith's ops for one of the tensors; the
    error names that tensor."""
    for name, tensor in tensors.items():
        if (why := no_memory_of_its_own(type(tensor))) is not None:
            raise ArgumentError(f"{name}: {why}")
    if is_exporting_to_onnx():
        raise ArgumentError(
            f"{next(iter(tensors))}: {_ONNX.facts}; flashsmith.sdpa() leaves its calls to PyTorch "
            "there"
        )


def as_limit(length: Any) -> Any:
    """Converts max_seqlen to an op's argument: a number is returned unchanged, a tensor or an array
    becomes None.

    The value of a tensor is not known while tracing, so the op itself computes the longest length.
    That synchronizes with the GPU, as reading the tensor would.
    """
    return None if isinstance(length, torch.Tensor | np.ndarray | np.generic) else length


def _is_one_grad() -> bool:
    """Whether a single torch.func.grad or vjp is the only active transform."""
    levels = torch._C._functorch.get_interpreter_stack()
    return [level.key() for level in levels] == [torch._C._functorch.TransformType.Grad]


def without_transforms(tensor: Any) -> Any:
    """Returns the tensor without the wrappers that torch.func's transforms put around it; a plain
    tensor is returned unchanged."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_on_host(device: Any) -> bool:
    """Whether kernels for a torch.device ('cpu' or 'cuda') run in the emulator."""
    return bool(device.type == "cpu")


def reads_environment(device: Any) -> bool:
    """Whether the result of why_not_on() depends on the environment, which may change between
    calls."""
    return is_on_host(device) or query_gpu(device.index).arch >= FIRST_UNTUNED_ARCH


def why_not_on(
    device: Any, emulate: bool | None, d: int, *, with_gradients: bool, over_cache: bool = False
) -> Reason | None:
    """Returns why calls of head dimension ``d`` on a torch.device ('cpu' or 'cuda') are left to
    PyTorch; None if the kernels compute them.

    ``over_cache``: whether attention_with_cache() serves these calls.
    """
    is_wide = d > MAX_D_OF_ALL_GPUS
    if is_wide and with_gradients and torch.are_deterministic_algorithms_enabled():
        said = f"d {d} under torch.use_deterministic_algorithms; the kernels' dq of d above "
        return Reason("query", f"{said}{MAX_D_OF_ALL_GPUS} is not bitwise repeatable")
    if is_on_host(device):
        runs = _emulation_enabled() if emulate is None else emulate
        return None if runs else _ON_THE_HOST
    # Tracers evaluate these functions: d may be symbolic, and cannot be an argument.
    facts = _why_not_wide_on_gpu(device.index, over_cache) if is_wide else None
    facts = facts or _why_not_on_gpu(device.index)
    return None if facts is None else Reason("query", facts)


def needs_gradients(*tensors: Any) -> bool:
    """Whether autograd will compute a gradient for any of the arguments. Arguments that are None
    are ignored."""
    return torch.is_grad_enabled() and any(it is not None and it.requires_grad for it in tensors)


@assume_constant_result
def _why_not_wide_on_gpu(ordinal: int, over_cache: bool) -> str | None:
    try:
        device = query_gpu(ordinal)
    except ArgumentError:
        return None  # this machine has no such GPU: the program is exported for another
    if device.arch == HOPPER_ARCH or (over_cache and not unserved_head(MAX_D, device)):
        return None
    where = f"on cuda:{ordinal}, an sm_{device.arch}"
    if over_cache:
        return f"{where} whose shared memory is too small for d above {MAX_D_OF_ALL_GPUS}"
    return f"{where}; kernels of d above {MAX_D_OF_ALL_GPUS} need sm_{HOPPER_ARCH}"


@assume_constant_result
def _why_not_on_gpu(ordinal: int) -> str | None:
    try:
        arch = query_gpu(ordinal).arch
    except ArgumentError:
        return None  # this machine has no such GPU: the program is exported for another
    where = f"on cuda:{ordinal}, an sm_{arch}"
    if OLDEST_ARCH <= arch < FIRST_UNTUNED_ARCH:
        return None
    if arch < OLDEST_ARCH:
        return f"{where}; the kernels need sm_{OLDEST_ARCH}"
    if env.untuned_enabled():
        return None
    return (
        f"{where}; nothing was measured on sm_{FIRST_UNTUNED_ARCH} and later, and the kernels use "
        "Ampere's instructions there; to use them, set the variable FLASHSMITH_UNTUNED=1"
    )
