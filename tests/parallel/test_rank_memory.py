"""Memory that ranks copy from each other: GPUs run what hosts ask of them in any order allowed."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith.errors import GroupError  # noqa: E402
from flashsmith.parallel.rank_memory import HostSync, RankMemory  # noqa: E402

SLOT = 64


class Event:
    """Records are numbered: a stream waits for the last one of when it was told to."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0


class Gpu:
    """Of one rank: streams as queues, run by Gpus.run in any order that events allow."""

    def __init__(self, gpus: Gpus, rank: int) -> None:
        self._gpus, self.rank = gpus, rank
        self.streams: dict[str, deque[Callable[[], bool]]] = {"main": deque(), "side": deque()}

    def ask(self, stream: str, work: Callable[[], Any]) -> None:
        with self._gpus.lock:
            self.streams[stream].append(lambda: (work(), True)[1])

    def record(self, stream: str, event: Event) -> None:
        with self._gpus.lock:
            event.recorded += 1
            number = event.recorded
            self.streams[stream].append(lambda: (setattr(event, "reached", number), True)[1])

    def wait(self, stream: str, event: Event) -> None:
        with self._gpus.lock:
            number = event.recorded
            self.streams[stream].append(lambda: event.reached >= number)


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
    """As GpuMemory, of such a GPU."""

    def __init__(self, gpu: Gpu, gpus: Gpus, *, careless: str = "") -> None:
        self._gpu, self._gpus, self._careless = gpu, gpus, careless
        self.memory = torch.zeros(2 * SLOT, dtype=torch.uint8)
        self.written, self.is_read = [Event(), Event()], [Event(), Event()]
        gpus.memories[gpu.rank] = self

    @property
    def _others(self) -> list[Memory]:
        return [it for rank, it in self._gpus.memories.items() if rank != self._gpu.rank]

    def wait_until_read(self, slot: int) -> None:
        for other in self._others:
            if self._careless != "wait_until_read":
                self._gpu.wait("main", other.is_read[slot])

    def publish(self, slot: int) -> None:
        self._gpu.record("main", self.written[slot])

    def begin_reading(self, slot: int) -> None:
        for it in (self, *self._others):
            if self._careless != ("own" if it is self else "theirs"):
                self._gpu.wait("side", it.written[slot])

    def read(self, parts: Any) -> None:
        def work() -> None:
            for rank, there, here, nbytes in parts:
                source = self._gpus.memories[rank].memory
                self.memory[here : here + nbytes] = source[there : there + nbytes]

        self._gpu.ask("side", work)

    def arrived(self) -> Callable[[], None]:
        event = Event()
        self._gpu.record("side", event)
        return lambda: self._gpu.wait("main", event)

    def end_reading(self, slot: int) -> Callable[[], None]:
        event = self.is_read[slot]
        self._gpu.record("side", event)
        return lambda: self._gpu.wait("main", event)


class Meeting:
    """Ranks as threads that say numbers to each other."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._words = threading.Barrier(ranks), [0] * ranks

    def same(self, rank: int) -> Callable[[int], bool]:
        def ask(word: int) -> bool:
            self._words[rank] = word
            self._barrier.wait(20)
            found = len(set(self._words)) == 1
            self._barrier.wait(20)
            return found

        return ask


def wrong_reads(ranks: int, seed: int, careless: str = "") -> int:
    """Transfers of numbers that each rank's kernels write and read; how many they read wrong."""
    gpus, meeting, wrong = Gpus(ranks, seed), Meeting(ranks), []

    def host(rank: int) -> None:
        gpu = gpus.gpus[rank]
        memory = Memory(gpu, gpus, careless=careless)
        peers = RankMemory(HostSync(rank, ranks, meeting.same(rank), lambda: None), memory, SLOT)
        meeting.same(rank)(0)
        others = [it for it in range(ranks) if it != rank]

        def finish() -> None: ...

        for turn in range(8):
            slot = peers.begin()
            found = peers.view(slot, "all", lambda tensor: tensor(0, (ranks,), torch.uint8))

            def write(found: Any = found, turn: int = turn) -> None:
                found[rank] = 16 * rank + turn

            def check(found: Any, turn: int, of: Sequence[int]) -> None:
                wrong.extend(it for it in of if found[it] != 16 * it + turn)

            gpu.ask("main", write)
            peers.offer(slot)
            parts = others[:1], others[1:]
            copies = ([(it, it, it, 1) for it in part] for part in parts)
            arrivals = list(zip(parts, peers.copy(slot, *copies), strict=True))
            # What came by the transfer before may be needed while this one is under way.
            finish()

            def finish(
                found: Any = found, turn: int = turn, arrivals: list[Any] = arrivals
            ) -> None:
                for part, arrived in arrivals:
                    arrived()
                    gpu.ask("main", lambda part=part: check(found, turn, (*part, rank)))

        finish()

    threads = [threading.Thread(target=host, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Only now: no host waits for its GPU.
    gpus.run()
    return len(wrong)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gpus_in_any_order_read_what_was_written(ranks: int) -> None:
    assert sum(wrong_reads(ranks, seed) for seed in range(6)) == 0


@pytest.mark.parametrize("careless", ["wait_until_read", "own", "theirs"])
def test_a_missing_wait_is_seen(careless: str) -> None:
    assert any(wrong_reads(2, seed, careless) for seed in range(40))


def test_ranks_out_of_step_are_an_error() -> None:
    gpus = Gpus(1, 0)
    others = HostSync(0, 2, lambda word: False, lambda: None)
    peers = RankMemory(others, Memory(gpus.gpus[0], gpus), SLOT)
    with pytest.raises(GroupError, match="not at the same transfer"):
        peers.offer(peers.begin())


def test_every_wait_of_a_stream_for_the_others_is_marked() -> None:
    gpus, marks = Gpus(1, 0), []
    gpu = gpus.gpus[0]

    def mark() -> None:
        marks.append(len(gpu.streams["main"]))

    peers = RankMemory(HostSync(0, 2, lambda word: True, mark), Memory(gpu, gpus), SLOT)
    slot = peers.begin()
    peers.offer(slot)
    part = (0, 0, 0, 1)
    arrivals = peers.copy(slot, [part], [], [part])
    assert marks == []
    counts = []
    for arrived in arrivals:
        arrived()
        counts.append(len(gpu.streams["main"]))
    # None for the group that is empty; each when the stream has been told to wait.
    assert marks == [counts[0], counts[2]]
