"""Framework: the interface to tensor libraries, with one adapter per library.

An adapter is created only when the caller holds a tensor of its framework, so it may import that
framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.semantics.cache_format import DTYPES_OF_8BIT

try:
    import ml_dtypes

    _BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
    _FP8 = {name: np.dtype(getattr(ml_dtypes, name)) for name in DTYPES_OF_8BIT}
except ImportError:
    # Kernels of the hub may not require it. Only arrays of NumPy and JAX have elements of its type.
    _BFLOAT16 = np.dtype("V2")
    # Each name needs a dtype of its own.
    _FP8 = {name: np.dtype([(name, "u1")]) for name in DTYPES_OF_8BIT}

# Alignment of a workspace in bytes; every GPU allocator provides it.
WORKSPACE_ALIGNMENT = 256

# The names of element types in NumPy, CuPy, JAX and flashsmith's own arrays.
NUMPY_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": _BFLOAT16,
    "float32": np.dtype(np.float32),
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    **_FP8,
}


class Device(NamedTuple):
    """Where a tensor lives: kind 'cpu' or 'cuda', and the GPU's ordinal (0 on the host)."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.ordinal}"


HOST = Device("cpu", 0)


class TensorView(NamedTuple):
    """The properties of a tensor of any framework. Strides count elements.

    ``dtype`` is a name in NUMPY_DTYPES, or '' for any other dtype.
    """

    name: str  # the argument's
    framework: Framework
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: Device
    writable: bool
    source: Any

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return NUMPY_DTYPES[self.dtype].itemsize


class Workspace(NamedTuple):
    """Uninitialised memory at ``address``, a multiple of WORKSPACE_ALIGNMENT, that lives as long as
    ``owner``.

    The memory is freed in stream order, so drop the Workspace as soon as all uses are enqueued on
    its stream.
    """

    address: int
    owner: Any


class Framework(ABC):
    """One framework's tensors. Streams are passed as CUDA handles."""

    name: ClassVar[str]

    def __init__(self, dtypes: Mapping[str, Any] = NUMPY_DTYPES) -> None:
        """``dtypes`` maps the names in NUMPY_DTYPES to the framework's dtypes."""
        self.dtypes = dict(dtypes)
        self.dtype_names = {dtype: name for name, dtype in dtypes.items()}

    @classmethod
    @abstractmethod
    def owns(cls, kind: type) -> bool:
        """Whether objects of type ``kind`` are this framework's tensors. Imports nothing."""

    @classmethod
    def refusal(cls, kind: type) -> str | None:
        """Why objects of type ``kind`` are refused if they belong to this framework but are not
        tensors; None for any other type."""
        return None

    @abstractmethod
    def view(self, name: str, tensor: Any) -> TensorView:
        """The view of argument ``name``, of any dtype; copies nothing.

        Raises ArgumentError when no kernel could work on it.
        """

    @abstractmethod
    def allocate(
        self, like: Any, shape: tuple[int, ...], dtype: str | None = None, *, poisoned: bool = False
    ) -> Any:
        """A new dense tensor on the device of ``like``, of its dtype unless another is named.

        It is uninitialised, or filled with NaN when ``poisoned``, which exposes elements that a
        kernel does not write.
        """

    @abstractmethod
    def address(self, tensor: Any) -> int:
        """The address of an allocated tensor's first element."""

    @abstractmethod
    def as_numpy(self, tensor: Any) -> np.ndarray:
        """A host tensor's own memory without a copy, or a host copy of a GPU tensor."""

    @abstractmethod
    def dense_copy(self, tensor: Any) -> Any:
        """A row-major copy of a tensor, aligned for kernels."""

    @abstractmethod
    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        """Allocates ``nbytes`` (at least 1) for the work enqueued next on ``stream``. During
        capture the memory is part of the graph.

        Raises LaunchError, or the framework's own error, when there is not enough memory.
        """

    def is_deterministic(self) -> bool:
        """Whether the program requires deterministic results from the framework."""
        return False

    def longest_steps(self, vectors: Sequence[Any]) -> list[int]:
        """The largest increase between neighbours in each vector, 0 without neighbours. All vectors
        must be on one GPU. The call waits for that GPU, only once if the framework allows that."""
        steps = (np.diff(self.as_numpy(vector).astype(np.int64)) for vector in vectors)
        return [max(0, int(step.max(initial=0))) for step in steps]

    def current_stream(self, ordinal: int) -> int:
        """The framework's current stream on GPU ``ordinal``. Every call queries it, so the current
        device does not matter."""
        return 0

    def is_capturing(self, ordinal: int) -> bool:
        """Whether that stream is capturing a CUDA graph. Meanwhile nothing may wait for the device
        or take seconds."""
        return False

    def finish(self, ordinal: int) -> None:
        """Waits for the launch, unless the framework orders its next work after the launch."""
        return None


class RepeatableFramework(Framework):
    """A framework whose launches can be cached (cached_calls.py), because reading a tensor's
    data_ptr(), stride(), is_neg(), dtype, shape, device and requires_grad takes almost no time.

    is_neg() returns whether memory holds the negated values."""

    # Exactly this type: a derived class may behave differently.
    tensor_type: type[Any]
    # ``current_stream``, or a faster equivalent.
    stream_of: Callable[[int], int]
    # Whether autograd records operations on tensors that require grad.
    grad_enabled: Callable[[], bool]
    # Whether the framework may fill the memory that it allocates.
    fills: Callable[[], bool]

    @abstractmethod
    def layout_check(self, tensors: tuple[Any, ...]) -> Callable[..., bool]:
        """A function that takes the same number of tensors and returns whether they have the types,
        dtypes, devices, shapes, strides and requires_grad of ``tensors``.

        It also returns False if a tensor is given twice, and always returns False if the framework
        has no such check.
        """

    @abstractmethod
    def allocator(
        self,
        like: Any,
        shape: tuple[int, ...],
        dtype: str,
        *,
        strides: tuple[int, ...] | None = None,
        filled: bool = False,
    ) -> Callable[[], Any]:
        """A function that makes dense tensors on the device of ``like``; it keeps no reference to
        ``like``. Without ``strides``, in elements, they are contiguous. With ``filled``, new memory
        is filled if the framework's settings require it."""


class HostMemory:
    """Exposes an address range to NumPy as an array; ``owner`` keeps the memory alive."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        itemsize: int,
        strides_bytes: tuple[int, ...] | None = None,
        owner: Any = None,
    ) -> None:
        """Without strides the array is dense."""
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{itemsize}",
            "shape": shape,
            "strides": strides_bytes,
            "data": (address, False),
        }


def host_workspace(nbytes: int) -> Workspace:
    """A workspace on the host, aligned here because host allocators do not guarantee it."""
    memory = np.empty(nbytes + WORKSPACE_ALIGNMENT - 1, np.uint8)
    first: int = memory.__array_interface__["data"][0]
    return Workspace(first + -first % WORKSPACE_ALIGNMENT, memory)


def in_elements(
    name: str, framework: str, strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Converts strides from bytes to elements. Raises ArgumentError for fractions of an element."""
    if any(stride % itemsize for stride in strides):
        raise ArgumentError(
            f"{name}: strides of {strides} bytes are not whole elements of {itemsize} bytes; "
            f"copy it with {framework}.ascontiguousarray"
        )
    return tuple(stride // itemsize for stride in strides)


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
