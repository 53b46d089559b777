"""The watch over a group's rank: where it would wait for a lost rank for ever, its process ends.

The host finds a lost rank by itself wherever it waits for others: on the board, or in a call of the
group's host backend. A GPU does not. A kernel of NCCL, or a stream behind another rank's event,
waits for ever, and with it the host in whatever call of CUDA it makes next: no exception reaches
it, and no result may be taken from a GPU whose transfers were cut off. What can still act is a
thread that makes no call of CUDA. It knows what the host has asked for, and what the GPU was seen
to reach; another thread asks the GPU, because that call may not return either.

PyTorch's own watchdog looks after NCCL alone, and takes much longer than the group's timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch

from flashsmith.errors import FlashsmithError, GroupError
from flashsmith.runtime import driver

# Seconds between looks.
_PERIOD = 0.5


def lost_error(rank: int, size: int, why: object) -> GroupError:
    """What a rank is told that cannot go on without the others."""
    return GroupError(
        f"group: rank {rank} of {size} lost the others: one has ended, or did not make the same "
        f"call within the group's timeout; see that rank's own error. What is known here: {why}"
    )


class Watch:
    """Of one rank of a group: what it waits for, and since when.

    lost: says which rank has ended, '' where none has or it is not known. timeout: the group's, in
    seconds.
    """

    # Seconds that a GPU may still need when a rank has ended; the group's timeout if that is less.
    PATIENCE = 5.0
    # Seconds beyond the group's timeout, in which the host finds a late rank by itself and raises.
    GRACE = 3.0

    def __init__(self, rank: int, size: int, timeout: float, lost: Callable[[], str]) -> None:
        self._rank, self._size, self._timeout, self._lost = rank, size, timeout, lost
        self._marks: Any = None
        # Transfers are counted: the host's waits, its marks on a GPU, and the last one reached.
        self._numbers = itertools.count(1)
        self._number = self._marked = self._reached = 0
        self._inside: set[object] = set()
        self._failed = False
        # Of the watching thread: the wait that it saw last, and for how long.
        self._seen, self._waited, self._alone = 0, 0.0, 0.0

    def start(self) -> Watch:
        """Has this process's threads look after the rank from now on, as long as there is this
        object."""
        _threads(os.getpid())
        with _lock:
            _watched.add(self)
        return self

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around calls that may wait for others on the host; turns a failure of torch.distributed
        into a GroupError."""
        token = object()
        self._number = next(self._numbers)
        self._inside.add(token)
        try:
            yield
        except FlashsmithError:
            raise
        except RuntimeError as failure:
            self._failed = True
            raise lost_error(self._rank, self._size, failure) from failure
        finally:
            self._inside.discard(token)

    def mark(self, device: Any) -> None:
        """The current stream of a device has been told to wait for others: what it has been given
        so far will be done when they have sent what they must. Nothing on the host, which waits
        itself."""
        kind = MARKS.get(device.type)
        if kind is None:
            return
        if self._marks is None:
            self._marks = kind(device)
        self._marks.set()
        self._marked = self._number = next(self._numbers)

    def ask(self) -> None:
        """Asks the GPU how far it is; may not return."""
        marked = self._marked
        if marked == self._reached:
            return
        try:
            is_reached = self._marks.reached()
        except (FlashsmithError, RuntimeError):
            is_reached = True  # CUDA's own error, which the calls of this process meet, too
        if is_reached:
            self._reached = marked

    def reason(self, seconds: float) -> str:
        """Why this rank would wait for ever, '' while it need not; so many seconds have passed
        since it was asked before. Makes no call of CUDA."""
        number = self._number
        if number != self._seen or not (self._inside or self._is_behind):
            self._seen, self._waited, self._alone = number, 0.0, 0.0
            return ""
        self._waited += seconds
        lost = self._lost()
        self._alone = self._alone + seconds if lost else 0.0
        if self._alone > min(self.PATIENCE, self._timeout):
            return f"{lost}, and this rank has waited for it for {self._alone:.0f} s"
        if self._waited > self._timeout + self.GRACE:
            return (
                f"this rank has waited for {self._waited:.0f} s, and the group's timeout is "
                f"{self._timeout:g} s"
            )
        return ""

    @property
    def _is_behind(self) -> bool:
        """Whether the GPU has not been seen to reach the last mark."""
        return self._reached != self._marked

    @property
    def has_failed(self) -> bool:
        """Whether a GroupError was raised: transfers may be left that nobody answers."""
        return self._failed

    def end_process(self, why: str) -> None:
        """Ends this process, with an exit status of 1, and says why and where its threads are."""
        error = lost_error(self._rank, self._size, why)
        text = (
            f"flashsmith.errors.GroupError: {error}. This process ends, because no exception can "
            "reach a thread that waits in CUDA; its threads:\n"
        )
        # A full pipe, which nobody reads, must not hold it up.
        threading.Timer(1.0, os._exit, (1,)).start()
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
            faulthandler.dump_traceback(2)
        os._exit(1)


class GpuMarks:
    """Events on the streams of one GPU, each recorded again by every mark."""

    def __init__(self, device: Any) -> None:
        self._device, self._ordinal = device, device.index
        self._events: dict[int, Any] = {}

    def set(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        event = self._events.get(stream.cuda_stream) or torch.cuda.Event()
        event.record(stream)
        self._events[stream.cuda_stream] = event

    def reached(self) -> bool:
        return all(
            driver.is_reached(event.cuda_event, self._ordinal)
            for event in list(self._events.values())
        )


# By the type of a device.
MARKS: dict[str, Any] = {"cuda": GpuMarks}

_watched: WeakSet[Watch] = WeakSet()
_lock = threading.Lock()


def _watches() -> list[Watch]:
    with _lock:
        return list(_watched)


@functools.cache
def _threads(pid: int) -> None:
    """Starts the threads of this process, which a forked one does not inherit."""
    for work in (_ask, _look):
        threading.Thread(target=work, name=f"flashsmith-watch{work.__name__}", daemon=True).start()


def _ask() -> None:
    while True:
        time.sleep(_PERIOD / 2)
        for watch in _watches():
            watch.ask()


def _look() -> None:
    before = time.monotonic()
    while True:
        time.sleep(_PERIOD)
        now = time.monotonic()
        # The time in which this process was stopped itself does not count.
        seconds, before = min(now - before, 2 * _PERIOD), now
        for watch in _watches():
            if why := watch.reason(seconds):
                watch.end_process(why)


def _end_in_time() -> None:
    """An interpreter that ends waits, in the destructors of PyTorch's groups and tensors, for
    transfers that are left. No thread of Python's runs then: an alarm ends it."""
    if any(watch.has_failed for watch in _watches()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, Watch.PATIENCE)


# What is registered first is called last: other libraries' ends come before the alarm is set.
atexit.register(_end_in_time)
