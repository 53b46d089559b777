"""The watch: ends the process of a rank that would otherwise wait forever for a lost rank.

While the host itself waits for other ranks, at the shared words or in a call to the group's host
backend, it notices a lost rank. A GPU does not notice a lost rank. A kernel of NCCL, or a stream
that waits for an event of another rank, waits forever. Then the host also waits forever in its next
CUDA call. No exception can reach the waiting host, and results of incomplete transfers cannot be
used. Only a thread that makes no CUDA call can still act. This thread knows which waits the host
has started, and which of them have ended on the GPU. A separate thread asks the GPU which waits
have ended, because that call may not return either.

PyTorch's own watchdog is only for NCCL, and takes much longer than the timeout of the group.
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

# Seconds between checks.
_PERIOD = 0.5


def lost_error(rank: int, size: int, why: object) -> GroupError:
    """The error of a rank that has lost the others and cannot continue."""
    return GroupError(
        f"group: rank {rank} of {size} lost the others: one has ended, or did not make the same "
        f"call within the group's timeout; see that rank's own error. What is known here: {why}"
    )


class Watch:
    """Watches the waits of one rank, and limits how long they may take.

    lost: a function that returns which rank has ended; '' if no rank is known to have ended.
    timeout: the timeout of the group in seconds.
    """

    # After a rank has ended, a wait may continue for this many seconds, but not beyond the timeout.
    PATIENCE = 5.0
    # After the timeout, the host itself has this many seconds to notice that a rank is late and to
    # raise an error.
    GRACE = 3.0

    def __init__(self, rank: int, size: int, timeout: float, lost: Callable[[], str]) -> None:
        self._rank, self._size, self._timeout, self._lost = rank, size, timeout, lost
        self._marks: Any = None
        # Waits and marks are numbered together: the number of the last one, of the last mark on a
        # GPU, and of the last mark that was reached.
        self._numbers = itertools.count(1)
        self._number = self._marked = self._reached = 0
        self._inside: set[object] = set()
        self._failed = False
        # For the watching thread: the number that it last saw, the seconds since then, and the
        # seconds since a rank ended.
        self._seen, self._waited, self._alone = 0, 0.0, 0.0

    def start(self) -> Watch:
        """Makes the threads of this process watch the rank, until this object is freed."""
        _threads(os.getpid())
        with _lock:
            _watched.add(self)
        return self

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context for calls in which the host may wait for others.

        An error that torch.distributed raises inside the context becomes a GroupError.
        """
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

    def mark(self, device: Any, stream: Any = None) -> None:
        """Marks a stream, of a device, that may wait for other ranks from now on. None means the
        current stream.

        The GPU reaches the mark when the work on the stream so far is complete. For the device
        'cpu' this does nothing, since the host itself waits.
        """
        kind = MARKS.get(device.type)
        if kind is None:
            return
        if self._marks is None:
            self._marks = kind(device)
        self._marks.set(stream)
        self._marked = self._number = next(self._numbers)

    def ask(self) -> None:
        """Checks whether the GPU has reached the last mark. This may never return."""
        marked = self._marked
        if marked == self._reached:
            return
        try:
            is_reached = self._marks.reached()
        except (FlashsmithError, RuntimeError):
            is_reached = True  # a CUDA error, which other calls in this process will raise too
        if is_reached:
            self._reached = marked

    def reason(self, seconds: float) -> str:
        """Why this rank would wait forever; '' as long as it may still continue.

        ``seconds`` is the time since the last call. This method makes no CUDA call.
        """
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
        """Whether the GPU may not have reached the last mark."""
        return self._reached != self._marked

    @property
    def has_failed(self) -> bool:
        """Whether a GroupError was raised. After such an error, some transfers may never
        complete."""
        return self._failed

    def end_process(self, why: str) -> None:
        """Prints the reason and the stacks of this process's threads, and ends it with exit status
        1."""
        error = lost_error(self._rank, self._size, why)
        text = (
            f"flashsmith.errors.GroupError: {error}. This process ends, because no exception can "
            "reach a thread that waits in CUDA; its threads:\n"
        )
        # The process must end even if its standard error is a full pipe.
        threading.Timer(1.0, os._exit, (1,)).start()
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
            faulthandler.dump_traceback(2)
        os._exit(1)


class GpuMarks:
    """Marks on a GPU, with one event for each stream. Setting a mark records the stream's event
    again."""

    def __init__(self, device: Any) -> None:
        self._device, self._ordinal = device, device.index
        self._events: dict[int, Any] = {}

    def set(self, stream: Any) -> None:
        stream = stream or torch.cuda.current_stream(self._device)
        event = self._events.get(stream.cuda_stream) or torch.cuda.Event()
        event.record(stream)
        self._events[stream.cuda_stream] = event

    def reached(self) -> bool:
        return all(
            driver.is_reached(event.cuda_event, self._ordinal)
            for event in list(self._events.values())
        )


# By device type.
MARKS: dict[str, Any] = {"cuda": GpuMarks}

_watched: WeakSet[Watch] = WeakSet()
_lock = threading.Lock()


def _watches() -> list[Watch]:
    with _lock:
        return list(_watched)


@functools.cache
def _threads(pid: int) -> None:
    """Starts the threads of this process.

    This is done once per process id, because a forked process does not inherit threads.
    """
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
        # Time during which this process was stopped does not count.
        seconds, before = min(now - before, 2 * _PERIOD), now
        for watch in _watches():
            if why := watch.reason(seconds):
                watch.end_process(why)


def _end_in_time() -> None:
    """Sets an alarm, which ends the process if it hangs at exit because some transfers never
    complete.

    The destructors of PyTorch's groups and tensors wait for these transfers, and no Python thread
    runs then.
    """
    if any(watch.has_failed for watch in _watches()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, Watch.PATIENCE)


# Exit functions run in reverse order: registered first, this one sets the alarm after other
# libraries' functions.
atexit.register(_end_in_time)
