"""The adapters: whose tensors are whose, and workspaces in the order of the call's stream.

CuPy, JAX and the GPU are stood in for; the tests marked gpu ask the real ones.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pretended_driver import PretendedDriver, pretended_driver

from flashsmith.errors import LaunchError
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks import FRAMEWORKS, framework_of
from flashsmith.runtime.frameworks.base import (
    HOST,
    NUMPY_DTYPES,
    WORKSPACE_ALIGNMENT,
    Device,
    Framework,
)
from flashsmith.runtime.frameworks.cupy import CupyArrays
from flashsmith.runtime.frameworks.device_array import DeviceArray, DeviceArrays
from flashsmith.runtime.frameworks.jax import JaxArrays
from flashsmith.runtime.frameworks.numpy import NumpyArrays
from flashsmith.runtime.frameworks.torch import TorchTensors

GPU_1 = Device("cuda", 1)


def kind_of(module: str, name: str, *bases: type) -> type:
    """A class as a framework that is not installed has it."""
    return type(name, bases, {"__module__": module})


KINDS = {
    "numpy": [np.ndarray, kind_of("users", "Matrix", np.ndarray)],
    "flashsmith": [DeviceArray],
    "torch": [
        kind_of("torch", "Tensor"),
        kind_of("users", "Weight", kind_of("torch", "Tensor")),
    ],
    "cupy": [kind_of("cupy", "ndarray"), kind_of("cupy._core.core", "ndarray")],
    "jax": [kind_of("jaxlib._jax", "ArrayImpl"), kind_of("jax._src.array", "ArrayImpl")],
}


@pytest.mark.parametrize("name", KINDS)
def test_a_type_is_of_one_framework(name: str) -> None:
    for kind in KINDS[name]:
        assert [framework.name for framework in FRAMEWORKS if framework.owns(kind)] == [name]


@pytest.mark.parametrize(
    "kind",
    [
        object,
        list,
        np.float16,
        kind_of("users", "Tensor"),
        kind_of("torch", "Generator"),
        kind_of("cupy", "Event"),
        kind_of("users", "ArrayImpl"),
        kind_of("jax._src.core", "Tracer"),
    ],
)
def test_other_types_are_of_none(kind: type) -> None:
    assert framework_of(kind) is None


def test_no_framework_is_imported_that_the_caller_has_no_tensor_of() -> None:
    code = (
        "import sys, numpy; from flashsmith.runtime.frameworks import framework_of\n"
        "assert framework_of(numpy.ndarray).name == 'numpy'\n"
        "assert framework_of(dict) is None\n"
        "assert not {'torch', 'cupy', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_framework_has_one_adapter() -> None:
    derived = kind_of("users", "Matrix", np.ndarray)
    assert framework_of(derived) is framework_of(np.ndarray)


def fill(address: int, nbytes: int, value: int) -> None:
    ctypes.memset(address, value, nbytes)


def check_blocks(adapter: Framework, device: Device, stream: int) -> None:
    """Blocks that are used at once are aligned, and each has its own bytes."""
    sizes = (1, 100, 4096, 70_000)
    blocks = [adapter.workspace(size, device, stream) for size in sizes]
    for value, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        assert block.address % WORKSPACE_ALIGNMENT == 0
        fill(block.address, size, value)
    for value, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        assert ctypes.string_at(block.address, size) == bytes([value]) * size


@pytest.mark.parametrize(
    "kind", [NumpyArrays, JaxArrays, pytest.param(TorchTensors, marks=pytest.mark.torch)]
)
def test_a_workspace_on_the_host(kind: type[Framework]) -> None:
    check_blocks(kind(), HOST, 0)


class Streams:
    """What a framework has of streams: the current one, and a block in which another is."""

    def __init__(self, current: int) -> None:
        self.current = current
        self.devices: list[int] = []

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Memory:
    """A block of the host's that passes for a GPU's. ``stream`` was current when it was made."""

    def __init__(self, nbytes: int, stream: int) -> None:
        self.nbytes, self.stream = nbytes, stream
        self.block = np.zeros(nbytes + 511, np.uint8)
        self.ptr = -(-self.block.ctypes.data // 512) * 512

    def data_ptr(self) -> int:
        return self.ptr


@pytest.mark.torch
class TestTorchsAllocator:
    """PyTorch hands out memory again in the order of the stream that was current."""

    @staticmethod
    def adapter(streams: Streams, made: list[Memory]) -> TorchTensors:
        torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

        def empty(nbytes: int, *, dtype: Any, device: Any) -> Memory:
            assert dtype is torch.uint8
            streams.devices.append(torch.device(device).index)
            made.append(Memory(nbytes, streams.current))
            return made[-1]

        adapter = TorchTensors()
        adapter.stream_of = lambda ordinal: streams.current
        adapter._torch = SimpleNamespace(
            uint8=torch.uint8,
            device=torch.device,
            empty=empty,
            cuda=SimpleNamespace(stream=streams.use, ExternalStream=lambda handle, device: handle),
        )
        return adapter

    @pytest.mark.parametrize("current", [0, 7])
    def test_memory_belongs_to_the_calls_stream(self, current: int) -> None:
        streams, made = Streams(current), []
        adapter = self.adapter(streams, made)
        check_blocks(adapter, GPU_1, 7)
        assert [memory.stream for memory in made] == [7] * 4
        assert streams.current == current

    def test_the_workspace_keeps_the_memory_and_is_not_larger(self) -> None:
        made: list[Memory] = []
        block = self.adapter(Streams(7), made).workspace(1000, GPU_1, 7)
        assert made[0].nbytes == 1000
        assert (block.owner, block.address) == (made[0], made[0].ptr)


class PretendedCupy(ModuleType):
    """CuPy with one stream of many current, and whether it captures."""

    def __init__(self, streams: Streams) -> None:
        super().__init__("cupy")
        self.capturing = False  # any stream
        self.made: list[Memory] = []

        @contextmanager
        def device(ordinal: int) -> Iterator[None]:
            streams.devices.append(ordinal)
            yield

        def alloc(nbytes: int) -> Memory:
            assert not self.capturing, "what CuPy's pool gives to a graph it gives to others, too"
            self.made.append(Memory(nbytes, streams.current))
            return self.made[-1]

        self.cuda = SimpleNamespace(
            Device=device,
            alloc=alloc,
            runtime=SimpleNamespace(streamIsCapturing=lambda stream: self.capturing),
            get_current_stream=lambda: SimpleNamespace(ptr=streams.current),
        )


class TestCupysAllocator:
    def test_memory_belongs_to_the_calls_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        streams = Streams(7)
        cupy = PretendedCupy(streams)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        check_blocks(CupyArrays(), GPU_1, 7)
        assert [memory.stream for memory in cupy.made] == [7] * 4
        assert set(streams.devices) == {1}

    @pytest.mark.parametrize(("current", "capturing"), [(7, True), (0, False), (0, True)])
    def test_a_graph_and_another_stream_have_memory_of_the_drivers(
        self,
        current: int,
        capturing: bool,
        pretended: PretendedDriver,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        cupy = PretendedCupy(Streams(current))
        cupy.capturing = capturing
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        check_blocks(CupyArrays(), GPU_1, 7)
        assert cupy.made == []
        assert pretended.streams == [("allocate", 7)] * 4 + [("free", 7)] * 4


@pytest.fixture
def pretended() -> Iterator[PretendedDriver]:
    with pretended_driver() as library:
        yield library


@pytest.mark.parametrize("kind", [DeviceArrays, JaxArrays])
class TestTheDriversPool:
    """Frameworks that lend no memory: the driver's own, in the order of the stream."""

    @pytest.mark.parametrize("stream", [0, 7])
    def test_blocks_go_back_when_they_are_dropped(
        self, kind: type[Framework], stream: int, pretended: PretendedDriver
    ) -> None:
        check_blocks(kind(), GPU_1, stream)
        # A null stream's handle is None in ctypes.
        assert (
            pretended.streams == [("allocate", stream or None)] * 4 + [("free", stream or None)] * 4
        )
        assert pretended.memory == {}
        assert pretended.current == []

    def test_memory_stays_as_long_as_its_owner(
        self, kind: type[Framework], pretended: PretendedDriver
    ) -> None:
        block = kind().workspace(100, GPU_1, 7)
        owner = block.owner
        del block
        assert len(pretended.memory) == 1
        del owner
        assert pretended.memory == {}

    def test_too_little_memory_is_an_error(
        self, kind: type[Framework], pretended: PretendedDriver
    ) -> None:
        with pytest.raises(LaunchError, match="cuMemAllocAsync: CUDA error 2: out of memory"):
            kind().workspace(1 << 40, GPU_1, 7)
        assert pretended.current == []


