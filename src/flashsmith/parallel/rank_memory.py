"""Memory of the ranks on one host, from which they copy each other's data.

GPUs copy it with copy engines, which use no SMs. The kernels of NCCL would take SMs from attention.
A rank writes data for others to a slot in its own memory, announces this through the shared words
(shared_words.py), and copies the data that it needs from the slots of others. There are two slots,
which alternate. A transfer has three steps:

    begin      The current stream waits until nobody copies from the slot any more.
    offer      An event is recorded after the writes. The ranks then meet on the shared words, so
               that every rank has recorded its event before another rank's stream waits for that
               event.
    copy       The transfer stream waits for the events of all ranks, copies, and records another
               event. The current stream waits for that event, as does the begin() after next of the
               other ranks.

So no GPU waits for an event that is not recorded yet. If a rank does not arrive, the hosts of the
others notice this through the shared words, within the timeout of the group. An event that was
recorded may still never happen, for example if a process is killed while its GPU is working. The
watch (watch.py) is for this case.
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
# The bytes of the message about its memory that a rank sends to the others.
_NAME = 512


class HostSync(NamedTuple):
    """How the hosts of the ranks synchronise."""

    rank: int
    size: int
    same: Callable[[int], bool]  # whether all ranks have this number; raises GroupError
    mark: Callable[[], None]  # marks the current stream: see Watch.mark()


class RankMemory:
    """The memory of all ranks of a group, as one of the ranks uses it.

    All ranks must make the same calls.
    """

    def __init__(self, others: HostSync, memory: Any, capacity: int) -> None:
        self.rank, self.size, self.capacity = others.rank, others.size, capacity
        self._others, self._memory, self._number = others, memory, 0
        self._views: tuple[dict[Any, Any], ...] = ({}, {})

    @staticmethod
    def shared(
        others: HostSync, device: Any, nbytes: int, exchange: Callable[[bytes], bytes]
    ) -> RankMemory | None:
        """Creates slots of at least ``nbytes`` bytes; all ranks must call this.

        Returns None if a rank cannot read the memory of another. ``exchange`` sends bytes to all
        ranks, and returns the bytes from all ranks in the order of ranks.
        """
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
        self._meet()  # No rank has it open
        self._memory.free()

    def begin(self) -> int:
        """Returns the slot for the next transfer, which the current stream may then write."""
        self._number += 1
        slot = self._number % 2
        self._memory.wait_until_read(slot)
        return slot

    def view(self, slot: int, key: Hashable, make: Callable[[Callable[..., Any]], Any]) -> Any:
        """The result of ``make``, which is cached under ``key``.

        ``make`` is called with a function that makes a tensor in the slot from an offset in bytes,
        a shape and a dtype.
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

    def offer(self, slot: int) -> None:
        """Lets other ranks read what the current stream has written to the slot.

        After this, copy() can read the slots of the others. Raises GroupError if a rank does not
        arrive.
        """
        self._memory.publish(slot)
        self._meet()

    def _meet(self) -> None:
        if not self._others.same(-1 - self._number):
            raise GroupError("group: the ranks are not at the same transfer of one call")

    def copy(
        self, slot: int, *groups: Sequence[tuple[int, int, int, int]]
    ) -> list[Callable[[], None]]:
        """Copies groups of parts, one group after the other.

        It must be called once for each transfer.

        A part is (rank, offset in that rank's slot, offset in this rank's slot, bytes). Returns for
        each group a function that makes the current stream wait for it and for all groups before
        it.
        """
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
    """The stream for transfers of a GPU. They then need not wait for kernels of this GPU."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class _IpcMemHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


_LAZY_PEER_ACCESS = 1


class _Address:
    """Memory that PyTorch can use as a tensor, by ``__cuda_array_interface__``."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class GpuMemory:
    """Memory of this rank's GPU and, by CUDA's IPC handles, of the GPUs of the other ranks."""

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
        # Two events per slot: after this rank has written it, and after this rank has copied from
        # the others' slots.
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
        """Waits for the streams of this rank, and closes the memory of the others."""
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
            # Kernels on the previous stream read the slots too.
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
        """A function that makes the current stream wait for all copies so far."""
        event = torch.cuda.Event()
        event.record(self._side)
        return functools.partial(self._main.wait_event, event)

    def end_reading(self, slot: int) -> Callable[[], None]:
        event = self._read[slot]
        event.record(self._side)
        return functools.partial(self._main.wait_event, event)


# By device type.
MEMORIES: dict[str, Any] = {"cuda": GpuMemory}
