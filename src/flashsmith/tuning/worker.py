"""Worker: runs calls in another process, which may crash or hang without consequences for this
process."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_connections
from operator import methodcaller
from types import FrameType
from typing import Any, Literal

FailureKind = Literal["crash", "hang", "error", "startup", "lost"]
# The time that a process may take to start: enough to create a CUDA context, and to import PyTorch
# from a disk whose cache is cold.
STARTUP_SECONDS = 300.0
_GRACE_SECONDS = 5.0
_DEATH_SECONDS = 60.0
_SHOWN_CHARACTERS = 500
_READY, _RETURNED, _RAISED = "ready", "returned", "raised"
_PR_SET_PDEATHSIG = 1
# multiprocessing would run the user's script again if it has no `__main__` guard.
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from flashsmith.tuning.worker import serve
serve({descriptor}, {parent}, {gentle})
"""


@dataclass(frozen=True)
class Failure:
    """The reason why a call has no value: the process died ("crash"), took too long ("hang"),
    raised an exception ("error"), did not start ("startup"), or disappeared for another reason
    ("lost").

    raised: the class name of the exception; '' if there was none.
    """

    kind: FailureKind
    reason: str
    raised: str = ""


@dataclass(frozen=True)
class WorkerResult:
    """The result of a call: a value or a failure."""

    value: Any = None
    failure: Failure | None = None


class Worker:
    """Calls methods of `target` in a separate process, one call at a time.

    `target` is pickled and sent to the process, which first calls its ``open()``. The first request
    starts the process; later requests use the same process. After a failure the process is killed;
    the next request starts another one. If `gentle`, the process gets SIGTERM before it is killed.
    `environment` has the environment variables of the process; if None, it gets those of this
    process. A Worker is not thread-safe. The thread that makes the first request must live longer
    than the process.
    """

    def __init__(
        self,
        target: Any,
        *,
        gentle: bool = False,
        startup_seconds: float = STARTUP_SECONDS,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._target = pickle.dumps(target)
        self._gentle = gentle
        self._startup_seconds = startup_seconds
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._words: Any = None
        self._waiting: tuple[str, tuple[Any, ...], float] | None = None
        self._started = False
        self._deadline: float | None = None
        self.starts = 0

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return self._deadline is not None

    @property
    def deadline(self) -> float:
        """The value of time.monotonic() after which the current request counts as hanging."""
        return math.inf if self._deadline is None else self._deadline

    def request(self, method: str, *arguments: Any, seconds: float) -> None:
        """Makes the process call `method`, which may take `seconds`, not counting the time to start
        the process."""
        if self.busy:
            raise RuntimeError(f"request({method!r}): the worker is busy")
        self._waiting = (method, arguments, seconds)
        if self._process is None:
            self._start()
            self._deadline = time.monotonic() + self._startup_seconds
        else:
            self._send()

    def outcome(self) -> WorkerResult | None:
        """Returns the result of the request; None while the request is in progress. Does not
        wait."""
        if self._connection is None or self._deadline is None:
            return None
        try:
            while self._connection.poll():
                kind, value = self._connection.recv()
                if kind == _READY:
                    self._started = True
                    self._send()
                    continue
                if kind == _RETURNED:
                    self._deadline = None
                    return WorkerResult(value)
                raised, reason = value
                return self._fail("error" if self._started else "startup", reason, raised)
        except (EOFError, ConnectionError):
            return self._fail("crash" if self._started else "startup", self._last_words())
        if time.monotonic() >= self._deadline:
            if not self._started:
                return self._fail("startup", f"not up after {self._startup_seconds:g} s")
            seconds = self._waiting[2] if self._waiting else 0.0
            return self._fail("hang", f"not done after {seconds:g} s")
        return None

    def stop(self) -> None:
        """Ends the process, if there is one; a request in progress has no result."""
        self._deadline = None
        process, self._process = self._process, None
        if process is None:
            return
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._gentle:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # If the driver is broken, the process may not die, and this process must not wait forever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DEATH_SECONDS)
        self._words.close()

    # ---- the process ----

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._words = os.fdopen(os.memfd_create("worker"), "w+b")
        program = _PROGRAM.format(
            path=sys.path, descriptor=theirs.fileno(), parent=os.getpid(), gentle=self._gentle
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._started = False
        self.starts += 1
        with contextlib.suppress(ConnectionError):  # outcome() will report its death
            self._connection.send_bytes(self._target)

    def _send(self) -> None:
        if self._connection is None or self._waiting is None:
            return
        method, arguments, seconds = self._waiting
        self._deadline = time.monotonic() + seconds
        with contextlib.suppress(ConnectionError):
            self._connection.send((method, arguments))

    def _last_words(self) -> str:
        """Returns a string that says how the process ended, with the end of its output."""
        if self._process is None:
            return "the process is gone"
        try:
            code = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "the process closed its connection but did not exit"
        how = f"ended with {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
        self._words.seek(0)
        # In a report of faulthandler, an empty line precedes the stack; the stack is left out.
        words = self._words.read().decode(errors="replace").partition("\n\n")[0]
        text = " ".join(words.split())[-_SHOWN_CHARACTERS:]
        return f"the process {how}" + (f": {text}" if text else "")

    def _fail(self, kind: FailureKind, reason: str, raised: str = "") -> WorkerResult:
        self.stop()
        return WorkerResult(failure=Failure(kind, reason, raised))


def wait_for_any(workers: Iterable[Worker], seconds: float) -> None:
    """Waits until a busy worker sends something or reaches its deadline, but at most `seconds`."""
    busy = [worker for worker in workers if worker.busy]
    left = min((worker.deadline for worker in busy), default=math.inf) - time.monotonic()
    connections = [w._connection for w in busy if w._connection is not None]
    if connections:
        wait_for_connections(connections, max(0.0, min(seconds, left)))
    else:
        time.sleep(seconds)


# ---- inside the process ----


def serve(descriptor: int, parent: int, gentle: bool) -> None:
    """Executes, one at a time, the calls that the process `parent` sends on the socket
    `descriptor`.

    The first message is the pickled target, whose ``open()`` is called. Each further message is
    (method, arguments). Ends if the parent closes the socket, dies, or sends SIGTERM. If `gentle`,
    the process then unwinds its stack, so that it can end its own children.
    """
    _die_with(parent, signal.SIGTERM if gentle else signal.SIGKILL)
    if gentle:
        signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the parent handles Ctrl-C
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Connection(descriptor) as connection:
        try:
            target = pickle.loads(connection.recv_bytes())
            _answer(connection, _READY, target.open)
            while True:
                method, arguments = connection.recv()
                _answer(connection, _RETURNED, methodcaller(method, *arguments), target)
        except (EOFError, ConnectionError):
            pass
    # No clean-up, because closing a broken GPU context can take minutes.
    sys.stderr.flush()
    os._exit(0)


def _answer(connection: Connection, kind: str, function: Any, *arguments: Any) -> None:
    answer: tuple[str, Any]
    try:
        answer = (kind, function(*arguments))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}, line {place.lineno}, in {place.name}"
        name = type(error).__name__
        answer = (_RAISED, (name, f"{name}: {error} ({where})"))
    connection.send(answer)


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _die_with(parent: int, signum: int) -> None:
    """Makes Linux send `signum` to this process when its parent ends, for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:  # The parent died before prctl()
        os._exit(0)