DTYPES = [name for name in NUMPY_DTYPES if "float" in name]


class TestAllocations:
    """Outputs are dense, beside the tensor that is given, of its dtype or a named one."""

    @pytest.mark.parametrize("dtype", [None, *DTYPES])
    @pytest.mark.parametrize("poisoned", [False, True])
    def test_numpys(self, dtype: str | None, poisoned: bool) -> None:
        like = np.zeros((4, 6), np.float16)[:, ::2]
        made = NumpyArrays().allocate(like, (2, 3), dtype, poisoned=poisoned)
        assert (made.shape, made.dtype) == ((2, 3), NUMPY_DTYPES[dtype or "float16"])
        assert made.flags.c_contiguous
        assert not poisoned or np.isnan(made.astype(np.float32)).all()

    @pytest.mark.parametrize("dtype", [None, *DTYPES])
    @pytest.mark.parametrize("poisoned", [False, True])
    def test_device_arrays(
        self, dtype: str | None, poisoned: bool, pretended: PretendedDriver
    ) -> None:
        adapter = DeviceArrays()
        like = DeviceArray.empty((4, 3), np.dtype(np.float16), 0)
        made = adapter.allocate(like, (2, 3), dtype, poisoned=poisoned)
        assert (made.shape, made.dtype) == ((2, 3), NUMPY_DTYPES[dtype or "float16"])
        assert adapter.address(made) == made.address
        assert not poisoned or np.isnan(adapter.as_numpy(made).astype(np.float32)).all()

    @pytest.mark.torch
    @pytest.mark.parametrize("shape", [(4, 3), (2, 3)])
    @pytest.mark.parametrize("dtype", [None, *DTYPES])
    @pytest.mark.parametrize("poisoned", [False, True])
    def test_pytorchs(self, shape: tuple[int, ...], dtype: str | None, poisoned: bool) -> None:
        torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
        adapter = framework_of(torch.Tensor)
        assert adapter is not None
        like = torch.zeros((4, 6), dtype=torch.bfloat16)[:, ::2]
        made = adapter.allocate(like, shape, dtype, poisoned=poisoned)
        assert tuple(made.shape) == shape
        assert made.is_contiguous()
        host = adapter.as_numpy(made)
        assert host.dtype == NUMPY_DTYPES[dtype or "bfloat16"]
        assert adapter.address(made) == host.__array_interface__["data"][0]
        assert not poisoned or np.isnan(host.astype(np.float32)).all()


