"""A GPU that is not there: PyTorch's host tensors pass for its own, and launches are only noted.

Everything up to the launch is the real thing: the checks, the choice of a config, the arguments.
The contents of the tensors afterwards are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from flashsmith.families import device_spec
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
    """One launch: of which kernel, prepared with what, and where its tensors are (0: absent)."""

    config: Any
    semantics: Any
    prepared: tuple[Any, ...]
    stream: int
    addresses: tuple[int, ...]


@dataclass
class PretendedGpu:
    """``launches`` so far; ``stream`` is PyTorch's current one.

    ``launcher`` is called with a stream and addresses, as a library's own; None notes the launch.
    ``block_bytes`` is the size of the workspaces that kernels of the backward pass, and those over
    a KV cache, need.
    With ``only_uneven`` no kernel is for whole tiles alone.
    """

    launches: list[Launch] = field(default_factory=list)
    stream: int = 0
    launcher: Callable[..., Any] | None = None
    block_bytes: int = 0
    only_uneven: bool = False
    kernels: dict[Any, libraries.LoadedKernel] = field(default_factory=dict)

    def kernel(self, config: Any, arch: int, semantics: Any, may_build: Any) -> Any:
        """In the place of LoadedKernels.get: there is every kernel."""
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
                addresses = addresses[:n_addresses]  # without the workspaces'
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
    """PyTorch's host tensors as those of GPU 0."""

    def __init__(self, pretended: PretendedGpu) -> None:
        super().__init__()
        self.stream_of = lambda ordinal: pretended.stream

    def device_of(self, name: str, device: Any) -> Device:
        return Device("cuda", 0)

    def is_capturing(self, ordinal: int) -> bool:
        return False

    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        # PyTorch's, as on a GPU.
        memory = self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu")
        return Workspace(memory.data_ptr(), memory)


@contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """Host tensors live on GPU 0, an H200, until the end of the block."""
    pretended = PretendedGpu()
    replaced = {
        (driver, "query_gpu"): lambda ordinal: H200,
        # Not its class's method: an attribute of the object itself would hide that, and a real GPU
        # would be given the host's addresses.
        (forward_pass, "loaded_kernels"): SimpleNamespace(get=pretended.kernel),
        (kernel_choice, "loaded_kernels"): SimpleNamespace(get=pretended.kernel),
    }
    with ExitStack() as stack:
        for (where, name), pretence in replaced.items():
            stack.enter_context(mock.patch.object(where, name, pretence))
        # Whose tensors are whose, learnt before or while pretending, is not to be kept.
        adapters = {TorchTensors: PretendedTensors(pretended)}
        stack.enter_context(mock.patch.dict(frameworks._adapters, adapters))
        stack.enter_context(mock.patch.dict(frameworks._by_type, clear=True))
        forget_cached_launches()
        try:
            yield pretended
        finally:
            forget_cached_launches()
