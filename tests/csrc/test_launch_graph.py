"""Plans of several launches as one CUDA graph: when, with which arguments, and when not."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pretended_library import H200, PretendedLibrary

STREAM, OTHER, GRAPH = 7, 8, 70
CTAS = 3
X, O = 1 << 40, 2 << 40  # noqa: E741
OUT_OF_MEMORY = 2
# Calls that are launched one kernel after the other, before there is a graph.
BEFORE = 2
MOST_GRAPHS = 256

Launch = Callable[..., None]


def prepare(
    library: PretendedLibrary, wrong: int = 0, ordinal: int = 0, timed: bool = False
) -> Any:
    """The plan of two_steps.h, whose sums are zeroed in the block."""
    device = (H200.arch, H200.sm_count, H200.max_smem_per_block, H200.max_smem_per_sm)
    call = [library.two_steps, *device, 2, CTAS, wrong, X, 0, 0, O, *(0,) * 7]
    return library.functions.prepare(*call, ordinal, timed)[0]


@pytest.fixture
def launch(library: PretendedLibrary) -> Launch:
    function = prepare(library)

    def launch(stream: int = STREAM, x: int = X, o: int = O) -> None:
        function(stream, x, 0, 0, o)

    return launch


def given(library: PretendedLibrary, index: int) -> tuple[int, int, int]:
    """The stream of a plan's two launches, what the first reads and the second writes."""
    first, second = library.launches()[2 * index : 2 * index + 2]
    assert (first.kernel, second.kernel) == (0x2000, 0x2001)
    assert (first.smem_bytes, second.smem_bytes) == (1024, 2048)
    assert tuple(first.grid) == tuple(second.grid) == (CTAS, 1, 1)
    assert first.stream == second.stream
    read, *of_first = struct.unpack("<4Q", bytes(first.arguments)[:32])
    scratch, sums, written, counter = struct.unpack("<4Q", bytes(second.arguments)[:32])
    assert of_first == [scratch, sums, counter]
    return first.stream, read, written


def counts(library: PretendedLibrary) -> tuple[int, int, int]:
    """Launches of kernels, of graphs, and graphs that were made."""
    names = "cudaLaunchKernel", "cudaGraphLaunch", "cudaGraphInstantiate"
    one, graphs, made = map(library.count, names)
    return one, graphs, made


def test_the_third_call_in_a_row_makes_a_graph(library: PretendedLibrary, launch: Launch) -> None:
    for _ in range(BEFORE):
        launch()
    assert counts(library) == (2 * BEFORE, 0, 0)
    for _ in range(4):
        launch()
    assert counts(library) == (2 * BEFORE, 4, 1)
    assert [given(library, call) for call in range(BEFORE + 4)] == [(STREAM, X, O)] * (BEFORE + 4)
    assert library.count("cudaFuncSetAttribute") == 2, "once for good"


def test_other_tensors_are_new_arguments(library: PretendedLibrary, launch: Launch) -> None:
    tensors = [(X + 4096 * i, O + 8192 * i) for i in range(8)]
    for x, o in tensors:
        launch(STREAM, x, o)
    assert [given(library, call) for call in range(8)] == [(STREAM, x, o) for x, o in tensors]
    assert counts(library) == (2 * BEFORE, 8 - BEFORE, 1)


def test_the_same_tensors_are_not_set_again(library: PretendedLibrary) -> None:
    function = prepare(library)
    memory = np.zeros(4096, np.uint8)
    block = memory.ctypes.data + -memory.ctypes.data % 256
    for x in (X, X, X, X, X + 4096, X + 4096, X):
        function(STREAM, x, 0, 0, O, *(0,) * 7, block)
    assert counts(library) == (2 * BEFORE, 5, 1)
    assert library.count("cudaGraphExecKernelNodeSetParams") == 2 * 2
    read = [given(library, call)[1] for call in range(7)]
    assert read == [X, X, X, X, X + 4096, X + 4096, X]


def test_streams_that_alternate_get_launches(library: PretendedLibrary, launch: Launch) -> None:
    """A graph would have one wait for the other."""
    for _ in range(5):
        launch(STREAM)
        launch(OTHER)
    assert counts(library) == (20, 0, 0)
    for _ in range(4):
        launch(OTHER)
    assert counts(library)[1:] == (3, 1)
    for _ in range(4):
        launch(STREAM)
    assert counts(library)[1:] == (5, 1), "the same graph, on the stream that calls now"
    assert given(library, 17) == (STREAM, X, O)


def test_what_is_captured_is_launched_as_before(library: PretendedLibrary, launch: Launch) -> None:
    for _ in range(4):
        launch()
    library.cuda.pretended_capture(STREAM, GRAPH)
    for _ in range(4):
        launch()
    library.cuda.pretended_end_capture(STREAM)
    assert counts(library) == (2 * BEFORE + 8, 2, 1)
    launch()
    assert counts(library)[1:] == (3, 1)
    assert given(library, 8) == (STREAM, X, O)


def test_a_graph_is_made_while_another_stream_is_captured(
    library: PretendedLibrary, launch: Launch
) -> None:
    launch()
    library.cuda.pretended_capture(OTHER, GRAPH)
    launch()
    launch()
    library.cuda.pretended_end_capture(OTHER)
    assert counts(library) == (2 * BEFORE, 1, 1)


@pytest.mark.parametrize("wrong", [11, 12], ids=["programmatic", "clusters"])
def test_launches_with_attributes_stay_launches(library: PretendedLibrary, wrong: int) -> None:
    function = prepare(library, wrong)
    for _ in range(5):
        function(STREAM, X, 0, 0, O)
    assert len(library.launches()) == 10
    assert counts(library)[1:] == (0, 0)


