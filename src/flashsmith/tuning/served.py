"""The inside of a worker process: unpickle a target, answer calls until the parent is gone."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from operator import methodcaller
from types import FrameType
from typing import Any

READY, RETURNED, RAISED = "ready", "returned", "raised"
_PR_SET_PDEATHSIG = 1


def serve(descriptor: int, parent: int, gentle: bool) -> None:
    """Answers on the socket `descriptor` for the process `parent`, one call at a time.

    The first message is the pickled target, whose ``open()`` is called; every other one is
    (method, arguments). Ends when the parent hangs up, dies, or sends SIGTERM. A `gentle` process
    unwinds then, so that it can end its own children.
    """
    _die_with(parent, signal.SIGTERM if gentle else signal.SIGKILL)
    if gentle:
        signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Connection(descriptor) as connection:
        try:
            target = pickle.loads(connection.recv_bytes())
            _answer(connection, READY, target.open)
            while True:
                method, arguments = connection.recv()
                _answer(connection, RETURNED, methodcaller(method, *arguments), target)
        except (EOFError, ConnectionError):
            pass
    # Nothing here is worth the minutes that tearing down a broken GPU context can take.
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
        answer = (RAISED, (name, f"{name}: {error} ({where})"))
    connection.send(answer)


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _die_with(parent: int, signum: int) -> None:
    """Has the kernel end this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(0)
