"""A simulated GPU: host tensors of PyTorch stand for tensors on a GPU, and launches are only
recorded.

Everything before the launch is real: the checks, the choice of a config, the arguments. Afterwards,
the contents of the tensors are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from flashsmith.families import device_spec
from flashsmith.integrations import pytorch_state, sdpa
from flashsmith.operations import operation
from flashsmith.runtime import (
    driver,
    forget_cached_launches,
    forward_pass,
    frameworks,
    kernel_choice,
    libraries,
)
from flashsmith.runtime.frameworks.base import Device, Workspace
from flashsmith.runtime.frameworks.torch import TorchTensors

H200 = device_spec("H200")


@dataclass(frozen=True)
class Launch:
    """A launch: its kernel, prepared arguments, stream, and addresses of tensors (0 if absent)."""

    config: Any
    semantics: Any
    prepared: tuple[Any, ...]
    stream: int
    addresses: tuple[int, ...]


@dataclass
class PretendedGpu:
    """The simulated GPU.

    ``launches`` are those so far; ``stream`` stands for PyTorch's current stream.

    ``launcher`` is called with a stream and addresses, like the launcher of a library; if it is
    None, launches are recorded. ``block_bytes`` is how many bytes of workspaces kernels for the
    backward pass or a KV cache need. With ``only_uneven``, no kernel needs whole tiles.
    """

    launches: list[Launch] = field(default_factory=list)
    stream: int = 0
    launcher: Callable[..., Any] | None = None
    block_bytes: int = 0
    only_uneven: bool = False
    kernels: dict[Any, libraries.LoadedKernel] = field(default_factory=dict)

    def kernel(self, config: Any, arch: int, semantics: Any, may_build: Any) -> Any:
        """Replaces LoadedKernels.get(); every kernel exists."""
        semantics = replace(semantics, uneven=semantics.uneven or self.only_uneven)
        key = config, arch, semantics
        if key not in self.kernels:
            self.kernels[key] = self._load(config, semantics)
        return self.kernels[key]

    def _load(self, config: Any, semantics: Any) -> libraries.LoadedKernel:
        operation_name = config.family.operation
        n_addresses = len(operation(operation_name).tensors)
        block_bytes = self.block_bytes if operation_name in ("backward", "decode") else 0

        def prepare(index: int, *arguments: Any) -> tuple[Callable[..., Any], int]:
            def note(stream: int, *addresses: int) -> None:
                addresses = addresses[:n_addresses]  # Without those of workspaces
                absent = (0,) * (n_addresses - len(addresses))
                self.launches.append(
                    Launch(config, semantics, arguments, stream, (*addresses, *absent))
                )

            return self.launcher or note, block_bytes

        library: Any = SimpleNamespace(
            manifest=SimpleNamespace(semantics=semantics, nvcc_version="13.0.88"),
            entry=lambda config: SimpleNamespace(beside=()),
        )
        functions: Any = SimpleNamespace(prepare=prepare)
        return libraries.LoadedKernel(config, library, 0, functions)


class PretendedTensors(TorchTensors):
    """Treats host tensors of PyTorch as tensors of GPU 0."""

    def __init__(self, pretended: PretendedGpu) -> None:
        super().__init__()
        self.stream_of = lambda ordinal: pretended.stream

    def device_of(self, name: str, device: Any) -> Device:
        return Device("cuda", 0)

    def is_capturing(self, ordinal: int) -> bool:
        return False

    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        # PyTorch allocates the memory, as on a GPU.
        memory = self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu")
        return Workspace(memory.data_ptr(), memory)


@contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """In the block, host tensors count as tensors of GPU 0, which is an H200."""
    pretended = PretendedGpu()
    replaced = {
        **{(where, "is_on_host"): lambda device: False for where in (pytorch_state, sdpa)},
        (pytorch_state, "query_gpu"): lambda ordinal: H200,
        (driver, "query_gpu"): lambda ordinal: H200,
        # The object is replaced, not the method of its class: an attribute of the object would hide
        # the method, and a real GPU would get host addresses.
        (forward_pass, "loaded_kernels"): SimpleNamespace(get=pretended.kernel),
        (kernel_choice, "loaded_kernels"): SimpleNamespace(get=pretended.kernel),
    }
    with ExitStack() as stack:
        for (where, name), pretence in replaced.items():
            stack.enter_context(mock.patch.object(where, name, pretence))
        # The adapters for types of tensors are cached; these must not be used outside the block.
        adapters = {TorchTensors: PretendedTensors(pretended)}
        stack.enter_context(mock.patch.dict(frameworks._adapters, adapters))
        stack.enter_context(mock.patch.dict(frameworks._by_type, clear=True))
        forget_cached_launches()
        try:
            yield pretended
        finally:
            forget_cached_launches()