@pytest.mark.torch
@pytest.mark.parametrize(("n_gpus", "current"), [(1, 0), (2, 0), (2, 1)])
def test_pytorchs_allocator_of_the_current_gpu_alone_serves_that_one(
    n_gpus: int, current: int
) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    adapter, like = TorchTensors(), torch.zeros(2, dtype=torch.float16)
    ordinal = n_gpus - 1
    on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda", index=ordinal))
    allocate = torch.empty_strided

    def elsewhere(shape: Any, strides: Any, *, dtype: Any, device: Any) -> Any:
        return "told", device.index, allocate(shape, strides, dtype=dtype)

    adapter._torch = SimpleNamespace(
        empty_strided=elsewhere,
        cuda=SimpleNamespace(device_count=lambda: n_gpus),
        _C=SimpleNamespace(_cuda_getDevice=lambda: current),
    )
    adapter._guards = SimpleNamespace(
        _empty_strided_cuda=lambda *how: ("current", current, allocate(*how[:2], dtype=how[2]))
    )
    allocator = adapter.allocator(on_gpu, (2, 3, 1), "float32")
    how, device, made = allocator()
    assert (how, device) == ("current" if current == ordinal else "told", ordinal)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3, 1), (3, 1, 1), torch.float32)
    filling = adapter.allocator(on_gpu, (2, 3, 1), "float32", filled=True)
    assert filling()[:2] == ("told", ordinal)
    # A PyTorch without it, and the host's.
    adapter._guards = SimpleNamespace()
    assert adapter.allocator(on_gpu, (2,), "float32")()[:2] == ("told", ordinal)
    made = TorchTensors().allocator(like, (2, 3), "bfloat16")()
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.bfloat16)


@pytest.mark.torch
def test_pytorchs_layout_check() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    adapter = framework_of(torch.Tensor)
    assert isinstance(adapter, TorchTensors)

    def of(*shape: int, dtype: Any = torch.float16, **more: Any) -> Any:
        return torch.zeros(shape, dtype=dtype, **more)

    check = adapter.layout_check((of(4, 6), of(3, dtype=torch.int32)))
    assert check(of(4, 6), of(3, dtype=torch.int32))
    others = {
        "shape": of(6, 4),
        "rank": of(4, 6, 1),
        "strides": of(6, 4).T,
        "dtype": of(4, 6, dtype=torch.bfloat16),
        "device": of(4, 6, device="meta"),
        "gradients": of(4, 6, requires_grad=True),
        "type": torch.nn.Parameter(of(4, 6), requires_grad=False),
        "none": None,
        "array": np.zeros((4, 6), np.float16),
    }
    for what, other in others.items():
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                assert not check(other, of(3, dtype=torch.int32)), what
    same = of(4, 6)
    assert not adapter.layout_check((same, same))(same, same)
    # A PyTorch without it: calls are found by their signatures.
    older = TorchTensors()
    older._guards = None
    assert not older.layout_check((same,))(same)


