"""Memory through which the ranks on one host copy data to each other.

GPUs copy data with copy engines, which use no SMs. NCCL's kernels would take SMs from attention. A
rank copies its data to a slot in another rank's memory, and then writes a number to a word in that
memory. The other rank's GPU waits for this number. A rank has two slots, which are used
alternately. A transfer has these steps:

    send       The transfer stream waits until the current stream has written the data. It writes to
               the others that the slot of this rank is free: what the current stream did with the
               transfer before last is complete then. For each other rank it waits until that rank's
               slot is free, copies the data there, and then writes to that rank that they are
               there. It may also copy to this rank's own slot.
    wait       The current stream waits for the data of the others. Later it waits until this rank
               has copied its own, so that the memory they came from may be used again. Or else
               PyTorch's allocator keeps that memory.

The numbers only grow, and a GPU waits until a word in its own memory is large enough. Therefore the
hosts need not synchronise. No two GPUs wait for each other: a transfer waits only for what the
ranks do before it, and all ranks make the same transfers in the same order. To check the latter,
ranks compare how many transfers they have made (RankMemory.number) whenever they agree on a call.
If a rank is lost, the GPUs of the other ranks wait forever; the watch (watch.py) handles this case.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from flashsmith.errors import FlashsmithError, GroupError
from flashsmith.runtime import driver

# The largest slot in bytes; for larger transfers, the group's backend is used.
MOST = 256 << 20
# The size of a slot is a multiple of this, so that slots rarely have to grow.
_STEP = 16 << 20
# The size in bytes of the message in which a rank describes its memory to the others.
_NAME = 512
# A rank has two words for each other rank: the number of the transfer for which that rank's slot is
# free, and the number of the last group of data that has arrived from that rank.
FREE, HERE = 0, 1


class HostSync(NamedTuple):
    """The functions by which the ranks' host processes synchronise."""

    rank: int
    size: int
    same: Callable[[int], bool]  # whether all ranks have this number; raises GroupError
    mark: Callable[[Any], None]  # marks a stream: see Watch.mark()


class RowShape(NamedTuple):
    """Rows of bytes at equal distances, in a tensor and in a slot of a rank."""

    width: int
    number: int = 1
    step: int = 0  # From one row to the next in the tensor
    slot_step: int = 0


class Place(NamedTuple):
    """Rows to copy: the address at which they begin in this rank's memory, the offset at which they
    begin in a slot, and their shape."""

    address: int
    offset: int
    rows: RowShape


class Word(NamedTuple):
    """A word through which this rank and rank ``rank`` synchronise, and a value for it."""

    rank: int
    kind: int
    value: int


# For each rank to which data are sent, the data's places.
Sent = Sequence[tuple[int, Sequence[Place]]]


