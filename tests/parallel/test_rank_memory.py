"""Memory to which ranks copy: GPUs run what hosts ask of them in any order allowed."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith.errors import LaunchError  # noqa: E402
from flashsmith.parallel import causal_allgather, rank_memory  # noqa: E402
from flashsmith.parallel.rank_memory import (  # noqa: E402
    FREE,
    HERE,
    HostSync,
    Place,
    RankMemory,
    RowShape,
    Word,
)

SLOT = 256
# Bytes of a message, in rows of two bytes: so a GPU may stop in the middle of one.
MESSAGE = RowShape(2, 4, 2, 2)
SIZE = 8
TURNS = 8


class Event:
    """Records are numbered: a stream waits for the last one of when it was told to."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0


class Gpu:
    """Of one rank: streams as queues, run by Gpus.run in any order that waits allow."""

    def __init__(self, gpus: Gpus, rank: int) -> None:
        self._gpus, self.rank = gpus, rank
        self.streams: dict[str, deque[Callable[[], bool]]] = {"main": deque(), "side": deque()}

    def ask(self, stream: str, work: Callable[[], Any]) -> None:
        self.wait_until(stream, lambda: (work(), True)[1])

    def wait_until(self, stream: str, is_reached: Callable[[], bool]) -> None:
        with self._gpus.lock:
            self.streams[stream].append(is_reached)

    def record(self, stream: str, event: Event) -> None:
        event.recorded += 1
        number = event.recorded
        self.ask(stream, lambda: setattr(event, "reached", number))

    def wait(self, stream: str, event: Event) -> None:
        number = event.recorded
        self.wait_until(stream, lambda: event.reached >= number)


class Gpus:
    def __init__(self, ranks: int, seed: int) -> None:
        self.lock, self._random = threading.Lock(), random.Random(seed)
        self.memories: dict[int, Memory] = {}
        self.gpus = [Gpu(self, rank) for rank in range(ranks)]

    def run(self) -> None:
        """Until all queues are empty; each time the first one that can go on, for some steps."""
        queues = [queue for gpu in self.gpus for queue in gpu.streams.values()]
        while any(queues):
            self._random.shuffle(queues)
            moved = False
            for queue in queues:
                steps = self._random.randint(1, 12)
                while queue and steps and queue[0]():
                    queue.popleft()
                    moved, steps = True, steps - 1
                if moved:
                    break
            assert moved, "streams wait for each other"


class Memory:
    """As GpuMemory, of such a GPU; ``careless`` names what it leaves out."""

    main = "main"

    def __init__(
        self, gpu: Gpu, gpus: Gpus, *, careless: str = "", one_queue: bool = False
    ) -> None:
        self._gpu, self._gpus, self._careless = gpu, gpus, careless
        self._side = "main" if one_queue else "side"
        self.memory = torch.zeros(2 * SLOT, dtype=torch.uint8)
        self.words = {(rank, kind): 0 for rank in range(len(gpus.gpus)) for kind in (FREE, HERE)}
        self._ready, self._sent = Event(), Event()
        gpus.memories[gpu.rank] = self

    def begin(self) -> None: ...

    def begin_sending(self) -> None:
        self._gpu.record("main", self._ready)
        if self._careless != "sources":
            self._gpu.wait(self._side, self._ready)

    def end_sending(self) -> Callable[[], None]:
        self._gpu.record(self._side, self._sent)
        return lambda: None if self._careless == "sent" else self._gpu.wait("main", self._sent)

    def keep(self, tensors: Any) -> str:
        return self._side

    def put(self, first: int, places: Any) -> None:
        self._copy("main", self._gpu.rank, first, places)

    def send(self, rank: int, first: int, places: Any) -> None:
        self._copy(self._side, rank, first, places)

    def _copy(self, stream: str, rank: int, first: int, places: Any) -> None:
        for address, offset, rows in places:
            for row in range(rows.number):
                source, to = address + row * rows.step, first + offset + row * rows.slot_step

                def work(source: int = source, to: int = to, width: int = rows.width) -> None:
                    base = self._gpus.memories[rank].memory.data_ptr()
                    ctypes.memmove(base + to, source, width)

                self._gpu.ask(stream, work)

    def tell(self, words: Sequence[Word], awaited: Sequence[Word] = ()) -> None:
        for told in words:

            def work(told: Word = told) -> None:
                of_other = self._gpus.memories[told.rank].words
                assert of_other[self._gpu.rank, told.kind] < told.value
                of_other[self._gpu.rank, told.kind] = told.value

            self._gpu.ask(self._side, work)
        if self._careless != "free":
            self._await(self._side, awaited)

    def wait(self, words: Sequence[Word]) -> None:
        if self._careless != "here":
            self._await("main", words)

    def _await(self, stream: str, words: Sequence[Word]) -> None:
        for rank, kind, value in words:
            self._gpu.wait_until(
                stream, lambda at=(rank, kind), value=value: self.words[at] >= value
            )


