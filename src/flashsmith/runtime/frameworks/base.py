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
    # Hub kernels may not require ml_dtypes. Only NumPy and JAX arrays have elements of ml_dtypes'
    # types.
    _BFLOAT16 = np.dtype("V2")
    # No two names may share a dtype.
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
    """The properties of any framework's tensor; strides are in elements.

    ``dtype`` is a name in NUMPY_DTYPES, or '' for any other dtype.
    """

    name: str  # the name of the argument that the tensor was passed as
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

    The memory is freed in stream order, so the Workspace may be dropped as soon as all work that
    uses it is enqueued on its stream.
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
        """Whether ``kind`` is a tensor type of this framework. Imports nothing."""

    @classmethod
    def refusal(cls, kind: type) -> str | None:
        """Returns why objects of type ``kind`` are refused, if they belong to this framework but
        are not tensors; None for all other types."""
        return None

    @abstractmethod
    def view(self, name: str, tensor: Any) -> TensorView:
        """Returns the view of argument ``name``, of any dtype; copies nothing.

        Raises ArgumentError when no kernel could use the tensor.
        """

    @abstractmethod
    def allocate(
        self, like: Any, shape: tuple[int, ...], dtype: str | None = None, *, poisoned: bool = False
    ) -> Any:
        """Returns a new dense tensor on the device of ``like``, with the dtype of ``like`` unless
        ``dtype`` is given.

        It is uninitialised, or filled with NaN when ``poisoned``, which exposes elements that a
        kernel does not write.
        """

    @abstractmethod
    def address(self, tensor: Any) -> int:
        """Returns the address of an allocated tensor's first element."""

    @abstractmethod
    def as_numpy(self, tensor: Any) -> np.ndarray:
        """Returns a NumPy array: a host tensor's own memory, not copied, or a host copy of a GPU
        tensor."""

    @abstractmethod
    def dense_copy(self, tensor: Any) -> Any:
        """Returns a row-major copy of a tensor, aligned for kernels."""

    @abstractmethod
    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        """Allocates ``nbytes`` (at least 1) for the work enqueued next on ``stream``. During
        capture the memory is part of the graph.

        Raises LaunchError, or the framework's own error, when there is not enough memory.
        """

    def note_writes(self, tensors: Sequence[Any]) -> None:
        """Notes in the framework that a kernel changes the contents of the caller's tensors."""
        return None

    def is_deterministic(self) -> bool:
        """Whether the user has set the framework to require deterministic results."""
        return False

    def longest_steps(self, vectors: Sequence[Any]) -> list[int]:
        """Returns, for each vector, the largest increase from one element to the next; 0 if it has
        fewer than two elements. All vectors must be on the same GPU. Waits for that GPU, if
        possible once for all vectors."""
        steps = (np.diff(self.as_numpy(vector).astype(np.int64)) for vector in vectors)
        return [max(0, int(step.max(initial=0))) for step in steps]

    def current_stream(self, ordinal: int) -> int:
        """Returns the framework's current stream on GPU ``ordinal``. Each call queries that GPU's
        stream, whichever device is current."""
        return 0

    def is_capturing(self, ordinal: int) -> bool:
        """Whether the current stream is capturing a CUDA graph. During capture nothing may wait for
        the device or take seconds."""
        return False

    def finish(self, ordinal: int) -> None:
        """Waits until the launched work has finished, unless the framework orders its next work
        after it anyway."""
        return None


class RepeatableFramework(Framework):
    """A framework whose launches can be cached (cached_calls.py), because reading a tensor's
    data_ptr(), stride(), is_neg(), dtype, shape, device and requires_grad takes almost no time.

    is_neg() returns whether memory holds the negated values.
    """

    # Only tensors of exactly this type, because a derived class may behave differently.
    tensor_type: type[Any]
    # A function equivalent to ``current_stream``, possibly faster.
    stream_of: Callable[[int], int]
    # Returns whether autograd records operations on tensors that require grad.
    grad_enabled: Callable[[], bool]
    # Returns whether the framework's settings may require that new memory is filled.
    fills: Callable[[], bool]
    # A function equivalent to ``note_writes``, possibly faster.
    count_writes: Callable[[Sequence[Any]], Any]

    @abstractmethod
    def layout_check(self, tensors: tuple[Any, ...]) -> Callable[..., bool]:
        """Returns a function that takes the same number of tensors and returns whether they have
        the types, dtypes, devices, shapes, strides and requires_grad of ``tensors``.

        The function also returns False if the same tensor is given twice. If the framework has no
        fast check, it always returns False.
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
        """Returns a function that allocates dense tensors on the device of ``like``, without a
        reference to ``like``. ``strides`` are in elements; without them the tensors are contiguous.
        If ``filled``, new memory is filled whenever the framework's settings require it."""


class HostMemory:
    """A NumPy array over an address range; ``owner`` keeps the memory alive."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        itemsize: int,
        strides_bytes: tuple[int, ...] | None = None,
        owner: Any = None,
    ) -> None:
        """If no strides are given, the array is dense."""
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{itemsize}",
            "shape": shape,
            "strides": strides_bytes,
            "data": (address, False),
        }


def host_workspace(nbytes: int) -> Workspace:
    """Returns a workspace on the host, aligned by this function because host allocators do not
    guarantee the alignment."""
    memory = np.empty(nbytes + WORKSPACE_ALIGNMENT - 1, np.uint8)
    first: int = memory.__array_interface__["data"][0]
    return Workspace(first + -first % WORKSPACE_ALIGNMENT, memory)


def in_elements(
    name: str, framework: str, strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Converts strides from bytes to elements. Raises ArgumentError if a stride is not a whole
    number of elements."""
    if any(stride % itemsize for stride in strides):
        raise ArgumentError(
            f"{name}: strides of {strides} bytes are not whole elements of {itemsize} bytes; "
            f"copy it with {framework}.ascontiguousarray"
        )
    return tuple(stride // itemsize for stride in strides)


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the row-major strides of ``shape``, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
