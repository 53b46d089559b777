"""The adapter for PyTorch's tensors, which are on a GPU or the host and are used on PyTorch's
current stream."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.runtime import process_forks
from flashsmith.runtime.frameworks.base import (
    HOST,
    NUMPY_DTYPES,
    Device,
    RepeatableFramework,
    TensorView,
    Workspace,
    contiguous_strides,
    host_workspace,
)
from flashsmith.semantics.cache_format import DTYPES_OF_8BIT

_WITHOUT_NUMPY = ("bfloat16", *DTYPES_OF_8BIT)
# This is twice as fast as a NamedTuple's constructor, and every launch creates several views.
_new_tuple = tuple.__new__


class TorchTensors(RepeatableFramework):
    """Strided tensors that need no gradient, of torch.Tensor or a derived class."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        super().__init__({name: getattr(torch, name) for name in NUMPY_DTYPES})
        self._torch, self.tensor_type = torch, torch.Tensor
        # This function is internal to torch.compile and not a public interface, so it is used only
        # if it exists.
        dynamo = getattr(torch._C, "_dynamo", None)
        self._guards: Any = getattr(dynamo, "guards", None)
        self._strided, self.grad_enabled = torch.strided, torch.is_grad_enabled
        # PyTorch's public function is a wrapper of this one.
        self.fills = getattr(
            torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
        )
        # PyTorch's public function is a wrapper of this one, too.
        self.count_writes = getattr(
            torch._C, "_increment_version", torch.autograd.graph.increment_version
        )
        self._devices: dict[Any, Device] = {}
        self._gpu = cache(partial(torch.device, "cuda"))
        # Getting the raw handle takes a tenth of the time of making a Stream object.
        raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream_of = raw or (lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream)

    @classmethod
    def owns(cls, kind: type) -> bool:
        return any(
            base.__name__ == "Tensor" and base.__module__.partition(".")[0] == "torch"
            for base in kind.__mro__
        )

    def view(self, name: str, tensor: Any) -> TensorView:
        if self._torch._C._is_tracing():
            raise ArgumentError(
                f"{name}: inside torch.jit.trace, which records no kernel of flashsmith; use "
                "torch.compile or torch.export, or flashsmith.sdpa(), which leaves its calls to "
                "PyTorch there"
            )
        if tensor.is_nested:
            raise ArgumentError(
                f"{name}: is a nested tensor; give its values, packed, and its offsets as "
                "cu_seqlens_q and cu_seqlens_k"
            )
        if tensor.layout is not self._strided:
            raise ArgumentError(f"{name}: layout {tensor.layout}; give a strided (dense) tensor")
        if tensor.requires_grad and self.grad_enabled():
            raise ArgumentError(
                f"{name}: requires grad, but gets no gradient from this call; "
                "flashsmith.attention() differentiates q, k, v and sinks; otherwise call under "
                "torch.no_grad(), or detach it"
            )
        device = self._devices.get(tensor.device)
        if device is None:
            device = self._devices[tensor.device] = self.device_of(name, tensor.device)
        is_plain = not tensor.is_neg()
        if not is_plain:
            # The tensor's memory holds the negated values, so a kernel would read and write wrong
            # values.
            tensor = tensor.resolve_neg()
        dtype, address = self.dtype_names.get(tensor.dtype, ""), tensor.data_ptr()
        shape, strides = tuple(tensor.shape), tensor.stride()
        if address == 0 and tensor.numel() and (why := no_memory_of_its_own(type(tensor))):
            raise ArgumentError(f"{name}: {why}")
        return _new_tuple(
            TensorView, (name, self, dtype, shape, strides, address, device, is_plain, tensor)
        )

    def device_of(self, name: str, device: Any) -> Device:
        """Returns the Device of a torch.device. Raises ArgumentError unless it is the host or a
        GPU."""
        kind = device.type
        if kind == "cpu":
            return HOST
        if kind == "cuda":
            return Device(kind, device.index)
        raise ArgumentError(f"{name}: lives on device {device}; allowed are cpu and cuda")

    def allocate(
        self, like: Any, shape: tuple[int, ...], dtype: str | None = None, *, poisoned: bool = False
    ) -> Any:
        torch = self._torch
        own = like.dtype if dtype is None else self.dtypes[dtype]
        if poisoned:
            return torch.full(shape, math.nan, dtype=own, device=like.device)
        if dtype is None and shape == like.shape:
            # This call takes half the time of empty().
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        return torch.empty(shape, dtype=own, device=like.device)

    def address(self, tensor: Any) -> int:
        return int(tensor.data_ptr())

    def as_numpy(self, tensor: Any) -> np.ndarray:
        host = tensor.detach().cpu()
        name = self.dtype_names.get(host.dtype, "")
        if name in _WITHOUT_NUMPY:
            # torch cannot convert these dtypes to NumPy, so their bits are passed as integers.
            integer = self._torch.int16 if host.itemsize == 2 else self._torch.uint8
            bits: np.ndarray = host.view(integer).numpy()
            return bits.view(NUMPY_DTYPES[name])
        array: np.ndarray = host.numpy()
        return array

    def dense_copy(self, tensor: Any) -> Any:
        return tensor.clone(memory_format=self._torch.contiguous_format)

    def note_writes(self, tensors: Sequence[Any]) -> None:
        self.count_writes(tensors)

    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        if device == HOST:
            return host_workspace(nbytes)
        torch, ordinal = self._torch, device.ordinal
        # The allocator reuses memory in the order of the stream that is current at the call. While
        # that stream is capturing, the allocator uses the graph's pool. Blocks are aligned to 512
        # bytes.
        if self.stream_of(ordinal) == stream:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._gpu(ordinal))
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=ordinal)):
                memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        return _new_tuple(Workspace, (memory.data_ptr(), memory))

    def is_deterministic(self) -> bool:
        return bool(self._torch.are_deterministic_algorithms_enabled())

    def longest_steps(self, vectors: Sequence[Any]) -> list[int]:
        torch = self._torch
        steps = [torch.diff(vector) for vector in vectors]
        tops = [step.max() if step.numel() else step.new_zeros(()) for step in steps]
        return [max(0, top) for top in torch.stack(tops).tolist()]

    def current_stream(self, ordinal: int) -> int:
        return int(self.stream_of(ordinal))

    def is_capturing(self, ordinal: int) -> bool:
        with self._torch.cuda.device(ordinal):
            return bool(self._torch.cuda.is_current_stream_capturing())

    def layout_check(self, tensors: tuple[Any, ...]) -> Callable[..., bool]:
        # The tensor guards of torch.compile: one C++ call that takes 0.1 us per tensor.
        guards_of = getattr(self._guards, "TensorGuards", None)
        if guards_of is None:
            return lambda *given: False
        guards = guards_of(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        return check

    def allocator(
        self,
        like: Any,
        shape: tuple[int, ...],
        dtype: str,
        *,
        strides: tuple[int, ...] | None = None,
        filled: bool = False,
    ) -> Callable[[], Any]:
        own, device = self.dtypes[dtype], like.device
        if strides is None:
            strides = contiguous_strides(shape)
        allocate = partial(self._torch.empty_strided, shape, strides, dtype=own, device=device)
        # torch.compile's allocation function takes half the time of empty() and never fills memory.
        directly = getattr(self._guards, f"_empty_strided_{device.type}", None)
        if directly is None or filled:
            return allocate
        if device.type == "cpu" or self._torch.cuda.device_count() == 1:
            return partial(directly, shape, strides, own)
        current = self._torch._C._cuda_getDevice

        # The function ``directly`` can allocate only on the current device.
        def allocate_there() -> Any:
            return directly(shape, strides, own) if current() == device.index else allocate()

        return allocate_there


def no_memory_of_its_own(kind: type) -> str | None:
    """Returns why tensors of this class are refused, if its tensors have no memory of their own;
    None for other classes."""
    if kind.__name__ == "DTensor":
        return (
            "is a DTensor, whose memory is that of its local tensors; call within "
            "torch.distributed.tensor.experimental.local_map, sharded along the batch or the "
            "heads; docs/integrations.md has the call"
        )
    return None


def _cuda_is_initialised() -> bool:
    # This is done only if torch.cuda is already fully imported, because a fork must not import
    # anything.
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    return is_initialized is not None and is_initialized()


process_forks.register_cuda_user(_cuda_is_initialised)