class RankMemory:
    """The memory of all ranks of a group, as one of the ranks uses it.

    All ranks must make the same calls. ``number`` counts the transfers so far.
    """

    def __init__(self, others: HostSync, memory: Any, capacity: int) -> None:
        self.rank, self.size, self.capacity = others.rank, others.size, capacity
        self.number = 0
        self._host, self._memory = others, memory
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._views: tuple[dict[Any, Any], ...] = ({}, {})

    @staticmethod
    def shared(
        others: HostSync, device: Any, nbytes: int, exchange: Callable[[bytes], bytes]
    ) -> RankMemory | None:
        """Creates slots of at least ``nbytes`` bytes; all ranks must call this.

        Tests whether every rank can write data and words to the other ranks' memory; returns None
        if not. ``exchange`` sends bytes to all ranks, and returns the bytes from all ranks in the
        order of ranks.
        """
        capacity = -(-max(nbytes, 1) // _STEP) * _STEP
        memory, name = None, b""
        try:
            memory = MEMORIES[device.type](device, others.rank, others.size, 2 * capacity)
            name = memory.name
        except (KeyError, FlashsmithError, RuntimeError, AttributeError):
            pass
        given = exchange(name.ljust(_NAME, b"\0"))
        names = [given[at : at + _NAME] for at in range(0, len(given), _NAME)]
        works = False
        if memory is not None and all(name.strip(b"\0") for name in names):
            works = _tried(lambda: (memory.open(names), memory.greet()))
        all_work = exchange(bytes([works])) == b"\1" * others.size
        works = memory is not None and all_work and _tried(memory.check_greetings)
        if exchange(bytes([works])) == b"\1" * others.size:
            return RankMemory(others, memory, capacity)
        if memory is not None:
            memory.leave()
        exchange(b"\0")  # No rank has it open
        if memory is not None:
            memory.free()
        return None

    def close(self) -> None:
        """Frees the memory; all ranks must call this."""
        self._memory.leave()
        if not self._host.same(-1 - self.number):  # No rank has it open
            raise GroupError("group: the ranks are not at the same transfer of one call")
        self._memory.free()

    def begin(self) -> int:
        """Begins a transfer, and returns its slot.

        From here on, the current stream may write to the slot, and must no longer use the data of
        the transfer before last.
        """
        self.number += 1
        self._memory.begin()
        return self.number % 2

    def view(self, slot: int, key: Hashable, make: Callable[[Callable[..., Any]], Any]) -> Any:
        """The result of ``make``, which is cached under ``key``.

        ``make`` is called with a function that takes an offset in bytes, a shape and a dtype, and
        returns a tensor in the slot.
        """
        views = self._views[slot]
        if key not in views:
            if len(views) >= 64:
                views.clear()
            memory, first = self._memory.memory, slot * self.capacity

            def tensor(offset: int, shape: Sequence[int], dtype: Any) -> Any:
                nbytes = dtype.itemsize
                for extent in shape:
                    nbytes *= extent
                return memory[first + offset : first + offset + nbytes].view(dtype).view(shape)

            views[key] = make(tensor)
        return views[key]

    def put(self, slot: int, places: Sequence[Place]) -> None:
        """Copies to this rank's own slot, on the current stream."""
        self._memory.put(slot * self.capacity, places)

    def send(
        self,
        slot: int,
        sent: Sequence[Sent],
        come: Sequence[Sequence[int]],
        kept: Sequence[Any] = (),
        own: Sequence[Place] = (),
    ) -> list[Callable[[], None]]:
        """Sends groups of data, one group after the other.

        Must be called exactly once for each transfer.

        ``sent`` lists what this rank sends in each group, ``come`` lists the ranks that send each
        group to this rank, and ``own`` lists what this rank copies to its own slot after sending.
        Returns one function for each group, which makes the current stream wait until the group has
        arrived, and a last function, which makes the current stream wait until everything is sent.
        With ``own``, the function of the last group also waits for the copies to this rank's slot.
        If the tensors that are sent are passed as ``kept``, the last function waits for nothing:
        the allocator keeps their memory until everything is sent, and they must not be overwritten.
        """
        memory, first, is_free = self._memory, slot * self.capacity, set[int]()
        memory.begin_sending()
        # Words are written in the same driver call as the next wait.
        told = [Word(rank, FREE, self.number) for rank in self._others]
        for group, of_ranks in enumerate(sent):
            for rank, places in of_ranks:
                memory.tell(told, () if rank in is_free else (Word(rank, FREE, self.number),))
                is_free.add(rank)
                memory.send(rank, first, places)
                told = [Word(rank, HERE, self._word(group))]
        memory.tell(told)
        if own:
            memory.send(self.rank, first, own)
        last = has_sent = _nothing_to_wait_for
        if kept:
            self._host.mark(memory.keep(kept))
        elif own:
            last = memory.end_sending()
        elif is_free:
            has_sent = functools.partial(self._wait, (), 0, memory.end_sending())
        ends = [_nothing_to_wait_for] * (len(come) - 1) + [last]
        waits = [
            functools.partial(self._wait, ranks, self._word(group), end)
            for group, (ranks, end) in enumerate(zip(come, ends, strict=True))
        ]
        return [*waits, has_sent]

    def _word(self, group: int) -> int:
        return 2 * self.number + group

    def _wait(self, ranks: Sequence[int], word: int, also: Callable[[], None]) -> None:
        if ranks:
            self._memory.wait([Word(rank, HERE, word) for rank in ranks])
        also()
        if ranks or also is not _nothing_to_wait_for:
            self._host.mark(self._memory.main)


def _nothing_to_wait_for() -> None: ...


def _tried(work: Callable[[], object]) -> bool:
    """Calls ``work``; returns whether it raised no error and returned something other than
    False."""
    try:
        return work() is not False
    except (FlashsmithError, RuntimeError, AttributeError):
        return False


_streams: dict[Any, Any] = {}


def transfer_stream(device: Any) -> Any:
    """The stream for transfers of a GPU. On this stream, transfers need not wait for kernels of
    this GPU."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class _IpcMemHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


_LAZY_PEER_ACCESS = 1
# The distance in bytes from one word to the next.
_WORD = 64


class _Address:
    """Device memory that PyTorch can use as a tensor through ``__cuda_array_interface__``."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, nbytes: int, device: Any) -> Any:
    """A tensor of bytes over the memory at an address of a GPU."""
    found = torch.as_tensor(_Address(address, nbytes), device=device)
    if found.data_ptr() != address:
        raise RuntimeError("PyTorch has copied the memory")
    return found


class GpuMemory:
    """Memory of this rank's GPU, and memory of the other ranks' GPUs, which CUDA's IPC handles make
    accessible.

    ``memory`` has ``nbytes`` bytes for slots. The words are stored after the slots. ``main`` is the
    stream that was current when the last transfer began.
    """

    def __init__(self, device: Any, rank: int, size: int, nbytes: int) -> None:
        self._device, self._rank, self._size = device, rank, size
        self._ordinal, self._words = device.index, nbytes
        address, total = ctypes.c_uint64(), nbytes + 2 * size * _WORD
        with driver.current_gpu(self._ordinal):
            driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(total))
        self._address = address.value
        try:
            self.name = self._handle()
            whole = _tensor_at(self._address, total, device)
        except BaseException:
            self.free()
            raise
        self.memory, self._all_words = whole[:nbytes], whole[nbytes:]
        self._all_words.zero_()
        torch.cuda.synchronize(device)  # Before another rank writes there
        self._bases: list[int] = []
        self._side = transfer_stream(device)
        self.main = torch.cuda.current_stream(device)
        self._ready, self._sent = torch.cuda.Event(), torch.cuda.Event()

    def _handle(self) -> bytes:
        handle = _IpcMemHandle()
        with driver.current_gpu(self._ordinal):
            driver.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._address))
        return bytes(handle.reserved)

    def open(self, names: Sequence[bytes]) -> None:
        for rank, name in enumerate(names):
            if rank == self._rank:
                self._bases.append(self._address)
                continue
            base = ctypes.c_uint64()
            handle = _IpcMemHandle.from_buffer_copy(name[:64])
            with driver.current_gpu(self._ordinal):
                driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, _LAZY_PEER_ACCESS)
            self._bases.append(base.value)

    def greet(self) -> None:
        """Sends each rank two rows of data and a word, as transfers do, and waits until they have
        arrived."""
        data = torch.tensor([self._rank + 1] * 64, dtype=torch.uint8, device=self._device)
        self.begin()
        self.begin_sending()
        for rank in range(self._size):
            place = Place(data.data_ptr(), 64 * self._rank, RowShape(16, 2, 32, 48))
            self.send(rank, 0, [place])
            self.tell([Word(rank, HERE, 1)])
        self.wait([Word(self._rank, HERE, 1)])
        torch.cuda.synchronize(self._device)

    def check_greetings(self) -> bool:
        """Whether the test data from all ranks are right. The data must have arrived before the
        call."""
        words = self._all_words.view(torch.int32)[:: _WORD // 4].view(self._size, 2)[:, HERE]
        rows = self.memory[: 64 * self._size].view(self._size, 64)
        expected = torch.arange(1, self._size + 1)[:, None]
        came = torch.cat([rows[:, :16], rows[:, 48:]], 1).cpu()
        return bool((words.cpu() == 1).all() and (came == expected).all())

    def leave(self) -> None:
        """Waits for the streams of this rank, and closes the other ranks' memory."""
        torch.cuda.synchronize(self._device)
        with driver.current_gpu(self._ordinal):
            for rank, base in enumerate(self._bases):
                if rank != self._rank:
                    driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(base))

    def free(self) -> None:
        with driver.current_gpu(self._ordinal):
            driver.call("cuMemFree_v2", ctypes.c_uint64(self._address))

    def begin(self) -> None:
        main = torch.cuda.current_stream(self._device)
        if main != self.main:
            # Kernels on the previous stream use the slots too.
            main.wait_stream(self.main)
            self.main = main

    def begin_sending(self) -> None:
        self._ready.record(self.main)
        self._side.wait_event(self._ready)

    def end_sending(self) -> Callable[[], None]:
        """Returns a function that makes the current stream wait until everything is sent."""
        self._sent.record(self._side)
        return functools.partial(self.main.wait_event, self._sent)

    def keep(self, tensors: Sequence[Any]) -> Any:
        """Makes the allocator keep the memory of tensors until everything is sent; returns the
        stream of transfers."""
        for tensor in tensors:
            tensor.record_stream(self._side)
        return self._side

    def put(self, first: int, places: Sequence[Place]) -> None:
        self._copy(self._rank, first, places, self.main)

    def send(self, rank: int, first: int, places: Sequence[Place]) -> None:
        self._copy(rank, first, places, self._side)

    def _copy(self, rank: int, first: int, places: Sequence[Place], on: Any) -> None:
        base, stream, ordinal = self._bases[rank] + first, on.cuda_stream, self._ordinal
        for address, offset, (width, number, step, slot_step) in places:
            driver.copy_rows(
                base + offset, slot_step, address, step, width, number, ordinal, stream
            )

    def tell(self, words: Sequence[Word], awaited: Sequence[Word] = ()) -> None:
        """Enqueues writes of words in other ranks' memory on the stream of transfers, which then
        waits for the words ``awaited`` of this rank."""
        at = self._words + 2 * self._rank * _WORD
        written = [(self._bases[it.rank] + at + it.kind * _WORD, it.value) for it in words]
        driver.words(written, self._own(awaited), self._ordinal, self._side.cuda_stream)

    def wait(self, words: Sequence[Word]) -> None:
        """Makes the stream ``main`` wait until words of this rank have the given values."""
        driver.words((), self._own(words), self._ordinal, self.main.cuda_stream)

    def _own(self, words: Sequence[Word]) -> list[tuple[int, int]]:
        first = self._address + self._words
        return [(first + (2 * it.rank + it.kind) * _WORD, it.value) for it in words]


# By device type.
MEMORIES: dict[str, Any] = {"cuda": GpuMemory}
