"""Tile counters of dynamic schedules: whose they are, that they are zero, and that they are few."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable

import pytest
from hopper_plans import DYNAMIC, LONGEST_FIRST, PERSISTENT, K, O, Q, V, call, semantics_of
from pretended_library import PretendedLibrary

PLACES = (Q, K, V, O)
CHUNK_BYTES = 1024 * 64
MOST_STREAMS = 1024
MOST_KEPT = 16384
OUT_OF_MEMORY = 2


class Launcher:
    """Launches, and tells which counter each launch was given and what it held."""

    def __init__(self, library: PretendedLibrary, cfg: object = DYNAMIC, ordinal: int = 0) -> None:
        a_call = call()
        library.compute(semantics_of(a_call, cfg))  # type: ignore[arg-type]
        self.library = library
        self.offset = library.plan(cfg, a_call).workspace_offset  # type: ignore[arg-type]
        self.launch = library.prepare(cfg, a_call, ordinal)  # type: ignore[arg-type]

    def __call__(self, stream: int) -> int:
        """The counter's address."""
        self.launch(stream, *PLACES)
        arguments = self.library.last_launch().arguments
        return int.from_bytes(arguments[self.offset : self.offset + 8], "little")


@pytest.fixture
def launch(library: PretendedLibrary) -> Launcher:
    return Launcher(library)


def counter(address: int) -> bytes:
    return ctypes.string_at(address, 64)


def test_a_counter_is_zero_to_begin_with(library: PretendedLibrary, launch: Launcher) -> None:
    assert counter(launch(1)) == bytes(64)
    assert library.count("cudaMalloc") == library.count("cudaMemsetAsync") == 1


def test_launches_on_one_stream_share_theirs(library: PretendedLibrary, launch: Launcher) -> None:
    """They run one after the other, and the last CTA of each leaves the counter zero."""
    first = launch(1)
    assert {launch(1) for _ in range(10)} == {first}
    assert Launcher(library, LONGEST_FIRST)(1) == first
    assert library.count("cudaMemsetAsync") == 1, "nothing is enqueued before a launch"


def test_streams_have_their_own(library: PretendedLibrary, launch: Launcher) -> None:
    addresses = [launch(stream) for stream in range(300)]
    assert len(set(addresses)) == 300
    assert all(abs(a - b) >= 64 for a, b in itertools.pairwise(addresses))
    assert [launch(stream) for stream in range(300)] == addresses
    assert library.count("cudaMalloc") == 1
    assert library.cuda.pretended_memory_bytes() == CHUNK_BYTES


def test_a_handle_that_a_later_stream_got_is_another_stream(
    library: PretendedLibrary, launch: Launcher
) -> None:
    first = launch(1)
    library.cuda.pretended_forget_stream(ctypes.c_uint64(1))
    assert launch(1) != first


def test_threads_that_come_at_once(library: PretendedLibrary) -> None:
    """On streams of their own, and on one that all of them use."""
    launcher, addresses = Launcher(library), {}
    barrier = threading.Barrier(8)

    def work(thread: int) -> None:
        barrier.wait()
        for stream in (1000, 2000 + thread):
            launcher.launch(stream, *PLACES)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for launched in library.launches():
        at = bytes(launched.arguments)[launcher.offset : launcher.offset + 8]
        addresses.setdefault(launched.stream, set()).add(at)
    assert len(addresses) == 9
    assert all(len(found) == 1 for found in addresses.values())
    assert len(set().union(*addresses.values())) == 9


def test_devices_have_their_own_memory(library: PretendedLibrary) -> None:
    library.reset(devices=2)
    first, second = (Launcher(library, ordinal=ordinal)(1) for ordinal in (0, 1))
    assert abs(first - second) >= CHUNK_BYTES or library.count("cudaMalloc") == 2
    assert library.count("cudaMalloc") == 2


