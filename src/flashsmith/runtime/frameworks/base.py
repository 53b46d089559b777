"""Framework: the interface to the libraries that make tensors, with one adapter for each of them.

An adapter exists only once the caller holds a tensor of its framework, so that it may import that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from flashsmith.errors import ArgumentError

# Alignment of a workspace, bytes; every allocator on a GPU provides it.
WORKSPACE_ALIGNMENT = 256

# The names of element types in NumPy, CuPy, JAX and flashsmith's own arrays.
NUMPY_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
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

    ``dtype`` is a name in NUMPY_DTYPES, or empty for any other.
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
    """Uninitialised memory at ``address``, a multiple of WORKSPACE_ALIGNMENT, as long as ``owner``
    lives.

    It is freed in the order of its stream: drop it as soon as all its uses are enqueued there.
    """

    address: int
    owner: Any


class Framework(ABC):
    """One framework's tensors. Streams are passed as CUDA handles."""

    name: ClassVar[str]

    def __init__(self, dtypes: Mapping[str, Any] = NUMPY_DTYPES) -> None:
        """``dtypes`` are the framework's own, by the names in NUMPY_DTYPES."""
        self.dtypes = dict(dtypes)
        self.dtype_names = {dtype: name for name, dtype in dtypes.items()}

    @classmethod
    @abstractmethod
    def owns(cls, kind: type) -> bool:
        """Whether objects of type ``kind`` are this framework's tensors. Imports nothing."""

    @classmethod
    def refusal(cls, kind: type) -> str | None:
        """Why objects of type ``kind`` cannot be taken, if they are this framework's, yet no
        tensors."""
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
        """A dense tensor beside ``like``, of its dtype unless another is named.

        Uninitialised, or NaN throughout when ``poisoned``, so that elements a kernel does not write
        show.
        """

    @abstractmethod
    def address(self, tensor: Any) -> int:
        """The address of an allocated tensor's first element."""

    @abstractmethod
    def as_numpy(self, tensor: Any) -> np.ndarray:
        """A host tensor's own memory, nothing copied; a GPU's tensor copied to the host."""

    @abstractmethod
    def dense_copy(self, tensor: Any) -> Any:
        """A row-major copy of a tensor, aligned for kernels."""

    @abstractmethod
    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        """At least one byte for what is enqueued on ``stream`` next; during capture, part of the
        graph.

        Raises LaunchError, or the framework's own error, when there is not enough memory.
        """

    def is_deterministic(self) -> bool:
        """Whether the program asked the framework for results with the same bits in every run."""
        return False

    def longest_steps(self, vectors: Sequence[Any]) -> list[int]:
        """The largest step up in each vector on one GPU, 0 where there is none. Waits for the GPU,
        once if it can."""
        steps = (np.diff(self.as_numpy(vector).astype(np.int64)) for vector in vectors)
        return [max(0, int(step.max(initial=0))) for step in steps]

    def current_stream(self, ordinal: int) -> int:
        """The framework's current stream on GPU ``ordinal``. Queried by every call, so that the
        current device does not matter."""
        return 0

    def is_capturing(self, ordinal: int) -> bool:
        """Whether that stream captures a CUDA graph: then nothing may wait for the device, or take
        seconds."""
        return False

    def finish(self, ordinal: int) -> None:
        """Waits for the launch, where the framework would not order its next work behind it."""
        return None


class RepeatableFramework(Framework):
    """A framework whose launches can be cached (cached_calls.py): reading a tensor's data_ptr(),
    stride(), is_neg(), dtype, shape, device and requires_grad takes next to no time.

    is_neg() says whether the values are those in memory with the other sign."""

    # Exactly this type: a derived class may behave differently.
    tensor_type: type[Any]
    # ``current_stream``, or a faster equivalent.
    stream_of: Callable[[int], int]
    # Whether operations on tensors that require grad are to be followed.
    grad_enabled: Callable[[], bool]
    # Whether the framework may fill what it allocates.
    fills: Callable[[], bool]

    @abstractmethod
    def layout_check(self, tensors: tuple[Any, ...]) -> Callable[..., bool]:
        """A function of as many tensors that says whether they have the types, dtypes, devices,
        shapes, strides and requires_grad of these.

        False also for tensors of which one is given twice, and always where the framework has no
        such function.
        """

    @abstractmethod
    def allocator(
        self, like: Any, shape: tuple[int, ...], dtype: str, *, filled: bool = False
    ) -> Callable[[], Any]:
        """A function that makes dense tensors beside ``like``, which it does not keep alive;
        ``filled`` as the framework fills its own."""


class HostMemory:
    """An address range as an array for NumPy; ``owner`` keeps the memory alive."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        itemsize: int,
        strides_bytes: tuple[int, ...] | None = None,
        owner: Any = None,
    ) -> None:
        """Without strides it is dense."""
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{itemsize}",
            "shape": shape,
            "strides": strides_bytes,
            "data": (address, False),
        }


def host_workspace(nbytes: int) -> Workspace:
    """A workspace on the host, where no allocator promises the alignment."""
    memory = np.empty(nbytes + WORKSPACE_ALIGNMENT - 1, np.uint8)
    first: int = memory.__array_interface__["data"][0]
    return Workspace(first + -first % WORKSPACE_ALIGNMENT, memory)


def in_elements(
    name: str, framework: str, strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Strides in bytes as strides in elements. Raises ArgumentError unless they are whole ones."""
    if any(stride % itemsize for stride in strides):
        raise ArgumentError(
            f"{name}: strides of {strides} bytes are no whole elements of {itemsize} bytes; "
            f"copy it with {framework}.ascontiguousarray"
        )
    return tuple(stride // itemsize for stride in strides)


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
