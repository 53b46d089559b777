"""Memory that is kept zero, such as tile counters: whose it is, that it is zero, and how much."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hopper_plans import DYNAMIC, LONGEST_FIRST, PERSISTENT, K, O, Q, V, call, semantics_of
from pretended_library import H200, Launch, PretendedLibrary

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


# --- plans of more than 64 bytes -----------------------------------------------------------------

MIB = 1 << 20
LARGE_CHUNK_BYTES = 2 * MIB
LARGE_STREAMS = LARGE_BRANCHES = 64


class LargeLauncher:
    """Launches a plan over `nbytes` that are kept zero, and tells where they were."""

    def __init__(self, library: PretendedLibrary, nbytes: int = MIB, ordinal: int = 0) -> None:
        device = (H200.arch, H200.sm_count, H200.max_smem_per_block, H200.max_smem_per_sm)
        numbers = (2, 1, -nbytes)
        self.tensors = (Q, 0, 0, O, *(0,) * 7)
        self.launch, block_bytes = library.functions.prepare(
            library.two_steps, *device, *numbers, *self.tensors, ordinal, False
        )
        assert block_bytes == 0
        self.library = library

    def __call__(self, stream: int) -> int:
        self.launch(stream, *self.tensors)
        return self.address_of(self.library.last_launch())

    @staticmethod
    def address_of(launch: Launch) -> int:
        return int.from_bytes(bytes(launch.arguments[24:32]), "little")


@pytest.fixture
def large(library: PretendedLibrary) -> LargeLauncher:
    return LargeLauncher(library)


def assert_apart(addresses: Iterable[int]) -> None:
    """Whether these are slots of 1 MiB that do not overlap."""
    in_order = sorted(addresses)
    assert all(b - a >= MIB for a, b in itertools.pairwise(in_order))


def large_bytes(library: PretendedLibrary, slots: int) -> int:
    """What so many slots take."""
    assert slots % 2 == 0
    return slots // 2 * LARGE_CHUNK_BYTES


def test_up_to_64_bytes_are_in_the_slots_of_counters(
    library: PretendedLibrary, launch: Launcher
) -> None:
    first = launch(1)
    assert {LargeLauncher(library, nbytes)(1) for nbytes in (1, 49, 64)} == {first}
    assert library.cuda.pretended_memory_bytes() == CHUNK_BYTES
    assert LargeLauncher(library, 65)(1) != first
    assert library.cuda.pretended_memory_bytes() == CHUNK_BYTES + LARGE_CHUNK_BYTES


@pytest.mark.parametrize("nbytes", [65, 4096, MIB])
def test_large_plans_share_the_slot_of_their_stream(library: PretendedLibrary, nbytes: int) -> None:
    launch = LargeLauncher(library, nbytes)
    first = launch(1)
    assert first % 256 == 0
    assert ctypes.string_at(first, MIB) == bytes(MIB)
    assert {launch(1) for _ in range(10)} == {first}
    assert LargeLauncher(library)(1) == first
    assert library.count("cudaMemsetAsync") == library.count("cudaMalloc") == 1


def test_one_byte_too_many_is_refused(library: PretendedLibrary) -> None:
    message = "1048592 bytes of workspaces that are kept zero; at most 1048576"
    with pytest.raises(RuntimeError, match=message):
        LargeLauncher(library, MIB + 1)


def test_64_streams_have_large_slots_and_others_memory_in_their_own_order(
    library: PretendedLibrary,
) -> None:
    launch = LargeLauncher(library, 5000)
    addresses = [launch(stream) for stream in range(LARGE_STREAMS)]
    assert_apart(addresses)
    assert library.count("cudaMalloc") == LARGE_STREAMS // 2
    kept = library.cuda.pretended_memory_bytes()
    assert kept == large_bytes(library, LARGE_STREAMS)
    for stream in (LARGE_STREAMS, LARGE_STREAMS + 1):
        assert launch(stream) not in addresses
        assert library.last_launch().memory_bytes == kept + 5008, "until after the launch"
        assert library.cuda.pretended_memory_bytes() == kept
    assert library.count("cudaMallocAsync") == library.count("cudaFreeAsync") == 2
    assert [launch(stream) for stream in range(LARGE_STREAMS)] == addresses
    assert library.count("cudaMalloc") == LARGE_STREAMS // 2


def test_a_handle_that_a_later_stream_got_has_another_large_slot(
    library: PretendedLibrary, large: LargeLauncher
) -> None:
    first = large(1)
    library.cuda.pretended_forget_stream(ctypes.c_uint64(1))
    assert_apart([first, large(1)])


def test_devices_and_contexts_have_large_slots_of_their_own(library: PretendedLibrary) -> None:
    library.reset(devices=2)
    first, second = (LargeLauncher(library, ordinal=ordinal) for ordinal in (0, 1))
    addresses = [first(1), second(1)]
    for device, address in enumerate(addresses):
        assert library.count("cudaMalloc") == 2
        launched = library.launches()[device]
        assert (launched.device, LargeLauncher.address_of(launched)) == (device, address)
    library.cuda.pretended_capture(1, GRAPH)
    addresses += [first(1), second(1)]
    assert [first(1), second(1)] == addresses[2:]
    library.cuda.pretended_end_capture(1)
    assert library.count("cudaMalloc") == 2
    library.cuda.pretended_lose_context(0)
    addresses.append(first(1))
    assert library.count("cudaMalloc") == 3
    assert_apart(addresses)
    assert second(1) == addresses[1]


def test_what_is_captured_on_one_stream_in_one_capture_shares_a_slot(
    library: PretendedLibrary, large: LargeLauncher, capture: Callable[[int, int], None]
) -> None:
    """As many launches as a model has layers. Replays hold no user object, and branches on other
    streams run beside them."""
    outside = large(1)
    capture(1, GRAPH)
    captured = {large(1) for _ in range(100)}
    library.cuda.pretended_join(3, 1)
    branch = {large(3) for _ in range(100)}
    assert {large(1) for _ in range(10)} == captured
    for stream in (1, 3):
        library.cuda.pretended_end_capture(stream)
    assert (len(captured), len(branch)) == (1, 1)
    capture(1, GRAPH)  # its handle may be that of a graph that is gone
    again = large(1)
    library.cuda.pretended_end_capture(1)
    assert_apart([outside, *captured, *branch, again])
    assert ctypes.string_at(again, MIB) == bytes(MIB)
    assert library.count("cudaUserObjectCreate") == 0
    assert large(1) == outside


def test_in_a_capture_the_own_streams_of_threads_are_branches(
    library: PretendedLibrary, large: LargeLauncher, capture: Callable[[int, int], None]
) -> None:
    """All of them have one handle."""
    per_thread = 2  # cudaStreamPerThread
    capture(per_thread, GRAPH)

    def work(_: int) -> None:
        for _ in range(3):
            large.launch(per_thread, *large.tensors)

    in_threads(work, 4)
    assert len(library.launches()) == 4 * 3
    addresses = by_stream(library)[per_thread]
    assert len(addresses) == 4
    assert_apart(addresses)


def test_no_stream_that_is_captured_is_asked_for_its_id(
    library: PretendedLibrary, large: LargeLauncher, capture: Callable[[int, int], None]
) -> None:
    """It would end the capture."""
    large(1)
    capture(1, GRAPH)
    large(1)
    assert library.count("cudaStreamGetId") == 1
    assert library.count("cudaStreamGetCaptureInfo") == 2


def test_small_launches_of_a_capture_have_their_own_beside_large_ones(
    library: PretendedLibrary,
    launch: Launcher,
    large: LargeLauncher,
    capture: Callable[[int, int], None],
) -> None:
    capture(1, GRAPH)
    addresses = [one(1) for _ in range(5) for one in (launch, large)]
    assert len(set(addresses[::2])) == 5
    assert len(set(addresses[1::2])) == 1


def test_large_memory_may_be_allocated_while_something_is_captured(
    library: PretendedLibrary, large: LargeLauncher, capture: Callable[[int, int], None]
) -> None:
    capture(1, GRAPH)
    capture(9, OTHER)
    addresses = [large(stream) for stream in (1, 3, 9)]
    assert_apart(addresses)
    for address in addresses:
        assert ctypes.string_at(address, MIB) == bytes(MIB)
    assert library.count("cudaMallocAsync") == 0


@pytest.fixture
def no_large_kept(large: LargeLauncher, capture: Callable[[int, int], None]) -> list[int]:
    """As many branches are captured as have large slots of their own for good: these."""
    slots = []
    for _ in range(LARGE_BRANCHES):
        capture(1, KEEPING)
        slots.append(large(1))
        large.library.cuda.pretended_end_capture(1)
    large.library.cuda.pretended_destroy(KEEPING)
    assert large.library.count("cudaUserObjectCreate") == 0
    assert_apart(slots)
    return slots


def test_later_branches_give_their_slots_back_with_the_last_of_their_graph(
    library: PretendedLibrary,
    large: LargeLauncher,
    capture: Callable[[int, int], None],
    no_large_kept: list[int],
) -> None:
    capture(1, GRAPH)
    first = large(1)
    library.cuda.pretended_join(3, 1)
    branch = large(3)
    for stream, slot in ((1, first), (3, branch)):
        assert {large(stream) for _ in range(3)} == {slot}
    assert library.count("cudaUserObjectCreate") == 2, "one of each branch"
    assert library.count("cudaGraphRetainUserObject") == 2
    for stream in (1, 3):
        library.cuda.pretended_end_capture(stream)
    library.cuda.pretended_instantiate(GRAPH, EXECUTABLE)
    library.cuda.pretended_destroy(GRAPH)
    capture(1, OTHER)
    beside = large(1)
    library.cuda.pretended_end_capture(1)
    assert_apart([*no_large_kept, first, branch, beside])
    library.cuda.pretended_destroy(EXECUTABLE)
    taken = library.cuda.pretended_memory_bytes()
    capture(1, GRAPH)
    library.cuda.pretended_join(3, 1)
    assert {large(1), large(3)} == {first, branch}
    assert large(1) != large(3)
    assert library.cuda.pretended_memory_bytes() == taken
    assert large(4) not in {first, branch, beside}, "a stream that launches beside them"


@pytest.mark.usefixtures("no_large_kept")
def test_a_branch_is_forgotten_with_its_graph(
    library: PretendedLibrary, large: LargeLauncher, capture: Callable[[int, int], None]
) -> None:
    """Others have its slot by then. No process has a capture's id twice; here it shows what the
    library remembers."""
    capture(1, GRAPH)
    first, first_id = large(1), library.cuda.pretended_captures()
    library.cuda.pretended_end_capture(1)
    library.cuda.pretended_destroy(GRAPH)
    assert large(3) == first
    library.cuda.pretended_set_captures(first_id - 1)
    capture(1, OTHER)
    assert_apart([first, large(1)])
    library.cuda.pretended_set_captures(first_id)


@pytest.mark.usefixtures("no_large_kept")
def test_capturing_large_plans_again_and_again_takes_no_more_memory(
    library: PretendedLibrary, large: LargeLauncher, capture: Callable[[int, int], None]
) -> None:
    for _ in range(100):
        capture(1, GRAPH)
        for _ in range(3):
            large(1)
        library.cuda.pretended_end_capture(1)
        library.cuda.pretended_instantiate(GRAPH, EXECUTABLE)
        library.cuda.pretended_destroy(GRAPH)
        library.cuda.pretended_destroy(EXECUTABLE)
    assert library.cuda.pretended_memory_bytes() == large_bytes(library, LARGE_BRANCHES + 2)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "cudaUserObjectCreate",
        "cudaGraphRetainUserObject",
        "cudaStreamGetCaptureInfo",
        "cudaMalloc",
        "cudaMemsetAsync",
    ],
)
def test_a_capture_goes_on_after_what_failed_with_a_slot_that_is_its_own(
    library: PretendedLibrary,
    large: LargeLauncher,
    capture: Callable[[int, int], None],
    no_large_kept: list[int],
    name: str,
    later: bool,
) -> None:
    """Also where the driver destroys an object that no graph has only after the next launch."""
    kept = library.cuda.pretended_memory_bytes()
    library.cuda.pretended_destroy_later(later)
    capture(1, GRAPH)
    library.fail(name, OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
        large(1)
    own = large(1)
    library.cuda.pretended_destroy_later(False)
    capture(3, OTHER)
    other = large(3)
    assert {large(1) for _ in range(5)} == {own}
    assert_apart([*no_large_kept, own, other])
    assert library.cuda.pretended_memory_bytes() == kept + LARGE_CHUNK_BYTES
    for stream, graph in ((1, GRAPH), (3, OTHER)):
        library.cuda.pretended_end_capture(stream)
        library.cuda.pretended_destroy(graph)
    capture(1, GRAPH)
    capture(3, OTHER)
    assert {large(1), large(3)} == {own, other}, "both came back, once each"
    assert library.cuda.pretended_memory_bytes() == kept + LARGE_CHUNK_BYTES


@pytest.mark.parametrize(
    "name", ["cudaMalloc", "cudaStreamCreateWithFlags", "cudaMemsetAsync", "cudaStreamSynchronize"]
)
@pytest.mark.parametrize("is_captured", [False, True])
def test_no_large_memory_is_an_error_that_uses_nothing_up(
    library: PretendedLibrary,
    large: LargeLauncher,
    capture: Callable[[int, int], None],
    name: str,
    is_captured: bool,
) -> None:
    """Neither memory nor one of the slots that are for good, or of streams."""
    for _ in range(LARGE_BRANCHES):
        if is_captured:
            capture(1, GRAPH)
        library.fail(name, OUT_OF_MEMORY)
        with pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
            large(1)
        library.cuda.pretended_end_capture(1)
    assert library.cuda.pretended_memory_bytes() == 0
    for stream in range(LARGE_BRANCHES):
        if is_captured:
            capture(stream, GRAPH)
        assert ctypes.string_at(large(stream), MIB) == bytes(MIB)
    assert library.count("cudaUserObjectCreate") == library.count("cudaMallocAsync") == 0


def test_a_large_launch_that_is_refused_gives_temporary_memory_back(
    library: PretendedLibrary, large: LargeLauncher
) -> None:
    for stream in range(LARGE_STREAMS):
        large(stream)
    for name in ("cudaLaunchKernel", "cudaMallocAsync", "cudaMemsetAsync"):
        library.fail(name, OUT_OF_MEMORY)
        with pytest.raises(RuntimeError, match=f"{name}: cudaErrorMemoryAllocation"):
            large(LARGE_STREAMS)
        assert library.cuda.pretended_memory_bytes() == large_bytes(library, LARGE_STREAMS)


def by_stream(library: PretendedLibrary) -> dict[int, set[int]]:
    """What launches on each stream were given."""
    found: dict[int, set[int]] = {}
    for launched in library.launches():
        found.setdefault(launched.stream, set()).add(LargeLauncher.address_of(launched))
    return found


def in_threads(work: Callable[[int], None], threads: int = 8) -> None:
    """Lets threads work at once; raises what one of them did."""
    barrier = threading.Barrier(threads)

    def run(thread: int) -> None:
        barrier.wait()
        work(thread)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))


def test_threads_that_launch_large_plans_at_once(
    library: PretendedLibrary, large: LargeLauncher
) -> None:
    """On streams of their own, and on one that all of them use."""
    library.delay("cudaMalloc", 5)

    def work(thread: int) -> None:
        for stream in (1000, 2000 + thread, 1000):
            large.launch(stream, *large.tensors)

    in_threads(work)
    addresses = by_stream(library)
    assert len(addresses) == 9
    assert all(len(found) == 1 for found in addresses.values())
    assert_apart(address for (address,) in addresses.values())


def test_no_thread_has_a_slot_of_the_65th_stream(
    library: PretendedLibrary, large: LargeLauncher
) -> None:
    library.delay("cudaMalloc", 2)

    def work(thread: int) -> None:
        for stream in range(20):
            large.launch(100 * thread + stream, *large.tensors)

    in_threads(work)
    assert library.count("cudaMallocAsync") == 8 * 20 - LARGE_STREAMS
    assert library.count("cudaFreeAsync") == 8 * 20 - LARGE_STREAMS
    in_threads(work)
    assert library.count("cudaMallocAsync") == 2 * (8 * 20 - LARGE_STREAMS)


@pytest.mark.usefixtures("no_large_kept")
def test_threads_that_capture_large_plans_at_once(
    library: PretendedLibrary, large: LargeLauncher
) -> None:
    """Each graphs of its own, some of which it destroys while others capture, and two threads on
    one stream of one capture."""
    library.cuda.pretended_capture(5000, 0x5000)
    library.delay("cudaUserObjectCreate", 1)

    def work(thread: int) -> None:
        stream = 6000 + thread
        for i in range(30):
            graph = 0x10000 + 0x100 * thread + i
            library.cuda.pretended_capture(stream, graph)
            for on in (stream, 5000, stream):
                large.launch(on, *large.tensors)
            library.cuda.pretended_end_capture(stream)
            if i % 2:
                library.cuda.pretended_destroy(graph)

    in_threads(work)
    assert len(by_stream(library)[5000]) == 1
    library.cuda.pretended_end_capture(5000)
    # 15 graphs of each thread live, and 0x5000; each thread had one more at a time.
    live = 8 * 15 + 1
    most = library.cuda.pretended_memory_bytes() - large_bytes(library, LARGE_BRANCHES)
    assert live * MIB <= most <= large_bytes(library, live + 9)
    assert library.count("cudaUserObjectCreate") == 8 * 30 + 1
    beside = {}
    for stream in range(7000, 7150):
        library.cuda.pretended_capture(stream, 0x30000)
        beside[stream] = large(stream)
    assert_apart(beside.values())