def test_a_context_that_is_gone_took_its_memory_along(
    library: PretendedLibrary, launch: Launcher
) -> None:
    first = launch(1)
    library.cuda.pretended_lose_context(0)
    assert launch(1) != first
    assert library.count("cudaMalloc") == 2


def test_other_schedules_need_none(library: PretendedLibrary) -> None:
    a_call = call()
    library.compute(semantics_of(a_call, PERSISTENT))
    library.prepare(PERSISTENT, a_call)(1, *PLACES)
    assert library.count("cudaMalloc") == library.count("cudaStreamGetId") == 0


# --- more streams than any process has -----------------------------------------------------------


def test_streams_without_end_take_memory_and_give_it_back(
    library: PretendedLibrary, launch: Launcher
) -> None:
    kept = [launch(stream) for stream in range(MOST_STREAMS)]
    bytes_kept = library.cuda.pretended_memory_bytes()
    assert bytes_kept == CHUNK_BYTES
    for stream in range(MOST_STREAMS, MOST_STREAMS + 500):
        assert launch(stream) not in kept
    assert library.cuda.pretended_memory_bytes() == bytes_kept
    for name in ("cudaMallocAsync", "cudaFreeAsync"):
        assert library.count(name) == 500
    assert library.count("cudaMemsetAsync") == 500 + 1
    assert [launch(stream) for stream in range(MOST_STREAMS)] == kept


def test_a_refused_launch_gives_it_back_too(library: PretendedLibrary, launch: Launcher) -> None:
    for stream in range(MOST_STREAMS):
        launch(stream)
    library.fail("cudaLaunchKernel", OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="cudaLaunchKernel"):
        launch(MOST_STREAMS)
    library.fail("cudaMallocAsync", OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="cudaMallocAsync: cudaErrorMemoryAllocation"):
        launch(MOST_STREAMS)
    library.fail("cudaMemsetAsync", OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="cudaMemsetAsync: cudaErrorMemoryAllocation"):
        launch(MOST_STREAMS)
    assert library.cuda.pretended_memory_bytes() == CHUNK_BYTES


# --- captured graphs -----------------------------------------------------------------------------

GRAPH, EXECUTABLE, OTHER, KEEPING = 0x6000, 0x7000, 0x8000, 0x9000
KEPT_BYTES = MOST_KEPT // 1024 * CHUNK_BYTES


@pytest.fixture
def capture(library: PretendedLibrary) -> Callable[[int, int], None]:
    """Captures what a stream gets into a graph."""

    def begin(stream: int, graph: int) -> None:
        library.cuda.pretended_capture(stream, graph)

    return begin


def test_every_captured_launch_has_its_own(
    library: PretendedLibrary, launch: Launcher, capture: Callable[[int, int], None]
) -> None:
    """Branches of a graph run side by side, and graphs beside what streams launch."""
    outside = launch(1)
    capture(1, GRAPH)
    captured = [launch(1) for _ in range(5)]
    library.cuda.pretended_end_capture(1)
    assert len({outside, *captured}) == 6
    assert all(counter(address) == bytes(64) for address in captured)
    assert launch(1) == outside


def test_replays_of_the_first_captured_launches_hold_no_user_object(
    library: PretendedLibrary, launch: Launcher, capture: Callable[[int, int], None]
) -> None:
    """A replay of a graph that holds one takes 2 us longer. Their counters are theirs for good."""
    capture(1, GRAPH)
    kept = {launch(1) for _ in range(MOST_KEPT)}
    assert len(kept) == MOST_KEPT
    assert library.count("cudaUserObjectCreate") == 0
    assert library.cuda.pretended_memory_bytes() == MOST_KEPT // 1024 * CHUNK_BYTES
    launch(1)
    assert library.count("cudaUserObjectCreate") == 1
    library.cuda.pretended_end_capture(1)
    library.cuda.pretended_destroy(GRAPH)
    capture(1, OTHER)
    assert launch(1) not in kept


