"""GpuMemory with memory of the host and streams that run at once: what goes where, and what waits
for what. test_rank_memory.py has GPUs that run in any order."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith.errors import LaunchError  # noqa: E402
from flashsmith.parallel import rank_memory  # noqa: E402
from flashsmith.parallel.rank_memory import (  # noqa: E402
    HERE,
    GpuMemory,
    HostSync,
    Place,
    RankMemory,
    RowShape,
    Word,
)
from flashsmith.runtime import driver  # noqa: E402

SLOT, RANKS = 256, 3


class Stream:
    def __init__(self, *_: Any) -> None:
        self.cuda_stream = id(self)
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        assert event.on is not None, "an event that is not recorded"
        self.waits.append(event.on)

    def wait_stream(self, stream: Any) -> None:
        self.waits.append(stream)


class Event:
    on: Any = None

    def record(self, stream: Any) -> None:
        self.on = stream


class Driver:
    """Memory that is allocated, opened by its handle, and freed."""

    def __init__(self) -> None:
        self.allocated: dict[int, Any] = {}
        self.open: list[int] = []
        self.fails = ""
        self.waits: list[tuple[int, int]] = []

    def call(self, what: str, *given: Any) -> None:
        if what == self.fails:
            raise LaunchError(what)
        getattr(self, what)(*given)

    def cuMemAlloc_v2(self, address: Any, nbytes: Any) -> None:
        memory = (ctypes.c_ubyte * nbytes.value)(*[0xAB] * nbytes.value)
        address._obj.value = ctypes.addressof(memory)
        self.allocated[address._obj.value] = memory

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:
        number = address.value.to_bytes(8, "little")
        handle._obj.reserved[:] = list(number.rjust(64, b"h"))

    def cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: int) -> None:
        base._obj.value = int.from_bytes(bytes(handle.reserved)[-8:], "little")
        assert base._obj.value in self.allocated
        self.open.append(base._obj.value)

    def cuIpcCloseMemHandle(self, base: Any) -> None:
        self.open.remove(base.value)

    def cuMemFree_v2(self, address: Any) -> None:
        assert address.value not in self.open
        del self.allocated[address.value]

    def tensor_at(self, address: int, nbytes: int, device: Any) -> Any:
        assert ctypes.sizeof(self.allocated[address]) == nbytes
        return torch.frombuffer(self.allocated[address], dtype=torch.uint8)

    def copy_rows(
        self, to: int, to_step: int, source: int, step: int, width: int, rows: int, *_: Any
    ) -> None:
        for row in range(rows):
            ctypes.memmove(to + row * to_step, source + row * step, width)

    def words(self, written: Any, awaited: Any, *_: Any) -> None:
        for address, value in written:
            ctypes.c_uint32.from_address(address).value = value
        self.waits += awaited

    def check_waits(self) -> None:
        """Streams run at once here, so only what has come in the end can be compared."""
        for address, value in self.waits:
            assert ctypes.c_uint32.from_address(address).value == value, "a stream waits"
        self.waits.clear()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found, main = Driver(), Stream()
    for name in ("call", "copy_rows", "words"):
        monkeypatch.setattr(driver, name, getattr(found, name))
    monkeypatch.setattr(driver, "current_gpu", lambda ordinal: contextlib.nullcontext())
    monkeypatch.setattr(rank_memory, "_tensor_at", found.tensor_at)
    monkeypatch.setattr(rank_memory, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def memories() -> list[GpuMemory]:
    made = [GpuMemory(torch.device("cpu"), rank, RANKS, 2 * SLOT) for rank in range(RANKS)]
    names = [it.name.ljust(rank_memory._NAME, b"\0") for it in made]
    for it in made:
        it.open(names)
    return made


def is_same(word: int) -> bool:
    return True


def test_greetings_show_that_data_and_words_arrive(pretended: Driver) -> None:
    made = memories()
    made[0].greet()
    made[2].greet()
    pretended.check_waits()
    assert [it.check_greetings() for it in made] == [False] * RANKS
    made[1].greet()
    assert [it.check_greetings() for it in made] == [True] * RANKS
    made[0].memory[64 + 48] ^= 1  # the second row from rank 1
    made[1].tell([Word(2, HERE, 0)])
    assert [it.check_greetings() for it in made] == [False, True, False]


def test_each_rank_gets_the_rows_of_the_others_and_its_own(pretended: Driver) -> None:
    made = memories()
    shared = [
        RankMemory(HostSync(rank, RANKS, is_same, lambda stream: None), it, SLOT)
        for rank, it in enumerate(made)
    ]
    rows = RowShape(4, 2, 12, 36)  # of each slot's 64 bytes two rows of 12, a third a rank
    for turn in range(4):
        sources = [torch.randint(256, (2, 12), dtype=torch.uint8) for _ in shared]
        slots = [it.begin() for it in shared]
        waits = []
        for rank, it in enumerate(shared):
            place = Place(sources[rank].data_ptr() + 3, 12 * rank + turn, rows)
            others = [other for other in range(RANKS) if other != rank]
            waits += it.send(slots[rank], [[(to, [place]) for to in others]], [others])
            it.put(slots[rank], [place])
        for wait in waits:
            wait()
        pretended.check_waits()
        for it, slot in zip(made, slots, strict=True):
            assert slot == (turn + 1) % 2
            found = it.memory[slot * SLOT + turn :]
            for rank, source in enumerate(sources):
                for row in range(2):
                    first = 12 * rank + 36 * row
                    assert torch.equal(found[first : first + 4], source[row, 3:7])
            assert it._side.waits[-1] is it.main  # the data are written
            assert it.main.waits[-1] is it._side  # the data are sent


def test_memory_goes_when_no_rank_has_it_open(pretended: Driver) -> None:
    made = memories()
    assert len(pretended.allocated) == RANKS
    assert len(pretended.open) == RANKS * (RANKS - 1)
    for it in made:
        it.leave()
    assert pretended.open == []
    for it in made:
        it.free()
    assert pretended.allocated == {}


def test_memory_that_cannot_be_shared_is_freed(pretended: Driver) -> None:
    pretended.fails = "cuIpcGetMemHandle"
    with pytest.raises(LaunchError):
        memories()
    assert pretended.allocated == {}