def test_timed_calls_stay_launches(library: PretendedLibrary) -> None:
    function = prepare(library, timed=True)
    for _ in range(5):
        assert function(STREAM, X, 0, 0, O) == 1.0
    assert counts(library) == (10, 0, 0)


@pytest.mark.parametrize(
    "name",
    [
        "cudaGraphCreate",
        "cudaGraphAddKernelNode",
        "cudaGraphInstantiate",
        "cudaGraphUpload",
        "cudaGraphLaunch",
        "cudaGraphExecKernelNodeSetParams",
    ],
)
def test_where_cuda_refuses_a_graph_the_kernels_are_launched(
    library: PretendedLibrary, launch: Launch, name: str
) -> None:
    if name == "cudaGraphExecKernelNodeSetParams":
        for _ in range(BEFORE + 1):
            launch()
    graphs = library.count("cudaGraphLaunch")
    calls = len(library.launches()) // 2
    library.fail(name, OUT_OF_MEMORY)
    tensors = [X + 4096 * i for i in range(1, 6)]
    for x in tensors:
        launch(STREAM, x)
    assert [given(library, calls + i)[1] for i in range(5)] == tensors
    assert library.count("cudaGraphLaunch") == graphs + (name == "cudaGraphLaunch")
    assert library.cuda.pretended_graphs() == 0


def test_a_refused_launch_says_why(library: PretendedLibrary, launch: Launch) -> None:
    for _ in range(4):
        launch()
    library.fail("cudaGraphLaunch", OUT_OF_MEMORY)
    library.fail("cudaLaunchKernel", OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="cudaLaunchKernel: cudaErrorMemoryAllocation"):
        launch()


def test_a_tensor_map_that_is_refused_leaves_no_kernel_with_other_arguments(
    library: PretendedLibrary,
) -> None:
    function = prepare(library, wrong=13)
    memory = np.zeros(4096, np.uint8)
    block = memory.ctypes.data + -memory.ctypes.data % 256
    others = (*(0, 0), O, *(0,) * 7, block)
    for _ in range(4):
        function(STREAM, X, *others)
    library.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE: x"):
        function(STREAM, X + 4096, *others)
    function(STREAM, X, *others)
    function(STREAM, X + 4096, *others)
    assert [given(library, call)[1] for call in (3, 4, 5)] == [X, X, X + 4096]
    assert counts(library) == (2 * BEFORE, 4, 1)


def test_errors_where_they_happen_want_launches(
    library: PretendedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, graphs in (("1", 0), ("0", 1)):
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
        function = prepare(library)
        for _ in range(BEFORE + 1):
            function(STREAM, X, 0, 0, O)
        assert library.count("cudaGraphLaunch") == graphs


def test_graphs_are_bounded(fresh_library: Callable[[], PretendedLibrary]) -> None:
    library = fresh_library()
    functions = [prepare(library) for _ in range(MOST_GRAPHS + 3)]
    for function in functions:
        for _ in range(BEFORE + 1):
            function(STREAM, X, 0, 0, O)
    assert library.count("cudaGraphLaunch") == MOST_GRAPHS
    assert library.cuda.pretended_graphs() == 2 * MOST_GRAPHS
    last = functions[-1]
    del function
    functions[:-1] = []
    last(STREAM, X, 0, 0, O)
    assert library.count("cudaGraphLaunch") == MOST_GRAPHS + 1


def test_a_graph_goes_with_its_plan(library: PretendedLibrary) -> None:
    library.reset(devices=2)
    functions = [prepare(library, ordinal=ordinal) for ordinal in (0, 1)]
    for function in functions:
        for _ in range(4):
            function(STREAM, X, 0, 0, O)
    assert library.cuda.pretended_graphs() == 2 * 2
    del function
    functions.clear()
    assert library.cuda.pretended_graphs() == 0
    assert library.cuda.pretended_current_device() == 0


def test_a_context_that_is_gone_took_the_graph_along(
    library: PretendedLibrary, launch: Launch
) -> None:
    for _ in range(4):
        launch()
    library.cuda.pretended_lose_context(0)
    launch()
    assert counts(library)[1:] == (3, 2)
    assert library.count("cudaGraphExecDestroy") == 0
    assert given(library, 4) == (STREAM, X, O)


def test_a_forked_child_leaves_the_graph_alone(library: PretendedLibrary) -> None:
    function = prepare(library)
    for _ in range(4):
        function(STREAM, X, 0, 0, O)
    child = os.fork()
    if child == 0:
        del function
        calls = library.count("cudaGraphExecDestroy") + library.count("cudaSetDevice")
        os._exit(calls)
    assert os.waitpid(child, 0)[1] == 0
    del function
    assert library.cuda.pretended_graphs() == 0


def test_threads_share_a_graph(library: PretendedLibrary, launch: Launch) -> None:
    """Each call's kernels get its own tensors, whichever way they are launched."""
    barrier = threading.Barrier(8)

    def work(thread: int) -> None:
        barrier.wait()
        for i in range(50):
            launch(STREAM, X + 4096 * (50 * thread + i), O + 4096 * (50 * thread + i))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read: dict[int, int] = {}
    for one in library.launches():
        a, _, b, _ = struct.unpack("<4Q", bytes(one.arguments)[:32])
        number = (a - X) // 4096 if one.kernel == 0x2000 else (b - O) // 4096
        read[number] = read.get(number, 0) + (1 if one.kernel == 0x2000 else 1000)
    assert read == dict.fromkeys(range(400), 1001)
    assert library.count("cudaGraphInstantiate") == 1
