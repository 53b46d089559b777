"""Dynamic schedules on a GPU: their counters under streams, threads, graphs and captures."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flashsmith import attention, plan_forward
from flashsmith.families import Problem, Schedule, TileOrder, parse_kernel_name_into_config
from flashsmith.runtime import query_gpu

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

DYNAMIC = parse_kernel_name_into_config(
    "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
    "+rescale_8"
)
# Nothing is shared between the launches of this one, so that it says what is right.
ONE_TILE = replace(DYNAMIC, schedule=Schedule.ONE_TILE)
HEADS, D = 16, 128
# kMostKept of csrc/host/workspaces.cc: so many captured launches of a context keep their counters.
KEPT_COUNTERS = 16384


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if query_gpu(0).arch != 90:
        pytest.skip("needs a GPU of compute capability 9.0")


def drawn(seed: int, seq: int = 2048, batch: int = 2) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, seq, HEADS, D)
    options: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.float16}
    return [torch.randn(shape, **options) for _ in range(3)]


def call(tensors: list[Any], **options: Any) -> Any:
    return attention(*tensors, **{"config": DYNAMIC, "causal": True, **options})


def expected(tensors: list[Any]) -> Any:
    return call(tensors, config=ONE_TILE)


def captured(work: Callable[[], Any]) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()
    return graph, output


@pytest.mark.parametrize("order", list(TileOrder))
def test_launch_after_launch(order: TileOrder) -> None:
    tensors = drawn(0)
    right = expected(tensors)
    config = replace(DYNAMIC, tile_order=order)
    outputs = [call(tensors, config=config) for _ in range(50)]
    assert all(torch.equal(output, right) for output in outputs)


def test_streams_side_by_side() -> None:
    inputs = [drawn(seed, seq=512) for seed in range(6)]
    right = [expected(tensors) for tensors in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    outputs: list[list[Any]] = [[] for _ in inputs]
    for _ in range(30):
        for tensors, stream, got in zip(inputs, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(call(tensors))
    torch.cuda.synchronize()
    for got, one in zip(outputs, right, strict=True):
        assert all(torch.equal(output, one) for output in got)


def test_threads() -> None:
    inputs = [drawn(seed, seq=512) for seed in range(6)]
    right = [expected(tensors) for tensors in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs = [call(inputs[index]) for _ in range(30)]
            torch.cuda.current_stream().synchronize()
        if not all(torch.equal(output, right[index]) for output in outputs):
            wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_replays_beside_launches_and_other_graphs() -> None:
    """Two graphs on streams of their own, each with two launches, and launches on a third."""
    inputs = [drawn(seed, seq=1024) for seed in range(3)]
    right = [expected(tensors) for tensors in inputs]
    call(inputs[0])  # whatever a first call loads is loaded now
    graphs = [captured(lambda t=tensors: (call(t), call(t))) for tensors in inputs[:2]]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    eager = []
    for _ in range(20):
        for (graph, _), stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager.append(call(inputs[2]))
    torch.cuda.synchronize()
    for (_, outputs), one in zip(graphs, right, strict=False):
        assert all(torch.equal(output, one) for output in outputs)
    assert all(torch.equal(output, right[2]) for output in eager)


def test_branches_of_one_graph() -> None:
    inputs = [drawn(seed, seq=1024) for seed in range(4)]
    right = [expected(tensors) for tensors in inputs]
    call(inputs[0])
    sides = [torch.cuda.Stream() for _ in inputs]

    def fork() -> list[Any]:
        main, outputs = torch.cuda.current_stream(), []
        for side, tensors in zip(sides, inputs, strict=True):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                outputs.append(call(tensors))
        for side in sides:
            main.wait_stream(side)
        return outputs

    graph, outputs = captured(fork)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(got, one) for got, one in zip(outputs, right, strict=True))


def test_capturing_again_and_again_takes_no_more_counters() -> None:
    """Beyond those that are kept for good, a counter comes back with its graph, and the next
    launch that gets it begins with zero."""
    tensors = drawn(0, seq=512)
    right = expected(tensors)
    plan = plan_forward(DYNAMIC, Problem.parse("b2 s512 h16 d128 fp16 causal"), query_gpu(0))
    out = torch.empty_like(call(tensors))
    call(tensors, out=out)
    for _ in range(KEPT_COUNTERS // 1024):
        captured(lambda: [call(tensors, out=out) for _ in range(1024)])
    seen = set()
    for _ in range(60):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            outputs = [call(tensors) for _ in range(40)]
        graph.instantiate()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(output, right) for output in outputs)
        counters = counters_of(graph.raw_cuda_graph(), plan.workspace_offset)
        assert len(counters) == len(set(counters)) == 40
        seen |= set(counters)
        del graph, outputs
        gc.collect()
    # The driver may give back those of one graph when the next has been captured already.
    assert len(seen) <= 3 * 40


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2: ``arguments`` holds the address of every argument."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def counters_of(graph: int, offset: int) -> list[int]:
    """The addresses at ``offset`` in the only argument of each of a graph's kernels."""
    driver, handle, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    counters = []
    for node in nodes:
        kernel = KernelNode()
        status = driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(kernel))
        assert status == 0
        at = kernel.arguments[0] + offset
        counters.append(ctypes.c_uint64.from_address(at).value)
    return counters


def test_a_stream_for_every_launch() -> None:
    """More than a thousand: the later ones take memory in their own order."""
    tensors = drawn(0, seq=256, batch=1)
    right = expected(tensors)
    torch.cuda.synchronize()
    outputs = []
    for _ in range(1100):
        # PyTorch's own streams come from a pool of 32.
        stream = torch.cuda.ExternalStream(new_stream())
        with torch.cuda.stream(stream):
            outputs.append(call(tensors))
    torch.cuda.synchronize()
    assert all(torch.equal(output, right) for output in outputs)


def new_stream() -> int:
    """The handle of a stream that is not used elsewhere."""
    handle = ctypes.c_void_p()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0  # non-blocking
    return int(handle.value or 0)