def is_same(word: int) -> bool:
    return True


def wrong_reads(
    ranks: int,
    seed: int,
    careless: str = "",
    *,
    one_queue: bool = False,
    kept: bool = False,
    beside: bool = False,
) -> int:
    """Transfers of numbers that each rank's kernels write and read; how many they read wrong.

    A message has the number of its rank, its turn, and its group. The memory from which it is sent
    is used again once the stream has been told to wait until it is sent, or never if it is kept.
    Its own data come by the stream of transfers if ``beside`` is given.
    """
    gpus, wrong = Gpus(ranks, seed), list[int]()
    memories = [Memory(gpu, gpus, careless=careless, one_queue=one_queue) for gpu in gpus.gpus]

    sources = torch.zeros(ranks, TURNS, 2 * SIZE, dtype=torch.uint8)

    def number(of: int, turn: int, group: int) -> int:
        return 64 * of + 4 * turn + group

    def host(rank: int) -> None:
        gpu = gpus.gpus[rank]
        peers = RankMemory(
            HostSync(rank, ranks, is_same, lambda stream: None), memories[rank], SLOT
        )
        others = [it for it in range(ranks) if it != rank]
        groups = [it for it in others if it > rank], [it for it in others if it < rank]

        def finish() -> None: ...

        for turn in range(TURNS):
            slot = peers.begin()
            found = peers.view(slot, "all", lambda tensor: tensor(0, (ranks, SIZE), torch.uint8))
            source = sources[rank, turn if kept else turn % 2]

            def write(source: Any = source, turn: int = turn) -> None:
                for group, half in enumerate(source.chunk(2)):
                    half.fill_(number(rank, turn, group))

            def check(found: Any, turn: int, group: int, of: Sequence[int]) -> None:
                wrong.extend(
                    it for it in of if set(found[it].tolist()) != {number(it, turn, group)}
                )

            gpu.ask("main", write)
            sent = [
                [(it, [Place(source.data_ptr() + group * SIZE, rank * SIZE, MESSAGE)]) for it in to]
                for group, to in enumerate(groups)
            ]
            come = groups[::-1]
            own = [Place(source.data_ptr(), rank * SIZE, MESSAGE)]
            *waits, has_sent = peers.send(
                *(slot, sent, come), kept=[source] if kept else (), own=own if beside else ()
            )
            if not beside:
                peers.put(slot, own)
            # What came by the transfer before may be needed while this one is under way.
            if turn % 2:
                finish()

            def finish(
                found: Any = found,
                turn: int = turn,
                waits: Any = waits,
                come: Any = come,
                has_sent: Any = has_sent,
            ) -> None:
                for group, wait in enumerate(waits):
                    wait()
                    of = come[group]
                    gpu.ask("main", lambda group=group, of=of: check(found, turn, group, of))
                has_sent()
                gpu.ask("main", lambda: check(found, turn, 0, [rank]))

            if turn % 2:
                finish()

    threads = [threading.Thread(target=host, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Only now: no host waits for its GPU, or for another host.
    gpus.run()
    return len(wrong)


@pytest.mark.parametrize("how", [{}, {"kept": True}, {"beside": True}])
@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gpus_in_any_order_read_what_was_sent(
    ranks: int, one_queue: bool, how: dict[str, bool]
) -> None:
    found = [wrong_reads(ranks, seed, one_queue=one_queue, **how) for seed in range(4)]
    assert sum(found) == 0


@pytest.mark.parametrize("careless", ["sources", "sent", "free", "here"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_missing_wait_is_seen(careless: str, beside: bool) -> None:
    assert any(wrong_reads(2, seed, careless, beside=beside) for seed in range(40))


def test_every_wait_of_a_stream_for_the_others_is_marked() -> None:
    gpus, marks = Gpus(2, 0), list[tuple[Any, int]]()
    gpu = gpus.gpus[0]

    def mark(stream: Any) -> None:
        marks.append((stream, len(gpu.streams[stream])))

    peers = RankMemory(HostSync(0, 2, is_same, mark), Memory(gpu, gpus), SLOT)
    source = torch.zeros(SIZE, dtype=torch.uint8)
    some = [(1, [Place(source.data_ptr(), 0, MESSAGE)])]
    kept: dict[str, Any] = {"kept": (source,)}
    own: dict[str, Any] = {"own": some[0][1]}
    for sent, come, how, marked in (
        ([some, []], [[], []], {}, [False, False, True]),
        ([[], []], [[1], [1]], {}, [True, True, False]),
        ([[], []], [[1], []], {}, [True, False, False]),
        ([some], [[]], kept, [False, False]),
        ([some], [[1]], kept, [True, False]),
        ([some, []], [[], []], own, [False, True, False]),
        ([[], some], [[], [1]], own, [False, True, False]),
    ):
        marks.clear()
        waits = peers.send(peers.begin(), sent, come, **how)
        # When the stream of transfers has been told to wait, if no other stream waits for it.
        assert marks == [("side", len(gpu.streams["side"]))] * (how is kept)
        for wait, is_marked in zip(waits, marked, strict=True):
            marks.clear()
            wait()
            assert marks == [("main", len(gpu.streams["main"]))] * is_marked


class Tried(Memory):
    """What ``fails`` raises an error; a greeting that is ``lost`` does not come."""

    calls: ClassVar[list[str]] = []
    fails, lost = "", False
    name = b"name"

    def __init__(self, *given: Any) -> None:
        gpus = Gpus(2, 0)
        super().__init__(gpus.gpus[0], gpus)
        self._note("make")

    def _note(self, what: str) -> None:
        self.calls.append(what)
        if self.fails == what:
            raise LaunchError(what)

    def open(self, names: Any) -> None:
        self._note("open")

    def greet(self) -> None:
        self._note("greet")

    def check_greetings(self) -> bool:
        self._note("check")
        return not self.lost

    def leave(self) -> None:
        self._note("leave")

    def free(self) -> None:
        self._note("free")


@pytest.mark.parametrize(
    ("fails", "lost", "other_fails", "calls"),
    [
        ("", False, "", ["make", "open", "greet", "check"]),
        ("make", False, "", ["make"]),
        ("open", False, "", ["make", "open", "leave", "free"]),
        ("greet", False, "", ["make", "open", "greet", "leave", "free"]),
        ("", True, "", ["make", "open", "greet", "check", "leave", "free"]),
        ("", False, "name", ["make", "leave", "free"]),
        ("", False, "greet", ["make", "open", "greet", "leave", "free"]),
        ("", False, "check", ["make", "open", "greet", "check", "leave", "free"]),
    ],
)
def test_memory_that_does_not_work_on_all_ranks_is_not_used(
    fails: str, lost: bool, other_fails: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are those of both ranks; the messages of the other are planted."""
    monkeypatch.setattr(Tried, "calls", [])
    monkeypatch.setattr(Tried, "fails", fails)
    monkeypatch.setattr(Tried, "lost", lost)
    monkeypatch.setitem(rank_memory.MEMORIES, "cpu", Tried)
    steps = iter(["name", "greet", "check", "leave"])

    def exchange(mine: bytes) -> bytes:
        step = next(steps)
        theirs = b"name" if step == "name" else b"\1"
        failed = ["name", "greet", "check"].index(other_fails or "check")
        if other_fails and step != "leave" and ["name", "greet", "check"].index(step) >= failed:
            theirs = b"\0"
        return mine + theirs.ljust(len(mine), b"\0")

    others = HostSync(0, 2, is_same, lambda stream: None)
    found = RankMemory.shared(others, torch.device("cpu"), 1, exchange)
    assert (found is not None) == (calls[-1] == "check")
    assert Tried.calls == calls
    assert list(steps) == (["leave"] if found is not None else [])


@pytest.mark.parametrize("of", [0, 1])
def test_copies_of_keys_are_kept_until_they_are_sent(of: int) -> None:
    """The allocator may give the memory of a copy to the next kernel as soon as nobody holds it."""

    class Peers:
        size, rank = 2, of
        sent: ClassVar[list[int]] = []

        def begin(self) -> int:
            return 0

        def view(self, slot: int, key: Any, make: Callable[..., Any]) -> Any:
            return make(lambda offset, shape, dtype: torch.empty(shape, dtype=dtype))

        def send(self, slot: int, sent: Any, come: Any, own: Any = ()) -> list[Callable[[], None]]:
            self.sent += [address for group in sent for _, its in group for address, *_ in its]
            return [lambda: None] * 3

        def put(self, slot: int, places: Any) -> None: ...

    qkv = torch.randn(1, 8, 3, 2, 16)
    peers: Any = Peers()
    keys = causal_allgather._copy_keys(peers, qkv[:, :, 1], qkv[:, :, 2])
    assert all(it.is_contiguous() for it in keys.sent)
    assert {it.data_ptr() for it in keys.sent} <= set(peers.sent)
