"""Memory that the ranks of one host copy from each other: GPUs by their copy engines, which take
nothing of the SMs that kernels run on, and need no kernel's place on them as NCCL's do.

A rank writes what the others are to have into a slot of its own memory, says so on the board, and
copies what it needs from theirs. There are two slots, used by turns:

    begin      the current stream waits until nobody copies from the slot any more
    offer      an event follows what has been written; the ranks meet on the board, so that each
               has recorded its event before another's stream is told to wait for it
    copy       on the stream of transfers, behind the events of all; one follows that the current
               stream waits for, and the others' begin() after next

No GPU waits for an event that is yet to be recorded: a rank that does not come is missed on the
board, by the host, within the group's timeout. What is recorded may still never happen, as when a
process is killed whose GPU had work to do: for that there is the watch (watch.py).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from flashsmith.errors import FlashsmithError, GroupError
from flashsmith.runtime import driver

# Bytes of a slot up to which memory is kept for this; more is left to the group's backend.
MOST = 256 << 20
# What slots grow by, so that they seldom do.
_STEP = 16 << 20
# Of what a rank tells the others about its memory.
_NAME = 512


class Others(NamedTuple):
    """How one rank gets on with the others of its group, over the host."""

    rank: int
    size: int
    same: Callable[[int], bool]  # whether all say this number; raises GroupError
    mark: Callable[[], None]  # the current stream has been told to wait for the others


class Peers:
    """One rank's view of the memory of all ranks of a group. Every rank makes the same calls."""

    def __init__(self, others: Others, memory: Any, capacity: int) -> None:
        self.rank, self.size, self.capacity = others.rank, others.size, capacity
        self._others, self._memory, self._number = others, memory, 0
        self._views: tuple[dict[Any, Any], ...] = ({}, {})

    @staticmethod
    def shared(
        others: Others, device: Any, nbytes: int, exchange: Callable[[bytes], bytes]
    ) -> Peers | None:
        """Slots of at least so many bytes; None where a rank's memory cannot be read by all. All
        ranks call this. ``exchange`` gives as many bytes to each, and all of them, by rank."""
        capacity = -(-max(nbytes, 1) // _STEP) * _STEP
        memory, name = None, b""
        try:
            memory = MEMORIES[device.type](device, others.rank, 2 * capacity)
            name = memory.name
        except (KeyError, FlashsmithError, RuntimeError):
            pass
        given = exchange(name.ljust(_NAME, b"\0"))
        names = [given[at : at + _NAME] for at in range(0, len(given), _NAME)]
        opened = False
        if memory is not None and all(name.strip(b"\0") for name in names):
            try:
                memory.open(names)
                opened = True
            except (FlashsmithError, RuntimeError):
                pass
        if exchange(bytes([opened])) == b"\1" * others.size:
            return Peers(others, memory, capacity)
        if memory is not None:
            memory.leave()
        exchange(b"\0")  # nobody has it open
        if memory is not None:
            memory.free()
        return None

    def close(self) -> None:
        """Gives the memory back. All ranks call this."""
        self._memory.leave()
        self._meet()  # nobody has it open
        self._memory.free()

    def begin(self) -> int:
        """The slot of the next transfer, for the current stream to write to."""
        self._number += 1
        slot = self._number % 2
        self._memory.wait_until_read(slot)
        return slot

    def view(self, slot: int, key: Hashable, make: Callable[[Callable[..., Any]], Any]) -> Any:
        """``make``'s result, kept by ``key``; it is given a function of an offset in bytes, a shape
        and a dtype, to a tensor in the slot."""
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

    def offer(self, slot: int) -> None:
        """What the current stream has written to the slot is there for the others, and theirs for
        copy(). Raises GroupError where a rank does not come."""
        self._memory.publish(slot)
        self._meet()

    def _meet(self) -> None:
        if not self._others.same(-1 - self._number):
            raise GroupError("group: the ranks are not at the same transfer of one call")

    def copy(
        self, slot: int, *groups: Sequence[tuple[int, int, int, int]]
    ) -> list[Callable[[], None]]:
        """Copies groups of parts one after another: of a rank's slot, from an offset to one of this
        slot, so many bytes. The results have the current stream wait for a group and those before.
        To be called once for each transfer."""
        first, memory = slot * self.capacity, self._memory
        memory.begin_reading(slot)
        arrivals: list[Callable[[], None]] = []
        last = max((place for place, parts in enumerate(groups) if parts), default=0)
        for place, parts in enumerate(groups):
            if parts:
                memory.read(
                    [
                        (rank, first + there, first + here, nbytes)
                        for rank, there, here, nbytes in parts
                    ]
                )
            if place == last:
                arrivals.append(self._marked(memory.end_reading(slot)))
            elif parts:
                arrivals.append(self._marked(memory.arrived()))
            else:
                arrivals.append(_nothing_to_wait_for)
        return arrivals

    def _marked(self, wait: Callable[[], None]) -> Callable[[], None]:
        def wait_and_mark() -> None:
            wait()
            self._others.mark()

        return wait_and_mark


def _nothing_to_wait_for() -> None: ...


_streams: dict[Any, Any] = {}


def transfer_stream(device: Any) -> Any:
    """The stream that a GPU's transfers wait on, so that they need not wait for its kernels."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class _IpcMemHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


_LAZY_PEER_ACCESS = 1


class _Address:
    """Memory as PyTorch takes it in: ``__cuda_array_interface__``."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class GpuMemory:
    """Of this rank's GPU, and of the others' by CUDA's handles between processes."""

    def __init__(self, device: Any, rank: int, nbytes: int) -> None:
        self._device, self._rank = device, rank
        self._ordinal = device.index
        address, handle = ctypes.c_uint64(), _IpcMemHandle()
        with driver.current_gpu(self._ordinal):
            driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
            self._address = address.value
            driver.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.memory = torch.as_tensor(_Address(self._address, nbytes), device=device)
        if self.memory.data_ptr() != self._address:
            raise RuntimeError("PyTorch has copied the memory")
        self._bases: list[int] = []
        self._side = transfer_stream(device)
        self._main = torch.cuda.current_stream(device)
        # Of each slot: after this rank has written, and after it has copied from the others.
        self._written, self._read = (
            [torch.cuda.Event(interprocess=True) for _ in range(2)] for _ in range(2)
        )
        for event in (*self._written, *self._read):
            event.record(self._main)
        events = b"".join(event.ipc_handle() for event in (*self._written, *self._read))
        self.name = bytes(handle.reserved) + events

    def open(self, names: Sequence[bytes]) -> None:
        self._their_written: list[list[Any]] = [[], []]
        self._their_read: list[list[Any]] = [[], []]
        for rank, name in enumerate(names):
            if rank == self._rank:
                self._bases.append(self._address)
                continue
            base = ctypes.c_uint64()
            handle = _IpcMemHandle.from_buffer_copy(name[:64])
            with driver.current_gpu(self._ordinal):
                driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, _LAZY_PEER_ACCESS)
            self._bases.append(base.value)
            for place, events in enumerate((*self._their_written, *self._their_read), 1):
                its = name[64 * place : 64 * (place + 1)]
                events.append(torch.cuda.Event.from_ipc_handle(self._device, its))

    def leave(self) -> None:
        """Waits for this rank's streams, and closes the others' memory."""
        torch.cuda.synchronize(self._device)
        with driver.current_gpu(self._ordinal):
            for rank, base in enumerate(self._bases):
                if rank != self._rank:
                    driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(base))

    def free(self) -> None:
        with driver.current_gpu(self._ordinal):
            driver.call("cuMemFree_v2", ctypes.c_uint64(self._address))

    def wait_until_read(self, slot: int) -> None:
        main = torch.cuda.current_stream(self._device)
        if main != self._main:
            # Kernels of the stream before read the slots, too.
            main.wait_stream(self._main)
            self._main = main
        for event in self._their_read[slot]:
            main.wait_event(event)

    def publish(self, slot: int) -> None:
        self._written[slot].record(self._main)

    def begin_reading(self, slot: int) -> None:
        self._side.wait_event(self._written[slot])
        for event in self._their_written[slot]:
            self._side.wait_event(event)

    def read(self, parts: Sequence[tuple[int, int, int, int]]) -> None:
        stream = self._side.cuda_stream
        for rank, there, here, nbytes in parts:
            driver.copy(
                self._address + here, self._bases[rank] + there, nbytes, self._ordinal, stream
            )

    def arrived(self) -> Callable[[], None]:
        """After what has been read so far."""
        event = torch.cuda.Event()
        event.record(self._side)
        return functools.partial(self._main.wait_event, event)

    def end_reading(self, slot: int) -> Callable[[], None]:
        event = self._read[slot]
        event.record(self._side)
        return functools.partial(self._main.wait_event, event)


# By the type of a device.
MEMORIES: dict[str, Any] = {"cuda": GpuMemory}