@pytest.fixture
def none_kept(launch: Launcher, capture: Callable[[int, int], None]) -> None:
    """As many launches are captured as have counters of their own for good."""
    capture(1, KEEPING)
    for _ in range(MOST_KEPT):
        launch(1)
    launch.library.cuda.pretended_end_capture(1)


def test_memory_may_be_allocated_while_something_is_captured(
    library: PretendedLibrary, launch: Launcher, capture: Callable[[int, int], None]
) -> None:
    """Neither a call that capture forbids is made, nor one that becomes part of the graph."""
    capture(1, GRAPH)
    capture(9, OTHER)
    address = launch(1)
    assert counter(address) == bytes(64)
    assert library.count("cudaMalloc") == 1
    assert launch(2) != address, "a stream beside it is not captured"


@pytest.mark.usefixtures("none_kept")
def test_a_graph_gives_its_counters_back_when_nothing_of_it_is_left(
    library: PretendedLibrary, launch: Launcher, capture: Callable[[int, int], None]
) -> None:
    capture(1, GRAPH)
    first = launch(1)
    library.cuda.pretended_end_capture(1)
    library.cuda.pretended_instantiate(GRAPH, EXECUTABLE)
    library.cuda.pretended_destroy(GRAPH)
    capture(1, OTHER)
    assert launch(1) != first, "the executable may still be replayed"
    library.cuda.pretended_end_capture(1)
    library.cuda.pretended_destroy(EXECUTABLE)
    capture(1, GRAPH)
    assert launch(1) == first


@pytest.mark.usefixtures("none_kept")
def test_capturing_again_and_again_takes_no_more_memory(
    library: PretendedLibrary, launch: Launcher, capture: Callable[[int, int], None]
) -> None:
    for _ in range(40):
        capture(1, GRAPH)
        for _ in range(100):
            launch(1)
        library.cuda.pretended_end_capture(1)
        library.cuda.pretended_instantiate(GRAPH, EXECUTABLE)
        library.cuda.pretended_destroy(GRAPH)
        library.cuda.pretended_destroy(EXECUTABLE)
    assert library.cuda.pretended_memory_bytes() == KEPT_BYTES + CHUNK_BYTES


@pytest.mark.usefixtures("none_kept")
def test_graphs_that_live_have_as_many_as_they_need(
    library: PretendedLibrary, launch: Launcher, capture: Callable[[int, int], None]
) -> None:
    capture(1, GRAPH)
    addresses = {launch(1) for _ in range(2500)}
    assert len(addresses) == 2500
    assert library.cuda.pretended_memory_bytes() == KEPT_BYTES + 3 * CHUNK_BYTES
    library.cuda.pretended_end_capture(1)
    library.cuda.pretended_destroy(GRAPH)
    capture(1, OTHER)
    assert {launch(1) for _ in range(2500)} == addresses


@pytest.mark.usefixtures("none_kept")
@pytest.mark.parametrize(
    "name", ["cudaUserObjectCreate", "cudaGraphRetainUserObject", "cudaStreamGetCaptureInfo"]
)
def test_what_fails_while_a_graph_is_captured_is_named_and_costs_nothing(
    library: PretendedLibrary,
    launch: Launcher,
    capture: Callable[[int, int], None],
    name: str,
) -> None:
    capture(1, GRAPH)
    library.fail(name, OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match=f"{name}: cudaErrorMemoryAllocation"):
        launch(1)
    addresses = {launch(1) for _ in range(1024)}
    assert len(addresses) == 1024
    assert library.cuda.pretended_memory_bytes() == KEPT_BYTES + CHUNK_BYTES


@pytest.mark.parametrize(
    "name", ["cudaMalloc", "cudaStreamCreateWithFlags", "cudaMemsetAsync", "cudaStreamSynchronize"]
)
def test_no_memory_is_an_error_that_the_next_launch_does_not_share(
    library: PretendedLibrary, launch: Launcher, name: str
) -> None:
    library.fail(name, OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
        launch(1)
    assert library.cuda.pretended_memory_bytes() == 0
    assert counter(launch(1)) == bytes(64)