@pytest.mark.parametrize(
    ("offsets", "longest"), [([0, 3, 3, 10], 7), ([0], 0), ([5, 2], 0), ([0, -4, 2], 6)]
)
def test_the_longest_step(offsets: list[int], longest: int) -> None:
    vectors = [np.array(offsets, np.int32), np.array([0, 2], np.int32)]
    assert NumpyArrays().longest_steps(vectors) == [longest, 2]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("offsets", "longest"), [([0, 3, 3, 10], 7), ([0], 0), ([5, 2], 0), ([0, -4, 2], 6)]
)
def test_the_longest_step_by_pytorch(offsets: list[int], longest: int) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    vectors = [torch.tensor(offsets, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)]
    assert TorchTensors().longest_steps(vectors) == [longest, 2]


def on_stream(stream: int, what: str, *arguments: object) -> None:
    """Enqueues what one of the driver's own functions does."""
    with driver.current_gpu(0):
        driver.call(what, *arguments, ctypes.c_void_p(stream))


def use_workspaces(adapter: Framework, stream: int, outputs: list[int], nbytes: int) -> None:
    """Fills a workspace for each output in turn, and copies it there once it is full."""
    for value, output in enumerate(outputs, start=1):
        block = adapter.workspace(nbytes, Device("cuda", 0), stream)
        assert block.address % WORKSPACE_ALIGNMENT == 0
        size, address = ctypes.c_size_t(nbytes), ctypes.c_uint64(block.address)
        on_stream(stream, "cuMemsetD8Async", address, ctypes.c_ubyte(value), size)
        on_stream(stream, "cuMemcpyDtoDAsync_v2", ctypes.c_uint64(output), address, size)


@pytest.mark.gpu
class TestOnAGpu:
    """Each block holds what was put there until the stream is done with it, in graphs, too."""

    NBYTES = 1 << 20

    def check(self, outputs: list[np.ndarray]) -> None:
        for value, output in enumerate(outputs, start=1):
            assert (output == value).all()

    @pytest.mark.torch
    def test_pytorch(self) -> None:
        torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
        adapter = framework_of(torch.Tensor)
        outputs = [torch.zeros(self.NBYTES, dtype=torch.uint8, device="cuda") for _ in range(3)]
        places = [output.data_ptr() for output in outputs]
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        use_workspaces(adapter, side.cuda_stream, places, self.NBYTES)  # it is not the current one
        side.synchronize()
        self.check([output.cpu().numpy() for output in outputs])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            use_workspaces(adapter, adapter.current_stream(0), places, self.NBYTES)
        # Memory that is free for others must not be what the graph writes to.
        others = [torch.zeros(self.NBYTES, dtype=torch.uint8, device="cuda") for _ in range(8)]
        for output in outputs:
            output.zero_()
        graph.replay()
        self.check([output.cpu().numpy() for output in outputs])
        assert not any(other.any() for other in others)

    def test_cupy(self) -> None:
        cupy = pytest.importorskip("cupy", reason="needs CuPy: it is not installed")
        adapter = framework_of(cupy.ndarray)
        outputs = [cupy.zeros(self.NBYTES, cupy.uint8) for _ in range(3)]
        places = [output.data.ptr for output in outputs]
        cupy.cuda.Device().synchronize()
        side = cupy.cuda.Stream(non_blocking=True)
        use_workspaces(adapter, side.ptr, places, self.NBYTES)  # it is not the current one
        side.synchronize()
        self.check([output.get() for output in outputs])
        with side:
            side.begin_capture()
            use_workspaces(adapter, adapter.current_stream(0), places, self.NBYTES)
            graph = side.end_capture()
            others = [cupy.zeros(self.NBYTES, cupy.uint8) for _ in range(8)]
            for output in outputs:
                output.fill(0)
            for _ in range(2):
                graph.launch(side)
            side.synchronize()
        self.check([output.get() for output in outputs])
        assert not any(other.any() for other in others)

    @pytest.mark.parametrize("kind", [DeviceArrays, JaxArrays])
    def test_the_drivers_pool(self, kind: type[Framework]) -> None:
        outputs = [DeviceArray.from_host(np.zeros(self.NBYTES, np.uint8)) for _ in range(3)]
        use_workspaces(kind(), 0, [output.address for output in outputs], self.NBYTES)
        self.check([output.to_host() for output in outputs])
